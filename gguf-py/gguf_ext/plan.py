"""What a GGUF file will hold, and the pieces it is made of.

A `Plan` has every key, and for every tensor its name, shape, type and a function that gives any of its rows. All
offsets and the file's size follow from the plan alone, so they are known before a byte is written. The file's data is a
sequence of pieces, ranges of rows of one tensor, that can be made in any order and by several threads; they are
computed when asked for, since a large model has millions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from math import prod
from typing import Any, NamedTuple

import numpy as np

from . import constants as c
from .constants import GGML_QUANT_SIZES, SCALAR_FORMATS, GGMLQuantizationType, GGUFValueType
from .errors import GGUFError, UnwritableError

Chunk = np.ndarray | bytes | bytearray | memoryview
Producer = Callable[[int, int], Chunk]  # first row, number of rows -> their bytes


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written: `ne` fastest dimension first.

    `produce(first, count)` gives the bytes of `count` rows of ne[0] values from row `first`, all higher dimensions
    counted through; it may be called by several threads at once. It is asked for `piece_rows` rows at a time from a
    multiple of that, fewer at the end; 0 means the whole tensor at once. It raises GGUFError when the values cannot be
    written, and anything else when they could not be read this time. `row_memory` is about how many bytes it holds
    per row meanwhile, result included; 0 means the result only.
    """

    name: str
    ne: tuple[int, ...]
    type: GGMLQuantizationType
    produce: Producer = field(repr=False, compare=False)
    piece_rows: int = field(default=0, compare=False)
    row_memory: int = field(default=0, compare=False)

    @property
    def n_bytes(self) -> int:
        return c.type_size(self.type, prod(self.ne))

    @property
    def n_rows(self) -> int:
        return prod(self.ne[1:])

    @property
    def n_pieces(self) -> int:
        return -(-self.n_rows // self.piece_rows) if self.piece_rows else 1


class Piece(NamedTuple):
    """Rows [first, first + n_rows) of a tensor, at `offset` of the file, with `padding` zero bytes after them."""

    tensor: PlannedTensor
    first: int
    n_rows: int
    offset: int
    n_bytes: int
    padding: int

    @property
    def memory(self) -> int:
        """About how many bytes are held while the piece is made."""
        return max(self.n_bytes, self.n_rows * self.tensor.row_memory)

    def produce(self) -> memoryview:
        """The bytes.

        Raises:
            UnwritableError: the tensor's producer raised GGUFError, or gave more or fewer bytes than planned. Other
                errors are those of reading the source and pass through.
        """
        try:
            data = _as_bytes(self.tensor.produce(self.first, self.n_rows))
        except GGUFError as error:
            raise UnwritableError(str(error)) from None
        if len(data) != self.n_bytes:
            rows = f"rows {self.first} to {self.first + self.n_rows - 1}"
            raise UnwritableError(
                f"tensor {self.tensor.name}: {rows}: {self.n_bytes} bytes planned, {len(data)} produced"
            )
        return data


class Plan:
    """What a file will hold. Keys and tensors keep the order in which they are added."""

    def __init__(self) -> None:
        self.fields: dict[str, tuple[GGUFValueType, GGUFValueType | None, Any]] = {}
        self.tensors: dict[str, PlannedTensor] = {}
        self._fields_bytes: list[bytes] = []

    def add_field(self, key: str, value: Any, type_: GGUFValueType, element: GGUFValueType | None = None) -> None:
        """Add a key. `type_` is the GGUF type; an ARRAY needs `element`.

        Raises:
            GGUFError: the key is empty or already there, or the value does not fit the type.
        """
        if not key:
            raise GGUFError("a key cannot be empty")
        if key in self.fields:
            raise GGUFError(f"key {key} is added twice")
        try:
            encoded = _encode_string(key) + _encode_value(value, type_, element)
        except (struct.error, OverflowError, AttributeError, TypeError, UnicodeEncodeError) as error:
            kind = type_.name if element is None else f"{type_.name} of {element.name}"
            raise GGUFError(f"key {key}: the value is not {kind}: {error}") from None
        self.fields[key] = (type_, element, value)
        self._fields_bytes.append(encoded)

    def add_tensor(self, tensor: PlannedTensor) -> None:
        """Add a tensor.

        Raises:
            GGUFError: the name is empty, over 63 bytes or already there; the shape is empty, has more than four
                dimensions or one below 1; rows are not whole blocks of the type.
        """
        name, ne = tensor.name, tensor.ne
        if not 0 < len(name.encode()) <= c.MAX_TENSOR_NAME:
            raise GGUFError(f"tensor name {name!r} has {len(name.encode())} bytes, expected 1 to {c.MAX_TENSOR_NAME}")
        if name in self.tensors:
            raise GGUFError(f"tensor {name} is added twice")
        if not 1 <= len(ne) <= c.MAX_DIMS or min(ne) < 1:
            raise GGUFError(f"tensor {name}: impossible dimensions {ne}")
        block = GGML_QUANT_SIZES[tensor.type][0]
        if ne[0] % block:
            raise GGUFError(f"tensor {name}: rows of {ne[0]} values are not whole {tensor.type.name} blocks of {block}")
        self.tensors[name] = tensor

    def part(self, tensors: Iterable[PlannedTensor], *, with_fields: bool) -> Plan:
        """A plan of some of the tensors, with all keys so far or none."""
        part = Plan()
        if with_fields:
            part.fields = dict(self.fields)
            part._fields_bytes = list(self._fields_bytes)
        part.tensors = {tensor.name: tensor for tensor in tensors}
        return part

    def offsets(self) -> dict[str, int]:
        """Tensor name -> bytes from the start of the data section."""
        offsets, at = {}, 0
        for tensor in self.tensors.values():
            offsets[tensor.name] = at
            at += _padded(tensor.n_bytes)
        return offsets

    def header(self) -> bytes:
        """Everything before the tensor data, padded to the alignment."""
        parts = [c.MAGIC, struct.pack("<IQQ", c.VERSION, len(self.tensors), len(self.fields)), *self._fields_bytes]
        offsets = self.offsets()
        for tensor in self.tensors.values():
            parts.append(_encode_string(tensor.name))
            parts.append(struct.pack(f"<I{len(tensor.ne)}Q", len(tensor.ne), *tensor.ne))
            parts.append(struct.pack("<IQ", int(tensor.type), offsets[tensor.name]))
        header = b"".join(parts)
        return header.ljust(_padded(len(header)), b"\0")

    @property
    def data_bytes(self) -> int:
        """Size of the data section, padding included."""
        return sum(_padded(tensor.n_bytes) for tensor in self.tensors.values())

    @property
    def n_pieces(self) -> int:
        return sum(tensor.n_pieces for tensor in self.tensors.values())

    def pieces(self, data_offset: int) -> Iterator[Piece]:
        """The pieces in file order. `data_offset` is where the data begins, the length of the header."""
        at = data_offset
        for tensor in self.tensors.values():
            n_rows, n_bytes = tensor.n_rows, tensor.n_bytes
            row_bytes, step = n_bytes // n_rows, tensor.piece_rows or n_rows
            padding = _padded(n_bytes) - n_bytes
            for first in range(0, n_rows, step):
                count = min(step, n_rows - first)
                is_last = first + count == n_rows
                yield Piece(tensor, first, count, at + first * row_bytes, count * row_bytes, padding if is_last else 0)
            at += n_bytes + padding

    def digest(self) -> str:
        """SHA-256 over the header and the sizes of the pieces: plans with equal digests make the same file the same
        way, given the same source."""
        digest = sha256(self.header())
        for tensor in self.tensors.values():
            digest.update(struct.pack("<Q", tensor.piece_rows))
        return digest.hexdigest()


def _as_bytes(chunk: Chunk) -> memoryview:
    if isinstance(chunk, np.ndarray):
        return memoryview(np.ascontiguousarray(chunk).data).cast("B")  # a strided view is copied in its order
    return memoryview(chunk).cast("B")


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // c.ALIGNMENT) * c.ALIGNMENT


def _encode_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _encode_value(value: Any, type_: GGUFValueType, element: GGUFValueType | None) -> bytes:
    head = struct.pack("<I", int(type_))
    if type_ != GGUFValueType.ARRAY:
        return head + _encode_item(value, type_)
    if element is None or element == GGUFValueType.ARRAY:
        raise TypeError("an array needs the type of its elements")
    return head + struct.pack("<IQ", int(element), len(value)) + _encode_items(value, element)


def _encode_items(values: Sequence[Any], type_: GGUFValueType) -> bytes:
    """The elements of an array; those of a vocabulary are hundreds of thousands, so one call packs many."""
    if type_ == GGUFValueType.STRING:
        texts = [text.encode() for text in values]
        parts = [b""] * (2 * len(texts))
        parts[::2] = map(struct.Struct("<Q").pack, map(len, texts))
        parts[1::2] = texts
        return b"".join(parts)
    if type_ == GGUFValueType.BOOL:
        return b"".join(_encode_item(value, type_) for value in values)
    return struct.pack(f"<{len(values)}{SCALAR_FORMATS[type_]}", *values)


def _encode_item(value: Any, type_: GGUFValueType) -> bytes:
    if type_ == GGUFValueType.STRING:
        return _encode_string(value)
    if type_ == GGUFValueType.BOOL and not isinstance(value, bool):
        raise TypeError(f"{value!r} is not true or false")
    return struct.pack("<" + SCALAR_FORMATS[type_], value)
