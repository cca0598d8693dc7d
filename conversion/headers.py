"""The header of a safetensors file, checked, and the tensors it describes.

Format: u64 header length, JSON header {name: {dtype, shape, data_offsets}}, then the tensors without gaps.
"""

from __future__ import annotations

from math import prod
from pathlib import PurePath
from typing import Any, TypeGuard

import numpy as np

from .config import parse_json
from .errors import Checks, ConversionError
from .shards import Shard

FLOAT_DTYPES = ("F32", "F16", "BF16")

_MAX_HEADER = 100_000_000  # bytes; the limit of the format
_MAX_AXES = 16  # far beyond any tensor's
_MAX_NUMBER = 1 << 63  # no file has so many bytes
_LFS_POINTER = b"version https://git-lfs"
_SHOWN_CHARACTERS = 100
_DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
LFS_POINTER_PROBLEM = "is a pointer of Git LFS, not the file itself: fetch it with `git lfs pull`"
_INT = {int}  # not bool, which is another type

_Entry = tuple[int, int, str, str, tuple[int, ...]]  # begin, end, name, dtype, shape


class Source:
    """A tensor in a shard: `shape` as stored (slowest dimension first), `offset` in bytes from the start of the
    file."""

    __slots__ = ("dtype", "name", "offset", "shape", "shard")

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...], shard: Shard, offset: int) -> None:
        self.name, self.dtype, self.shape, self.shard, self.offset = name, dtype, shape, shard, offset

    @property
    def n_elements(self) -> int:
        return prod(self.shape)

    @property
    def n_bytes(self) -> int:
        return self.n_elements * _DTYPE_BYTES[self.dtype]

    def raw(self, first: int = 0, count: int | None = None) -> np.ndarray:
        """The bytes of `count` elements from element `first`, uint8."""
        size = _DTYPE_BYTES[self.dtype]
        count = self.n_elements - first if count is None else count
        return self.shard.read(self.offset + first * size, count * size)

    def bytes_2d(self) -> np.ndarray:
        """The whole of a two-dimensional U8 tensor."""
        return self.raw().reshape(self.shape)

    def floats(self, first: int = 0, count: int | None = None) -> np.ndarray:
        """`count` elements from element `first` as float32 `[count]`; exact for the dtypes in `FLOAT_DTYPES`."""
        raw = self.raw(first, count)
        if self.dtype == "BF16":
            return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        return raw.view({"F32": "<f4", "F16": "<f2"}[self.dtype]).astype(np.float32, copy=False)


def is_lfs_pointer(content: bytes) -> bool:
    """Whether a file is what a clone without Git LFS has in place of a large one."""
    return content.startswith(_LFS_POINTER)


def read_header(shard: Shard) -> bytes:
    """The JSON text of a shard's header.

    Raises:
        ConversionError: the file is too short for the header it announces.
    """
    size = shard.size()
    if size < 8:
        raise ConversionError(f"{shard.path}: {size} bytes, too short for a safetensors file")
    first = shard.read(0, 8)
    if first.tobytes() == _LFS_POINTER[:8] and is_lfs_pointer(shard.read(0, min(size, len(_LFS_POINTER))).tobytes()):
        raise ConversionError(f"{shard.path} {LFS_POINTER_PROBLEM}")
    length = int(first.view("<u8")[0])
    if length > min(_MAX_HEADER, size - 8):
        raise ConversionError(
            f"{shard.path}: header of {length} bytes announced, but the file has {size} and {_MAX_HEADER} is the limit"
        )
    return shard.read(8, length).tobytes()


def parse_header(shard: Shard, text: bytes, checks: Checks) -> list[Source]:
    """The tensors of a shard, in the order of their names; tells the shard where each ends.

    Raises:
        ConversionError: an entry is malformed; the tensors overlap, leave gaps or do not end where the file ends.
    """
    path, size, start = shard.path, shard.size(), 8 + len(text)
    header = parse_json(text, f"header of {path}")
    header.pop("__metadata__", None)
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # experts share a few shapes; half a million tuples would not
    entries = [_check_entry(path, name, entry, shapes) for name, entry in header.items()]
    entries.sort()
    at = 0
    for begin, end, name, _, _ in entries:
        if begin != at:
            kind = "overlaps the tensor before it" if begin < at else "leaves a gap before it"
            raise ConversionError(f"{path}: tensor {name} {kind}: it begins at byte {begin} of the data, expected {at}")
        at = end
    with checks:  # the tensors are known all the same
        if start + at != size:
            kind = "truncated" if start + at > size else "longer than its header says"
            raise ConversionError(f"{path} is {kind}: {size} bytes, expected {start + at}")
    shard.header_was_read(text, np.array([start, *(start + entry[1] for entry in entries)], dtype=np.int64))
    entries.sort(key=lambda entry: entry[2])
    return [Source(name, dtype, shape, shard, start + begin) for begin, _, name, dtype, shape in entries]


def _check_entry(path: PurePath, name: str, entry: Any, shapes: dict[tuple[int, ...], tuple[int, ...]]) -> _Entry:
    if not name.isprintable():
        raise ConversionError(f"{path}: {_shown(name)} is no name of a tensor: it has characters that cannot be shown")
    if not isinstance(entry, dict):
        raise ConversionError(f"{path}: tensor {name}: the header holds no description of it")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise ConversionError(f"{path}: tensor {name}: unknown dtype {_shown(dtype)}")
    if not _naturals(shape) or len(shape) > _MAX_AXES:
        raise ConversionError(f"{path}: tensor {name}: impossible shape {_shown(shape)}")
    if not _naturals(offsets) or len(offsets) != 2:
        raise ConversionError(f"{path}: tensor {name}: impossible data_offsets {_shown(offsets)}")
    begin, end = offsets
    expected = prod(shape) * _DTYPE_BYTES[dtype]
    if end - begin != expected:
        raise ConversionError(
            f"{path}: tensor {name}: {dtype} {shape} takes {expected} bytes, but {end - begin} are announced"
        )
    key = tuple(shape)
    return begin, end, name, dtype, shapes.setdefault(key, key)


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and set(map(type, value)) <= _INT
        and min(value, default=0) >= 0
        and max(value, default=0) < _MAX_NUMBER
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
