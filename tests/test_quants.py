"""Row quantization of the engine against the gguf package, bit for bit, for every type of the table."""

from __future__ import annotations

import zlib
from typing import Any

import gguf as pygguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import quants
from numpy.typing import NDArray

import native

ffi, lib = native.load()

TYPES = [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.MXFP4]
BLOCK_TYPES = [Type.Q8_0, Type.MXFP4]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def pointer(array: NDArray[Any]) -> Any:
    return ffi.cast("void *", array.ctypes.data)


def row_bytes(kind: int, n_cols: int) -> int:
    return int(lib.delta_row_bytes(kind, n_cols))


def encode(x: Floats, kind: int, n_threads: int = 1) -> Bytes:
    x = np.ascontiguousarray(x, np.float32)
    out = np.full((x.shape[0], row_bytes(kind, x.shape[1])), 0xA5, np.uint8)
    native.check(lib.delta_quantize_rows(kind, ffi.cast("float *", x.ctypes.data), pointer(out), *x.shape, n_threads))
    return out


def decode(raw: Bytes, kind: int, n_cols: int, n_threads: int = 1) -> Floats:
    out = np.full((raw.shape[0], n_cols), np.nan, np.float32)
    destination = ffi.cast("float *", out.ctypes.data)
    native.check(lib.delta_dequantize_rows(kind, pointer(raw), destination, *out.shape, n_threads))
    return out


def expected_bytes(x: Floats, kind: Type) -> Bytes:
    with np.errstate(over="ignore"):
        return quants.quantize(x, kind).view(np.uint8).reshape(x.shape[0], -1)


def assert_same_bits(found: Floats, expected: Floats) -> None:
    np.testing.assert_array_equal(found.view(np.uint32), np.ascontiguousarray(expected).view(np.uint32))


def matrices(rng: np.random.Generator) -> dict[str, Floats]:
    """Inputs that all types can hold: ordinary ones and those at the edges of the formats."""
    normal = rng.standard_normal((64, 96), dtype=np.float32)
    scales = np.exp2(rng.integers(-24, 12, (64, 1))).astype(np.float32)
    sparse = normal * (rng.random(normal.shape) < 0.05)
    ties = rng.integers(-254, 255, normal.shape).astype(np.float32) / 2
    ties[:, ::32] = 127  # scale 1 in Q8_0: halves sit between codes
    powers = np.exp2(rng.integers(-20, 15, normal.shape)).astype(np.float32)
    with np.errstate(under="ignore"):
        below = np.nextafter(powers, np.float32(0))
    return {
        "normal": normal,
        "scaled": normal * scales,
        "heavy tails": rng.standard_t(2, normal.shape).astype(np.float32).clip(-6e4, 6e4),
        "sparse": sparse.astype(np.float32),
        "zero": np.zeros_like(normal),
        "negative zero": -np.zeros_like(normal),
        "ties": ties,
        "powers of two": powers,
        "below powers of two": below.astype(np.float32),
        "negative": -np.abs(normal),
        "MXFP4 values": rng.choice(
            [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], normal.shape
        ).astype(np.float32),
    }


def vector() -> Floats:
    """The 512 values of the checksum table, as two rows."""
    u = (np.arange(512, dtype=np.uint64) * 2654435761 % 2**32) >> 8
    x = (u.astype(np.float64) / 2**24 * 2 - 1).astype(np.float32) * np.float32(0.75)
    return x.reshape(2, 256)


# -- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)
def test_block_sizes_are_those_of_the_format(kind: Type) -> None:
    block, size = pygguf.GGML_QUANT_SIZES[kind]
    assert row_bytes(kind, 3 * block) == 3 * size
    assert row_bytes(kind, 0) == 0
    if block > 1:
        assert row_bytes(kind, block + 1) == 0


def test_unknown_type_has_no_rows() -> None:
    assert row_bytes(Type.Q4_K, 256) == 0
    assert row_bytes(2**32 - 1, 256) == 0
    assert row_bytes(Type.F32, -1) == 0


# -- encoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)
def test_encodes_as_the_gguf_package(kind: Type, rng: np.random.Generator) -> None:
    for name, x in matrices(rng).items():
        np.testing.assert_array_equal(encode(x, kind), expected_bytes(x, kind), err_msg=name)


@pytest.mark.parametrize(
    ("kind", "crc"),
    [(Type.Q8_0, 0xEF296D70), (Type.MXFP4, 0x3552AA5B), (Type.BF16, 0xBB86F166), (Type.F16, 0x67448750)],
)
def test_checksum_of_the_known_vector(kind: Type, crc: int) -> None:
    assert zlib.crc32(encode(vector(), kind).tobytes()) == crc


@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.BF16], ids=lambda t: t.name)
def test_plain_types_carry_nan_and_infinity(kind: Type) -> None:
    x = np.array([[np.nan, np.inf, -np.inf, -0.0]], np.float32)
    back = decode(encode(x, kind), kind, 4)
    np.testing.assert_array_equal(back, x)
    assert np.signbit(back[0, 3])


def test_q8_0_where_the_reciprocal_of_the_scale_overflows() -> None:
    """max / 127 below 2^-128: the scale is zero in half precision, so all codes must decode to zero."""
    x = np.full((1, 32), 1e-38, np.float32)
    raw = encode(x, Type.Q8_0)
    assert not raw.any()


def test_mxfp4_scales_end_at_zero() -> None:
    """Below 2^-125 the scale has no code and stays the smallest one; wrapped it could become 255, which is NaN."""
    for exponent in range(-149, -125):
        raw = encode(np.full((1, 32), 2.0**exponent, np.float32), Type.MXFP4)
        assert raw[0, 0] == 0
    np.testing.assert_array_equal(decode(raw, Type.MXFP4, 32), np.float32(2.0**-126))


def test_mxfp4_exponent_of_every_power_of_two() -> None:
    x = np.exp2(np.arange(-125, 128, dtype=np.float64)).astype(np.float32)
    raw = encode(np.repeat(x[:, None], 32, axis=1), Type.MXFP4)
    np.testing.assert_array_equal(raw[:, 0], np.arange(0, 253))
    np.testing.assert_array_equal(raw[:, 1:], 0x66)  # 4 * scale


# -- decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)
def test_decodes_random_bytes_as_the_gguf_package(kind: Type, rng: np.random.Generator) -> None:
    raw = rng.integers(0, 256, (500, row_bytes(kind, 96)), np.uint8)
    if kind == Type.MXFP4:
        raw[:, ::17] = rng.integers(0, 255, (500, 3))  # 255 is another matter
    if kind == Type.Q8_0:
        raw.reshape(500, 3, 34)[:, :, 1] &= 0xBF  # no infinite or NaN scale
    found = decode(raw, kind, 96)
    with np.errstate(over="ignore"):
        expected = quants.dequantize(raw, kind)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    assert_same_bits(found[~nan], expected[~nan])


def test_decodes_every_half() -> None:
    halves = np.arange(65536, dtype=np.uint16)
    found = decode(halves.view(np.uint8).reshape(1, -1), Type.F16, 65536)[0]
    expected = halves.view(np.float16).astype(np.float32)
    finite = np.isfinite(expected)
    assert_same_bits(found[finite], expected[finite])
    np.testing.assert_array_equal(found, expected)


def test_decodes_every_mxfp4_scale_and_code() -> None:
    raw = np.zeros((256, 17), np.uint8)
    raw[:, 0] = np.arange(256)
    raw[:, 1:] = np.arange(16) * 17
    found = decode(raw, Type.MXFP4, 32)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    with np.errstate(over="ignore"):
        expected = (np.tile(values, 2) * np.exp2(np.arange(256.0)[:, None] - 127)).astype(np.float32)
    np.testing.assert_array_equal(found[:255], expected[:255])
    assert np.isnan(found[255]).all(), "scale 255 is NaN and must not pass for a number"


@pytest.mark.parametrize(
    ("kind", "first", "middle", "last", "total", "total_abs"),
    [
        (Type.Q8_0, [1.29968, 2.99927, 4.69885, 6.39844], 2.89929, 2.79932, -11.197266, 196.751953),
        (Type.MXFP4, [-0.75, 0, 0.0625, 0.125], 0.75, 0.75, 0.75, 9.75),
    ],
    ids=["Q8_0", "MXFP4"],
)
def test_decodes_the_known_block(
    kind: Type, first: list[float], middle: float, last: float, total: float, total_abs: float
) -> None:
    """A block with byte i = 17 i + 29 type + 3 and a scale of about 0.1."""
    size = pygguf.GGML_QUANT_SIZES[kind][1]
    raw = ((17 * np.arange(size) + 29 * int(kind) + 3) % 256).astype(np.uint8)
    raw[: 2 if kind == Type.Q8_0 else 1] = [0x66, 0x2E] if kind == Type.Q8_0 else [124]
    x = decode(raw[None], kind, 32)[0]
    np.testing.assert_allclose([*x[:4], x[16], x[-1]], [*first, middle, last], rtol=1e-5)
    np.testing.assert_allclose(
        [x.sum(dtype=np.float64), np.abs(x).sum(dtype=np.float64)], [total, total_abs], rtol=1e-6
    )


# -- rows and threads ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)
def test_thread_count_changes_nothing(kind: Type, rng: np.random.Generator) -> None:
    x = rng.standard_normal((1500, 64), dtype=np.float32)
    raw = encode(x, kind)
    back = decode(raw, kind, 64)
    for n_threads in (0, 2, 3, 8):
        np.testing.assert_array_equal(encode(x, kind, n_threads), raw)
        assert_same_bits(decode(raw, kind, 64, n_threads), back)


@pytest.mark.parametrize("kind", TYPES, ids=lambda t: t.name)
def test_rows_may_start_at_any_address(kind: Type, rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 32), dtype=np.float32)
    size = row_bytes(kind, 32)
    room = np.zeros(3 * size + 1, np.uint8)
    shifted = room[1:].reshape(3, size)
    native.check(lib.delta_quantize_rows(kind, ffi.cast("float *", x.ctypes.data), pointer(shifted), 3, 32, 1))
    np.testing.assert_array_equal(shifted, encode(x, kind))
    assert_same_bits(decode(shifted, kind, 32), decode(encode(x, kind), kind, 32))


@pytest.mark.parametrize("shape", [(0, 32), (5, 0), (0, 0)])
def test_nothing_to_do_is_fine(shape: tuple[int, int]) -> None:
    native.check(lib.delta_quantize_rows(Type.Q8_0, ffi.NULL, ffi.NULL, *shape, 1))
    native.check(lib.delta_dequantize_rows(Type.Q8_0, ffi.NULL, ffi.NULL, *shape, 1))


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BLOCK_TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n_threads", [1, 3])
def test_block_types_refuse_what_is_no_number(kind: Type, bad: float, n_threads: int) -> None:
    x = np.ones((900, 64), np.float32)
    x[700, 3] = x[701, 0] = x[431, 37] = bad
    with pytest.raises(native.NativeError, match="row 431, column 37") as error:
        encode(x, kind, n_threads)
    assert error.value.name == "NUMERIC"
    assert kind.name in error.value.message


@pytest.mark.parametrize(
    ("kind", "fits", "beyond"),
    [(Type.F16, 65519.0, 65520.0), (Type.BF16, 3.39e38, 3.4e38), (Type.Q8_0, 8321039.0, 8321040.0)],
)
def test_overflow_is_refused(kind: Type, fits: float, beyond: float) -> None:
    x = np.zeros((2, 32), np.float32)
    x[1, 5] = -fits
    assert np.isfinite(decode(encode(x, kind), kind, 32)).all()
    x[1, 5] = -beyond
    with pytest.raises(native.NativeError, match="row 1, column 5") as error:
        encode(x, kind)
    assert error.value.name == "NUMERIC"


def test_bad_arguments_are_named() -> None:
    x = np.zeros((1, 48), np.float32)
    room = np.zeros(4096, np.uint8)
    source, out = ffi.cast("float *", x.ctypes.data), pointer(room)
    for arguments, status, message in [
        ((Type.Q4_K, source, out, 1, 256, 1), "UNSUPPORTED", "12"),
        ((Type.Q8_0, source, out, 1, 48, 1), "ARG", "48"),
        ((Type.F32, source, out, -1, 48, 1), "ARG", "-1"),
        ((Type.F32, source, out, 1, -48, 1), "ARG", "-48"),
        ((Type.F32, source, out, 2**62, 2**62, 1), "ARG", "too many"),
        ((Type.F32, ffi.NULL, out, 1, 48, 1), "ARG", "src"),
        ((Type.F32, source, ffi.NULL, 1, 48, 1), "ARG", "dst"),
        ((Type.F32, source, out, 1, 48, 10**6), "ARG", "threads"),
    ]:
        with pytest.raises(native.NativeError, match=message) as error:
            native.check(lib.delta_quantize_rows(*arguments))
        assert error.value.name == status
