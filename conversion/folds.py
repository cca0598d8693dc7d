"""From the tensors of a checkpoint to the tensors of a file: one class per transformation.

A fold gets its sources by name and plans one or more output tensors. Each output carries a producer that reads,
transforms and returns one slab of rows at a time, any slab at any time; nothing but `A_log` is read while planning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from gguf_ext import GGUFError, PlannedTensor
from gguf_ext import constants as c
from gguf_ext.constants import GGMLQuantizationType
from gguf_ext.quants import quantize_rows

from . import packed
from .checkpoint import Source
from .errors import ConversionError
from .types import Types

# Values that a thread holds at a time: enough that the work outweighs its organisation, small enough that all threads
# of a large machine fit in the memory of the pipeline.
SLAB_VALUES = 1 << 19
PACKED_SLAB_VALUES = 1 << 20
_VALUE_MEMORY = 8  # bytes: as stored, as float32 where the native library is not built, as written
_PACKED_VALUE_MEMORY = 2

Sources = Mapping[str, Source]  # by the name in the converter's table

# What the quantizers take without the way through float32; BF16 as its bits.
_STORED = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}

# The bits of the exponent: all of them set means infinite or not a number.
_EXPONENTS = {
    (GGMLQuantizationType.F32, "F32"): np.uint32(0x7F800000),
    (GGMLQuantizationType.F16, "F16"): np.uint16(0x7C00),
    (GGMLQuantizationType.BF16, "BF16"): np.uint16(0x7F80),
}


class Fold(Protocol):
    """A transformation. Folds are compared by value: table rows with equal folds feed the same outputs."""

    def plan(self, prefix: str, sources: Sources, types: Types) -> list[PlannedTensor]:
        """Outputs in file order; `prefix` is "blk.N." or empty."""
        ...


@dataclass(frozen=True)
class Copy:
    """The same values in the same order. `conv`: with the dimensions convolutions have, ne {taps, 1, channels, 1}."""

    name: str
    conv: bool = False

    def plan(self, prefix: str, sources: Sources, types: Types) -> list[PlannedTensor]:
        (source,) = sources.values()
        ne = (source.shape[-1], 1, source.shape[0], 1) if self.conv else source.shape[::-1]
        type_ = types.of(prefix, self.name, ne)

        def produce(first: int, count: int) -> np.ndarray:
            return _rows(source, ne[0], type_, first, count)

        return [_slabs(prefix + self.name, ne, type_, produce, source.n_elements // ne[0])]


@dataclass(frozen=True)
class Product:
    """`norm * projection` elementwise in float32: only the product of the two vectors enters the residual scores."""

    name: str

    def plan(self, prefix: str, sources: Sources, types: Types) -> list[PlannedTensor]:
        norm, projection = sources.values()
        ne = (norm.n_elements,)

        def produce(first: int, count: int) -> np.ndarray:
            with np.errstate(over="ignore"):  # an overflow is not finite and refused below
                values = norm.floats() * projection.floats()
            return quantize_rows(values[None], type_, f"{norm.name} times {projection.name}")

        type_ = types.of(prefix, self.name, ne)
        return [PlannedTensor(prefix + self.name, ne, type_, produce)]


@dataclass(frozen=True)
class NegativeExp:
    """`-exp(A_log)` over the real heads, float64 rounded to float32. What is longer is padding and must be zero."""

    name: str
    n_heads: int
    ne: tuple[int, ...]

    def plan(self, prefix: str, sources: Sources, types: Types) -> list[PlannedTensor]:
        (source,) = sources.values()
        type_ = types.of(prefix, self.name, self.ne)
        values = source.floats().astype(np.float64)
        tail = np.flatnonzero(values[self.n_heads :])
        if len(tail):
            at = self.n_heads + tail[0]
            raise ConversionError(
                f"tensor {source.name}: element {at} is {values[at]:g}, expected 0: the model has {self.n_heads} heads "
                "and what follows must be padding"
            )
        with np.errstate(over="ignore"):  # an overflow is not finite and refused
            result = (-np.exp(values[: self.n_heads])).astype(np.float32)
        rows = quantize_rows(result[None], type_, f"-exp of {source.name}")
        return [PlannedTensor(prefix + self.name, self.ne, type_, lambda first, count: rows)]


@dataclass(frozen=True)
class SplitKvB:
    """`kv_b_proj` `[heads * (nope + v), latent]` to K, each head transposed for the absorbed product, ne {nope, latent,
    heads}, and V as it is, ne {latent, v, heads}."""

    n_heads: int
    nope: int
    v: int

    def plan(self, prefix: str, sources: Sources, types: Types) -> list[PlannedTensor]:
        (source,) = sources.values()
        latent = source.shape[1]
        k_ne, v_ne = (self.nope, latent, self.n_heads), (latent, self.v, self.n_heads)

        def head(index: int, first: int, count: int) -> np.ndarray:
            row = index * (self.nope + self.v) + first
            return _stored(source, latent, row, count)

        def produce_k(first: int, count: int) -> np.ndarray:
            index = first // latent  # one head is a piece
            rows = np.ascontiguousarray(head(index, 0, self.nope).T)
            return quantize_rows(rows, k_type, f"{source.name}, K of head {index} transposed")

        def produce_v(first: int, count: int) -> np.ndarray:
            index = first // self.v
            rows = head(index, self.nope, self.v)
            return quantize_rows(rows, v_type, source.name, index * (self.nope + self.v) + self.nope)

        k_type, v_type = types.of(prefix, c.ATTN_K_B, k_ne), types.of(prefix, c.ATTN_V_B, v_ne)
        return [
            PlannedTensor(prefix + c.ATTN_K_B, k_ne, k_type, produce_k, latent, _VALUE_MEMORY * self.nope),
            PlannedTensor(prefix + c.ATTN_V_B, v_ne, v_type, produce_v, self.v, _VALUE_MEMORY * latent),
        ]


@dataclass(frozen=True)
class AxisMajorRope:
    """Q, K and V as one matrix `[3 * heads * d, cols]`, for a rotation in two directions: within each head of Q and K
    the pairs that turn with x come first, those that turn with y after them. In the checkpoint they take turns."""

    name: str
    n_heads: int

    def plan(self, prefix: str, sources: Sources, types: Types) -> list[PlannedTensor]:
        (source,) = sources.values()
        n_rows, n_cols = source.shape
        d = n_rows // (3 * self.n_heads)
        # Row 4a + 2b + c of a head is part c of pair a in direction b.
        head = np.arange(d).reshape(-1, 2, 2).transpose(1, 0, 2).ravel()
        heads = np.arange(2 * self.n_heads)[:, None] * d + head
        order = np.concatenate([heads.ravel(), np.arange(2 * self.n_heads * d, n_rows)])
        type_ = types.of(prefix, self.name, (n_cols, n_rows))

        def produce(first: int, count: int) -> np.ndarray:
            wanted = order[first : first + count]
            low = int(wanted.min())
            rows = _stored(source, n_cols, low, int(wanted.max()) + 1 - low)[wanted - low]
            return quantize_rows(rows, type_, f"{source.name}, rows reordered", first)

        return [_slabs(prefix + self.name, (n_cols, n_rows), type_, produce, n_rows)]


def stack_plain(prefix: str, name: str, experts: list[Source], types: Types) -> PlannedTensor:
    """All experts' matrices `[rows, cols]` of one projection, in order of their numbers: ne {cols, rows, n_experts}."""
    n_rows, n_cols = experts[0].shape
    ne = (n_cols, n_rows, len(experts))
    type_ = types.of(prefix, name, ne)

    def one(expert: int, first: int, count: int) -> np.ndarray:
        return _rows(experts[expert], n_cols, type_, first, count)

    return _slabs(prefix + name, ne, type_, _stacked(one, n_rows), n_rows)


def stack_packed(prefix: str, name: str, experts: list[tuple[Source, Source]]) -> PlannedTensor:
    """The same for packed experts: MXFP4 whatever output type was asked for, bit for bit."""
    n_rows, half = experts[0][0].shape
    ne = (2 * half, n_rows, len(experts))

    def one(expert: int, first: int, count: int) -> np.ndarray:
        return packed.repack_rows(*experts[expert], expert, first, count)

    piece_rows = slab_rows(n_rows, ne[0], PACKED_SLAB_VALUES)
    produce, memory = _stacked(one, n_rows), _PACKED_VALUE_MEMORY * ne[0]
    return PlannedTensor(prefix + name, ne, GGMLQuantizationType.MXFP4, produce, piece_rows, memory)


def slab_rows(n_rows: int, row_length: int, slab_values: int = SLAB_VALUES) -> int:
    """How many rows of a stack of matrices of `n_rows` make a piece: whole matrices if they are small, else an equal
    share of one if its rows can be shared equally."""
    most = max(1, slab_values // row_length)
    if most >= n_rows:
        return most // n_rows * n_rows
    return next((rows for rows in range(most, most // 2, -1) if n_rows % rows == 0), most)


def _slabs(
    name: str, ne: tuple[int, ...], type_: GGMLQuantizationType, produce: Callable[[int, int], np.ndarray], n_rows: int
) -> PlannedTensor:
    return PlannedTensor(name, ne, type_, produce, slab_rows(n_rows, ne[0]), _VALUE_MEMORY * ne[0])


def _stacked(one: Callable[[int, int, int], np.ndarray], n_rows: int) -> Callable[[int, int], np.ndarray]:
    """Rows of a stack of matrices of `n_rows` each, from `one(matrix, first, count)`."""

    def produce(first: int, count: int) -> np.ndarray:
        parts = []
        while count:
            matrix, row = divmod(first, n_rows)
            n = min(count, n_rows - row)
            parts.append(one(matrix, row, n))
            first, count = first + n, count - n
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    return produce


def _rows(source: Source, row_length: int, type_: GGMLQuantizationType, first: int, count: int) -> np.ndarray:
    """`count` rows of a source from row `first` in the type of the output."""
    exponent = _EXPONENTS.get((type_, source.dtype))
    if exponent is not None:
        return _same(source, row_length, exponent, first, count)
    return quantize_rows(_stored(source, row_length, first, count), type_, source.name, first)


def _stored(source: Source, row_length: int, first: int, count: int) -> np.ndarray:
    """`count` rows from row `first` as they are stored."""
    raw = source.raw(first * row_length, count * row_length)
    return raw.view(_STORED[source.dtype]).reshape(count, row_length)


def _same(source: Source, row_length: int, exponent: np.unsignedinteger, first: int, count: int) -> np.ndarray:
    """The bytes as they are, without the way through float32, which would cost most of the time of such a copy."""
    bits: np.ndarray = _stored(source, row_length, first, count).view(exponent.dtype)
    special = (bits & exponent) == exponent
    if special.any():
        row, column = np.argwhere(special)[0]
        raise GGUFError(f"tensor {source.name}: row {first + row}, column {column} is not a finite number")
    return bits
