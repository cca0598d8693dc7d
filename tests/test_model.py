"""Whole models: the engine's logits against the float64 reference, at every position, however the input is cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import native
import reference as ref
from engine import Engine
from file_constants import as_the_file_holds

EXACT = 1e-10  # normalised mean squared error of the logits of one position
ROUNDED = 1e-14  # the same if nothing but the logits is rounded to float32: 2^-48 / 3 on average
BLOCK = 1e-20  # the same for one block of a layer on the input that the engine gave it, in float64
ROUTER_GAP = 1e-5  # positions after a closer decision of a router are left out, and counted


def nmse_rows(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """[n]: per position, in float64."""
    found = found.astype(np.float64)
    return np.sum((found - expected) ** 2, axis=1) / np.sum(expected**2, axis=1)


def golden_prompts(golden: Path) -> dict[str, list[int]]:
    lines = (golden / "logits" / "prompts.txt").read_text().splitlines()
    return {line.split()[0]: [int(t) for t in line.split()[2:]] for line in lines if line.strip()}


@pytest.mark.parametrize("device", ["ref", "cpu"])
@pytest.mark.parametrize("name", ["kl-mini", "k3-mini"])
def test_golden_logits(golden: Path, gguf: Callable[..., Path], device: str, name: str) -> None:
    with Engine(gguf(golden / name), device=device, n_ctx=160, n_batch=64) as engine:
        for prompt, tokens in golden_prompts(golden).items():
            expected = np.load(golden / "logits" / name / f"{prompt}.npy").astype(np.float64)
            worst = nmse_rows(engine.logits(tokens), expected).max()
            assert worst < EXACT, f"{prompt}: {worst:.2e}"


PRESETS = [
    ("k3", 70),
    ("kl", 70),
    ("k3-bf16-experts", 20),
    ("k3-no-q-lora", 20),
    ("k3-full-width-experts", 20),
    ("k3-no-latent-norm", 20),
    ("k3-no-output-gate", 20),
    ("k3-softplus-gate", 40),
    ("kl-q-lora", 20),
    ("k3-odd", 40),
    ("k3-odd-packed", 40),
    ("kl-odd", 40),
    ("k3-real-widths", 24),
    ("kl-real-widths", 24),
    ("k3-896-experts", 12),
    ("k3-full-vocab", 3),
]


@pytest.mark.parametrize("device", ["ref", "cpu"])
@pytest.mark.parametrize("preset,n", PRESETS)
def test_logits_equal_the_reference(
    tiny_checkpoint: Callable[..., Path], gguf: Callable[..., Path], device: str, preset: str, n: int
) -> None:
    """Every position of a fixed text, but those after a router decision that rounding may turn (at most 1 %)."""
    folder = tiny_checkpoint(preset)
    model = ref.Model.from_checkpoint(folder)
    tokens = np.random.default_rng(1).integers(0, model.embedding.shape[0], n).tolist()
    trace: dict[str, np.ndarray] = {}
    expected = model.forward(tokens, trace=trace)
    assert np.mean(trace["router_gaps"] < ROUTER_GAP) <= 0.01
    with Engine(gguf(folder), device=device, n_ctx=n, n_batch=32) as engine:
        errors = nmse_rows(engine.logits(tokens), expected)
    assert errors.max() < EXACT, f"worst {errors.max():.2e}"


@pytest.mark.parametrize("device", ["ref", "cpu"])
@pytest.mark.parametrize("preset,n", PRESETS)
def test_fresh_texts_differ_by_nothing_but_the_rounding_of_their_logits(
    tiny_checkpoint: Callable[..., Path],
    gguf: Callable[..., Path],
    rng: np.random.Generator,
    device: str,
    preset: str,
    n: int,
) -> None:
    """No position is left out: with the constants of the file, no router decision is close enough to turn."""
    folder = tiny_checkpoint(preset)
    model = as_the_file_holds(ref.Model.from_checkpoint(folder))
    tokens = rng.integers(0, model.embedding.shape[0], n).tolist()
    with Engine(gguf(folder), device=device, n_ctx=n, n_batch=32) as engine:
        errors = nmse_rows(engine.logits(tokens), model.forward(tokens))
    assert errors.max() < ROUNDED, f"worst {errors.max():.2e}"


@pytest.mark.parametrize("activations", ["exact", "fine", "fast"])
@pytest.mark.parametrize("preset", ["k3", "kl", "k3-odd", "kl-odd"])
def test_d1_d2_no_bit_depends_on_how_the_input_is_cut(
    tiny_checkpoint: Callable[..., Path],
    gguf: Callable[..., Path],
    rng: np.random.Generator,
    preset: str,
    activations: str,
) -> None:
    """D1, D2: pieces of any length against one step over everything."""
    path = gguf(tiny_checkpoint(preset), "q8_0" if activations == "fast" else "f32")
    with Engine(path, n_ctx=200, n_batch=200, n_outputs=200, activations=activations) as engine:
        tokens = rng.integers(0, engine.n_vocab, 200).tolist()
        whole = engine.logits(tokens)
        cuts = [[k] * (200 // k) for k in (1, 7, 16, 64)]
        # Every single cut where it is cheap; around the chunk of the scan, and the ends, where it is not.
        every = preset in ("k3", "kl") and activations == "fine"
        cuts += [[k] for k in (range(1, 200) if every else (1, 2, 15, 17, 31, 33, 100, 199))]
        for pieces in cuts:
            assert np.array_equal(engine.logits(tokens, pieces), whole), pieces[:3]


@pytest.mark.parametrize("n_batch", [1, 3, 16])
@pytest.mark.parametrize("preset", ["k3", "kl"])
def test_d6_steps_smaller_than_the_input(
    tiny_checkpoint: Callable[..., Path], gguf: Callable[..., Path], rng: np.random.Generator, preset: str, n_batch: int
) -> None:
    path = gguf(tiny_checkpoint(preset))
    with Engine(path, n_ctx=50, n_batch=n_batch) as small, Engine(path, n_ctx=50, n_batch=50) as large:
        tokens = rng.integers(0, small.n_vocab, 50).tolist()
        assert np.array_equal(small.logits(tokens), large.logits(tokens))


@pytest.mark.parametrize("activations", ["exact", "fine", "fast"])
@pytest.mark.parametrize("outtype", ["f32", "q8_0"])
def test_threads_change_nothing(
    tiny_checkpoint: Callable[..., Path],
    gguf: Callable[..., Path],
    rng: np.random.Generator,
    outtype: str,
    activations: str,
) -> None:
    path = gguf(tiny_checkpoint("k3"), outtype)
    tokens = rng.integers(0, 512, 60).tolist()
    results = []
    for n_threads in (1, 2, 5):
        with Engine(path, n_ctx=60, n_batch=32, n_threads=n_threads, activations=activations) as engine:
            results.append(engine.logits(tokens, [40, 1, 1]))
    placed = {"n_threads": 1, "n_threads_batch": 3, "pin_threads": 1, "interleave_memory": 1}
    with Engine(path, n_ctx=60, n_batch=32, activations=activations, **placed) as engine:
        assert engine.info.n_threads == 3
        results.append(engine.logits(tokens, [40, 1, 1]))
    assert all(np.array_equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("preset", ["k3", "kl"])
def test_d7_sequences_in_one_step_equal_each_alone(
    tiny_checkpoint: Callable[..., Path], gguf: Callable[..., Path], rng: np.random.Generator, preset: str
) -> None:
    """D7: prompts of 1, 5 and 9 tokens, then greedy tokens, together and alone."""
    with Engine(gguf(tiny_checkpoint(preset)), n_ctx=40, n_batch=32, n_sessions=3) as engine:
        prompts = [rng.integers(0, engine.n_vocab, n).tolist() for n in (1, 5, 9)]
        alone = []
        for prompt in prompts:
            session = engine.session()
            alone.append(session.greedy(prompt, 12))
            session.free()
        sessions = [engine.session() for _ in prompts]
        together: list[list[int]] = [[] for _ in prompts]
        pending = prompts
        for _ in range(12):
            engine.eval_batch(list(zip(sessions, pending, strict=True)))
            for tokens, session in zip(together, sessions, strict=True):
                tokens.append(int(np.argmax(session.row())))
            pending = [tokens[-1:] for tokens in together]
        assert together == alone


def observe(engine: Engine, tokens: list[int]) -> dict[str, list[np.ndarray]]:
    """Outputs of all ops of one evaluation, by name, in the order they ran."""
    seen: dict[str, list[np.ndarray]] = {}
    ffi, lib = engine.ffi, engine.lib

    @ffi.callback("void(const char *, const char *, int32_t, const double *, int32_t, int32_t, void *)")  # type: ignore[untyped-decorator]
    def note(op: Any, name: Any, layer: int, data: Any, rows: int, cols: int, user: Any) -> None:
        if data != ffi.NULL and rows * cols:
            values = np.frombuffer(ffi.buffer(data, 8 * rows * cols), np.float64).reshape(rows, cols).copy()
            seen.setdefault(ffi.string(name).decode(), []).append(values)

    native.check(lib.delta_test_observe(engine.model, note, ffi.NULL))
    try:
        engine.logits(tokens)
    finally:
        native.check(lib.delta_test_observe(engine.model, ffi.NULL, ffi.NULL))
    return seen


@pytest.mark.skipif(not native.has_test_api(), reason="the library was built without its test interface")
@pytest.mark.parametrize("device", ["ref", "cpu"])
@pytest.mark.parametrize("n_layers", [4, 16, 93])
def test_d11_each_layer_of_a_deep_model(
    tiny_checkpoint: Callable[..., Path],
    gguf: Callable[..., Path],
    rng: np.random.Generator,
    n_layers: int,
    device: str,
) -> None:
    """D11: mixing residuals amplifies rounding with depth. In float64 nothing of it reaches the logits, whatever the
    depth, and each sub-block is judged on the input the engine gave it."""
    folder = tiny_checkpoint("k3-93-layers", **({} if n_layers == 93 else layers(n_layers)))
    model = as_the_file_holds(ref.Model.from_checkpoint(folder))
    tokens = rng.integers(0, 512, 10).tolist()
    with Engine(gguf(folder), device=device, n_ctx=10, n_batch=16, n_outputs=16) as engine:
        seen = observe(engine, tokens)
        logits = engine.logits(tokens)
    for i, layer in enumerate(model.layers):
        h = seen[f"blk.{i}.attn_norm"][0]
        whole: Any = [(slice(0, len(tokens)), layer.attn.new_state())]
        attn = nmse_rows(seen[f"blk.{i}.attn_output"][0], layer.attn.forward(h, whole)).max()
        assert attn < BLOCK, f"layer {i} attention: {attn:.2e}"
        h = seen[f"blk.{i}.ffn_norm"][0]
        if isinstance(layer.ffn, ref.DenseFfn):
            found, expected = seen[f"blk.{i}.ffn_down"][0], layer.ffn.forward(h)
        else:
            # The last two additions of a layer: the shared experts' and the residual's.
            found, (expected, _) = seen[f"blk.{i}.add"][-2], layer.ffn.forward(h)
        ffn = nmse_rows(found, expected).max()
        assert ffn < BLOCK, f"layer {i} feed-forward: {ffn:.2e}"
    assert nmse_rows(logits, model.forward(tokens)).max() < ROUNDED


def layers(n: int) -> dict[str, Any]:
    mla = sorted({i for i in range(1, n + 1) if i % 4 == 0} | {n - 1, n})
    kda = [i for i in range(1, n + 1) if i not in mla]
    return {"num_hidden_layers": n, "linear_attn_config": {"full_attn_layers": mla, "kda_layers": kda}}


@pytest.mark.skipif(not native.has_test_api(), reason="the library was built without its test interface")
@pytest.mark.parametrize("activations", ["exact", "fine"])
@pytest.mark.parametrize("preset", ["k3", "kl"])
def test_poisoned_memory_changes_nothing(
    tiny_checkpoint: Callable[..., Path],
    gguf: Callable[..., Path],
    rng: np.random.Generator,
    preset: str,
    activations: str,
) -> None:
    """Outputs filled with NaN before every op or group of ops, in steps of few rows, where groups run at once, and of
    more: nothing reads what was not written in this step."""
    path = gguf(tiny_checkpoint(preset), "q8_0")
    tokens = rng.integers(0, 512, 45).tolist()
    results = []
    for poison in (0, 1):
        with Engine(path, n_ctx=45, n_batch=20, n_threads=3, poison=poison, activations=activations) as engine:
            results.append(engine.logits(tokens, [20, 1, 8, 1, 9, 6]))
    assert np.array_equal(results[0], results[1])


def test_d12_a_large_batch_on_a_deep_model(tiny_checkpoint: Callable[..., Path], gguf: Callable[..., Path]) -> None:
    """D12: the number of ops never depends on the number of rows."""
    with Engine(gguf(tiny_checkpoint("k3-93-layers")), n_ctx=4096, n_batch=4096) as engine:
        session = engine.session()
        session.eval(list(range(512)) * 8, "LAST")
        assert session.length == 4096 and np.isfinite(session.row()).all()


@pytest.mark.parametrize("preset", ["k3", "kl"])
def test_rounded_activations_stay_close_to_exact(
    tiny_checkpoint: Callable[..., Path], gguf: Callable[..., Path], rng: np.random.Generator, preset: str
) -> None:
    """Mean KL divergence over positions of a Q8_0 file: `fine` is a thousand times closer to exact inputs than int8.

    All experts are chosen, so that no route can flip and what is left is the rounding.
    """
    path = gguf(tiny_checkpoint(preset, num_experts_per_token=8), "q8_0")
    tokens = rng.integers(0, 512, 160).tolist()
    logits = {}
    for activations in ("exact", "fine", "fast"):
        with Engine(path, n_ctx=160, activations=activations) as engine:
            logits[activations] = log_softmax(engine.logits(tokens))
    p = logits.pop("exact")
    kl = {name: np.mean(np.sum(np.exp(p) * (p - q), axis=1)) for name, q in logits.items()}
    assert kl["fine"] < 1e-5 and kl["fast"] < 0.1 and kl["fine"] * 1000 < kl["fast"], kl


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.sum(np.exp(x), axis=1, keepdims=True))
