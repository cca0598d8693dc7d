"""The safetensors shards of a checkpoint as one index of tensors, nothing loaded.

Headers are read and checked here; payloads are read by range when a tensor is asked for them (`shards.py`).

Format of a shard: u64 header length, JSON header {name: {dtype, shape, data_offsets}}, then the tensors without gaps.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from math import prod
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any, TypeGuard

import numpy as np

from .config import parse_json, read_json
from .errors import ConversionError, listed
from .shards import LocalShard, Shard

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_MAX_HEADER = 100_000_000  # bytes; the limit of the format
_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5,6})\.safetensors", re.DOTALL)
_DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
FLOAT_DTYPES = ("F32", "F16", "BF16")


class Source:
    """A tensor in a shard: `shape` as stored (slowest dimension first), `offset` in bytes from the start of the
    file."""

    __slots__ = ("dtype", "name", "offset", "shape", "shard")

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...], shard: Shard, offset: int) -> None:
        self.name, self.dtype, self.shape, self.shard, self.offset = name, dtype, shape, shard, offset

    @property
    def n_elements(self) -> int:
        return prod(self.shape)

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


class Checkpoint:
    """All tensors of a model folder: `tensors` maps a name to its `Source`, in the order of file name, then of tensor
    name.

    The shards are those of `model.safetensors.index.json`; without one, `model.safetensors` or one complete numbered
    set.

    Raises:
        ConversionError: a shard is missing, unlisted, truncated or malformed; index and shards disagree; a tensor
            occurs twice.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, Source] = {}
        self.shards: list[Shard] = []
        try:
            index = folder / INDEX_NAME
            if os.path.lexists(index):
                self._open_indexed(index)
            else:
                self._open_shards(_shards_without_index(folder))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for shard in self.shards:
            shard.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _open_indexed(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConversionError(f"{index}: weight_map is missing or empty")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
                raise ConversionError(f"{index}: tensor {name}: {file!r} is not the name of a file in this folder")
        files = set(weight_map.values())
        absent = [file for file in files if not (self.folder / file).is_file()]
        if absent:
            raise ConversionError(f"{index}: listed but not in the folder: {listed(absent)}")
        unlisted = [path.name for path in self.folder.glob("model*.safetensors") if path.name not in files]
        if unlisted:
            raise ConversionError(f"{index}: in the folder but not listed: {listed(unlisted)}")
        self._open_shards(sorted(files))
        self._compare(index, weight_map)

    def _compare(self, index: Path, weight_map: dict[str, str]) -> None:
        problems = []
        if missing := weight_map.keys() - self.tensors.keys():
            problems.append(f"listed but in no shard: {listed(missing)}")
        if extra := self.tensors.keys() - weight_map.keys():
            problems.append(f"in a shard but not listed: {listed(extra)}")
        moved = [
            f"{name} (listed in {weight_map[name]}, found in {source.shard.path.name})"
            for name, source in self.tensors.items()
            if name in weight_map and weight_map[name] != source.shard.path.name
        ]
        if moved:
            problems.append(f"in another shard: {listed(moved)}")
        if problems:
            raise ConversionError(f"{index} and the shards disagree: " + "; ".join(problems))

    def _open_shards(self, files: Iterable[str]) -> None:
        for file in files:
            shard = LocalShard(file, self.folder / file)
            self.shards.append(shard)
            for source in _read_header(shard):
                if source.name in self.tensors:
                    other = self.tensors[source.name].shard.path.name
                    raise ConversionError(f"{self.folder}: tensor {source.name} is in {other} and in {file}")
                self.tensors[source.name] = source


def _shards_without_index(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    sets: dict[tuple[str, str], dict[int, str]] = {}
    for name in names:
        if match := _NUMBERED.fullmatch(name):
            sets.setdefault((match["stem"], match["count"]), {})[int(match["number"])] = name
    if SINGLE_NAME in names:
        if sets:
            raise ConversionError(
                f"{folder}: {SINGLE_NAME} and numbered shards, and no {INDEX_NAME} that says which to use"
            )
        return [SINGLE_NAME]
    if not sets:
        raise ConversionError(
            f"{folder}: no {INDEX_NAME}, no {SINGLE_NAME} and no numbered shards; safetensors files are needed"
        )
    if len(sets) > 1:
        kinds = listed(f"{stem}-…-of-{count}" for stem, count in sets)
        raise ConversionError(f"{folder}: several sets of shards ({kinds}), and no {INDEX_NAME} that says which to use")
    ((stem, count), shards) = next(iter(sets.items()))
    absent = [n for n in range(1, int(count) + 1) if n not in shards]
    if absent or len(shards) != int(count):
        wanted = listed(f"{stem}-{n:05d}-of-{count}.safetensors" for n in absent)
        raise ConversionError(f"{folder}: {len(shards)} of {int(count)} shards, missing: {wanted}")
    return [shards[number] for number in sorted(shards)]


def _read_header(shard: Shard) -> list[Source]:
    """The tensors of a shard, in the order of their names."""
    path = shard.path
    size = shard.size()
    if size < 8:
        raise ConversionError(f"{path}: {size} bytes, too short for a safetensors file")
    length = int(shard.read(0, 8).view("<u8")[0])
    if length > min(_MAX_HEADER, size - 8):
        raise ConversionError(
            f"{path}: header of {length} bytes announced, but the file has {size} and {_MAX_HEADER} is the limit"
        )
    text = shard.read(8, length).tobytes()
    shard.header_was_read(text)
    header = parse_json(text, f"header of {path}")
    header.pop("__metadata__", None)
    start = 8 + length
    entries = [_check_entry(path, name, entry) for name, entry in header.items()]
    at = 0
    for begin, end, name, _, _ in sorted(entries, key=lambda entry: entry[:3]):
        if begin != at:
            kind = "overlaps the tensor before it" if begin < at else "leaves a gap before it"
            raise ConversionError(f"{path}: tensor {name} {kind}: it begins at byte {begin} of the data, expected {at}")
        at = end
    if start + at != size:
        kind = "truncated" if start + at > size else "longer than its header says"
        raise ConversionError(f"{path} is {kind}: {size} bytes, expected {start + at}")
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # experts share a few shapes; half a million tuples would not
    return [
        Source(name, dtype, shapes.setdefault(shape, shape), shard, start + begin)
        for begin, _, name, dtype, shape in sorted(entries, key=lambda entry: entry[2])
    ]


def _check_entry(path: PurePath, name: str, entry: Any) -> tuple[int, int, str, str, tuple[int, ...]]:
    if not isinstance(entry, dict):
        raise ConversionError(f"{path}: tensor {name}: the header holds no description of it")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise ConversionError(f"{path}: tensor {name}: unknown dtype {dtype!r}")
    if not _naturals(shape):
        raise ConversionError(f"{path}: tensor {name}: impossible shape {shape!r}")
    if not _naturals(offsets) or len(offsets) != 2:
        raise ConversionError(f"{path}: tensor {name}: impossible data_offsets {offsets!r}")
    begin, end = offsets
    expected = prod(shape) * _DTYPE_BYTES[dtype]
    if end - begin != expected:
        raise ConversionError(
            f"{path}: tensor {name}: {dtype} {shape} takes {expected} bytes, but {end - begin} are announced"
        )
    return begin, end, name, dtype, tuple(shape)


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)
