"""From the tensors of a checkpoint to the tensors of a file: one class per transformation.

A fold gets its sources by name and plans one or more output tensors. Each output carries a producer that reads,
transforms and yields one slab of rows or one expert at a time; nothing but `A_log` is read while planning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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

SLAB_BYTES = 8 << 20  # of float32 values held at a time

Sources = Mapping[str, Source]  # by the name in the converter's table

_BF16_EXPONENT = np.uint16(0x7F80)


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
        return [PlannedTensor(prefix + self.name, ne, type_, lambda: _rows(source, ne[0], type_))]


@dataclass(frozen=True)
class Product:
    """`norm * projection` elementwise in float32: only the product of the two vectors enters the residual scores."""

    name: str

    def plan(self, prefix: str, sources: Sources, types: Types) -> list[PlannedTensor]:
        first, second = sources.values()
        ne = (first.n_elements,)

        def produce() -> Iterator[np.ndarray]:
            with np.errstate(over="ignore"):  # an overflow is not finite and refused below
                values = first.floats() * second.floats()
            yield quantize_rows(values[None], type_, f"{first.name} times {second.name}")

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
        return [PlannedTensor(prefix + self.name, self.ne, type_, lambda: (rows,))]


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
            return source.floats(row * latent, count * latent).reshape(count, latent)

        def produce_k() -> Iterator[np.ndarray]:
            for index in range(self.n_heads):
                rows = np.ascontiguousarray(head(index, 0, self.nope).T)
                yield quantize_rows(rows, k_type, f"{source.name}, K of head {index} transposed")

        def produce_v() -> Iterator[np.ndarray]:
            for index in range(self.n_heads):
                rows = head(index, self.nope, self.v)
                yield quantize_rows(rows, v_type, source.name, index * (self.nope + self.v) + self.nope)

        k_type, v_type = types.of(prefix, c.ATTN_K_B, k_ne), types.of(prefix, c.ATTN_V_B, v_ne)
        return [
            PlannedTensor(prefix + c.ATTN_K_B, k_ne, k_type, produce_k),
            PlannedTensor(prefix + c.ATTN_V_B, v_ne, v_type, produce_v),
        ]


def stack_plain(prefix: str, name: str, experts: list[Source], types: Types) -> PlannedTensor:
    """All experts' matrices `[rows, cols]` of one projection, in order of their numbers: ne {cols, rows, n_experts}."""
    ne = (*experts[0].shape[::-1], len(experts))
    type_ = types.of(prefix, name, ne)

    def produce() -> Iterator[np.ndarray]:
        for source in experts:
            yield from _rows(source, ne[0], type_)

    return PlannedTensor(prefix + name, ne, type_, produce)


def stack_packed(prefix: str, name: str, experts: list[tuple[Source, Source]]) -> PlannedTensor:
    """The same for packed experts: MXFP4 whatever output type was asked for, bit for bit."""
    rows, half = experts[0][0].shape

    def produce() -> Iterator[np.ndarray]:
        for expert, (weight, scale) in enumerate(experts):
            yield packed.repack_expert(weight, scale, expert)

    return PlannedTensor(prefix + name, (2 * half, rows, len(experts)), GGMLQuantizationType.MXFP4, produce)


def _rows(source: Source, row_length: int, type_: GGMLQuantizationType) -> Iterator[np.ndarray]:
    step = max(1, SLAB_BYTES // (4 * row_length))
    n_rows = source.n_elements // row_length
    for first in range(0, n_rows, step):
        count = min(step, n_rows - first)
        if source.dtype == "BF16" and type_ == GGMLQuantizationType.BF16:
            yield _same_bf16(source, first, count, row_length)
        else:
            rows = source.floats(first * row_length, count * row_length).reshape(count, row_length)
            yield quantize_rows(rows, type_, source.name, first)


def _same_bf16(source: Source, first: int, count: int, row_length: int) -> np.ndarray:
    """BF16 to BF16 without the way through float32, which would cost most of the time of such a conversion."""
    bits = source.raw(first * row_length, count * row_length).view("<u2").reshape(count, row_length)
    special = (bits & _BF16_EXPONENT) == _BF16_EXPONENT
    if special.any():
        row, column = np.argwhere(special)[0]
        raise GGUFError(f"tensor {source.name}: row {first + row}, column {column} is not a finite number")
    return bits
