"""Every op on every device against the float64 reference, alone, at odd sizes and at extremes.

The bound is on the normalised mean squared error. The devices that compute in float64 must equal the reference but for
the order of sums. Float32 results of a correct op lie near 1e-14; 1e-12 leaves room for the order of long sums and for
kernels whose exponential is a few units in the last place off.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import native
import reference as ref
from op_runner import F32, Sequence, State, Type, Weight, nmse, run

pytestmark = pytest.mark.skipif(not native.has_test_api(), reason="the library was built without its test interface")

DEVICES = ["ref", "cpu", "cpu-float"]
WIDE = ("ref", "cpu")  # devices that compute in float64
WEIGHT_TYPES = [F32, int(Type.F16), int(Type.BF16), int(Type.Q8_0), int(Type.MXFP4)]
INTEGER_TYPES = [int(Type.Q8_0), int(Type.MXFP4)]  # whose products take rounded inputs on cpu-float


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def encode(rng: np.random.Generator, type_: int, *shape: int) -> Weight:
    return Weight.encode(normal(rng, *shape), type_)


def bound(device: str) -> float:
    return 1e-24 if device in WIDE else 1e-12


def steps_of(x: np.ndarray) -> np.ndarray:
    """What float32 products with integers round x [n, a] to multiples of: 32 values to 1/32639 of the largest."""
    return np.abs(x).reshape(len(x), -1, 32).max(axis=2).repeat(32, axis=1) / 32639


def rounded(x: np.ndarray) -> np.ndarray:
    steps = steps_of(x)
    return np.rint(x / steps) * steps


def product_is_right(out: np.ndarray, x: np.ndarray, w: np.ndarray, device: str, type_: int) -> bool:
    """x [n, a] times w [b, a]. Rounding loses a share of the terms, whatever they cancel to.

    Rounding inputs to whole steps moves a sum of s_i w_i, s_i the step, by more than t |s w| with a probability below
    2 exp(-2 t^2), by Hoeffding's inequality; t = 4 makes it 3e-14 an output.
    """
    x = x.astype(np.float64)
    error = np.abs(out - x @ w.T)
    share = 1e-28 if device in WIDE else 1e-13
    if device not in WIDE and type_ in INTEGER_TYPES:
        error = np.maximum(0, error - 4 * np.sqrt(steps_of(x) ** 2 @ (w**2).T))
    return bool(np.mean(error**2) < share * np.mean((np.abs(x) @ np.abs(w).T) ** 2))


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def type_name(type_: int) -> str:
    return Type(type_).name


@pytest.mark.parametrize("type_", WEIGHT_TYPES, ids=type_name)
def test_embed(device: str, rng: np.random.Generator, type_: int) -> None:
    table = encode(rng, type_, 17, 64)
    tokens = np.array([3, 16, 0, 3], np.int32)
    out = run("embed", [], [table], device=device, out_cols=64, n_rows=4, tokens=tokens)
    assert np.array_equal(out, table.values[tokens].astype(np.float32))


@pytest.mark.parametrize("rows,cols", [(1, 1), (1, 7), (3, 48), (5, 129), (2, 2304)])
def test_rms_norm(device: str, rng: np.random.Generator, rows: int, cols: int) -> None:
    x, w = normal(rng, rows, cols, scale=3), encode(rng, F32, cols)
    out = run("rms_norm", [x], [w], [1e-5], device=device, out_cols=cols)
    assert nmse(out, ref.rms_norm(x.astype(np.float64), w.values, np.float32(1e-5).astype(np.float64))) < bound(device)


def test_rms_norm_of_tiny_values_is_ruled_by_epsilon(device: str, rng: np.random.Generator) -> None:
    x, w = normal(rng, 2, 40, scale=1e-4), encode(rng, F32, 40)
    out = run("rms_norm", [x], [w], [1e-6], device=device, out_cols=40)
    assert nmse(out, ref.rms_norm(x.astype(np.float64), w.values, np.float64(np.float32(1e-6)))) < bound(device)


def test_add(device: str, rng: np.random.Generator) -> None:
    a, b = normal(rng, 3, 77), normal(rng, 3, 77)
    wide = np.float64 if device in WIDE else np.float32
    assert np.array_equal(run("add", [a, b], device=device, out_cols=77), a.astype(wide) + b)


@pytest.mark.parametrize("type_", WEIGHT_TYPES, ids=type_name)
@pytest.mark.parametrize(
    "rows,n_in,n_out", [(1, 32, 1), (1, 96, 33), (2, 64, 5), (3, 256, 7), (17, 160, 40), (64, 1024, 19)]
)
def test_linear(device: str, rng: np.random.Generator, type_: int, rows: int, n_in: int, n_out: int) -> None:
    x, w = normal(rng, rows, n_in), encode(rng, type_, n_out, n_in)
    out = run("linear", [x], [w], device=device, out_cols=n_out)
    assert product_is_right(out, x, w.values, device, type_)


ENCODED = [
    Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K,
    Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S, Type.IQ4_NL, Type.IQ4_XS,
    Type.TQ1_0, Type.TQ2_0, Type.MXFP4, Type.NVFP4,
]  # fmt: skip


# Without integer kernels: decoded to float32, and inputs are taken as they are.
DECODED = [t for t in ENCODED if t.name.startswith(("IQ1", "IQ2", "IQ3", "TQ", "NVFP4"))]


@pytest.mark.parametrize("type_", ENCODED, ids=lambda t: t.name)
def test_every_type_in_every_op_that_takes_it(device: str, rng: np.random.Generator, type_: Type) -> None:
    """Random bytes; on cpu-float types with integer kernels meet rounded inputs, the others are decoded.

    The experts' definition rounds its inputs, too. Of those close to half a step float32 rounds some in a thousand
    the other way, a hundredth of what rounding as such loses: 1e-7 where the weights are extreme.
    """
    table = Weight.random(rng, type_, 7, 256)
    out = run("embed", [], [table], device=device, out_cols=256, n_rows=2, tokens=np.array([6, 0], np.int32))
    assert np.array_equal(out, table.values[[6, 0]])
    for rows in (1, 3, 12):
        x, w = normal(rng, rows, 512), Weight.random(rng, type_, 2, 35, 512)
        out = run("linear", [x], [Weight(w.type, w.data, w.values.reshape(70, 512))], device=device, out_cols=70)
        assert product_is_right(out, x, w.values.reshape(70, 512), device, INTEGER_TYPES[0])
        both = np.concatenate([x, x[::-1]], axis=1)
        out = run("head_linear", [both], [w], [512], device=device, out_cols=70)
        assert product_is_right(out[:, 35:], x[::-1], w.values[1], device, INTEGER_TYPES[0])
    z = normal(rng, 20, 256)
    gate, up, down = (Weight.random(rng, type_, 3, 256, 256) for _ in range(3))
    chosen = np.argsort(rng.random((20, 3)), axis=1)[:, :2]
    route = np.concatenate([chosen, rng.random((20, 2))], axis=1).astype(np.float32)
    out = run("moe_experts", [z, route], [gate, up, down], [2, 1, 4.0, 25.0], device=device, out_cols=256)
    weights = route[:, 2:].astype(np.float64)
    as_read = rounded if device not in WIDE and type_ not in DECODED else np.asarray
    expected = ref.experts(
        as_read(z.astype(np.float64)), chosen, weights, gate.values, up.values, down.values,
        lambda g, u: as_read(ref.situ(g, u)),
    )  # fmt: skip
    assert nmse(out, expected) < (bound(device) if device in WIDE else 1e-10 if type_ in DECODED else 1e-8)


@pytest.mark.parametrize("type_", [F32, int(Type.F16), int(Type.BF16)], ids=type_name)
@pytest.mark.parametrize("n_in,n_out", [(1, 1), (7, 3), (40, 48), (131, 9)])
def test_linear_rows_of_any_length(device: str, rng: np.random.Generator, type_: int, n_in: int, n_out: int) -> None:
    x, w = normal(rng, 5, n_in), encode(rng, type_, n_out, n_in)
    assert product_is_right(run("linear", [x], [w], device=device, out_cols=n_out), x, w.values, device, type_)


@pytest.mark.parametrize("type_", WEIGHT_TYPES, ids=type_name)
@pytest.mark.parametrize("heads,n_in,n_out,stride", [(1, 32, 5, 32), (3, 64, 40, 80), (2, 128, 96, 192)])
def test_head_linear(
    device: str, rng: np.random.Generator, type_: int, heads: int, n_in: int, n_out: int, stride: int
) -> None:
    x, w = normal(rng, 4, heads * stride), encode(rng, type_, heads, n_out, n_in)
    out = run("head_linear", [x], [w], [stride], device=device, out_cols=heads * n_out)
    used = x.reshape(4, heads, stride)[:, :, :n_in]
    for h, found in enumerate(out.reshape(4, heads, n_out).transpose(1, 0, 2)):
        assert product_is_right(found, used[:, h], w.values[h], device, type_)


@pytest.mark.parametrize("kind,beta,linear_beta", [(0, 0, 0), (1, 4, 25), (1, 4, 0), (1, 1.5, 3)])
def test_glu(device: str, rng: np.random.Generator, kind: int, beta: float, linear_beta: float) -> None:
    gate, up = normal(rng, 3, 53, scale=20), normal(rng, 3, 53, scale=40)
    gate[0, :4], up[0, :4] = [0, 100, -100, 1e-8], [0, 100, -100, 1e-8]
    out = run("glu", [gate, up], [], [kind, beta, linear_beta], device=device, out_cols=53)
    g, u = gate.astype(np.float64), up.astype(np.float64)
    expected = ref.swiglu(g, u) if kind == 0 else ref.situ(g, u, beta, linear_beta or None)
    assert nmse(out, expected) < bound(device)


@pytest.mark.parametrize("heads,dim,taps", [(1, 5, 2), (3, 48, 4), (2, 32, 7)])
@pytest.mark.parametrize("stream", [0, 2])
def test_short_conv_continues_where_it_stopped(
    device: str, rng: np.random.Generator, heads: int, dim: int, taps: int, stream: int
) -> None:
    """Pieces of 1, 2, 9 and 3 rows: shorter and longer than the state, two sequences side by side."""
    inner = heads * dim
    w = encode(rng, F32, inner, taps)
    state = State(n_head=heads, head_dim=dim, conv_rows=taps - 1, n_slots=3)
    state.recurrent[:] = normal(rng, *state.recurrent.shape)
    before = state.recurrent.copy()
    position = 0
    history = {slot: state.conv(slot, stream).astype(np.float64) for slot in (0, 2)}
    for n in (1, 2, 9, 3):
        x = normal(rng, 2 * n, inner)
        out = run(
            "short_conv", [x], [w], [stream], device=device, out_cols=inner, state=state,
            sequences=[Sequence(2, 0, n, position), Sequence(0, n, n, position)],
        )  # fmt: skip
        for slot, rows in ((2, slice(0, n)), (0, slice(n, 2 * n))):
            y, history[slot] = ref.short_conv(x[rows].astype(np.float64), w.values, history[slot])
            assert nmse(out[rows], y) < bound(device)
            assert np.array_equal(state.conv(slot, stream), history[slot])
        position += n
    assert np.array_equal(state.recurrent[1], before[1]), "a sequence that was not in the step changed"
    assert np.array_equal(state.scan(0), before[0, 3 * (taps - 1) * inner :].reshape(heads, dim, dim))


@pytest.mark.parametrize("bounded", [False, True])
def test_d5_kda_gate_is_two_functions(device: str, rng: np.random.Generator, bounded: bool) -> None:
    """D5: a lower bound selects another function, it is not a clamp."""
    heads, dim = 3, 40
    f = normal(rng, 4, heads * dim, scale=10)
    f[0, :3] = [0, 80, -80]
    a = Weight.encode(-np.exp(normal(rng, heads)))
    dt = encode(rng, F32, heads * dim)
    out = run("kda_gate", [f], [a, dt], [float(bounded), -5.0], device=device, out_cols=heads * dim)
    expected = ref.kda_gate(
        f.astype(np.float64).reshape(4, heads, dim),
        np.log(-a.values),
        dt.values.reshape(heads, dim),
        -5.0 if bounded else None,
    )
    assert nmse(out, expected.reshape(4, -1)) < bound(device)
    small = np.abs(expected.reshape(4, -1)) < 1e-3
    if small.any():
        assert np.allclose(out[small], expected.reshape(4, -1)[small], rtol=1e-5, atol=1e-30)


def scan_inputs(rng: np.random.Generator, n: int, heads: int, dim: int, decay: float) -> list[np.ndarray]:
    """q, k, v, g, beta logits; log decays down to -decay, a few of them almost zero."""
    g = -np.abs(normal(rng, n, heads * dim, scale=decay / 2))
    g[rng.random(g.shape) < 0.1] = -1e-6
    return [*(normal(rng, n, heads * dim, scale=s) for s in (2, 2, 5)), g, normal(rng, n, heads, scale=2)]


def scan_reference(inputs: list[np.ndarray], heads: int, dim: int, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """state and result as [heads, v, k], the engine's order."""
    q, k, v, g = (x.astype(np.float64).reshape(-1, heads, dim) for x in inputs[:4])
    o, s = ref.kda_recurrent(
        ref.l2_norm(q) * dim**-0.5,
        ref.l2_norm(k),
        v,
        g,
        ref.sigmoid(inputs[4].astype(np.float64)),
        state.transpose(0, 2, 1),
    )
    return o.reshape(len(o), -1), s.transpose(0, 2, 1)


@pytest.mark.parametrize("heads,dim", [(1, 4), (3, 48), (2, 128)])
@pytest.mark.parametrize("decay", [0.01, 5.0, 316.0])
@pytest.mark.parametrize("split", [[1], [200], [1, 7, 16, 64, 33], [15, 17, 2, 100]], ids=str)
def test_d1_d2_d4_kda_scan_at_any_split(
    device: str, rng: np.random.Generator, heads: int, dim: int, decay: float, split: list[int]
) -> None:
    """D1, D2, D4: every split of the rows gives the outputs and the state of the token-by-token definition, on a device
    that scans token by token (float64) and on one that does so in chunks (float32)."""
    state = State(n_head=heads, head_dim=dim, conv_rows=3)
    state.scan(0)[:] = normal(rng, heads, dim, dim)
    expected_state = state.scan(0).astype(np.float64)
    conv = state.recurrent[:, : 9 * heads * dim].copy()
    position = 0
    for n in split:
        inputs = scan_inputs(rng, n, heads, dim, decay)
        out = run(
            "kda_scan",
            inputs,
            device=device,
            out_cols=heads * dim,
            state=state,
            sequences=[Sequence(0, 0, n, position)],
        )
        expected, expected_state = scan_reference(inputs, heads, dim, expected_state)
        # What one token writes: a single output of a few channels may be what is left when two such cancel.
        written = np.abs(inputs[2].astype(np.float64)).mean() * dim**-0.5
        for found, right in ((out, expected), (state.scan(0), expected_state)):
            assert np.mean((found - right) ** 2) < scan_bound(device) * np.mean((np.abs(right) + written) ** 2)
        position += n
    assert np.array_equal(state.recurrent[:, : 9 * heads * dim], conv)


def scan_bound(device: str) -> float:
    return 1e-22 if device in WIDE else 1e-11


def test_d7_kda_scan_of_several_sequences(device: str, rng: np.random.Generator) -> None:
    """D7: sequences of 1, 5 and 37 rows in one step do not touch each other."""
    heads, dim, lengths, slots = 2, 16, [1, 5, 37], [3, 0, 2]
    state = State(n_head=heads, head_dim=dim, conv_rows=1, n_slots=4)
    state.recurrent[:] = normal(rng, *state.recurrent.shape)
    before = {slot: state.scan(slot).astype(np.float64) for slot in range(4)}
    inputs = scan_inputs(rng, sum(lengths), heads, dim, 1.0)
    starts = list(itertools.accumulate(lengths, initial=0))
    out = run(
        "kda_scan", inputs, device=device, out_cols=heads * dim, state=state,
        sequences=[Sequence(s, a, n, 9) for s, a, n in zip(slots, starts, lengths, strict=False)],
    )  # fmt: skip
    for slot, start, n in zip(slots, starts, lengths, strict=False):
        expected, s = scan_reference([x[start : start + n] for x in inputs], heads, dim, before[slot])
        assert nmse(out[start : start + n], expected) < scan_bound(device)
        assert nmse(state.scan(slot), s) < scan_bound(device)
    assert np.array_equal(state.scan(1), before[1])


def test_kda_scan_without_normalisable_input(device: str, rng: np.random.Generator) -> None:
    """A zero key and a zero query: epsilon keeps the norm finite."""
    state = State(n_head=1, head_dim=8, conv_rows=1)
    inputs = scan_inputs(rng, 20, 1, 8, 1.0)
    inputs[0][3], inputs[1][5] = 0, 0
    out = run("kda_scan", inputs, device=device, out_cols=8, state=state)
    expected, _ = scan_reference(inputs, 1, 8, np.zeros((1, 8, 8)))
    assert np.isfinite(out).all() and nmse(out, expected) < scan_bound(device)


@pytest.mark.parametrize("heads,dim", [(1, 3), (3, 48), (2, 128)])
def test_gated_norm(device: str, rng: np.random.Generator, heads: int, dim: int) -> None:
    o, r, w = normal(rng, 4, heads * dim), normal(rng, 4, heads * dim, scale=6), encode(rng, F32, dim)
    out = run("gated_norm", [o, r], [w], [1e-5], device=device, out_cols=heads * dim)
    shape = (4, heads, dim)
    expected = ref.gated_norm(
        o.astype(np.float64).reshape(shape), w.values, r.astype(np.float64).reshape(shape), np.float64(np.float32(1e-5))
    )
    assert nmse(out, expected.reshape(4, -1)) < bound(device)


Q8_0 = int(Type.Q8_0)
CACHE_TYPES = [F32, int(Type.F16), int(Type.BF16), Q8_0]


@pytest.mark.parametrize("cache_type", CACHE_TYPES, ids=type_name)
def test_latent_append(device: str, rng: np.random.Generator, cache_type: int) -> None:
    latent, rope = 58 if cache_type == Q8_0 else 40, 6  # Q8_0 takes whole blocks
    state = State(latent_width=latent + rope, n_ctx=12, cache_type=cache_type, n_slots=2)
    untouched = state.latent.copy()
    kv, w = normal(rng, 5, latent + rope), encode(rng, F32, latent)
    run(
        "latent_append", [kv], [w], [1e-6], device=device, out_cols=0, state=state,
        sequences=[Sequence(1, 0, 3, 4), Sequence(0, 3, 2, 0)],
    )  # fmt: skip
    x = kv.astype(np.float64)
    rows = np.concatenate([ref.rms_norm(x[:, :latent], w.values, np.float64(np.float32(1e-6))), x[:, latent:]], axis=1)
    rounding = {F32: 1e-14, int(Type.F16): 1e-6, int(Type.BF16): 1e-4, Q8_0: 1e-4}[cache_type] + bound(device)
    assert nmse(state.latents(1)[4:7], rows[:3]) < rounding
    assert nmse(state.latents(0)[:2], rows[3:]) < rounding
    if cache_type == Q8_0:
        # Half a step of 1/127 of the block's largest value, and the rounding of the step to float16, 127 times.
        largest = np.abs(rows).reshape(5, -1, 32).max(axis=2, keepdims=True)
        found = np.concatenate([state.latents(1)[4:7], state.latents(0)[:2]])
        errors = np.abs(found - rows).reshape(5, -1, 32) / largest
        assert errors.max() <= (0.5 / 127 + 2**-11) * 1.0001
    assert np.array_equal(state.latent[1, :4], untouched[1, :4]) and np.array_equal(
        state.latent[0, 2:], untouched[0, 2:]
    )


HEADS = [(1, 8, 0, 4), (3, 40, 6, 10), (2, 512, 64, 128), (45, 20, 4, 6)]  # heads, latent, rope, nope
BLOCK_HEADS = [(1, 32, 0, 4), (3, 90, 6, 10), (2, 512, 64, 128), (45, 60, 4, 6)]  # latents of whole blocks of Q8_0


@pytest.mark.parametrize(
    "cache_type,heads,latent,rope,nope",
    [(type_, *shape) for type_ in CACHE_TYPES for shape in (BLOCK_HEADS if type_ == Q8_0 else HEADS)],
)
@pytest.mark.parametrize("position,n", [(0, 1), (0, 70), (33, 1), (129, 19), (500, 2), (1000, 40)])
def test_mla_attention(
    device: str,
    rng: np.random.Generator,
    cache_type: int,
    heads: int,
    latent: int,
    rope: int,
    nope: int,
    position: int,
    n: int,
) -> None:
    width, n_ctx = latent + rope, position + n + 3
    state = State(latent_width=width, n_ctx=n_ctx, cache_type=cache_type)
    cache = Weight.encode(normal(rng, n_ctx, width), cache_type)
    cache_values = cache.values.copy()
    state.latent[0] = cache.data.reshape(n_ctx, -1)
    # Rows that lie in the future must not be read, whatever they hold.
    state.latent[0, position + n :] = 0xFF
    a, q = normal(rng, n, heads * latent, scale=0.5), normal(rng, n, heads * (nope + rope), scale=0.5)
    scale = (nope + rope) ** -0.5
    out = run(
        "mla_attention", [a, q], [], [heads, latent, rope, scale], device=device, out_cols=heads * latent, state=state,
        sequences=[Sequence(0, 0, n, position)],
    )  # fmt: skip
    queries = np.concatenate(
        [a.astype(np.float64).reshape(n, heads, latent), q.astype(np.float64).reshape(n, heads, -1)[:, :, nope:]],
        axis=2,
    )
    expected = np.empty((n, heads, latent))
    for t in range(n):
        keys = cache_values[: position + t + 1]
        s = queries[t] @ keys.T * scale
        p = np.exp(s - s.max(axis=1, keepdims=True))
        expected[t] = (p / p.sum(axis=1, keepdims=True)) @ keys[:, :latent]
    assert nmse(out, expected.reshape(n, -1)) < bound(device)


def test_mla_attention_with_large_scores(device: str, rng: np.random.Generator) -> None:
    """Scores of several hundred: the largest is taken off before the exponential."""
    state = State(latent_width=16, n_ctx=300)
    keys = normal(rng, 300, 16, scale=30)
    state.latent[0] = keys.view(np.uint8).reshape(300, -1)
    a = normal(rng, 1, 16, scale=10)
    out = run(
        "mla_attention",
        [a, a],
        [],
        [1, 16, 0, 1.0],
        device=device,
        out_cols=16,
        state=state,
        sequences=[Sequence(0, 0, 1, 299)],
    )
    s = a.astype(np.float64) @ keys.astype(np.float64).T
    p = np.exp(s - s.max())
    assert nmse(out, p / p.sum() @ keys.astype(np.float64)) < 1e-9


def test_mul_sigmoid(device: str, rng: np.random.Generator) -> None:
    a, b = normal(rng, 3, 61), normal(rng, 3, 61, scale=30)
    out = run("mul_sigmoid", [a, b], device=device, out_cols=61)
    assert nmse(out, a.astype(np.float64) * ref.sigmoid(b.astype(np.float64))) < bound(device)


@pytest.mark.parametrize("n_expert,k", [(1, 1), (7, 2), (7, 7), (896, 16)])
@pytest.mark.parametrize("normalise", [True, False])
def test_d17_moe_route(device: str, rng: np.random.Generator, n_expert: int, k: int, normalise: bool) -> None:
    """D17: the bias takes part in the selection only; weights are the plain scores, renormalised and scaled."""
    logits = normal(rng, 9, n_expert, scale=2)
    bias = encode(rng, F32, n_expert)
    out = run("moe_route", [logits], [bias], [k, float(normalise), 2.446], device=device, out_cols=2 * k)
    scores = ref.sigmoid(logits.astype(np.float64))
    safe = ref.router_gap(scores, bias.values, k) > 1e-5
    chosen, weights = ref.route(scores, bias.values, k, float(np.float32(2.446)), normalise)
    for row in np.flatnonzero(safe):
        found = dict(zip(out[row, :k].astype(int), out[row, k:], strict=True))
        expected = dict(zip(chosen[row].tolist(), weights[row].tolist(), strict=True))
        assert found.keys() == expected.keys()
        assert all(abs(found[e] - w) < 1e-6 * 2.446 for e, w in expected.items())
    assert safe.any()


def test_moe_route_ties_go_to_the_lower_id(device: str) -> None:
    out = run("moe_route", [np.zeros((1, 6), np.float32)], [None], [3, 1.0, 1.0], device=device, out_cols=6)
    assert out[0, :3].tolist() == [0, 1, 2]
    assert np.allclose(out[0, 3:], 1 / 3, rtol=1e-6)


@pytest.mark.parametrize("type_", WEIGHT_TYPES, ids=type_name)
@pytest.mark.parametrize(
    "rows,n_expert,k,width,inner", [(1, 4, 2, 64, 32), (5, 7, 3, 32, 96), (40, 6, 2, 64, 64), (2, 40, 16, 32, 32)]
)
def test_moe_experts(
    device: str, rng: np.random.Generator, type_: int, rows: int, n_expert: int, k: int, width: int, inner: int
) -> None:
    z = normal(rng, rows, width)
    gate, up = (encode(rng, type_, n_expert, inner, width) for _ in range(2))
    down = encode(rng, type_, n_expert, width, inner)
    chosen = np.argsort(rng.random((rows, n_expert)), axis=1)[:, :k]
    weights = rng.random((rows, k)).astype(np.float32)
    route = np.concatenate([chosen.astype(np.float32), weights], axis=1)
    out = run(
        "moe_experts", [z, route], [gate, up, down], [k, 1, 4.0, 25.0], device=device, out_cols=width
    )  # fmt: skip
    expected = ref.experts(
        z.astype(np.float64), chosen, weights.astype(np.float64), gate.values, up.values, down.values, ref.situ
    )
    rounded = device not in WIDE and type_ in INTEGER_TYPES  # inputs of three products, one after the other
    assert nmse(out, expected) < (1e-7 if rounded else bound(device))


def test_bank_push_and_mix(device: str, rng: np.random.Generator) -> None:
    rows, width, n_slots = 5, 33, 3
    bank = np.full((rows, width * n_slots), np.nan)
    entries = [normal(rng, rows, width, scale=s) for s in (1, 30, 0.01)]
    for slot, x in enumerate(entries[:2]):
        bank = run("bank_push", [x, bank], [], [slot], device=device, out_cols=width * n_slots)
    assert np.array_equal(bank[:, :width], entries[0]) and np.array_equal(bank[:, width : 2 * width], entries[1])
    assert np.isnan(bank[:, 2 * width :]).all(), "a slot that was not pushed changed"
    score = encode(rng, F32, width)
    out = run("bank_mix", [bank, entries[2]], [score], [2, 1e-5], device=device, out_cols=width)
    expected, _ = ref.mix(np.stack(entries).astype(np.float64), score.values, float(np.float32(1e-5)))
    assert nmse(out, expected) < bound(device)


def test_pick_rows(device: str, rng: np.random.Generator) -> None:
    x = normal(rng, 6, 21)
    out = run("pick_rows", [x], device=device, out_cols=21, output_rows=[1, 5])
    assert np.array_equal(out, x[[1, 5]])


@pytest.mark.parametrize(
    "op,shapes,params",
    [("rms_norm", [(2, 32)], [1e-5]), ("mul_sigmoid", [(2, 32), (2, 32)], []), ("glu", [(2, 32), (2, 32)], [1, 4, 25])],
)
def test_nan_is_not_swallowed(
    device: str, rng: np.random.Generator, op: str, shapes: list[tuple[int, int]], params: list[float]
) -> None:
    inputs = [normal(rng, *shape) for shape in shapes]
    inputs[0][1, 3] = np.nan
    weights = [encode(rng, F32, 32)] if op == "rms_norm" else []
    out = run(op, inputs, weights, params, device=device, out_cols=32)
    assert np.isfinite(out[0]).all() and np.isnan(out[1, 3])


def test_nan_in_a_score_reaches_attention_and_route(device: str, rng: np.random.Generator) -> None:
    state = State(latent_width=8, n_ctx=4)
    state.latent[0] = normal(rng, 4, 8).view(np.uint8).reshape(4, -1)
    a = normal(rng, 1, 8)
    a[0, 0] = np.nan
    out = run(
        "mla_attention",
        [a, a],
        [],
        [1, 8, 0, 1.0],
        device=device,
        out_cols=8,
        state=state,
        sequences=[Sequence(0, 0, 1, 3)],
    )
    assert np.isnan(out).all()
    logits = normal(rng, 1, 6)
    logits[0, 2] = np.nan
    route = run("moe_route", [logits], [None], [2, 1.0, 1.0], device=device, out_cols=4)
    assert np.isnan(route[0, 2:]).all() and np.isfinite(route[0, :2]).all()


@pytest.mark.parametrize("activations", ["exact", "fine", "fast"])
@pytest.mark.parametrize("type_", WEIGHT_TYPES, ids=type_name)
def test_results_do_not_depend_on_threads_or_company(rng: np.random.Generator, type_: int, activations: str) -> None:
    """A row's products are bit for bit the same with 1 or 3 threads, alone or among 20 rows."""
    x, w = normal(rng, 20, 256), encode(rng, type_, 37, 256)
    many = run("linear", [x], [w], device="cpu", out_cols=37, activations=activations, n_threads=3)
    assert np.array_equal(
        many, run("linear", [x], [w], device="cpu", out_cols=37, activations=activations, n_threads=1)
    )
    for row in (0, 7, 19):
        alone = run("linear", [x[row : row + 1]], [w], device="cpu", out_cols=37, activations=activations, n_threads=2)
        assert np.array_equal(alone[0], many[row])


@pytest.mark.parametrize("activations", ["exact", "fine"])
def test_experts_do_not_depend_on_threads_or_company(rng: np.random.Generator, activations: str) -> None:
    """However the rows are grouped by expert, each adds up its own experts in the order of its route."""
    n, n_expert, k, width, inner = 40, 5, 3, 64, 160
    z = normal(rng, n, width)
    gate, up = (encode(rng, int(Type.MXFP4), n_expert, inner, width) for _ in range(2))
    down = encode(rng, int(Type.Q8_0), n_expert, width, inner)
    chosen = np.argsort(rng.random((n, n_expert)), axis=1)[:, :k].astype(np.float32)
    route = np.concatenate([chosen, rng.random((n, k)).astype(np.float32)], axis=1)

    def experts(rows: slice, n_threads: int) -> np.ndarray:
        return run(
            "moe_experts", [z[rows], route[rows]], [gate, up, down], [k, 1, 4.0, 25.0], device="cpu", out_cols=width,
            activations=activations, n_threads=n_threads,
        )  # fmt: skip

    many = experts(slice(None), 3)
    assert np.array_equal(many, experts(slice(None), 1))
    for row in (0, 17, 39):
        assert np.array_equal(experts(slice(row, row + 1), 2)[0], many[row])


@pytest.mark.parametrize("activations", ["exact", "fine"])
@pytest.mark.parametrize(
    "heads,position,n",
    [(5, 61, 9), (5, 250, 20), (3, 1000, 2), (40, 700, 3), (1, 0, 600)],
    ids=["short", "into a second chunk", "few queries", "many heads", "prompt"],
)
def test_attention_does_not_depend_on_threads_or_company(
    rng: np.random.Generator, activations: str, heads: int, position: int, n: int
) -> None:
    """Bit for bit: a row alone or among others, of its sequence and another one, with few threads and with many."""
    latent, rope, n_ctx = 40, 8, position + n
    state = State(n_slots=2, latent_width=latent + rope, n_ctx=n_ctx)
    for slot in range(2):
        state.latent[slot] = normal(rng, n_ctx, latent + rope).view(np.uint8).reshape(n_ctx, -1)
    a, q = normal(rng, n, heads * latent), normal(rng, n, heads * rope)

    def attention(rows: list[int], sequences: list[Sequence], n_threads: int) -> np.ndarray:
        return run(
            "mla_attention", [a[rows], q[rows]], [], [heads, latent, rope, 0.3], device="cpu", state=state,
            out_cols=heads * latent, activations=activations, n_threads=n_threads, sequences=sequences,
        )  # fmt: skip

    every = list(range(n))
    many = attention(every, [Sequence(0, 0, n, position)], 3)
    for n_threads in (1, 16):
        assert attention(every, [Sequence(0, 0, n, position)], n_threads).tobytes() == many.tobytes()
    for row in (0, n // 2, n - 1):
        for n_threads in (1, 2, 7):
            alone = attention([row], [Sequence(0, 0, 1, position + row)], n_threads)
            assert alone[0].tobytes() == many[row].tobytes()
            # The last row is of this test, those before it belong to another sequence.
            company = [Sequence(1, 0, 2, 1), Sequence(0, 2, 1, position + row)]
            assert attention([0, 1, row], company, n_threads)[2].tobytes() == many[row].tobytes()


@pytest.mark.parametrize("n_threads", [1, 4])
def test_nothing_of_a_later_row_reaches_an_earlier_one(rng: np.random.Generator, n_threads: int) -> None:
    """The step writes its own rows of the cache before it attends: those after a row may hold anything."""
    heads, latent, position, n = 2, 24, 270, 30
    state = State(latent_width=latent, n_ctx=position + n)
    keys = normal(rng, position + n, latent)
    a = normal(rng, n, heads * latent)

    def attention() -> np.ndarray:
        state.latent[0] = keys.view(np.uint8).reshape(position + n, -1)
        return run(
            "mla_attention", [a, a], [], [heads, latent, 0, 0.3], device="cpu", state=state, out_cols=heads * latent,
            activations="fine", n_threads=n_threads, sequences=[Sequence(0, 0, n, position)],
        )  # fmt: skip

    clean = attention()
    for row, number in ((7, np.nan), (20, np.inf)):
        before = keys[position + row].copy()
        keys[position + row] = number
        out = attention()
        assert out[:row].tobytes() == clean[:row].tobytes() and np.isnan(out[row:]).all()
        keys[position + row] = before


@pytest.mark.parametrize("activations", ["exact", "fine"])
@pytest.mark.parametrize("heads,dim,n", [(1, 64, 1), (3, 40, 20)])
def test_kda_scan_does_not_depend_on_threads(
    rng: np.random.Generator, heads: int, dim: int, n: int, activations: str
) -> None:
    inputs, results = scan_inputs(rng, n, heads, dim, 1.0), []
    for n_threads in (1, 2, 7):
        state = State(n_head=heads, head_dim=dim, conv_rows=1)
        out = run("kda_scan", inputs, device="cpu", out_cols=heads * dim, state=state, activations=activations,
                  n_threads=n_threads)  # fmt: skip
        results.append((out, state.recurrent.copy()))
    for out, recurrent in results[1:]:
        assert np.array_equal(out, results[0][0]) and np.array_equal(recurrent, results[0][1])


@pytest.mark.parametrize("type_", [int(Type.Q8_0), int(Type.MXFP4)], ids=type_name)
def test_rounded_inputs_stay_close(rng: np.random.Generator, type_: int) -> None:
    """`fine` loses at most 1e-7 of the energy of a product, `fast` (one int8 per block) about 2e-5."""
    x, w = normal(rng, 8, 512), encode(rng, type_, 64, 512)
    expected = x.astype(np.float64) @ w.values.T
    errors = {
        a: nmse(run("linear", [x], [w], device="cpu", out_cols=64, activations=a), expected)
        for a in ("exact", "fine", "fast")
    }
    assert errors["exact"] < bound("cpu") and errors["fine"] < 1e-7 and errors["fast"] < 2e-4, errors
