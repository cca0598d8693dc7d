"""The row functions of the native library, through ctypes.

This package works without the library and knows nothing of the engine's binding; where a library is found, rows are
converted there, many times faster and on several threads. It is the file that `DELTALLAMA_LIBRARY` names, else the one
inside the installed package `deltallama`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import os
import sys
from pathlib import Path

import numpy as np

from . import buffers
from .constants import GGML_QUANT_SIZES, GGMLQuantizationType
from .errors import GGUFError

ABI_VERSION = 3  # DELTA_ABI_VERSION of deltallama.h
_NUMERIC = 9  # DELTA_NUMERIC
_VARIABLE = "DELTALLAMA_LIBRARY"
_FILE = "libdeltallama.dylib" if sys.platform == "darwin" else "libdeltallama.so"

log = logging.getLogger("gguf_ext")

# Types of the numpy arrays that hold rows of the three source types; numpy has no bfloat16, its bits are uint16.
SOURCES = {
    np.dtype(np.float32): GGMLQuantizationType.F32,
    np.dtype(np.float16): GGMLQuantizationType.F16,
    np.dtype(np.uint16): GGMLQuantizationType.BF16,
}


class BadValueError(Exception):
    """A value cannot be encoded: `index` counts values (or blocks) of the array from its start."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class Library:
    """The functions of one library file. Arrays must be C-contiguous.

    Raises:
        OSError: the file does not load. AttributeError: it lacks a function.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        library = ctypes.CDLL(str(path))
        pointer, size, id_ = ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint32
        index = ctypes.POINTER(ctypes.c_int64)
        library.delta_abi_version.restype = ctypes.c_uint32
        library.delta_last_error.restype = ctypes.c_char_p
        self.abi_version: int = library.delta_abi_version()
        if self.abi_version == ABI_VERSION:
            library.delta_quantize_rows.argtypes = [id_, pointer, id_, pointer, size, size, pointer, id_, index]
            library.delta_dequantize_rows.argtypes = [id_, pointer, pointer, size, size, id_]
            library.delta_repack_mxfp4.argtypes = [pointer, pointer, pointer, size, size, id_, index]
        self._library = library

    def quantize(
        self, rows: np.ndarray, type_: GGMLQuantizationType, importance: np.ndarray | None, n_threads: int
    ) -> np.ndarray:
        """Rows `[n, row_length]` of one of `SOURCES` to uint8 `[n, row_bytes]`.

        Raises:
            BadValueError: a value is not finite or beyond what the type holds.
            GGUFError: the library refuses the call.
        """
        n_rows, row_length = rows.shape
        row_bytes = _row_bytes(type_, row_length)
        out = buffers.empty(n_rows * row_bytes).reshape(n_rows, row_bytes)
        weight = None if importance is None else importance.ctypes.data
        bad = ctypes.c_int64(-1)
        source = SOURCES[rows.dtype]
        status = self._library.delta_quantize_rows(
            type_, out.ctypes.data, source, rows.ctypes.data, n_rows, row_length, weight, n_threads, bad
        )
        self._check(status, bad)
        return out

    def dequantize(self, raw: np.ndarray, type_: GGMLQuantizationType, row_length: int, n_threads: int) -> np.ndarray:
        """Rows uint8 `[n, row_bytes]` to float32 `[n, row_length]`.

        Raises:
            GGUFError: the library refuses the call.
        """
        out = buffers.empty(4 * raw.shape[0] * row_length).view(np.float32).reshape(raw.shape[0], row_length)
        status = self._library.delta_dequantize_rows(
            type_, raw.ctypes.data, out.ctypes.data, raw.shape[0], row_length, n_threads
        )
        self._check(status, ctypes.c_int64(-1))
        return out

    def repack_mxfp4(self, packed: np.ndarray, scales: np.ndarray, n_threads: int) -> np.ndarray:
        """MXFP4 as compressed-tensors packs it, uint8 `[n, row_length / 2]` and `[n, row_length / 32]`, to blocks of
        GGUF, uint8 `[n, row_bytes]`.

        Raises:
            BadValueError: a scale is 255; `index` counts blocks.
            GGUFError: the library refuses the call.
        """
        n_rows, row_length = scales.shape[0], 32 * scales.shape[1]
        row_bytes = _row_bytes(GGMLQuantizationType.MXFP4, row_length)
        out = buffers.empty(n_rows * row_bytes).reshape(n_rows, row_bytes)
        bad = ctypes.c_int64(-1)
        status = self._library.delta_repack_mxfp4(
            packed.ctypes.data, scales.ctypes.data, out.ctypes.data, n_rows, row_length, n_threads, bad
        )
        self._check(status, bad)
        return out

    def _check(self, status: int, bad: ctypes.c_int64) -> None:
        if status == _NUMERIC and bad.value >= 0:
            raise BadValueError(bad.value)
        if status != 0:
            raise GGUFError(self._library.delta_last_error().decode(errors="replace"))


@functools.cache
def library() -> Library | None:
    """The library, opened once; None if there is none of this version.

    Raises:
        GGUFError: `DELTALLAMA_LIBRARY` names a file that is missing or does not load.
    """
    named = os.environ.get(_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise GGUFError(f"{_VARIABLE} names no file: {named}")
        return _open(Path(named), must_load=True)
    package = importlib.util.find_spec("deltallama")
    folders = package.submodule_search_locations if package is not None else None
    for path in (Path(folder) / _FILE for folder in folders or ()):
        if path.is_file():
            return _open(path, must_load=False)
    return None


def _open(path: Path, must_load: bool) -> Library | None:
    try:
        found = Library(path)
    except (OSError, AttributeError) as error:
        if must_load:
            raise GGUFError(f"the native library does not load: {error}") from error
        log.warning("the native library does not load, numpy converts instead: %s", error)
        return None
    if found.abi_version != ABI_VERSION:
        log.warning(
            "%s has interface version %d, expected %d; numpy converts instead", path, found.abi_version, ABI_VERSION
        )
        return None
    return found


def _row_bytes(type_: GGMLQuantizationType, row_length: int) -> int:
    block, size = GGML_QUANT_SIZES[type_]
    return row_length // block * size
