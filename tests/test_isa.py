"""Every entry of every CPU kernel table: the instruction sets of this processor and the portable kernels at each width.

Or those of another processor under an emulator: kernels.py says how.

Each result is compared with float64 numpy, at sizes that are multiples of nothing and at extremes; the generic table is
one of those compared, so that any two tables agree.
"""

from __future__ import annotations

import re
import shutil
import subprocess

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

import kernels
import native
import reference as ref
from op_runner import F32, Type, Weight, nmse, run
from random_blocks import TYPES, random_rows
from reference import vision

if not native.has_test_api():
    pytest.skip("the library was built without its test interface", allow_module_level=True)

FFI, LIB = native.load()
ISAS = kernels.isas()
INPUT_F32, INPUT_I16, INPUT_I8 = range(3)
BLOCK, KEY_BLOCK, CHUNK, LANES = 32, 64, 16, 16
INPUT_BYTES = np.dtype([("high", np.int8, BLOCK), ("low", np.int8, BLOCK), ("sums", np.int32, 2)])
ROUNDED_BLOCK = 2 * BLOCK + 3 * 4 + INPUT_BYTES.itemsize  # bytes of a block of rounded inputs
F16, BF16, Q8_0, MXFP4 = int(Type.F16), int(Type.BF16), int(Type.Q8_0), int(Type.MXFP4)
SIZES = [1, 3, 4, 15, 16, 17, 48, 129, 1000]
BOUND = 1e-12
GUARD = 64


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def call(
    isa: str,
    kernel: str,
    inputs: list[np.ndarray],
    outputs: list[np.ndarray],
    sizes: list[int],
    params: tuple[float, ...] = (),
    *,
    type_: int = F32,
    input_: int = INPUT_F32,
) -> list[np.ndarray]:
    """Calls one kernel on copies of `outputs`, which it may read, and returns them; fails if it wrote past one."""
    guarded = []
    for array in outputs:
        memory = np.full(array.nbytes + GUARD, 0xA5, np.uint8)
        memory[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        guarded.append(memory)
    kernels.call(isa, kernel, inputs, guarded, sizes, params, type_, input_)
    for array, memory in zip(outputs, guarded, strict=True):
        assert (memory[array.nbytes :] == 0xA5).all(), f"{kernel} of {isa} wrote past its output"
    return [m[: a.nbytes].view(a.dtype).reshape(a.shape) for a, m in zip(outputs, guarded, strict=True)]


def row(isa: str, kernel: str, inputs: list[np.ndarray], n: int, *params: float) -> np.ndarray:
    return call(isa, kernel, inputs, [nans(n)], [n], params)[0]


def nans(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan, np.float32)


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def off(found: np.ndarray, expected: np.ndarray, size: np.ndarray | float) -> float:
    """Mean squared error over the mean square of `size`: the sum of magnitudes that a cancelling sum is made of."""
    return float(np.mean((wide(found) - expected) ** 2) / np.mean(np.square(size)))


def ulps(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest error, in units of the last place of the expected float32, of the smallest normal one at least."""
    unit = np.spacing(np.maximum(np.abs(expected), np.finfo(np.float32).tiny).astype(np.float32)).astype(np.float64)
    return float(np.max(np.abs(wide(found) - expected) / unit))


# -- products ----------------------------------------------------------------------------------------------------------


# Types of small integers, which have kernels of their own.
INTEGERS = [
    *(Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K),
    *(Type.IQ4_NL, Type.IQ4_XS, Type.MXFP4),
]


def encoded(rng: np.random.Generator, type_: int, n_w: int, n: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Rows of bytes that begin at an odd address, where the type allows, their values, and bytes per row."""
    raw, values = random_rows(rng, Type(type_), (n_w, n), 0.5)
    shift = 0 if type_ == F32 else 1
    memory = np.zeros(raw.size + shift, np.uint8)
    memory[shift:] = raw.reshape(-1)
    return memory[shift:], wide(values), raw.shape[1]


def rounded_parts(row: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A rounded input (`CpuInput` in kernels.h): integers, scales, scaled sums of 16, the integers as bytes."""
    ends = np.cumsum([2 * n, 4 * (n // BLOCK), 4 * (n // 16)])
    q, scales, sums, each = np.split(row, ends)
    return q.view(np.int16), scales.view(np.float32), sums.view(np.float32), each.view(INPUT_BYTES)


def input_rows(isa: str, x: np.ndarray, input_: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows as the kernels read them, bytes [n_x, stride], and the values they stand for."""
    if input_ == INPUT_F32:
        return x.view(np.uint8).reshape(len(x), -1).copy(), wide(x)
    n = x.shape[1]
    rows, values = [], []
    for one in x:
        row = call(isa, "quantize", [one], [np.zeros(n // BLOCK * ROUNDED_BLOCK, np.uint8)], [n], input_=input_)[0]
        q, scales, sums, each = rounded_parts(row, n)
        rows.append(row)
        assert np.array_equal(256 * wide(each["high"]) + each["low"], wide(q).reshape(-1, BLOCK))
        assert np.array_equal(each["sums"], q.reshape(-1, 2, 16).sum(axis=2))
        values.append((wide(q).reshape(-1, BLOCK) * wide(scales)[:, None]).reshape(-1))
        expected = np.repeat(scales, 2) * q.reshape(-1, 16).sum(axis=1).astype(np.float32)
        assert np.array_equal(sums, expected, equal_nan=True)
    return np.stack(rows), np.stack(values)


def dot(
    isa: str, w: np.ndarray, n_w: int, row_bytes: int, x: np.ndarray, n: int, type_: int, input_: int
) -> np.ndarray:
    sizes = [n_w, len(x), n, row_bytes, x.shape[1]]
    return call(isa, "dot", [w, x], [nans(len(x), n_w)], sizes, type_=type_, input_=input_)[0]


PRODUCTS = [(t, INPUT_F32) for t in (F32, F16, BF16)] + [(int(t), i) for t in INTEGERS for i in (INPUT_I16, INPUT_I8)]


# Rows: fewer and more than a panel has; inputs: few, and enough for panels; columns: several panels and a rest.
@pytest.mark.parametrize("type_,input_", PRODUCTS, ids=lambda v: str(v))
@pytest.mark.parametrize(
    "n_w,n_x,n", [(1, 1, 256), (3, 2, 512), (9, 5, 768), (37, 9, 1280), (70, 23, 256), (8, 1, 7168)]
)
def test_dot(isa: str, rng: np.random.Generator, type_: int, input_: int, n_w: int, n_x: int, n: int) -> None:
    w, values, row_bytes = encoded(rng, type_, n_w, n)
    x, x_values = input_rows(isa, normal(rng, n_x, n), input_)
    out = dot(isa, w, n_w, row_bytes, x, n, type_, input_)
    assert off(out, x_values @ values.T, np.abs(x_values) @ np.abs(values).T) < BOUND


@pytest.mark.parametrize("type_", [int(t) for t in INTEGERS if GGML_QUANT_SIZES[t][0] == BLOCK])
@pytest.mark.parametrize("n", [32, 96, 544, 1056])
def test_dot_of_any_number_of_blocks(isa: str, rng: np.random.Generator, type_: int, n: int) -> None:
    w, values, row_bytes = encoded(rng, type_, 5, n)
    for n_x, input_ in ((3, INPUT_I16), (12, INPUT_I16), (3, INPUT_I8), (12, INPUT_I8)):
        x, x_values = input_rows(isa, normal(rng, n_x, n), input_)
        out = dot(isa, w, 5, row_bytes, x, n, type_, input_)
        assert off(out, x_values @ values.T, np.abs(x_values) @ np.abs(values).T) < BOUND


@pytest.mark.parametrize("type_", [F32, F16, BF16])
@pytest.mark.parametrize("n", [*SIZES, 511, 513])
def test_dot_of_any_length(isa: str, rng: np.random.Generator, type_: int, n: int) -> None:
    w, values, row_bytes = encoded(rng, type_, 6, n)
    for n_x in (1, 2, 3):
        x, x_values = input_rows(isa, normal(rng, n_x, n), INPUT_F32)
        out = dot(isa, w, 6, row_bytes, x, n, type_, INPUT_F32)
        assert off(out, x_values @ values.reshape(6, n).T, np.abs(x_values) @ np.abs(values).reshape(6, n).T) < BOUND


def odd_columns(kind: Type) -> list[int]:
    block = GGML_QUANT_SIZES[kind][0]
    return [1, 3, 17, 129, 1000] if block == 1 else [block, 3 * block, 7 * block, 33 * block]


@pytest.mark.skipif(bool(kernels.elsewhere()), reason="an op needs the library; elsewhere are kernels only")
@pytest.mark.parametrize("isa", [name for name in kernels.here() if not name.startswith("width")])
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_type_at_odd_sizes(
    monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, kind: Type, isa: str
) -> None:
    """The op `linear`, with kernels of the type or, where there are none, row by row decoded: few inputs and many."""
    monkeypatch.setenv("DELTALLAMA_CPU", isa)
    for n in odd_columns(kind):
        for n_w in (1, 7, 37):
            raw, values = random_rows(rng, kind, (n_w, n), 0.5)
            weight = Weight(int(kind), raw.reshape(-1), wide(values))
            for n_x in (1, 3, 8, 21):
                inputs = normal(rng, n_x, n)
                _, x = input_rows(isa, inputs, INPUT_I16 if kind in INTEGERS else INPUT_F32)
                out = run("linear", [inputs], [weight], device="cpu-float", out_cols=n_w)
                assert off(out, x @ values.T, np.abs(x) @ np.abs(values).T) < BOUND, (n_w, n_x, n)


@pytest.mark.parametrize("n", SIZES)
def test_wide_dot(isa: str, rng: np.random.Generator, n: int) -> None:
    w, x = rng.standard_normal(n), rng.standard_normal(n)
    out = call(isa, "wide_dot", [w, x], [np.full(1, np.nan)], [n])[0]
    terms = w.astype(np.longdouble) * x
    assert abs(out[0] - terms.sum()) <= 1e-15 * np.abs(terms).sum()


@pytest.mark.parametrize("type_,input_", PRODUCTS, ids=lambda v: str(v))
def test_dot_does_not_depend_on_its_neighbours(isa: str, rng: np.random.Generator, type_: int, input_: int) -> None:
    """Bit for bit the same for any number of weight rows and inputs in the call, and in any place among them."""
    n, n_w = 768, 43
    w, _, row_bytes = encoded(rng, type_, n_w, n)
    x, _ = input_rows(isa, normal(rng, 19, n), input_)
    all_ = dot(isa, w, n_w, row_bytes, x, n, type_, input_)
    for first, rows in ((0, 1), (3, 1), (2, 5), (10, 33), (42, 1)):
        for start, inputs in ((0, 1), (5, 1), (1, 2), (6, 3), (0, 7), (4, 11)):
            some = x[start : start + inputs].copy()
            part = dot(isa, w[first * row_bytes :], rows, row_bytes, some, n, type_, input_)
            assert np.array_equal(part, all_[start : start + inputs, first : first + rows])


# What decides the bits of a product is whether a multiplication and an addition round once.
FUSED = ["avx2", "avx512", "neon", "neon_dot", "neon_i8mm"]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("type_", [F32, F16, BF16, *(int(t) for t in INTEGERS)])
def test_no_instruction_set_changes_a_bit_of_a_product(rng: np.random.Generator, type_: int, fused: bool) -> None:
    alike = [isa for isa in ISAS if (isa in FUSED) == fused]
    if len(alike) < 2:
        pytest.skip(f"no two of these to compare: {', '.join(ISAS)}")
    w, _, row_bytes = encoded(rng, type_, 35, 512)
    for n_x in (1, 3, 13):
        for input_ in [INPUT_F32] if type_ in (F32, F16, BF16) else [INPUT_I16, INPUT_I8]:
            x, _ = input_rows(alike[0], normal(rng, n_x, 512), input_)
            found = [dot(isa, w, 35, row_bytes, x, 512, type_, input_) for isa in alike]
            assert all(np.array_equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("type_", [int(t) for t in INTEGERS])
def test_inputs_of_eight_bits_have_a_shorter_way_to_the_same_bits(
    isa: str, rng: np.random.Generator, type_: int
) -> None:
    """Also at the ends, where sums of 16 bits are largest: a bit pattern in all blocks, inputs of one size."""
    n_w, n = 19, 512
    rows = [random_rows(rng, Type(type_), (n_w, n), 0.5)[0]]
    block_bytes = GGML_QUANT_SIZES[Type(type_)][1]
    for pattern in (0x00, 0x0F, 0xF0, 0xFF):
        raw = rows[0].copy().reshape(-1, block_bytes)
        for at in range(block_bytes):
            kept = raw[:, at].copy()
            raw[:, at] = pattern
            with np.errstate(all="ignore"):
                is_scale = not np.isfinite(dequantize(raw, Type(type_))).all()
            if is_scale:
                raw[:, at] = kept
        rows.append(raw.reshape(rows[0].shape))
    signs = np.array([[1] * n, [-1] * n, [1, -1] * (n // 2)], np.float32)
    for raw in rows:
        w = raw.reshape(-1)
        for inputs in (normal(rng, 3, n), 3 * signs, normal(rng, 17, n), 3 * np.repeat(signs, 5, axis=0)):
            x, _ = input_rows(isa, inputs, INPUT_I8)
            longer, shorter = (dot(isa, w, n_w, raw.shape[1], x, n, type_, way) for way in (INPUT_I16, INPUT_I8))
            assert np.array_equal(longer, shorter)


@pytest.mark.parametrize("input_", [INPUT_I16, INPUT_I8])
def test_integer_products_do_not_overflow(isa: str, input_: int) -> None:
    n = 64
    block = np.concatenate([np.array([1], np.float16).view(np.uint8), np.full(BLOCK, 0x80, np.uint8)])
    w = np.tile(block, n // BLOCK)
    for sign in (1, -1):
        x, values = input_rows(isa, np.full((1, n), sign * 3.0, np.float32), input_)
        out = dot(isa, w, 1, len(w), x, n, Q8_0, input_)
        assert np.allclose(out, -128 * values.sum(), rtol=1e-6)


@pytest.mark.parametrize("type_,input_", PRODUCTS, ids=lambda v: str(v))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_input_reaches_every_product_of_its_row(
    isa: str, rng: np.random.Generator, type_: int, input_: int, bad: float
) -> None:
    w, _, row_bytes = encoded(rng, type_, 5, 256)
    for n_x in (3, 10):
        inputs = normal(rng, n_x, 256)
        inputs[1, 40] = bad
        x, _ = input_rows(isa, inputs, input_)
        out = dot(isa, w, 5, row_bytes, x, 256, type_, input_)
        assert np.isfinite(np.delete(out, 1, axis=0)).all() and not np.isfinite(out[1]).any()


def test_nan_scale_of_mxfp4_reaches_the_product(isa: str, rng: np.random.Generator) -> None:
    w, _, row_bytes = encoded(rng, MXFP4, 1, 64)
    w[17] = 255
    for input_, n_x in ((INPUT_I16, 1), (INPUT_I8, 1), (INPUT_I16, 9), (INPUT_I8, 9)):
        x, _ = input_rows(isa, normal(rng, n_x, 64), input_)
        assert np.isnan(dot(isa, w, 1, row_bytes, x, 64, MXFP4, input_)).all()


@pytest.mark.parametrize("type_", [F32, F16, BF16])
@pytest.mark.parametrize("n", [32, 96, 1024])
def test_widen_is_exact(isa: str, rng: np.random.Generator, type_: int, n: int) -> None:
    memory, values, _ = encoded(rng, type_, 1, n)
    out = call(isa, "widen", [memory], [nans(n)], [n], type_=type_)[0]
    assert np.array_equal(out, values.reshape(-1).astype(np.float32))


@pytest.mark.parametrize("type_", [F16, BF16])
@pytest.mark.parametrize("n", SIZES)
def test_widen_of_any_length(isa: str, rng: np.random.Generator, type_: int, n: int) -> None:
    memory, values, _ = encoded(rng, type_, 1, n)
    out = call(isa, "widen", [memory], [nans(n)], [n], type_=type_)[0]
    assert np.array_equal(out, values.reshape(-1).astype(np.float32))


@pytest.mark.parametrize("n", [32, 96, 576])
def test_widen_q8_0_is_exact(isa: str, rng: np.random.Generator, n: int) -> None:
    memory, values, _ = encoded(rng, Q8_0, 1, n)
    out = call(isa, "widen_q8_0", [memory], [nans(n)], [n])[0]
    assert np.array_equal(out, values.reshape(-1).astype(np.float32))
    memory[:2] = np.array([np.nan], np.float16).view(np.uint8)
    out = call(isa, "widen_q8_0", [memory], [nans(n)], [n])[0]
    assert np.isnan(out[:32]).all() and np.isfinite(out[32:]).all()


def test_widen_of_all_halves(isa: str) -> None:
    codes = np.arange(65536, dtype=np.uint16)
    halves = call(isa, "widen", [codes.view(np.uint8)], [nans(65536)], [65536], type_=F16)[0]
    assert np.array_equal(halves, codes.view(np.float16).astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("input_,steps", [(INPUT_I16, 127 * 257), (INPUT_I8, 127)])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e30])
def test_quantize_rounds_to_nearest(isa: str, rng: np.random.Generator, input_: int, steps: int, scale: float) -> None:
    x = normal(rng, 1, 320, scale=scale)
    x[0, :32] = 0
    _, values = input_rows(isa, x, input_)
    largest = np.abs(wide(x)).reshape(-1, BLOCK).max(axis=1)
    error = np.abs(values - wide(x)).reshape(-1, BLOCK).max(axis=1)
    assert (error <= largest / steps * 0.505).all() and (values[0, :32] == 0).all()


# -- functions of one variable, through the kernels that use them ------------------------------------------------------


def sweep(rng: np.random.Generator, limit: float) -> np.ndarray:
    tiny = np.float32(10) ** rng.uniform(-38, 0, 3000).astype(np.float32) * rng.choice([-1, 1], 3000)
    edges = np.array([0.0, -0.0, 1.0, 0.625, 0.6249, 88.7, 88.8, 103.9, 104.5, limit])
    x = np.concatenate([rng.uniform(-limit, limit, 6001), tiny, edges, -edges])
    return x[np.abs(x) <= limit].astype(np.float32)


def test_exponential(isa: str, rng: np.random.Generator) -> None:
    """As the decay of KDA; its gate reaches -316 and may go further."""
    g = np.concatenate([sweep(rng, 88.0), -np.abs(sweep(rng, 400.0)), [-1e30, -np.inf]]).astype(np.float32)[None]
    n = g.shape[1]
    ones = np.ones_like(g)
    decay = call(isa, "kda_prepare", [ones, ones, g], [*(nans(1, n) for _ in range(3)), nans(1)], [1, n, 1])[2]
    assert ulps(decay, np.exp(wide(g))) < 1.1
    assert decay[0, -1] == 0


def test_sigmoid(isa: str, rng: np.random.Generator) -> None:
    x = np.concatenate([sweep(rng, 120.0), [np.inf, -np.inf, np.nan]]).astype(np.float32)
    out = row(isa, "sigmoid", [x], len(x))
    # An exponential within 1.1, a sum and a quotient.
    assert ulps(out[:-3], ref.sigmoid(wide(x[:-3]))) < 2.5
    assert out[-3] == 1 and out[-2] == 0 and np.isnan(out[-1])


def test_tanh(isa: str, rng: np.random.Generator) -> None:
    """As the upper branch of situ: with a gate of 40, beta * tanh(gate / beta) * sigmoid(gate) is 4."""
    u = sweep(rng, 60.0)
    out = row(isa, "situ_mul", [np.full_like(u, 40), u], len(u), 4.0, 1.0)
    # Seven operations of half a unit at most; the exponential of the branch for large arguments hardly counts there.
    assert ulps(out, 4 * np.tanh(wide(u))) < 3.5
    bad = np.array([np.nan, np.inf, -np.inf], np.float32)
    out = row(isa, "situ_mul", [np.full_like(bad, 40), bad], 3, 4.0, 1.0)
    assert np.isnan(out[0]) and out[1] == 4 and out[2] == -4


def test_softplus(isa: str, rng: np.random.Generator) -> None:
    x = sweep(rng, 120.0)
    out = row(isa, "gate_softplus", [x, np.zeros_like(x)], len(x), -1.0)
    assert ulps(out, -np.logaddexp(0, wide(x))) < 2.5
    assert np.isnan(row(isa, "gate_softplus", [np.array([np.nan], np.float32)] * 2, 1, -1.0)).all()


# -- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", SIZES)
def test_elementwise(isa: str, rng: np.random.Generator, n: int) -> None:
    a, b = normal(rng, n, scale=4), normal(rng, n, scale=9)
    x, y = wide(a), wide(b)
    assert np.array_equal(row(isa, "add", [a, b], n), a + b)
    assert nmse(row(isa, "mul_sigmoid", [a, b], n), x * ref.sigmoid(y)) < BOUND
    assert nmse(row(isa, "silu_mul", [a, b], n), ref.swiglu(x, y)) < BOUND
    assert nmse(row(isa, "situ_mul", [a, b], n, 4.0, 25.0), ref.situ(x, y, 4.0, 25.0)) < BOUND
    assert nmse(row(isa, "situ_mul", [a, b], n, 1.5, 0.0), ref.situ(x, y, 1.5, None)) < BOUND
    # Rounding the sum of two inputs by one unit changes an exponential of it by as many as the sum is large.
    bounded, unbounded = -5 * ref.sigmoid(0.75 * (x + y)), -0.75 * np.logaddexp(0, x + y)
    assert off(row(isa, "gate_bounded", [a, b], n, -0.75, -5.0), bounded, bounded * (1 + np.abs(x + y))) < BOUND
    assert off(row(isa, "gate_softplus", [a, b], n, -0.75), unbounded, unbounded * (1 + np.abs(x + y))) < BOUND


@pytest.mark.parametrize("n", SIZES)
def test_norms(isa: str, rng: np.random.Generator, n: int) -> None:
    x, w, gate = normal(rng, n, scale=3), normal(rng, n), normal(rng, n, scale=5)
    eps = float(np.float32(1e-5))
    norm = wide(x) / np.sqrt(np.mean(wide(x) ** 2) + eps)
    assert nmse(row(isa, "rms_norm", [x, w], n, 1e-5), norm * w) < BOUND
    assert nmse(row(isa, "gated_norm", [x, gate, w], n, 1e-5), norm * w * ref.sigmoid(wide(gate))) < BOUND
    score = call(isa, "rms_dot", [x, w], [np.full(1, np.nan)], [n], (1e-5,))[0]
    assert np.allclose(score, norm @ wide(w), rtol=0, atol=1e-13 * np.abs(norm * w).sum())


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("count", [1, 4, 16, 64])
def test_sums_of_rows(isa: str, rng: np.random.Generator, n: int, count: int) -> None:
    x, weight, w = normal(rng, count, n), normal(rng, count), normal(rng, count, n)
    out = call(isa, "weighted_sum", [x, weight], [nans(n)], [n, count])[0]
    assert off(out, wide(weight) @ wide(x), np.abs(weight) @ np.abs(x)) < BOUND
    out = call(isa, "conv", [x, w], [nans(n)], [n, count])[0]
    s = (wide(w) * wide(x)).sum(axis=0)
    assert off(out, s * ref.sigmoid(s), np.abs(w * x).sum(axis=0)) < BOUND


# -- KDA and MLA -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 3, 16, 48, 128, 131])
def test_kda_prepare(isa: str, rng: np.random.Generator, d: int) -> None:
    q, k, g = normal(rng, 5, d), normal(rng, 5, d, scale=1e-4), -np.abs(normal(rng, 5, d, scale=100))
    k[2] = 0
    out = call(isa, "kda_prepare", [q, k, g], [*(nans(5, d) for _ in range(3)), nans(5)], [5, d, 1])
    assert nmse(out[0], ref.l2_norm(wide(q)) * d**-0.5) < BOUND
    assert nmse(out[1], ref.l2_norm(wide(k))) < BOUND
    assert ulps(out[2], np.exp(wide(g))) < 1.1  # of tiny values too, which with one column may be all there are
    assert np.allclose(out[3], (wide(out[0]) * wide(out[1])).sum(axis=1), rtol=0, atol=1e-7)


@pytest.mark.parametrize("d,n_v", [(1, 1), (5, 3), (16, 16), (48, 48), (128, 128), (131, 37)])
@pytest.mark.parametrize("n", [1, 2, 7, CHUNK])
@pytest.mark.parametrize("decay", [1e-3, 5.0, 316.0])
def test_kda_scan(isa: str, rng: np.random.Generator, d: int, n_v: int, n: int, decay: float) -> None:
    q, k = normal(rng, n, d), normal(rng, n, d)
    if n > 1:
        k[1] = k[0]  # parallel keys make the largest corrections
    g = -np.abs(normal(rng, n, d, scale=decay))
    v, beta, state = normal(rng, n, n_v, scale=25), rng.random(n).astype(np.float32), normal(rng, n_v, d)
    o, new = call(isa, "kda_scan", [q, k, g, v, beta], [nans(n, n_v), state], [n, d, n_v])
    expected, s = ref.kda_recurrent(
        (ref.l2_norm(wide(q)) * d**-0.5)[:, None],
        ref.l2_norm(wide(k))[:, None],
        wide(v)[:, None],
        wide(g)[:, None],
        wide(beta)[:, None],
        wide(state).T[None],
    )
    written = np.abs(wide(v)).mean() * d**-0.5  # what one token adds to the state; later ones may cancel it
    assert off(o, expected[:, 0], np.abs(expected[:, 0]) + written) < 1e-11
    assert off(new, s[0].T, np.abs(s[0].T) + written) < 1e-11


@pytest.mark.parametrize("d,n_v", [(5, 3), (48, 48), (131, 37)])
def test_kda_scan_does_not_depend_on_how_it_is_cut(isa: str, rng: np.random.Generator, d: int, n_v: int) -> None:
    """Bit for bit: tokens in several calls, and rows of the state in several calls."""
    n = 11
    q, k, v, g = normal(rng, n, d), normal(rng, n, d), normal(rng, n, n_v, scale=5), -np.abs(normal(rng, n, d))
    beta, state = rng.random(n).astype(np.float32), normal(rng, n_v, d)
    whole, end = call(isa, "kda_scan", [q, k, g, v, beta], [nans(n, n_v), state], [n, d, n_v])
    for rows in (slice(0, 1), slice(1, n_v), slice(0, n_v)):
        s, parts = state[rows].copy(), []
        for tokens in (slice(0, 1), slice(1, 4), slice(4, 5), slice(5, n)):
            inputs = [np.ascontiguousarray(x[tokens]) for x in (q, k, g, v[:, rows], beta)]
            sizes = [len(inputs[0]), d, len(s)]
            o, s = call(isa, "kda_scan", inputs, [nans(*inputs[3].shape), s], sizes)
            parts.append(o)
        assert np.array_equal(np.concatenate(parts), whole[:, rows]) and np.array_equal(s, end[rows])


def padded(x: np.ndarray, pad: int) -> np.ndarray:
    return np.ascontiguousarray(np.pad(x, ((0, 0), (0, pad - x.shape[1]))))


def running(n: int, pad: int) -> list[np.ndarray]:
    """y, best and sum of n queries that have seen no key."""
    return [np.zeros((n, pad), np.float32), np.full(n, -np.inf, np.float32), np.zeros(n, np.float32)]


def attend(
    isa: str, keys: np.ndarray, queries: np.ndarray, latent: int, scale: float, type_: int = F32
) -> list[np.ndarray]:
    """y, best and sum of the queries, with keys encoded as `type_`."""
    pad = (keys.shape[1] + LANES - 1) // LANES * LANES
    state = running(len(queries), pad)
    for first in range(0, len(keys), KEY_BLOCK):
        block = keys[first : first + KEY_BLOCK]
        sizes = [len(block), len(queries), latent, pad]
        encoded = Weight.encode(padded(block, pad), type_).data
        state = call(isa, "attend", [encoded, padded(queries, pad)], state, sizes, (scale,), type_=type_)
    return state


def weighted_keys(keys: np.ndarray, queries: np.ndarray, latent: int, scale: float) -> tuple[np.ndarray, float]:
    """The definition, and the error that a score's rounding may make of it, which the exponential multiplies."""
    s = wide(queries) @ wide(keys).T * float(np.float32(scale))
    p = np.exp(s - s.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True) @ wide(keys)[:, :latent], (3e-7 * float(np.abs(s).max())) ** 2


@pytest.mark.parametrize("n,latent,rest", [(1, 1, 0), (3, 40, 6), (7, 130, 3), (16, 512, 64), (32, 100, 10)])
@pytest.mark.parametrize("n_keys", [1, 5, 64, 75, 150])
@pytest.mark.parametrize("scale", [0.1, 20.0])
def test_attend(isa: str, rng: np.random.Generator, n: int, latent: int, rest: int, n_keys: int, scale: float) -> None:
    keys, queries = normal(rng, n_keys, latent + rest), normal(rng, n, latent + rest)
    y, _, total = attend(isa, keys, queries, latent, scale)
    expected, error = weighted_keys(keys, queries, latent, scale)
    assert off(y[:, :latent] / total[:, None], expected, np.abs(keys[:, :latent]).mean()) < BOUND + error


@pytest.mark.parametrize("latent,rest", [(40, 6), (130, 3)])
def test_attend_does_not_depend_on_the_other_queries(
    isa: str, rng: np.random.Generator, latent: int, rest: int
) -> None:
    """Bit for bit, in tiles of every size, and as if keys beyond those seen were not there."""
    keys, queries = normal(rng, 70, latent + rest), normal(rng, 32, latent + rest)
    many = attend(isa, keys, queries, latent, 0.2)
    for n in range(1, 32):
        first = int(rng.integers(0, 33 - n))
        few = attend(isa, keys, queries[first : first + n], latent, 0.2)
        for a, b in zip(many, few, strict=True):
            assert a[first : first + n].tobytes() == b.tobytes()


@pytest.mark.parametrize("latent,rest", [(32, 0), (500, 12), (512, 64)])
@pytest.mark.parametrize("type_", [F16, BF16])
def test_attend_reads_keys_as_they_are_stored(
    isa: str, rng: np.random.Generator, type_: int, latent: int, rest: int
) -> None:
    """With the bits of keys that were decoded before."""
    keys, queries = normal(rng, 75, latent + rest), normal(rng, 7, latent + rest)
    decoded = Weight.encode(keys, type_).values.astype(np.float32)
    for a, b in zip(
        attend(isa, keys, queries, latent, 0.1, type_), attend(isa, decoded, queries, latent, 0.1), strict=True
    ):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("latent", [1, 16, 37, 512])
@pytest.mark.parametrize("scale", [0.1, 20.0])
def test_attend_merge(isa: str, rng: np.random.Generator, latent: int, scale: float) -> None:
    """Keys in three parts, whichever of them has the largest score."""
    keys, query = normal(rng, 90, latent), normal(rng, 1, latent)
    for order in (keys, keys[::-1]):
        keys = np.ascontiguousarray(order)
        parts = [attend(isa, keys[rows], query, latent, scale) for rows in (slice(0, 9), slice(9, 70), slice(70, 90))]
        parts = [[y[0, :latent].copy(), best, total] for y, best, total in parts]
        merged = parts[0]
        for part in parts[1:]:
            merged = call(isa, "attend_merge", part, merged, [latent])
        expected, error = weighted_keys(keys, query, latent, scale)
        assert off(merged[0] / merged[2], expected[0], np.abs(keys).mean()) < BOUND + error
        assert merged[1] == max(part[1] for part in parts)


def test_attend_lets_nan_through(isa: str, rng: np.random.Generator) -> None:
    keys, queries = normal(rng, 3, 16), normal(rng, 2, 16)
    queries[1, 4] = np.nan
    y, best, total = attend(isa, keys, queries, 16, 1.0)
    assert np.isfinite(y[0] / total[0]).all() and np.isnan(y[1] / total[1]).all()
    for a, b in ((0, 1), (1, 0), (1, 1)):
        part, into = [[y[i], best[i : i + 1], total[i : i + 1]] for i in (a, b)]
        merged = call(isa, "attend_merge", part, into, [16])
        assert np.isnan(merged[0] / merged[2]).all()


# -- the tables --------------------------------------------------------------------------------------------------------


def test_every_entry_is_tested() -> None:
    """The C side refuses to compile without a case for each entry; here each case must be called."""
    with open(__file__, encoding="utf-8") as file:
        text = file.read()
    entries = FFI.string(LIB.delta_test_kernels()).decode().split()
    assert [name for name in entries if f'"{name}"' not in text] == []


@pytest.mark.parametrize("isa", [name for name in kernels.here() if not name.startswith("width")])
def test_a_forced_isa_is_used_and_reported(monkeypatch: pytest.MonkeyPatch, isa: str) -> None:
    monkeypatch.setenv("DELTALLAMA_CPU", isa)
    found = {}
    for index in range(LIB.delta_device_count()):
        info = FFI.new("delta_device_info *")
        info.size = FFI.sizeof("delta_device_info")
        native.check(LIB.delta_device_info_get(index, info))
        found[FFI.string(info.kind).decode()] = FFI.string(info.isa).decode()
    assert found["cpu"] == isa


def test_a_lacking_isa_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DELTALLAMA_CPU", "altivec")
    with pytest.raises(native.NativeError, match="altivec") as error:
        run("add", [np.zeros((1, 4), np.float32)] * 2, device="cpu", out_cols=4)
    assert error.value.name == "UNSUPPORTED"


def test_isa_files_include_nothing_shared() -> None:
    folder = native.ROOT / "csrc" / "cpu"
    ours, others = r'"cpu/(kernels\.h|simd\.h|kernels(_\w+)?\.inc)"', r"<(stddef|stdint|string|immintrin|arm_neon)\.h>"
    allowed = re.compile(f"{ours}|{others}")
    files = [*folder.glob("kernels*"), folder / "simd.h"]
    assert len(files) > 5
    for path in files:
        for name in re.findall(r"^\s*#\s*include\s+(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            assert allowed.fullmatch(name), f"{path.name} includes {name}"


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils) is not installed")
def test_isa_objects_share_nothing() -> None:
    """An object of one instruction set offers its init function only and takes nothing but functions of C: a shared
    inline function, a weak symbol, could be linked into code for every processor."""
    folder = native.library_path().parent / "CMakeFiles" / "delta_engine.dir" / "csrc" / "cpu"
    objects = sorted(folder.glob("kernels_*.o"))
    if not objects:
        pytest.skip(f"no object files beside the library: {folder}")
    assert "kernels_generic.cpp.o" in {o.name for o in objects}
    local = "trbdn"
    # Sanitizers call their own runtime and make functions unwindable.
    sanitizer = re.compile(r"__(asan|ubsan|tsan)_|_GLOBAL_OFFSET_TABLE_|(DW\.ref\.)?__gxx_personality_v0")
    for path in objects:
        lines = subprocess.run(["nm", str(path)], check=True, capture_output=True, text=True).stdout.splitlines()
        symbols = [(line.split()[-2], line.split()[-1]) for line in lines]
        isa = path.name.removeprefix("kernels_").split(".")[0]
        ours = re.compile(rf"T _ZN5delta\d+kernels_init_{isa}E.*|U (mem(cpy|set)|sqrt)")
        shared = [f"{kind} {name}" for kind, name in symbols if kind not in local and not sanitizer.match(name)]
        assert [s for s in shared if not ours.fullmatch(s)] == [], path.name
        assert len(shared) > 0, path.name


@pytest.mark.parametrize("n,d", [(6, 1), (12, 4), (6, 20), (18, 72), (96, 128), (6, 131)])
@pytest.mark.parametrize("n_keys", [1, 5, 64, 75, 150])
@pytest.mark.parametrize("scale", [0.1, 5.0])
def test_image_attend(isa: str, rng: np.random.Generator, n: int, d: int, n_keys: int, scale: float) -> None:
    """Keys in blocks, as columns; what lies beyond the last key of a block is finite, and has no influence."""
    keys, values, queries = normal(rng, n_keys, d), normal(rng, n_keys, d), normal(rng, n, d)
    pad = (d + LANES - 1) // LANES * LANES
    state = running(n, pad)
    for first in range(0, n_keys, KEY_BLOCK):
        block = slice(first, first + KEY_BLOCK)
        columns = np.full((d, KEY_BLOCK), 1e3, np.float32)
        columns[:, : len(keys[block])] = keys[block].T
        inputs = [columns, padded(values[block], pad), queries]
        state = call(isa, "image_attend", inputs, state, [len(keys[block]), n, d], (scale,))
    y, _, total = state
    s = wide(queries) @ wide(keys).T * float(np.float32(scale))
    p = np.exp(s - s.max(axis=1, keepdims=True))
    expected = p / p.sum(axis=1, keepdims=True) @ wide(values)
    error = (3e-7 * float(np.abs(s).max())) ** 2
    assert off(y[:, :d] / total[:, None], expected, np.abs(values).mean()) < BOUND + error


@pytest.mark.parametrize("n", SIZES)
def test_gelu_tanh(isa: str, rng: np.random.Generator, n: int) -> None:
    x = normal(rng, n, scale=3)
    # Of large negative inputs nothing is left, of which neither side has all digits.
    assert off(row(isa, "gelu_tanh", [x], n), vision.gelu_tanh(wide(x)), x) < BOUND
    ends = np.array([-np.inf, -1e30, -100, -0.0, 0, 100, 1e30, np.inf, np.nan], np.float32)
    found = row(isa, "gelu_tanh", [ends], len(ends))
    assert np.array_equal(found[1:8], [0, 0, 0, 0, 100, np.float32(1e30), np.inf])
    assert np.isnan(found[8])
