"""Read GGUF files, whole or split, checking every length, count and offset before using it.

The header is parsed from a memory map; tensor bytes are views of the map. A file that breaks a rule of the format gives
a `GGUFError` that names the key or tensor. Nothing is allocated in proportion to a number that the file merely claims.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import stat
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from gguf import quants

from . import constants as c
from .constants import GGML_QUANT_SIZES, SCALAR_FORMATS, GGMLQuantizationType, GGUFValueType
from .errors import GGUFError

_SPLIT_PATTERN = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_MAX_ELEMENTS = 2**63 - 1
_MAX_KEY = 65535  # bytes
_MIN_ALIGNMENT = 4  # bytes; a float32 is read in place
_LFS_POINTER = b"version https://git-lfs."
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")  # would hide in messages and listings
_U64 = struct.Struct("<Q")
_NUMPY_TYPES = {type_: np.dtype(f"<{format_}") for type_, format_ in SCALAR_FORMATS.items()}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. `ne` is fastest dimension first, `offset` counts bytes from the start of the file `path`."""

    name: str
    type: GGMLQuantizationType
    ne: tuple[int, ...]
    n_bytes: int
    path: Path
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The numpy shape: `ne` reversed."""
        return self.ne[::-1]


class GGUFReader:
    """A GGUF file, or all files of a split when given the first. The engine refuses the same files.

    The files are mapped, not copied: whoever shortens one while it is open ends the process with SIGBUS.

    Attributes:
        fields: key -> value (python scalars, `str`, `list[str]`, one-dimensional numpy arrays), in file order.
        types: key -> value type; for arrays `(ARRAY, element type)`.
        tensors: name -> `TensorInfo`, in file order.
        paths: the files read.

    Raises:
        GGUFError: the file is not readable GGUF; names what is wrong.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        first = _File(Path(path))
        self._files = {first.path: first}
        self.fields = first.fields
        self.types = first.types
        self.alignment = first.alignment
        self.tensors: dict[str, TensorInfo] = {}
        self._closed = False
        try:
            self._add(first)
            self._follow_split(first)
        except BaseException:
            self.close()
            raise

    @property
    def paths(self) -> list[Path]:
        return list(self._files)

    def data(self, name: str) -> np.ndarray:
        """The bytes of a tensor: uint8 `[n_bytes]`, a read-only view of the file."""
        info = self._info(name)
        return np.frombuffer(self._files[info.path].map, dtype=np.uint8, count=info.n_bytes, offset=info.offset)

    def dequantize(self, name: str) -> np.ndarray:
        """The values of a tensor: float32, shape `ne` reversed.

        Raises:
            GGUFError: the type has no float values here, or an MXFP4 block has the scale byte 255 (NaN).
        """
        info = self._info(name)
        block, size = GGML_QUANT_SIZES[info.type]
        rows = self.data(name).reshape(*info.shape[:-1], info.ne[0] // block * size)
        if info.type == GGMLQuantizationType.MXFP4 and (rows.reshape(-1, size)[:, 0] == 0xFF).any():
            raise GGUFError(f"{info.path}: tensor {name}: MXFP4 block with scale byte 255 (not a number)")
        try:
            return quants.dequantize(rows, info.type)
        except NotImplementedError:
            raise GGUFError(f"{info.path}: tensor {name}: type {info.type.name} cannot be dequantized here") from None

    def close(self) -> None:
        """Release the files. Arrays got from `data` stay valid; each keeps its own map alive."""
        self._closed = True
        for file in self._files.values():
            file.close()

    def __enter__(self) -> GGUFReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _info(self, name: str) -> TensorInfo:
        if self._closed:
            raise GGUFError(f"{self.paths[0]}: the reader is closed")
        if name not in self.tensors:
            raise GGUFError(f"{self.paths[0]}: no tensor {name!r}")
        return self.tensors[name]

    def _add(self, file: _File) -> None:
        for info in file.tensors:
            if info.name in self.tensors:
                raise GGUFError(f"{file.path}: tensor {info.name!r} occurs twice")
            self.tensors[info.name] = info

    def _follow_split(self, first: _File) -> None:
        if c.KEY_SPLIT_COUNT not in first.fields:
            if first.fields.get(c.KEY_SPLIT_NO, 0) != 0:
                raise GGUFError(f"{first.path}: {c.KEY_SPLIT_NO} without {c.KEY_SPLIT_COUNT}")
            return
        count, number, total = first.split_keys()
        if count > 1:
            self._add_parts(first, number, count)
        if total != len(self.tensors):
            raise GGUFError(
                f"{first.path}: {c.KEY_SPLIT_TENSORS_COUNT} is {total}, but the {count} parts hold "
                f"{len(self.tensors)} tensors"
            )

    def _add_parts(self, first: _File, number: int, count: int) -> None:
        if number != 0:
            raise GGUFError(f"{first.path}: this is part {number + 1} of a split file of {count}; open the first part")
        match = _SPLIT_PATTERN.fullmatch(first.path.name)
        if match is None or int(match["number"]) != 1 or int(match["count"]) != count:
            expected = c.SPLIT_NAME.format(stem="NAME", number=1, count=count)
            raise GGUFError(f"{first.path}: first part of {count}, but the file is not named {expected}")
        for index in range(1, count):
            path = first.path.with_name(c.SPLIT_NAME.format(stem=match["stem"], number=index + 1, count=count))
            if not path.is_file():
                raise GGUFError(f"{first.path}: part {index + 1} of {count} is missing: {path.name}")
            part = _File(path)
            self._files[path] = part
            _, found, _ = part.split_keys()
            if found != index:
                raise GGUFError(f"{path}: {c.KEY_SPLIT_NO} is {found}, expected {index}")
            for key in part.fields.keys() & first.fields.keys() - {c.KEY_SPLIT_NO}:
                if part.types[key] != first.types[key] or not _same(part.fields[key], first.fields[key]):
                    raise GGUFError(f"{path}: key {key} differs from the first part, {first.path.name}")
            self._add(part)


class _File:
    """One file: a cursor over its map, and what its header says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb", opener=_open_at_once) as handle:
            status = os.fstat(handle.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise GGUFError(f"{path}: not a regular file")
            size = status.st_size
            if size < 24:
                raise GGUFError(f"{path}: {size} bytes, too short for a GGUF header")
            self.map = mmap.mmap(handle.fileno(), size, access=mmap.ACCESS_READ)
        self.size = size
        self._at = 0
        self._what = "header"
        try:
            self._parse()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        with contextlib.suppress(BufferError):  # an array still views the map; it is unmapped when the last one goes
            self.map.close()

    def split_keys(self) -> tuple[int, int, int]:
        """How many parts there are, number of this one from 0, tensors in all parts: keys that each part must have."""
        values = []
        for key in (c.KEY_SPLIT_COUNT, c.KEY_SPLIT_NO, c.KEY_SPLIT_TENSORS_COUNT):
            value = self.fields.get(key)
            least = 1 if key == c.KEY_SPLIT_COUNT else 0
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                found = "missing" if value is None else repr(value)
                raise GGUFError(f"{self.path}: {key} is {found}, expected an integer of at least {least}")
            values.append(value)
        return values[0], values[1], values[2]

    def _parse(self) -> None:
        magic = self._take(4)
        if magic != c.MAGIC:
            if self.map[: len(_LFS_POINTER)] == _LFS_POINTER:
                raise GGUFError(f"{self.path}: not a GGUF file but a Git LFS pointer to one: fetch the file itself")
            raise GGUFError(f"{self.path}: not a GGUF file: it begins with {magic!r}, expected {c.MAGIC!r}")
        version = self._scalar(GGUFValueType.UINT32)
        if version not in c.READABLE_VERSIONS:
            if version in (v << 24 for v in c.READABLE_VERSIONS):
                raise GGUFError(f"{self.path}: big-endian GGUF; only little-endian files are read")
            raise GGUFError(
                f"{self.path}: GGUF version {version}, expected {' or '.join(map(str, c.READABLE_VERSIONS))}"
            )
        n_tensors, n_fields = self._scalar(GGUFValueType.UINT64), self._scalar(GGUFValueType.UINT64)
        # A field takes at least 13 bytes and a tensor description 33; this bounds both loops by the file's size.
        for what, count, least in (("keys", n_fields, 13), ("tensors", n_tensors, 33)):
            if count > (size_left := self.size - self._at) // least:
                raise GGUFError(f"{self.path}: {count} {what} announced, but only {size_left} bytes follow")
        self.fields: dict[str, Any] = {}
        self.types: dict[str, tuple[GGUFValueType, ...]] = {}
        for number in range(n_fields):
            self._field(number)
        self.alignment = alignment = self._alignment()
        heads = [self._tensor_head(number) for number in range(n_tensors)]
        start = _pad(self._at, alignment)
        self.tensors = []
        expected = 0
        for name, ne, type_, offset in heads:
            n_bytes = c.type_size(type_, prod(ne))
            # The format leaves no freedom: tensors follow one another in order, each padded to the alignment.
            if offset != expected:
                raise GGUFError(f"{self.path}: tensor {name}: offset {offset}, expected {expected}")
            if start + offset + n_bytes > self.size:
                raise GGUFError(
                    f"{self.path}: tensor {name}: bytes {start + offset} to {start + offset + n_bytes} lie beyond the "
                    f"end of the file ({self.size} bytes); the file is truncated"
                )
            self.tensors.append(TensorInfo(name, type_, ne, n_bytes, self.path, start + offset))
            expected = _pad(offset + n_bytes, alignment)

    def _alignment(self) -> int:
        value, types = self.fields.get(c.KEY_ALIGNMENT, c.ALIGNMENT), self.types.get(c.KEY_ALIGNMENT)
        if types not in (None, (GGUFValueType.UINT32,)):
            kind = " of ".join(type_.name.lower() for type_ in types or ())
            raise GGUFError(f"{self.path}: {c.KEY_ALIGNMENT} is {value!r} ({kind}), expected a uint32")
        if value < _MIN_ALIGNMENT or value & (value - 1):
            raise GGUFError(
                f"{self.path}: {c.KEY_ALIGNMENT} is {value}, expected a power of two of at least {_MIN_ALIGNMENT}"
            )
        return int(value)

    def _field(self, number: int) -> None:
        self._what = f"key number {number}"
        key = self._string()
        if not 0 < len(key.encode()) <= _MAX_KEY:
            found = "empty" if not key else f"over {_MAX_KEY} bytes long"
            raise GGUFError(f"{self.path}: key number {number} is {found}")
        if _CONTROL.search(key):
            raise GGUFError(f"{self.path}: key number {number}: {key[:80]!r} holds a control character")
        if key in self.fields:
            raise GGUFError(f"{self.path}: key {key!r} occurs twice")
        self._what = f"key {key}"
        type_ = self._value_type()
        if type_ == GGUFValueType.ARRAY:
            element = self._value_type()
            self.types[key] = (type_, element)
            self.fields[key] = self._array(element)
        else:
            self.types[key] = (type_,)
            if type_ == GGUFValueType.STRING:
                self.fields[key] = self._string()
            elif type_ == GGUFValueType.BOOL:
                self.fields[key] = bool(self._bools(np.frombuffer(self._take(1), dtype=np.uint8))[0])
            else:
                self.fields[key] = self._scalar(type_)

    def _array(self, element: GGUFValueType) -> list[str] | np.ndarray:
        count = self._scalar(GGUFValueType.UINT64)
        if element == GGUFValueType.ARRAY:
            raise GGUFError(f"{self.path}: {self._what}: an array of arrays is not supported")
        if element == GGUFValueType.STRING:
            return self._strings(count)
        dtype = _NUMPY_TYPES[element]
        if count > (self.size - self._at) // dtype.itemsize:
            raise self._beyond(f"array of {count} values")
        values = np.frombuffer(self._take(count * dtype.itemsize), dtype=dtype)
        return self._bools(values.view(np.uint8)) if element == GGUFValueType.BOOL else values

    def _bools(self, raw: np.ndarray) -> np.ndarray:
        if (raw > 1).any():
            raise GGUFError(f"{self.path}: {self._what}: a boolean of byte value {raw.max()}, expected 0 or 1")
        return raw.astype(np.bool_)

    def _strings(self, count: int) -> list[str]:
        if count > (self.size - self._at) // 8:
            raise self._beyond(f"array of {count} strings")
        data, at, end, length_at = self.map, self._at, self.size, _U64.unpack_from
        strings = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_at(data, at)[0]
                if at > end:
                    break
                strings.append(data[start:at].decode())
        except struct.error:
            pass  # fewer than 8 bytes left for a length: reported below
        except UnicodeDecodeError as error:
            raise GGUFError(f"{self.path}: {self._what}: string {len(strings)} is not UTF-8: {error.reason}") from None
        if len(strings) < count:
            raise GGUFError(
                f"{self.path}: {self._what}: string {len(strings)} of {count} lies beyond the end of the file"
            )
        self._at = at
        return strings

    def _tensor_head(self, number: int) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        self._what = f"tensor number {number}"
        name = self._string()
        if not 0 < len(name.encode()) <= c.MAX_TENSOR_NAME:
            raise GGUFError(
                f"{self.path}: tensor number {number}: name {name[:80]!r} is empty or over {c.MAX_TENSOR_NAME} bytes"
            )
        if _CONTROL.search(name):
            raise GGUFError(f"{self.path}: tensor number {number}: name {name!r} holds a control character")
        self._what = f"tensor {name}"
        n_dims = self._scalar(GGUFValueType.UINT32)
        if not 1 <= n_dims <= c.MAX_DIMS:
            raise GGUFError(f"{self.path}: tensor {name}: {n_dims} dimensions, expected 1 to {c.MAX_DIMS}")
        ne = tuple(self._scalar(GGUFValueType.UINT64) for _ in range(n_dims))
        if min(ne) < 1 or prod(ne) > _MAX_ELEMENTS:
            raise GGUFError(f"{self.path}: tensor {name}: impossible dimensions {ne}")
        type_id = self._scalar(GGUFValueType.UINT32)
        try:
            type_ = GGMLQuantizationType(type_id)
        except ValueError:
            raise GGUFError(f"{self.path}: tensor {name}: unknown type number {type_id}") from None
        block = GGML_QUANT_SIZES[type_][0]
        if ne[0] % block:
            raise GGUFError(
                f"{self.path}: tensor {name}: rows of {ne[0]} values are not whole {type_.name} blocks of {block}"
            )
        return name, ne, type_, self._scalar(GGUFValueType.UINT64)

    def _value_type(self) -> GGUFValueType:
        number = self._scalar(GGUFValueType.UINT32)
        try:
            return GGUFValueType(number)
        except ValueError:
            raise GGUFError(f"{self.path}: {self._what}: unknown value type {number}") from None

    def _string(self) -> str:
        raw = self._take(self._scalar(GGUFValueType.UINT64))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise GGUFError(f"{self.path}: {self._what}: text is not UTF-8: {error.reason}") from None

    def _scalar(self, type_: GGUFValueType) -> Any:
        format_ = "<" + SCALAR_FORMATS[type_]
        return struct.unpack(format_, self._take(struct.calcsize(format_)))[0]

    def _take(self, n_bytes: int) -> bytes:
        if n_bytes > self.size - self._at:
            raise self._beyond(f"{n_bytes} bytes")
        self._at += n_bytes
        return self.map[self._at - n_bytes : self._at]

    def _beyond(self, wanted: str) -> GGUFError:
        return GGUFError(
            f"{self.path}: {self._what}: {wanted} at byte {self._at} lie beyond the end of the file ({self.size} bytes)"
        )


def _open_at_once(path: str, flags: int) -> int:
    """Opening a pipe must not wait for a writer: it is refused for what it is."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _same(a: Any, b: Any) -> bool:
    """Whether two values of one type are equal; NaN equals itself, as in the bytes of a file."""
    if isinstance(a, np.ndarray | float):
        return np.asarray(a).tobytes() == np.asarray(b).tobytes()
    return bool(a == b)


def _pad(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment
