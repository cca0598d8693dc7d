"""Float rows to the bytes of a GGUF type: in the native library where it is found, else with numpy and `gguf.quants`.

Both give the same bytes. The types whose encoding is searched for (K-quants, IQ4) need the library. One call takes a
slab of rows, so a caller that walks a tensor slab by slab holds one slab and its result.
"""

from __future__ import annotations

import numpy as np
from gguf import quants

from . import native
from .constants import GGML_QUANT_SIZES, GGMLQuantizationType
from .errors import GGUFError

_T = GGMLQuantizationType

# The largest magnitude that each type written here can hold. Beyond it a scale (or the value itself) overflows its
# half; MXFP4 ends where the logarithm of the magnitude rounds up to 128.
_HALF = float.fromhex("0x1.ffdffep+15")  # the last float32 that rounds to a finite half
LARGEST = {
    _T.F32: float(np.finfo(np.float32).max),
    _T.F16: _HALF,
    _T.BF16: float.fromhex("0x1.fefffep+127"),
    _T.Q4_0: 8 * _HALF,
    _T.Q4_1: _HALF,
    _T.Q5_0: 16 * _HALF,
    _T.Q5_1: _HALF,
    _T.Q8_0: float.fromhex("0x1.fbe03ep+22"),
    _T.TQ1_0: _HALF,
    _T.TQ2_0: _HALF,
    _T.MXFP4: float.fromhex("0x1.ffffp+127"),
}
NEEDS_LIBRARY = (_T.Q2_K, _T.Q3_K, _T.Q4_K, _T.Q5_K, _T.Q6_K, _T.IQ4_NL, _T.IQ4_XS)
QUANTIZABLE = (*LARGEST, *NEEDS_LIBRARY)


def can_quantize(type_: GGMLQuantizationType, row_length: int) -> bool:
    """True when rows of `row_length` values consist of whole blocks of a type this module writes."""
    return type_ in QUANTIZABLE and row_length % GGML_QUANT_SIZES[type_][0] == 0


def check_available(type_: GGMLQuantizationType) -> None:
    """Raise unless this installation can write the type.

    Raises:
        GGUFError: it cannot, and why.
    """
    if type_ not in QUANTIZABLE:
        raise GGUFError(f"{type_.name} cannot be written here; possible: {', '.join(t.name for t in QUANTIZABLE)}")
    if type_ in NEEDS_LIBRARY and native.library() is None:
        raise GGUFError(
            f"{type_.name} needs the native library, which is not built here: install the package deltallama"
        )


def quantize_rows(
    rows: np.ndarray,
    type_: GGMLQuantizationType,
    name: str,
    first_row: int = 0,
    *,
    importance: np.ndarray | None = None,
    n_threads: int = 1,
) -> np.ndarray:
    """Quantize rows `[n, row_length]` to uint8 `[n, row_bytes]`.

    `rows` is float32, float16, or uint16 with the bits of bfloat16. `importance` `[row_length]` weighs the squared
    error of each column, which needs the library; types whose encoding leaves no choice pass it by. `name` and
    `first_row` (the number of rows[0] within the tensor) only serve messages.

    Raises:
        GGUFError: a value is not finite or too large for the type, the type is not one of `QUANTIZABLE`, the library
            is needed where there is none, or rows are not whole blocks.
    """
    if not can_quantize(type_, rows.shape[-1]):
        raise GGUFError(f"tensor {name}: rows of {rows.shape[-1]} values cannot be written as {type_.name}")
    check_available(type_)
    rows = np.ascontiguousarray(rows)
    library = native.library()
    try:
        if library is not None:
            weight = None if importance is None else np.ascontiguousarray(importance, np.float32)
            return library.quantize(rows, type_, weight, n_threads)
        if importance is not None:
            raise GGUFError(f"tensor {name}: weights of columns need the native library, which is not built here")
        return _quantize(_widened(rows), type_)
    except native.BadValueError as error:
        row, column = divmod(error.index, rows.shape[-1])
        value = _widened(rows[row : row + 1])[0, column]
        where = f"tensor {name}: row {first_row + row}, column {column}"
        if not np.isfinite(value):
            raise GGUFError(f"{where}: {value} is not a finite number") from None
        raise GGUFError(f"{where}: {value:g} does not fit {type_.name}; bf16 and f32 hold it") from None


def dequantize_rows(raw: np.ndarray, type_: GGMLQuantizationType, row_length: int, n_threads: int = 1) -> np.ndarray:
    """Rows uint8 `[n, row_bytes]` as float32 `[n, row_length]`.

    Raises:
        GGUFError: the type is unknown.
    """
    library = native.library()
    if library is not None:
        return library.dequantize(np.ascontiguousarray(raw), type_, row_length, n_threads)
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            return np.ascontiguousarray(quants.dequantize(raw, type_), np.float32).reshape(raw.shape[0], row_length)
    except NotImplementedError:
        raise GGUFError(f"type {type_.name} cannot be dequantized here") from None


def _widened(rows: np.ndarray) -> np.ndarray:
    if rows.dtype == np.uint16:
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return rows.astype(np.float32, copy=False)


# --- without the library --------------------------------------------------------------------------------------------


def _quantize(rows: np.ndarray, type_: GGMLQuantizationType) -> np.ndarray:
    """As `native.Library.quantize`, of float32 rows."""
    lost = ~(np.abs(rows) <= np.float32(LARGEST[type_]))  # NaN compares false
    if lost.any():
        raise native.BadValueError(int(np.flatnonzero(lost)[0]))
    if type_ in (_T.Q4_0, _T.Q4_1, _T.Q5_0, _T.Q5_1, _T.Q8_0, _T.TQ1_0, _T.TQ2_0):
        rows = _without_vanishing_blocks(rows, type_)
    if type_ == _T.MXFP4:
        return _quantize_mxfp4(rows)
    return np.ascontiguousarray(quants.quantize(rows, type_)).view(np.uint8).reshape(rows.shape[0], -1)


def _without_vanishing_blocks(rows: np.ndarray, type_: GGMLQuantizationType) -> np.ndarray:
    """Rows with zeros in the blocks whose scale has no finite reciprocal.

    Such a scale is zero as a half, so the block decodes to zeros whatever its codes are, but its codes would be what a
    cast of NaN happens to give.
    """
    blocks = rows.reshape(-1, GGML_QUANT_SIZES[type_][0])
    if type_ in (_T.Q4_1, _T.Q5_1):
        blocks = blocks + np.float32(0)  # -0 becomes +0: which of the two is the minimum would be left to chance
        scale = (blocks.max(axis=1, initial=-np.inf) - blocks.min(axis=1, initial=np.inf)) / np.float32(
            15 if type_ == _T.Q4_1 else 31
        )
    else:
        divisor = {_T.Q4_0: 8, _T.Q5_0: 16, _T.Q8_0: 127}.get(type_, 1)
        scale = np.abs(blocks).max(axis=1, initial=0) / np.float32(divisor)
    with np.errstate(divide="ignore", over="ignore"):
        vanishing = (scale != 0) & ~np.isfinite(1 / scale)
    return np.where(vanishing[:, None], np.float32(0), blocks).reshape(rows.shape)


_MXFP4_MIDPOINTS = np.array([0.5, 1.5, 2.5, 3.5, 5, 7, 10], np.float32)  # between twice the values 0 0.5 1 1.5 2 3 4 6


def _quantize_mxfp4(rows: np.ndarray) -> np.ndarray:
    """Scale 2^(floor(log2 max) - 2), codes the nearest ones, of two equally near ones that of smaller magnitude.

    `gguf.quants` does the same down to 2^-125; below, its scale byte wraps around.
    """
    blocks = rows.reshape(-1, 32)
    largest = np.abs(blocks).max(axis=1, initial=0)
    with np.errstate(divide="ignore"):
        exponent = np.floor(np.log2(largest)) - 2 + 127
    code = np.where(largest > 0, exponent, 0).clip(0)
    half_scale = np.ldexp(np.float32(1), code.astype(np.int32) - 128)
    with np.errstate(under="ignore"):
        limits = half_scale[:, None] * _MXFP4_MIDPOINTS
    q = np.zeros(blocks.shape, np.uint8)
    for k in range(limits.shape[1]):
        q += np.abs(blocks) > limits[:, k : k + 1]
    q |= np.where((blocks < 0) & (q > 0), np.uint8(8), np.uint8(0))
    out = np.empty((len(blocks), 17), np.uint8)
    out[:, 0] = code
    out[:, 1:] = q[:, :16] | q[:, 16:] << 4
    return out.reshape(rows.shape[0], -1)
