"""The reference against numbers from outside of it, and its fast forms against their definitions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import reference as ref
import tiny
from reference import Model
from tiny_files import Checkpoint, HfTensor

# ---- printed values of the fact sheet --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gate", "up", "value"),
    [
        (1, 1, 0.7158178280748404),
        (-2, 3, -0.6578738185454248),
        (10, -50, -95.1080215340149),
        (100, 100, 99.93292997390671),
    ],
)
def test_situ_values(gate: float, up: float, value: float) -> None:
    assert ref.situ(np.array(gate), np.array(up)) == pytest.approx(value, rel=1e-14)


@pytest.mark.parametrize(
    ("a_log", "z", "lower_bound", "value"),
    [
        (0, 0, -5.0, -2.5),
        (0.3, 1, -5.0, -3.9705327200352296),
        (-0.47, 3, -5.0, -4.335182721477153),
        (0, 0, None, -0.6931471805599453),
        (0.3, 1, None, -1.7727178555485978),
        (1, -2, None, -0.34502610594056116),
    ],
)
def test_gate_values(a_log: float, z: float, lower_bound: float | None, value: float) -> None:
    """D5: the lower bound selects another function, it does not clamp."""
    g = ref.kda_gate(np.array([[[0.25]]]), np.array([a_log]), np.array([[z - 0.25]]), lower_bound)
    assert g.shape == (1, 1, 1)
    assert g.item() == pytest.approx(value, rel=1e-14)


@pytest.mark.parametrize("form", ["recurrent", "chunked"])
def test_kda_values(form: str) -> None:
    """Three tokens, one head of two channels; the fact sheet prints ten digits."""
    q = ref.l2_norm(np.array([(3.0, 4), (1, 0), (0, 2)]))[:, None] * 2**-0.5
    k = ref.l2_norm(np.array([(1.0, 1), (0, 2), (-1, 2)]))[:, None]
    v = np.array([(1.0, 2), (3, -1), (0.5, 0.5)])[:, None]
    g = np.array([(-0.1, -0.2), (-1, -0.5), (-2, -0.01)])[:, None]
    beta = np.array([0.5, 0.9, 0.25])[:, None]
    scan = ref.kda_recurrent if form == "recurrent" else ref.kda_chunked
    o, state = scan(q, k, v, g, beta, np.zeros((1, 2, 2)))
    expected = [(0.3499999055, 0.6999998110), (0.0919697913, 0.1839395826), (1.6044644865, -0.3984848389)]
    np.testing.assert_allclose(o[:, 0], expected, rtol=0, atol=5.1e-11)
    expected = [(0.2302570142, -0.1073154704), (2.2690557207, -0.5635427341)]
    np.testing.assert_allclose(state[0], expected, rtol=0, atol=5.1e-11)


def test_mix_values() -> None:
    entries = np.array([(1.0, 0, -1, 2), (0.5, 0.5, 3, -1), (2, -2, 1, 0)])[:, None]
    score = np.array([1, 0.5, 2, 1]) * np.array([0.3, -0.2, 0.1, 0.4])
    mixed, weights = ref.mix(entries, score, 1e-5)
    np.testing.assert_allclose(weights[:, 0], [0.3982117132, 0.2298215183, 0.3719667685], rtol=0, atol=5.1e-11)
    expected = [1.2570560093, -0.6290227779, 0.6632196103, 0.5666019080]
    np.testing.assert_allclose(mixed[0], expected, rtol=0, atol=5.1e-11)
    # The printed scores, up to the common shift that softmax ignores.
    scores = np.array([0.7348444734, 0.1851636673, 0.6666651852])
    logs = np.log(weights[:, 0])
    np.testing.assert_allclose(logs - logs[0], scores - scores[0], rtol=0, atol=2e-10)


def test_mxfp4_worked_example() -> None:
    """Elements 1 2 … 15 0 | 0 1 … 15: low half of a byte first, code 8 is minus zero, the scale is 2^(byte - 127)."""
    packed = np.frombuffer(bytes.fromhex("21436587A9CBED0F 1032547698BADCFE".replace(" ", "")), np.uint8).reshape(1, 16)
    codes = [*range(1, 16), 0, *range(16)]
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    signed = np.array([values[c & 7] * (-1 if c & 8 else 1) for c in codes])
    for byte in (0, 1, 126, 127, 130, 254):
        got = ref.dequantize_mxfp4(packed, np.array([[byte]], np.uint8))
        np.testing.assert_array_equal(got[0], signed * 2.0 ** (byte - 127))
        assert np.signbit(got[0][codes.index(8)])


# ---- logits of another implementation --------------------------------------------------------------------------------

PROMPTS = ("p1", "p7", "p65", "p160")


def prompt(golden: Path, name: str) -> list[int]:
    for line in (golden / "logits" / "prompts.txt").read_text().splitlines():
        words = line.split()
        if words[0] == name:
            return [int(word) for word in words[2:]]
    raise KeyError(name)


@pytest.fixture(scope="module", params=[("recurrent", "expanded"), ("chunked", "absorbed")], ids="-".join)
def golden_models(request: pytest.FixtureRequest, golden: Path) -> dict[str, Model]:
    kda, mla = request.param
    return {name: Model.from_checkpoint(golden / name, kda=kda, mla=mla) for name in ("kl-mini", "k3-mini")}


@pytest.mark.parametrize("name", ["kl-mini", "k3-mini"])
@pytest.mark.parametrize("which", PROMPTS)
def test_golden_logits(golden: Path, golden_models: dict[str, Model], name: str, which: str) -> None:
    """The golden values are float32: ours may be half a unit in the last place away, and not more."""
    trace: dict[str, np.ndarray] = {}
    ids = prompt(golden, which)
    logits = golden_models[name].forward(ids, trace=trace)
    expected = np.load(golden / "logits" / name / f"{which}.npy")
    assert logits.shape == expected.shape == (len(ids), 512)
    half_unit = np.spacing(np.abs(expected)).astype(np.float64) / 2
    assert np.all(np.abs(logits - expected) <= half_unit + 1e-11)
    assert trace["router_gaps"].min() > 1e-5, "no position of the golden prompts may hang on a router tie"


# ---- every form equals its definition --------------------------------------------------------------------------------


def scan_inputs(rng: np.random.Generator, tokens: int, heads: int, dim: int, gate: str) -> tuple[np.ndarray, ...]:
    """q, k, v, g, beta and a state that is not empty, in the ranges the models produce, up to their ends."""
    shape = (tokens, heads, dim)
    q = ref.l2_norm(rng.standard_normal(shape)) * dim**-0.5
    k = ref.l2_norm(rng.standard_normal(shape))
    v = rng.standard_normal(shape) * rng.choice([0.1, 1, 25], shape)
    if gate == "bounded":
        g = ref.kda_gate(rng.normal(0, 6, shape), rng.normal(0, 1, heads), np.zeros((heads, dim)), -5.0)
    elif gate == "softplus":
        g = ref.kda_gate(rng.normal(-3, 4, shape), rng.normal(0, 1, heads), np.zeros((heads, dim)), None)
    else:  # decays of exp(-316) beside channels that forget nothing
        g = -rng.choice([0.0, 1e-9, 0.01, 5.0, 316.0], shape)
    beta = ref.sigmoid(rng.normal(0, 3, (tokens, heads)))
    return q, k, v, g, beta, rng.standard_normal((heads, dim, dim))


@pytest.mark.parametrize("gate", ["bounded", "softplus", "extreme"])
@pytest.mark.parametrize("chunk_size", [1, 7, 16, 64, 200])
def test_chunked_equals_recurrent(rng: np.random.Generator, chunk_size: int, gate: str) -> None:
    """D1, D4: any chunk size, a ragged last chunk, decays down to exp(-316)."""
    inputs = scan_inputs(rng, 133, 3, 12, gate)
    o, state = ref.kda_recurrent(*inputs)
    q, k, v, g, beta, start = inputs
    o_chunked, state_chunked = ref.kda_chunked(q, k, v, g, beta, start, chunk_size)
    assert np.isfinite(o).all()
    np.testing.assert_allclose(o_chunked, o, rtol=0, atol=1e-11 * np.abs(o).max())
    np.testing.assert_allclose(state_chunked, state, rtol=0, atol=1e-11 * np.abs(state).max())


def test_chunked_with_dependent_keys(rng: np.random.Generator) -> None:
    """D4: all keys equal, full write strength, hardly any decay: the triangular system is as full as it gets."""
    q, k, v, g, beta, state = scan_inputs(rng, 70, 2, 8, "bounded")
    k = np.broadcast_to(ref.l2_norm(k[:1]), k.shape)
    o, last = ref.kda_recurrent(q, k, v, g * 1e-3, np.ones_like(beta), state)
    o_chunked, last_chunked = ref.kda_chunked(q, k, v, g * 1e-3, np.ones_like(beta), state, chunk_size=64)
    np.testing.assert_allclose(o_chunked, o, rtol=0, atol=1e-10 * np.abs(o).max())
    np.testing.assert_allclose(last_chunked, last, rtol=0, atol=1e-10 * np.abs(last).max())


def test_scan_does_not_change_its_inputs(rng: np.random.Generator) -> None:
    for scan in (ref.kda_recurrent, ref.kda_chunked):
        inputs = scan_inputs(rng, 5, 2, 4, "bounded")
        copies = [x.copy() for x in inputs]
        scan(*inputs)
        for x, copy in zip(inputs, copies, strict=True):
            np.testing.assert_array_equal(x, copy)


@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_absorbed_equals_expanded(rng: np.random.Generator, tokens: int) -> None:
    heads, dn, dr, dv, rank, total = 3, 10, 6, 7, 20, 33
    q = rng.standard_normal((tokens, heads, dn + dr)) * 3
    latent = rng.standard_normal((total, rank + dr))
    w_kvb = rng.standard_normal((heads, dn + dv, rank))
    k, v = ref.expand_latent(latent, w_kvb, dn)
    expanded = ref.attention_expanded(q, k, v)
    absorbed = ref.attention_absorbed(q, latent, w_kvb, dn)
    assert expanded.shape == (tokens, heads, dv)
    np.testing.assert_allclose(absorbed, expanded, rtol=0, atol=1e-12 * np.abs(expanded).max())
    # Written out for the last token and head 1: every key, the scale of the full query width.
    scores = np.array([q[-1, 1] @ k[n, 1] for n in range(total)]) / np.sqrt(dn + dr)
    weights = np.exp(scores - scores.max())
    by_hand = sum(w * v[n, 1] for n, w in enumerate(weights / weights.sum()))
    np.testing.assert_allclose(expanded[-1, 1], by_hand, rtol=0, atol=1e-12 * np.abs(by_hand).max())


@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_short_conv(rng: np.random.Generator, kernel: int) -> None:
    """Against the sum written out, and continued over a split."""
    x, weight = rng.standard_normal((9, 5)), rng.standard_normal((5, kernel))
    start = np.zeros((kernel - 1, 5))
    y, state = ref.short_conv(x, weight, start)
    for t in range(9):
        for c in range(5):
            z = sum(weight[c, j] * x[t - kernel + 1 + j, c] for j in range(kernel) if t - kernel + 1 + j >= 0)
            assert y[t, c] == pytest.approx(z / (1 + np.exp(-z)), abs=1e-14)
    np.testing.assert_array_equal(state, x[9 - (kernel - 1) :])
    head, middle = ref.short_conv(x[:1], weight, start)
    tail, last = ref.short_conv(x[1:], weight, middle)
    np.testing.assert_allclose(np.concatenate([head, tail]), y, rtol=0, atol=1e-15)
    np.testing.assert_array_equal(last, state)


def test_scalar_functions_at_the_ends() -> None:
    x = np.array([-1e4, -800.0, -50.0, 0.0, 50.0, 800.0, 1e4])
    with np.errstate(over="raise", invalid="raise"):
        np.testing.assert_allclose(ref.sigmoid(x), [0, 0, np.exp(-50), 0.5, 1, 1, 1], rtol=1e-15)
        np.testing.assert_allclose(ref.softplus(x), [0, 0, np.exp(-50), np.log(2), 50, 800, 1e4], rtol=1e-15)


# ---- router and experts ----------------------------------------------------------------------------------------------


def test_router_selects_by_bias_and_weighs_without() -> None:
    """D17: the bias changes which experts run, not how much they count; ties go to the lower id."""
    scores = np.array([[0.9, 0.5, 0.4, 0.4]])
    bias = np.array([-0.8, 0.0, 0.3, 0.3])
    chosen, weights = ref.route(scores, bias, 2, 2.446)
    assert chosen.tolist() == [[2, 3]]
    np.testing.assert_allclose(weights, [[2.446 / 2, 2.446 / 2]], rtol=1e-15)
    chosen, weights = ref.route(scores, bias, 3, 1.0)
    assert chosen.tolist() == [[2, 3, 1]]
    np.testing.assert_allclose(weights, np.array([[0.4, 0.4, 0.5]]) / 1.3, rtol=1e-15)
    assert ref.route(scores, bias, 1, 1.0)[1].tolist() == [[0.4]], "a single expert's weight is not renormalised"
    assert ref.route(scores, bias, 2, 1.0, renormalize=False)[1].tolist() == [[0.4, 0.4]]


def test_router_gap() -> None:
    scores, bias = np.array([[0.9, 0.5, 0.4, 0.2]]), np.array([-0.8, 0.0, 0.3, 0.0])
    np.testing.assert_allclose(ref.router_gap(scores, bias, 2), [0.3], rtol=1e-14)
    assert ref.router_gap(scores, bias, 4).tolist() == [np.inf]


def test_experts_sum(rng: np.random.Generator) -> None:
    z, chosen = rng.standard_normal((4, 6)), np.array([[0, 2], [2, 1], [1, 0], [2, 0]])
    weights = rng.random((4, 2))
    w1, w3, w2 = rng.standard_normal((3, 5, 6)), rng.standard_normal((3, 5, 6)), rng.standard_normal((3, 6, 5))
    y = ref.experts(z, chosen, weights, w1, w3, w2, ref.swiglu)
    for t in range(4):
        by_hand = sum(weights[t, s] * w2[e] @ ref.swiglu(w1[e] @ z[t], w3[e] @ z[t]) for s, e in enumerate(chosen[t]))
        np.testing.assert_allclose(y[t], by_hand, rtol=0, atol=1e-13)


# ---- whole models ----------------------------------------------------------------------------------------------------

SPLIT_PRESETS = ["k3", "kl", "k3-odd", "kl-odd", "k3-softplus-gate", "k3-full-width-experts"]


@pytest.mark.parametrize("preset", SPLIT_PRESETS)
@pytest.mark.parametrize(("kda", "mla"), [("recurrent", "expanded"), ("chunked", "absorbed")])
def test_any_split_equals_one_call(
    tiny_checkpoint: Callable[..., Path], rng: np.random.Generator, preset: str, kda: str, mla: str
) -> None:
    """D1, D2: token by token, in random pieces and at once, both forms."""
    folder = tiny_checkpoint(preset)
    ids = rng.integers(0, 512, 41)
    whole = Model.from_checkpoint(folder).forward(ids)
    model = Model.from_checkpoint(folder, kda=kda, mla=mla, chunk_size=7)
    cuts = sorted(rng.choice(np.arange(1, 41), 4, replace=False))
    for pieces in (np.split(ids, cuts), np.split(ids, 41), [ids]):
        state = model.new_state()
        logits = np.concatenate([model.forward(piece, state) for piece in pieces])
        assert state.length == 41
        np.testing.assert_allclose(logits, whole, rtol=0, atol=1e-10, err_msg=f"{preset} cut at {cuts}")


def test_sequences_side_by_side(tiny_checkpoint: Callable[..., Path], rng: np.random.Generator) -> None:
    """D7: three prompts of 1, 5 and 9 tokens together give what each gives alone, also when continued."""
    model = Model.from_checkpoint(tiny_checkpoint("k3"))
    prompts = [rng.integers(0, 512, n) for n in (1, 5, 9)]
    states = [model.new_state() for _ in prompts]
    together = model.forward_batch(prompts, states)
    more = model.forward_batch([[1], [2, 3], [4]], states)
    for ids, extra, first, second in zip(prompts, ([1], [2, 3], [4]), together, more, strict=True):
        alone = model.forward([*ids, *extra])
        np.testing.assert_allclose(np.concatenate([first, second]), alone, rtol=0, atol=1e-11)


def test_copied_state_is_independent(tiny_checkpoint: Callable[..., Path], rng: np.random.Generator) -> None:
    for mla in ("expanded", "absorbed"):
        model = Model.from_checkpoint(tiny_checkpoint("k3"), mla=mla)
        ids = rng.integers(0, 512, 20)
        state = model.new_state()
        model.forward(ids[:9], state)
        kept = state.copy()
        model.forward(ids[3:8], state)  # goes elsewhere
        np.testing.assert_allclose(model.forward(ids[9:], kept), model.forward(ids)[9:], rtol=0, atol=1e-11)


def test_greedy(tiny_checkpoint: Callable[..., Path], rng: np.random.Generator) -> None:
    """The text of repeated full evaluation; a stop id ends it and is left out; many prompts give what one gives."""
    model = Model.from_checkpoint(tiny_checkpoint("k3"))
    ids = rng.integers(0, 512, 6).tolist()
    margins: list[float] = []
    out = model.greedy(ids, 8, margins=margins)
    assert len(out) == len(margins) == 8
    for i in range(8):
        last = np.sort(model.forward(ids + out[:i])[-1])
        assert model.forward(ids + out[:i])[-1].argmax() == out[i]
        assert margins[i] == pytest.approx(last[-1] - last[-2], abs=1e-9)
    stop = out[3]
    assert model.greedy(ids, 8, {stop}) == out[: out.index(stop)]
    others = [rng.integers(0, 512, n).tolist() for n in (1, 11)]
    batch = model.greedy_batch([ids, *others], 8)
    assert [tokens for tokens, _ in batch] == [model.greedy(p, 8) for p in (ids, *others)]
    assert model.greedy(ids, 0) == []
    with pytest.raises(ValueError, match="at least one prompt token"):
        model.greedy([], 4)


def test_trace_names_every_stage(tiny_checkpoint: Callable[..., Path], rng: np.random.Generator) -> None:
    model = Model.from_checkpoint(tiny_checkpoint("k3"))
    trace: dict[str, np.ndarray] = {}
    logits = model.forward(rng.integers(0, 512, 5), trace=trace)
    hidden = model.config["hidden_size"]
    for i in range(len(model.layers)):
        for stage in ("attn_in", "attn", "ffn_in", "ffn", "out"):
            assert trace[f"layer.{i}.{stage}"].shape == (5, hidden)
    gaps = [trace[f"layer.{i}.router_gap"] for i in range(1, len(model.layers))]
    assert "layer.0.router_gap" not in trace, "layer 0 is dense"
    np.testing.assert_array_equal(trace["router_gaps"], np.min(gaps, axis=0))
    np.testing.assert_array_equal(trace["output"] @ model.lm_head.T, logits)


def test_dead_mix_of_layer_0(tiny_checkpoint: Callable[..., Path], tmp_path: Path, rng: np.random.Generator) -> None:
    """Layer 0 has no earlier stream to mix: its attention-residual tensors exist and change nothing; layer 1's do."""
    ids = rng.integers(0, 512, 12)
    logits = Model.from_checkpoint(tiny_checkpoint("k3")).forward(ids)
    for layer, same in ((0, True), (1, False)):

        def ones(checkpoint: Checkpoint, layer: int = layer) -> None:
            checkpoint.set(
                f"model.layers.{layer}.self_attention_res_proj.weight", HfTensor.from_float(np.ones((1, 64)))
            )

        changed = tiny.write_checkpoint(tmp_path / str(layer), preset="k3", mutate=ones)
        assert np.array_equal(Model.from_checkpoint(changed).forward(ids), logits) is same


def test_float32_is_close_to_float64(tiny_checkpoint: Callable[..., Path], rng: np.random.Generator) -> None:
    folder = tiny_checkpoint("kl")
    ids = rng.integers(0, 512, 30)
    trace: dict[str, np.ndarray] = {}
    exact = Model.from_checkpoint(folder).forward(ids, trace=trace)
    single = Model.from_checkpoint(folder, dtype=np.float32).forward(ids)
    assert single.dtype == np.float32
    # A router tie within float32 rounding would rightly change the rest of the sequence.
    safe = np.minimum.accumulate(trace["router_gaps"]) > 1e-5
    np.testing.assert_allclose(single[safe], exact[safe], rtol=0, atol=2e-4)


def test_refused_arguments(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint("kl")
    with pytest.raises(ValueError, match="kda must be"):
        Model.from_checkpoint(folder, kda="parallel")
    with pytest.raises(ValueError, match="mla must be"):
        Model.from_checkpoint(folder, mla="flash")
