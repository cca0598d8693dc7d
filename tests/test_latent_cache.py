"""The latent cache of type Q8_0: what it costs in memory and in the logits, and that nothing else depends on it.

The op is compared with its definition in test_ops.py, value by value; F16 and BF16 caches are tested with whole models
in test_model.py and test_determinism.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import native
import tiny
from engine import Engine
from timelines import prompt

pytestmark = pytest.mark.skipif(not native.has_test_api(), reason="the library was built without its test interface")

WIDTH = 576  # of a latent of the models with the released widths
# Normalised mean squared error of the logits. Rounding in steps of 1/127 of the largest of 32 values loses
# 1 / (12 * 127^2) of its square, 2.3e-5 of the mean square of normal values. What attention reads is a mean of rows,
# and MLA layers add to what others leave; gates and norms make more of it. Measured on random models with the released
# widths: 4e-6 to 3.3e-5.
LOST = 1e-4


@pytest.fixture(params=["k3-real-widths", "kl-real-widths"])
def preset(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def path(preset: str, tiny_checkpoint: Callable[..., Path], gguf: Callable[..., Path]) -> Path:
    """All experts are chosen: no route can flip."""
    return gguf(tiny_checkpoint(preset, num_experts_per_token=8))


@pytest.mark.parametrize("device,activations", [("ref", "exact"), ("cpu", "exact"), ("cpu", "fine")])
def test_logits_lose_little(path: Path, rng: np.random.Generator, device: str, activations: str) -> None:
    tokens = prompt(rng, 80)
    logits = {}
    for cache_type in ("f32", "q8_0"):
        with Engine(path, n_ctx=80, device=device, activations=activations, cache_type=cache_type) as engine:
            logits[cache_type] = engine.logits(tokens).astype(np.float64)
    p, q = logits["f32"], logits["q8_0"]
    assert 0 < np.sum((p - q) ** 2) / np.sum(p**2) < LOST


def test_no_bit_depends_on_threads_or_on_how_the_input_is_cut(path: Path, rng: np.random.Generator) -> None:
    tokens = prompt(rng, 300)
    found = []
    for n_threads in (1, 3):
        with Engine(path, n_ctx=300, n_threads=n_threads, activations="fine", cache_type="q8_0") as engine:
            found += [engine.logits(tokens), engine.logits(tokens, [1, 7, 64, 28, 150, 50])]
    assert all(np.array_equal(found[0], other) for other in found[1:])


def test_sizes_and_saved_state(preset: str, path: Path, rng: np.random.Generator, tmp_path: Path) -> None:
    """Rows of 34 bytes for 32 values, in the plan and in a saved state, which goes on bit for bit."""
    tokens, more = prompt(rng, 40), prompt(rng, 5)
    planned, saved = {}, {}
    for cache_type in ("f16", "q8_0"):
        file = tmp_path / cache_type
        with Engine(path, n_ctx=64, n_sessions=2, activations="fine", cache_type=cache_type) as engine:
            memory = engine.ffi.new("delta_memory *")
            memory.size = engine.ffi.sizeof("delta_memory")
            native.check(engine.lib.delta_model_memory(engine.model, memory))
            planned[cache_type] = memory.state
            first, second = engine.session(), engine.session()
            first.sync(tokens)
            first.save(file)
            second.load(file)
            assert np.array_equal(second.eval(more), first.eval(more))
        saved[cache_type] = file.stat().st_size
    n_mla = len(tiny.default_layers(4, tiny.preset_arch(preset))[0])
    less = WIDTH * 2 - WIDTH // 32 * 34  # bytes of a row
    assert planned["f16"] - planned["q8_0"] == 2 * n_mla * 64 * less
    assert saved["f16"] - saved["q8_0"] == n_mla * len(tokens) * less


def test_a_model_whose_latents_are_no_whole_blocks_is_refused(k3_path: Path) -> None:
    with pytest.raises(native.NativeError) as error:
        Engine(k3_path, n_ctx=32, cache_type="q8_0").close()
    assert error.value.name == "UNSUPPORTED" and all(word in error.value.message for word in ("Q8_0", "32", "48"))
