"""Rows D10 and D14 of the list of known faults, numerics.

The others: D1, D2, D6, D7, D11, D12 in `test_model.py`, D4, D5, D17 in `test_ops.py` (and, of the reference itself, in
`test_reference.py`), D15 in `test_nano_engine.py`; a cache too narrow for its latents (D14) in `test_load.py`. E1 to
E10 are in `test_state.py`, E13 in `test_checkpoints.py`, E16 in `test_api.py` and the stress program. D18 and E14 are
about devices with memory of their own, which this engine does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import native
from engine import Engine
from timelines import nmse, prompt

pytestmark = pytest.mark.skipif(not native.has_test_api(), reason="the library was built without its test interface")


@pytest.mark.parametrize("activations", ["exact", "fine"])
def test_d10_a_graph_that_ran_before_computes_as_a_fresh_one(
    mini: Path, rng: np.random.Generator, activations: str
) -> None:
    """D10: the graph is recorded once, when a model is opened, and used for every step and every length."""
    prompts = [prompt(rng, n) for n in (1, 2, 3, 4, 5)]

    def answer(engine: Engine, tokens: list[int]) -> tuple[list[int], np.ndarray]:
        session = engine.session()
        text = session.greedy(tokens, 8)
        row = session.row().copy()
        session.free()
        return text, row

    fresh = []
    for tokens in prompts:
        with Engine(mini, n_ctx=64, activations=activations) as engine:
            fresh.append(answer(engine, tokens))
    with Engine(mini, n_ctx=64, activations=activations) as engine:
        for _ in range(3):
            for i in rng.permutation(len(prompts)):
                text, row = answer(engine, prompts[i])
                assert text == fresh[i][0] and np.array_equal(row, fresh[i][1])


def test_d14_image_features_beyond_float16(
    tiny_checkpoint: Callable[..., Path], gguf: Callable[..., Path], rng: np.random.Generator
) -> None:
    """D14: rows of 1e5, which float16 does not hold, are values like others. All experts: no route can flip."""
    path = gguf(tiny_checkpoint("k3", num_experts_per_token=8), "q8_0")
    features = (rng.standard_normal((6, 64)) * 1e5).astype(np.float32)
    pieces = [prompt(rng, 3), (features, 1), prompt(rng, 4)]
    logits = {}
    for activations in ("exact", "fine"):
        with Engine(path, n_ctx=64, activations=activations) as engine:
            session = engine.session()
            session.sync_pieces(pieces)
            logits[activations] = session.row()
    assert all(np.isfinite(row).all() for row in logits.values())
    assert nmse(logits["fine"], logits["exact"]) < 1e-5
