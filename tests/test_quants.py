"""Every tensor type of the engine against the gguf package, bit for bit where that defines the bytes. The quantizers
that search, which nobody else defines, are in `test_quants_search.py`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zlib
from typing import Any

import gguf as pygguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import quants

import native
from quant_rows import (
    BF16,
    F16,
    F32,
    Bytes,
    Floats,
    assert_same_bits,
    decode,
    encode,
    ffi,
    lib,
    pointer,
    row_bytes,
    vector,
)
from random_blocks import HALVES

PLAIN = [Type.F32, Type.F16, Type.BF16]
# Encodings that follow from a rule; the package has the same.
DEFINED = [*PLAIN, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.TQ1_0, Type.TQ2_0, Type.MXFP4]
# Encodings that are searched for.
SEARCHED = [Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_NL, Type.IQ4_XS]
READ_ONLY = [
    *(Type.IQ1_S, Type.IQ1_M, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S),
    Type.NVFP4,
]
ENCODED = [*DEFINED, *SEARCHED]
TYPES = [*ENCODED, *READ_ONLY]


def name_of(value: Any) -> str | None:
    return value.name if isinstance(value, Type) else None


def block_of(kind: Type) -> tuple[int, int]:
    """Values and bytes."""
    return pygguf.GGML_QUANT_SIZES[kind]


def lengths(kind: Type) -> list[int]:
    """Row lengths: one block, an odd number of them, more than is converted at a time and no multiple of it."""
    block = block_of(kind)[0]
    return [block, 3 * block, 7 * block, (2500 // block + 1) * block]


def expected_bytes(x: Floats, kind: Type) -> Bytes:
    if kind in (Type.Q4_1, Type.Q5_1):
        x = x + np.float32(0)  # the sign of a minimum of +0 and -0 is left open there; here it is +
    with np.errstate(over="ignore"):
        return quants.quantize(x, kind).view(np.uint8).reshape(x.shape[0], -1)


def matrices(rng: np.random.Generator, n_cols: int) -> dict[str, Floats]:
    """Inputs that all types can hold: ordinary ones and those at the edges of the formats."""
    normal = rng.standard_normal((40, n_cols), dtype=np.float32)
    scales = np.exp2(rng.integers(-24, 12, (40, 1))).astype(np.float32)
    sparse = normal * (rng.random(normal.shape) < 0.05)
    ties = rng.integers(-254, 255, normal.shape).astype(np.float32) / 2
    ties[:, ::32] = 127  # scale 1 in Q8_0: halves sit between codes
    powers = np.exp2(rng.integers(-20, 15, normal.shape)).astype(np.float32)
    with np.errstate(under="ignore"):
        below = np.nextafter(powers, np.float32(0))
        tiny = (normal * 1e-38).astype(np.float32)
    return {
        "normal": normal,
        "scaled": normal * scales,
        "shifted": normal + 3,
        "heavy tails": rng.standard_t(2, normal.shape).astype(np.float32).clip(-6e4, 6e4),
        "sparse": sparse.astype(np.float32),
        "zero": np.zeros_like(normal),
        "negative zero": -np.zeros_like(normal),
        "constant": np.full_like(normal, -0.37),
        "ties": ties,
        "powers of two": powers,
        "below powers of two": below.astype(np.float32),
        "negative": -np.abs(normal),
        "large": normal.clip(-1, 1) * np.float32(65000),
        "scales that are subnormal halves": normal * np.float32(3e-6),
        "beneath all halves": normal * np.float32(1e-12),
        "subnormal": tiny,
        "MXFP4 values": rng.choice(
            [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], normal.shape
        ).astype(np.float32),
    }


# -- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES, ids=name_of)
def test_block_sizes_are_those_of_the_format(kind: Type) -> None:
    block, size = block_of(kind)
    assert row_bytes(kind, 3 * block) == 3 * size
    assert row_bytes(kind, 0) == 0
    if block > 1:
        assert row_bytes(kind, block + 1) == 0


def test_unknown_type_has_no_rows() -> None:
    for unknown in (4, 5, Type.Q8_1, Type.Q8_K, 64, 2**32 - 1):
        assert row_bytes(unknown, 256) == 0
    assert row_bytes(Type.F32, -1) == 0


# -- encodings that follow from a rule -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DEFINED, ids=name_of)
def test_encodes_as_the_gguf_package(kind: Type, rng: np.random.Generator) -> None:
    for n_cols in lengths(kind):
        for name, x in matrices(rng, n_cols).items():
            if name == "subnormal":
                continue  # see below: the package casts NaN there
            np.testing.assert_array_equal(encode(x, kind), expected_bytes(x, kind), err_msg=f"{name}, {n_cols}")


# The search types have no checksum: nobody else's search finds the same codes.
@pytest.mark.parametrize(
    ("kind", "crc"),
    [
        (Type.Q8_0, 0xEF296D70),
        (Type.Q4_0, 0xC1F80D90),
        (Type.Q4_1, 0x3AABA131),
        (Type.Q5_0, 0x5C8EF292),
        (Type.Q5_1, 0xBCD58795),
        (Type.MXFP4, 0x3552AA5B),
        (Type.TQ1_0, 0xC653243E),
        (Type.TQ2_0, 0xA52BC310),
        (Type.BF16, 0xBB86F166),
        (Type.F16, 0x67448750),
    ],
    ids=name_of,
)
def test_checksum_of_the_known_vector(kind: Type, crc: int) -> None:
    assert zlib.crc32(encode(vector(), kind).tobytes()) == crc


@pytest.mark.parametrize("kind", [kind for kind in ENCODED if kind in HALVES], ids=name_of)
def test_where_the_reciprocal_of_a_scale_overflows(kind: Type) -> None:
    """Such scales are zero in half precision, so all must decode to zero, whatever the sign."""
    block = block_of(kind)[0]
    for value in (1e-38, -1e-38, 1e-45):
        x = np.full((1, block), value, np.float32)
        x[0, 1] = value / 2
        assert not decode(encode(x, kind), kind, block).any()


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


def random_blocks(kind: Type, n_rows: int, n_cols: int, rng: np.random.Generator) -> Bytes:
    """Random bytes, but no scale of MXFP4 that is 255: that is another matter."""
    raw = rng.integers(0, 256, (n_rows, row_bytes(kind, n_cols)), np.uint8)
    if kind == Type.MXFP4:
        raw[:, ::17] = rng.integers(0, 255, raw[:, ::17].shape)
    return raw


def assert_decodes_as_the_package(raw: Bytes, kind: Type, n_cols: int) -> None:
    found = decode(raw, kind, n_cols)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.ascontiguousarray(quants.dequantize(raw, kind)).reshape(found.shape)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    assert_same_bits(found[~nan], expected[~nan])


@pytest.mark.parametrize("kind", TYPES, ids=name_of)
def test_decodes_random_bytes_as_the_gguf_package(kind: Type, rng: np.random.Generator) -> None:
    for n_cols in lengths(kind):
        assert_decodes_as_the_package(random_blocks(kind, 60, n_cols, rng), kind, n_cols)


@pytest.mark.parametrize("kind", HALVES, ids=name_of)
@pytest.mark.parametrize("half", [0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF])
def test_decodes_extreme_scales_as_the_gguf_package(kind: Type, half: int, rng: np.random.Generator) -> None:
    """Zero of both signs, the smallest and largest subnormal half, the smallest normal one, the largest."""
    block, size = block_of(kind)
    raw = random_blocks(kind, 30, 5 * block, rng)
    for at in HALVES[kind]:
        raw.reshape(30, 5, size)[:, :, at : at + 2] = np.array([half], "<u2").view(np.uint8)
    assert_decodes_as_the_package(raw, kind, 5 * block)
    assert np.isfinite(decode(raw, kind, 5 * block)).all()


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


def test_decodes_every_nvfp4_scale() -> None:
    raw = np.zeros((64, 36), np.uint8)
    raw[:, :4] = np.arange(256).reshape(64, 4)
    raw[:, 4:] = np.arange(32) * 7
    assert_decodes_as_the_package(raw, Type.NVFP4, 64)


@pytest.mark.parametrize(
    ("kind", "first", "middle", "last", "total", "total_abs"),
    [
        (Type.Q4_0, [0.699829, -0.799805, -0.699829, -0.599854], -0.299927, -0.299927, -1.699585, 12.896851),
        (Type.Q4_1, [1.49963, 1.59961, 0.0999756, 0.199951], 0.999756, 0.999756, 26.993408, 26.993408),
        (Type.Q5_0, [0.699829, 0.799805, -0.699829, -0.599854], 0.0999756, -1.49963, -0.899780, 25.293823),
        (Type.Q5_1, [0.699829, 2.39941, 0.89978, 0.999756], 0.599854, 0.599854, 43.789307, 43.789307),
        (Type.Q8_0, [1.29968, 2.99927, 4.69885, 6.39844], 2.89929, 2.79932, -11.197266, 196.751953),
        (Type.Q2_K, [0.299927, 0.799805, 1.29968, -0.199951], 0.299927, 0.199951, 106.773926, 260.936279),
        (Type.Q3_K, [-0.399902, 0.599854, -0.799805, 0.199951], -1.99951, 2.99927, 8.098022, 789.907104),
        (Type.Q4_K, [48.5881, -3.89905, -0.399902, 3.09924], 59.4855, 80.0804, 6970.297852, 7078.271484),
        (Type.Q5_K, [-0.399902, -0.399902, -0.399902, -0.399902], 66.7837, 99.5757, 16028.085938, 16081.272949),
        (Type.Q6_K, [-62.2848, 88.9783, 240.241, -177.957], 21.6947, -140.766, -785.008301, 28763.975830),
        (Type.TQ1_0, [0.0999756, 0.0999756, 0.0999756, -0.0999756], 0.0999756, 0.0999756, 1.499634, 17.295776),
        (Type.TQ2_0, [0.0999756, 0.199951, -0.0999756, 0], 0.0999756, -0.0999756, 12.596924, 25.993652),
        (Type.IQ2_XXS, [-4.06151, 1.29968, 4.06151, -4.06151], -5.3112, -2.68684, -4.223969, 731.546356),
        (Type.IQ2_XS, [-0.499878, 1.56212, 0.499878, 2.68684], -1.29968, -7.81059, -108.186081, 1064.427567),
        (Type.IQ2_S, [-7.18575, -2.29944, 7.18575, 7.18575], -3.09924, -2.89929, 116.121643, 1291.784546),
        (Type.IQ3_XXS, [-6.29846, -2.09949, -23.0944, -2.09949], -2.29944, -4.4989, -40.140198, 2929.534607),
        (Type.IQ3_S, [2.89929, -20.295, -8.69788, -8.69788], 1.09973, 6.29846, -119.370850, 2699.140869),
        (Type.IQ1_S, [1.68709, 0.187454, -1.31218, 1.68709], -0.0874786, 0.16246, 8.897827, 127.543854),
        (Type.IQ4_NL, [1.29968, 2.49939, 3.79907, 5.29871], -2.19946, -2.19946, -27.893188, 174.457397),
        (Type.IQ4_XS, [65.9839, 29.9927, -2.99927, -38.9905], 26.3936, 22.0946, 1782.764648, 31367.939941),
        (Type.MXFP4, [-0.75, 0, 0.0625, 0.125], 0.75, 0.75, 0.75, 9.75),
        (Type.NVFP4, [-3, 0, 0.25, 0.5], -13.5, -1.03125, 11.375, 144.625),
        (Type.IQ1_M, [0.787308, -0.112473, -1.01225, 0.787308], -0.0874786, 0.337418, 2.49939, 147.264038),
    ],
    ids=name_of,
)
def test_decodes_the_known_block(
    kind: Type, first: list[float], middle: float, last: float, total: float, total_abs: float
) -> None:
    """A block with byte i = 17 i + 29 type + 3 and scales of about 0.1 (f16 0x2e66)."""
    n, size = block_of(kind)
    raw = ((17 * np.arange(size) + 29 * int(kind) + 3) % 256).astype(np.uint8)
    for at in HALVES.get(kind, []):
        raw[at : at + 2] = [0x66, 0x2E]
    if kind == Type.MXFP4:
        raw[0] = 124
    if kind == Type.NVFP4:
        raw[:4] = [0x30, 0x38, 0x41, 0x2B]
    if kind == Type.IQ1_M:  # the four digits of the half, lowest first
        raw[49::2] = (raw[49::2] & 15) | np.array([0x60, 0x60, 0xE0, 0x20], np.uint8)
    x = decode(raw[None], kind, n)[0]
    np.testing.assert_allclose([*x[:4], x[n // 2], x[-1]], [*first, middle, last], rtol=1e-5)
    np.testing.assert_allclose(
        [x.sum(dtype=np.float64), np.abs(x).sum(dtype=np.float64)], [total, total_abs], rtol=1e-6
    )


def test_codebooks_are_what_the_script_writes() -> None:
    folder = native.ROOT / "csrc" / "quant"
    written = subprocess.run(
        [sys.executable, str(folder / "make_iq_grids.py")], check=True, capture_output=True, text=True
    ).stdout
    assert written == (folder / "iq_grids.inc").read_text(encoding="utf-8")


# -- sources, rows, threads, processors ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ENCODED, ids=name_of)
@pytest.mark.parametrize("source", [F16, BF16], ids=name_of)
def test_16_bit_sources_are_widened_first(kind: Type, source: Type, rng: np.random.Generator) -> None:
    for n_cols in lengths(kind):
        x = rng.standard_normal((9, n_cols), dtype=np.float32)
        narrow = encode(x, source).view(np.uint16)
        wide = decode(narrow.view(np.uint8), source, n_cols)
        np.testing.assert_array_equal(encode(narrow, kind, source=source), encode(wide, kind))


@pytest.mark.parametrize("kind", ENCODED, ids=name_of)
def test_every_instruction_set_gives_the_same_bytes(
    kind: Type, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_cols = 5 * 256
    importance = rng.random(n_cols, dtype=np.float32)
    inputs = matrices(rng, n_cols)

    def run() -> list[Bytes]:
        plain = [encode(x, kind) for x in inputs.values()]
        back = [decode(raw, kind, n_cols).view(np.uint8) for raw in plain]
        return plain + back + [encode(x, kind, importance=importance) for x in inputs.values()]

    best = run()
    monkeypatch.setenv("DELTALLAMA_CPU", "generic")
    for found, expected in zip(run(), best, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils) is not installed")
def test_objects_of_an_instruction_set_share_nothing() -> None:
    """They offer their table only and take nothing but functions of C: a shared inline function, a weak symbol, could
    be linked into code for every processor."""
    folder = native.library_path().parent / "CMakeFiles" / "delta_base.dir" / "csrc" / "quant"
    objects = sorted(folder.glob("codecs_*.o"))
    if not objects:
        pytest.skip(f"no object files beside the library: {folder}")
    # Sanitizers call their own runtime and make functions unwindable.
    sanitizer = re.compile(r"__(asan|ubsan|tsan)_|_GLOBAL_OFFSET_TABLE_|(DW\.ref\.)?__gxx_personality_v0")
    for path in objects:
        lines = subprocess.run(["nm", str(path)], check=True, capture_output=True, text=True).stdout.splitlines()
        symbols = [(line.split()[-2], line.split()[-1]) for line in lines]
        shared = {f"{kind} {name}" for kind, name in symbols if kind not in "trbdn" and not sanitizer.match(name)}
        isa = path.name.removeprefix("codecs_").split(".")[0]
        ours = re.compile(rf"T _ZN5delta\d+{isa}_codecsEv|U (memcpy|memset|log2|ceilf|__stack_chk_fail)")
        assert [symbol for symbol in shared if not ours.fullmatch(symbol)] == [], path.name
        assert any(symbol.startswith("T ") for symbol in shared), path.name


@pytest.mark.parametrize("kind", ENCODED, ids=name_of)
def test_thread_count_changes_nothing(kind: Type, rng: np.random.Generator) -> None:
    x = rng.standard_normal((300, 512), dtype=np.float32)
    raw = encode(x, kind)
    back = decode(raw, kind, 512)
    for n_threads in (0, 2, 3, 8):
        np.testing.assert_array_equal(encode(x, kind, n_threads), raw)
        assert_same_bits(decode(raw, kind, 512, n_threads), back)


@pytest.mark.parametrize("kind", ENCODED, ids=name_of)
def test_rows_may_start_at_any_address(kind: Type, rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 256), dtype=np.float32)
    size = row_bytes(kind, 256)
    room, source = np.zeros(3 * size + 1, np.uint8), np.zeros(x.nbytes + 1, np.uint8)
    shifted = room[1:].reshape(3, size)
    source[1:] = x.view(np.uint8).reshape(-1)
    native.check(
        lib.delta_quantize_rows(kind, pointer(shifted), F32, pointer(source[1:]), 3, 256, ffi.NULL, 1, ffi.NULL)
    )
    np.testing.assert_array_equal(shifted, encode(x, kind))
    assert_same_bits(decode(shifted, kind, 256), decode(encode(x, kind), kind, 256))


@pytest.mark.parametrize("shape", [(0, 32), (5, 0), (0, 0)])
def test_nothing_to_do_is_fine(shape: tuple[int, int]) -> None:
    native.check(lib.delta_quantize_rows(Type.Q8_0, ffi.NULL, F32, ffi.NULL, *shape, ffi.NULL, 1, ffi.NULL))
    native.check(lib.delta_dequantize_rows(Type.Q8_0, ffi.NULL, ffi.NULL, *shape, 1))
    native.check(lib.delta_repack_mxfp4(ffi.NULL, ffi.NULL, ffi.NULL, *shape, 1, ffi.NULL))


# -- packed MXFP4 ----------------------------------------------------------------------------------------------------


def repack(packed: Bytes, scales: Bytes, n_threads: int = 1) -> Bytes:
    n_rows, n_cols = scales.shape[0], 32 * scales.shape[1]
    out = np.zeros((n_rows, row_bytes(Type.MXFP4, n_cols)), np.uint8)
    codes, scale = ffi.cast("uint8_t *", packed.ctypes.data), ffi.cast("uint8_t *", scales.ctypes.data)
    native.check(lib.delta_repack_mxfp4(codes, scale, pointer(out), n_rows, n_cols, n_threads, ffi.NULL))
    return out


@pytest.mark.parametrize("n_threads", [1, 3])
def test_repack_keeps_every_value(n_threads: int, rng: np.random.Generator) -> None:
    packed = rng.integers(0, 256, (700, 7 * 16), np.uint8)
    scales = rng.integers(0, 255, (700, 7), np.uint8)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(700, 7, 32)
    with np.errstate(over="ignore"):
        expected = (table[codes] * np.exp2(scales[:, :, None] - 127.0)).astype(np.float32)
    found = decode(repack(packed, scales, n_threads), Type.MXFP4, 7 * 32)
    np.testing.assert_array_equal(found, expected.reshape(700, -1))


def test_repack_refuses_a_scale_that_is_no_number(rng: np.random.Generator) -> None:
    packed, scales = np.zeros((900, 5 * 16), np.uint8), np.zeros((900, 5), np.uint8)
    scales[713, 2] = scales[431, 3] = scales[431, 4] = 255
    bad = ffi.new("int64_t *", -1)
    out = np.zeros((900, 5 * 17), np.uint8)
    codes, scale = ffi.cast("uint8_t *", packed.ctypes.data), ffi.cast("uint8_t *", scales.ctypes.data)
    with pytest.raises(native.NativeError, match="row 431, block 3: scale 255") as error:
        native.check(lib.delta_repack_mxfp4(codes, scale, pointer(out), 900, 160, 2, bad))
    assert error.value.name == "NUMERIC"
    assert bad[0] == 431 * 5 + 3


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ENCODED, ids=name_of)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n_threads", [1, 3])
def test_what_is_no_number_is_refused(kind: Type, bad: float, n_threads: int) -> None:
    x = np.ones((900, 256), np.float32)
    x[700, 3] = x[701, 0] = x[431, 37] = bad
    with pytest.raises(native.NativeError, match="row 431, column 37") as error:
        encode(x, kind, n_threads)
    assert error.value.name == "NUMERIC"
    assert kind.name in error.value.message
    assert error.value.bad_value == 431 * 256 + 37  # type: ignore[attr-defined]


@pytest.mark.parametrize("source", [F16, BF16], ids=name_of)
@pytest.mark.parametrize("column", [0, 2047, 2048, 5000])
def test_what_is_no_number_is_refused_in_16_bits(source: Type, column: int) -> None:
    x = np.zeros((3, 5120), np.uint16)
    x[1, column] = 0x7FC0 if source == BF16 else 0xFC00
    with pytest.raises(native.NativeError, match=f"row 1, column {column} is -?(nan|inf), which Q8_0 cannot hold"):
        encode(x, Type.Q8_0, source=source)


LIMITS = [
    (Type.F16, 65519.0, 65520.0),
    (Type.BF16, 3.39e38, 3.4e38),
    (Type.Q4_0, 524159.0, 524160.0),
    (Type.Q4_1, 65519.0, 65520.0),
    (Type.Q5_0, 1048319.0, 1048320.0),
    (Type.Q5_1, 65519.0, 65520.0),
    (Type.Q8_0, 8321039.0, 8321040.0),
    (Type.TQ1_0, 65519.0, 65520.0),
    (Type.TQ2_0, 65519.0, 65520.0),
    (Type.MXFP4, 3.4027e38, 3.4028e38),
    (Type.Q2_K, 2.0**19, 2.0**19 + 1),
    (Type.Q4_K, 2.0**21, 2.0**21 + 1),
    (Type.Q6_K, 2.0**26, 2.0**26 + 8),
]


@pytest.mark.parametrize(("kind", "fits", "beyond"), LIMITS, ids=name_of)
def test_overflow_is_refused(kind: Type, fits: float, beyond: float) -> None:
    x = np.zeros((2, 256), np.float32)
    x[1, 5] = -fits
    assert np.isfinite(decode(encode(x, kind), kind, 256)).all()
    x[1, 5] = -beyond
    with pytest.raises(native.NativeError, match="row 1, column 5") as error:
        encode(x, kind)
    assert error.value.name == "NUMERIC"


@pytest.mark.parametrize("kind", READ_ONLY, ids=name_of)
def test_types_that_can_only_be_read_say_so(kind: Type) -> None:
    with pytest.raises(native.NativeError, match=f"read {kind.name} but not encode") as error:
        encode(np.zeros((1, 256), np.float32), kind)
    assert error.value.name == "UNSUPPORTED"


def test_bad_arguments_are_named() -> None:
    x = np.zeros((1, 48), np.float32)
    room = np.zeros(4096, np.uint8)
    source, out = pointer(x), pointer(room)
    for arguments, status, message in [
        ((Type.Q8_K, out, F32, source, 1, 256, ffi.NULL, 1), "UNSUPPORTED", "15"),
        ((Type.Q8_0, out, Type.Q8_0, source, 1, 32, ffi.NULL, 1), "UNSUPPORTED", "Q8_0.*expected F32"),
        ((Type.Q8_0, out, 999, source, 1, 32, ffi.NULL, 1), "UNSUPPORTED", "999"),
        ((Type.Q8_0, out, F32, source, 1, 48, ffi.NULL, 1), "ARG", "48"),
        ((Type.F32, out, F32, source, -1, 48, ffi.NULL, 1), "ARG", "-1"),
        ((Type.F32, out, F32, source, 1, -48, ffi.NULL, 1), "ARG", "-48"),
        ((Type.F32, out, F32, source, 2**62, 2**62, ffi.NULL, 1), "ARG", "too many"),
        ((Type.F32, out, F32, ffi.NULL, 1, 48, ffi.NULL, 1), "ARG", "src"),
        ((Type.F32, ffi.NULL, F32, source, 1, 48, ffi.NULL, 1), "ARG", "dst"),
        ((Type.F32, out, F32, source, 1, 48, ffi.NULL, 10**6), "ARG", "threads"),
    ]:
        with pytest.raises(native.NativeError, match=message) as error:
            native.check(lib.delta_quantize_rows(*arguments, ffi.NULL))
        assert error.value.name == status
