"""Rows through gguf_ext: the native library and numpy give the same bytes and the same errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

import native as test_native
from gguf_ext import GGUFError, native, quants
from gguf_ext.quants import LARGEST, NEEDS_LIBRARY, check_available, dequantize_rows, quantize_rows
from test_quants import TYPES, lengths, matrices, name_of, random_blocks


@pytest.fixture(autouse=True)
def tested_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library that the other tests use."""
    monkeypatch.setenv("DELTALLAMA_LIBRARY", str(test_native.library_path()))
    library = native.library  # a test may put something else in its place
    library.cache_clear()
    yield
    library.cache_clear()


def in_numpy(rows: np.ndarray, kind: Type) -> np.ndarray:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        return quantize_rows(rows, kind, "x")


@pytest.mark.parametrize("kind", LARGEST, ids=name_of)
def test_numpy_gives_the_same_bytes(kind: Type, rng: np.random.Generator) -> None:
    assert native.library() is not None
    for n_cols in lengths(kind):
        for name, x in matrices(rng, n_cols).items():
            expected = quantize_rows(x, kind, "x")
            np.testing.assert_array_equal(in_numpy(x, kind), expected, err_msg=name)
            half = x.clip(-65504, 65504).astype(np.float16)
            np.testing.assert_array_equal(in_numpy(half, kind), quantize_rows(half, kind, "x"), err_msg=name)
            bits = (x.view(np.uint32) >> 16).astype(np.uint16)
            np.testing.assert_array_equal(in_numpy(bits, kind), quantize_rows(bits, kind, "x"), err_msg=name)


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_K], ids=name_of)
def test_rows_need_not_be_contiguous(kind: Type, rng: np.random.Generator) -> None:
    x = rng.standard_normal((512, 6), dtype=np.float32)
    np.testing.assert_array_equal(quantize_rows(x.T, kind, "x"), quantize_rows(x.T.copy(), kind, "x", n_threads=2))


@pytest.mark.parametrize("kind", TYPES, ids=name_of)
def test_numpy_decodes_the_same(kind: Type, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    n_cols = lengths(kind)[1]
    raw = random_blocks(kind, 20, n_cols, rng)
    found = dequantize_rows(raw, kind, n_cols)
    monkeypatch.setattr(native, "library", lambda: None)
    expected = dequantize_rows(raw, kind, n_cols)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", LARGEST, ids=name_of)
@pytest.mark.parametrize("has_library", [True, False])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "beyond", "-beyond"])
def test_bad_values_are_named(
    kind: Type, value: str, has_library: bool, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    if not has_library:
        monkeypatch.setattr(native, "library", lambda: None)
    limit = np.float32(LARGEST[kind])
    x = np.zeros((4, 256), np.float32)
    x[1, 7] = -limit
    assert np.isfinite(dequantize_rows(quantize_rows(x, kind, "w"), kind, 256)).all()
    beyond = np.nextafter(limit, np.float32(np.inf)) if kind != Type.F32 else np.float32(np.inf)
    bad = {"beyond": beyond, "-beyond": -beyond}.get(value)
    x[2, 5] = x[3, 1] = float(value) if bad is None else bad
    with pytest.raises(GGUFError, match=r"^tensor w: row 102, column 5: ") as error:
        quantize_rows(x, kind, "w", first_row=100)
    expected = "does not fit" if np.isfinite(x[2, 5]) else f"{x[2, 5]} is not a finite number"
    assert expected in str(error.value)


def test_limits_are_those_of_the_library() -> None:
    """The limits of numpy's path stand in the library's table too."""
    for kind, limit in LARGEST.items():
        x = np.zeros((1, 256), np.float32)
        x[0, 0] = limit
        quantize_rows(x, kind, "w")
        with np.errstate(over="ignore"):
            x[0, 0] = np.nextafter(np.float32(limit), np.float32(np.inf))
        with pytest.raises(GGUFError, match="column 0"):
            quantize_rows(x, kind, "w")


def test_the_interface_version_is_the_headers() -> None:
    assert test_native.load()[1].DELTA_ABI_VERSION == native.ABI_VERSION


@pytest.mark.parametrize("kind", NEEDS_LIBRARY, ids=name_of)
def test_searched_types_need_the_library(kind: Type, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.ones((1, 256), np.float32)
    check_available(kind)
    assert quantize_rows(x, kind, "x").shape[0] == 1
    monkeypatch.setattr(native, "library", lambda: None)
    for call in (lambda: check_available(kind), lambda: quantize_rows(x, kind, "x")):
        with pytest.raises(GGUFError, match=f"{kind.name} needs the native library"):
            call()


def test_weights_of_columns(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    x = rng.standard_normal((8, 512), dtype=np.float32)
    importance = np.where(np.arange(512) % 2, 1.0, 1e-3)
    error = dequantize_rows(quantize_rows(x, Type.Q4_K, "x", importance=importance), Type.Q4_K, 512) - x
    assert (error[:, 1::2] ** 2).mean() < 0.7 * (error[:, ::2] ** 2).mean()
    monkeypatch.setattr(native, "library", lambda: None)
    with pytest.raises(GGUFError, match="weights of columns need the native library"):
        quantize_rows(x, Type.Q4_0, "x", importance=importance)


def test_a_named_library_must_be_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DELTALLAMA_LIBRARY", str(tmp_path / "none.so"))
    native.library.cache_clear()
    with pytest.raises(GGUFError, match=r"DELTALLAMA_LIBRARY names no file: .*none\.so"):
        quantize_rows(np.zeros((1, 32), np.float32), Type.Q8_0, "x")
    (tmp_path / "none.so").write_bytes(b"no library")
    with pytest.raises(GGUFError, match="does not load"):
        quantize_rows(np.zeros((1, 32), np.float32), Type.Q8_0, "x")


def test_another_interface_version_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "ABI_VERSION", 999)
    native.library.cache_clear()
    assert native.library() is None
    assert "expected 999; numpy converts instead" in caplog.text


def test_types_that_nobody_writes() -> None:
    with pytest.raises(GGUFError, match="IQ2_XS cannot be written here; possible: F32, F16"):
        check_available(Type.IQ2_XS)
    with pytest.raises(GGUFError, match="tensor x: rows of 300 values cannot be written as Q4_K"):
        quantize_rows(np.zeros((1, 300), np.float32), Type.Q4_K, "x")
    assert quants.can_quantize(Type.Q4_K, 512) and not quants.can_quantize(Type.Q4_K, 128)


def test_repack(rng: np.random.Generator) -> None:
    library = native.library()
    assert library is not None
    packed, scales = rng.integers(0, 256, (9, 48), np.uint8), rng.integers(0, 255, (9, 3), np.uint8)
    blocks = library.repack_mxfp4(packed, scales, n_threads=1)
    np.testing.assert_array_equal(blocks.reshape(9, 3, 17)[:, :, 0], scales)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(9, 3, 32)
    np.testing.assert_array_equal(blocks.reshape(9, 3, 17)[:, :, 1:], codes[:, :, :16] | codes[:, :, 16:] << 4)
    scales[4, 2] = 255
    with pytest.raises(native.BadValueError) as error:
        library.repack_mxfp4(packed, scales, n_threads=1)
    assert error.value.index == 4 * 3 + 2
