"""Float rows to the bytes of a GGUF type, thin over `gguf.quants`.

One call takes a slab of rows, so a caller that walks a tensor slab by slab holds one slab and its result.
"""

from __future__ import annotations

import numpy as np
from gguf import quants

from .constants import GGML_QUANT_SIZES, GGMLQuantizationType
from .errors import GGUFError

QUANTIZABLE = (
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
    GGMLQuantizationType.Q8_0,
)


def can_quantize(type_: GGMLQuantizationType, row_length: int) -> bool:
    """True when rows of `row_length` values consist of whole blocks of a type this module writes."""
    return type_ in QUANTIZABLE and row_length % GGML_QUANT_SIZES[type_][0] == 0


def quantize_rows(rows: np.ndarray, type_: GGMLQuantizationType, name: str, first_row: int = 0) -> np.ndarray:
    """Quantize float32 rows `[n, row_length]` to uint8 `[n, row_bytes]`.

    `name` and `first_row` (the number of rows[0] within the tensor) only serve messages.

    Raises:
        GGUFError: a value is not finite, a value does not fit the type (F16, and the F16 scale of Q8_0), the type is
            not one of `QUANTIZABLE`, or rows are not whole blocks.
    """
    if not can_quantize(type_, rows.shape[-1]):
        raise GGUFError(f"tensor {name}: rows of {rows.shape[-1]} values cannot be written as {type_.name}")
    finite = np.isfinite(rows)
    if not finite.all():
        row, column = np.argwhere(~finite)[0]
        raise GGUFError(
            f"tensor {name}: row {first_row + row}, column {column}: {rows[row, column]} is not a finite number"
        )
    if type_ == GGMLQuantizationType.F16:
        with np.errstate(over="ignore"):
            half = rows.astype(np.float16)
        _refuse_overflow(np.isinf(half), rows, type_, name, first_row)
        return half.view(np.uint8)
    if type_ == GGMLQuantizationType.Q8_0:
        # The block scale, largest magnitude / 127, is stored in half precision; 65520 rounds to infinity.
        _refuse_overflow(np.abs(rows) / np.float32(127) >= np.float32(65520), rows, type_, name, first_row)
        rows = _without_vanishing_blocks(rows)
    return np.ascontiguousarray(quants.quantize(rows, type_)).view(np.uint8)


def _without_vanishing_blocks(rows: np.ndarray) -> np.ndarray:
    """Rows with zeros in the Q8_0 blocks whose scale has no finite reciprocal, 127 / largest > float32's maximum.

    Such a block decodes to zeros whatever its codes are, but its codes would be what a cast of NaN happens to give.
    """
    blocks = rows.reshape(-1, GGML_QUANT_SIZES[GGMLQuantizationType.Q8_0][0])
    vanishing = np.abs(blocks).max(axis=1, initial=0) < 4e-37
    if not vanishing.any():
        return rows
    return np.where(vanishing[:, None], np.float32(0), blocks).reshape(rows.shape)


def _refuse_overflow(
    over: np.ndarray, rows: np.ndarray, type_: GGMLQuantizationType, name: str, first_row: int
) -> None:
    if over.any():
        row, column = np.argwhere(over)[0]
        raise GGUFError(
            f"tensor {name}: row {first_row + row}, column {column}: {rows[row, column]:g} does not fit {type_.name}; "
            "bf16 and f32 hold it"
        )
