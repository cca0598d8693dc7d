"""Encoding and decoding rows in tests, through the C interface: numpy arrays in, numpy arrays out."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

import native

ffi, lib = native.load()

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

F32, F16, BF16 = Type.F32, Type.F16, Type.BF16


def pointer(array: NDArray[Any]) -> Any:
    return ffi.cast("void *", array.ctypes.data)


def row_bytes(kind: int, n_cols: int) -> int:
    return int(lib.delta_row_bytes(kind, n_cols))


def encode(
    x: NDArray[Any],
    kind: int,
    n_threads: int = 1,
    *,
    importance: Floats | None = None,
    source: int = F32,
) -> Bytes:
    """Rows of type `source` to bytes [n, row_bytes]. 16-bit sources are given as uint16.

    Raises:
        native.NativeError: has `bad_value`, the index that the call gave, -1 if none.
    """
    x = np.ascontiguousarray(x)
    assert x.dtype == (np.float32 if source == F32 else np.uint16)
    out = np.full((x.shape[0], row_bytes(kind, x.shape[1])), 0xA5, np.uint8)
    weight = ffi.NULL if importance is None else ffi.cast("float *", importance.ctypes.data)
    bad = ffi.new("int64_t *", -1)
    try:
        native.check(lib.delta_quantize_rows(kind, pointer(out), source, pointer(x), *x.shape, weight, n_threads, bad))
    except native.NativeError as error:
        error.bad_value = bad[0]  # type: ignore[attr-defined]
        raise
    assert bad[0] == -1
    return out


def decode(raw: Bytes, kind: int, n_cols: int, n_threads: int = 1) -> Floats:
    out = np.full((raw.shape[0], n_cols), np.nan, np.float32)
    destination = ffi.cast("float *", out.ctypes.data)
    native.check(lib.delta_dequantize_rows(kind, pointer(raw), destination, *out.shape, n_threads))
    return out


def assert_same_bits(found: Floats, expected: Floats) -> None:
    np.testing.assert_array_equal(found.view(np.uint32), np.ascontiguousarray(expected).view(np.uint32))


def vector() -> Floats:
    """512 fixed values whose encodings have known checksums, as two rows."""
    u = (np.arange(512, dtype=np.uint64) * 2654435761 % 2**32) >> 8
    x = (u.astype(np.float64) / 2**24 * 2 - 1).astype(np.float32) * np.float32(0.75)
    return x.reshape(2, 256)
