"""The safetensors shards of a checkpoint as one index of tensors, nothing loaded.

Headers are read and checked here (`headers.py`); payloads are read by range when a tensor is asked for them
(`shards.py`).
"""

from __future__ import annotations

import gc
import logging
import os
import re
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path, PurePosixPath
from types import TracebackType

from gguf_ext.pipeline import in_order

from .config import read_json
from .errors import Checks, ConversionError, listed
from .headers import FLOAT_DTYPES, Source, parse_header, read_header
from .shards import LocalStore, Shard, Store, is_plain_name

__all__ = ["FLOAT_DTYPES", "INDEX_NAME", "SINGLE_NAME", "Checkpoint", "Source"]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

log = logging.getLogger("conversion")

_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5,6})\.safetensors", re.DOTALL)


class Checkpoint:
    """All tensors of a model: `tensors` maps a name to its `Source`, in the order of file name, then of tensor name.

    The shards are those of `model.safetensors.index.json`, else of the only other index there is; without one,
    `model.safetensors` or one complete numbered set, in the folder itself or, if it has no such files, in one of its
    sub-folders.

    `folder` holds the index; `store` has the shards and is the folder itself unless given. `checks` decides whether the
    first problem ends it or all are gathered. `only`: beginnings of the names that are wanted; where there is an index,
    shards without any are neither opened nor needed.

    Raises:
        ConversionError: a shard is missing, unlisted, outside the folder, truncated or malformed; index and shards
            disagree; a tensor occurs twice.
    """

    def __init__(
        self,
        folder: Path,
        store: Store | None = None,
        checks: Checks | None = None,
        only: tuple[str, ...] = ("",),
    ) -> None:
        self.folder = folder
        self.tensors: dict[str, Source] = {}
        self.shards: list[Shard] = []
        self.is_complete = False  # whether the tensors of all shards are known
        self._store = store if store is not None else LocalStore(folder)
        self._checks = checks if checks is not None else Checks()
        try:
            with _without_garbage_collection():
                index = _find_index(folder)
                if index is not None:
                    self._open_indexed(index, only)
                else:
                    present = self._store.names()
                    files = _shards_without_index(folder, present)
                    _note_left_out(set(present) - set(files), f"no part of {files[0]}" + ", …" * (len(files) > 1))
                    self._open_shards(files)
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

    def _open_indexed(self, index: Path, only: tuple[str, ...]) -> None:
        names = _read_index(index)
        present = set(self._store.names())
        needed = {file for file, listed in names.items() if any(name.startswith(only) for name in listed)}
        absent = sorted(needed - present)
        with self._checks:
            if absent:
                raise ConversionError(f"{index}: listed but not in the folder: {listed(absent)}")
        folders = {str(PurePosixPath(file).parent) for file in names}
        unlisted = [
            file
            for file in present - names.keys()
            if str(PurePosixPath(file).parent) in folders and PurePosixPath(file).name.startswith("model")
        ]
        with self._checks:
            if unlisted:
                raise ConversionError(f"{index}: in the folder but not listed: {listed(unlisted)}")
        _note_left_out(present - names.keys() - set(unlisted), f"not listed in {index.name}")
        self._open_shards(sorted(needed - set(absent)), index, names)
        self.is_complete &= not absent

    def _open_shards(
        self, files: list[str], index: Path | None = None, names: dict[str, list[str]] | None = None
    ) -> None:
        """Read the headers of `files`; compare the tensors of each with `names`, what the index lists for it."""
        n_known = 0
        lost: dict[str, str] = {}  # listed for a file and not in it -> that file
        extra: dict[str, str] = {}  # in a file and not listed for it -> that file
        with closing(self._headers(files)) as headers:
            for file, shard, text in headers:
                with self._checks:
                    sources = parse_header(shard, text, self._checks)
                    if names is not None:
                        _compare(file, names.pop(file), sources, lost, extra)
                    self._add(file, sources)
                    n_known += 1
        self.is_complete = n_known == len(files)
        with self._checks:
            if lost or extra:
                raise _disagreement(index, lost, extra)

    def _headers(self, files: Iterable[str]) -> Generator[tuple[str, Shard, bytes], None, None]:
        """Open shards and read their headers, several at a time where waiting is most of it."""
        read = in_order(self._opened(files), _try_header, threads=self._store.n_parallel, memory=lambda _: 0)
        with closing(read):
            for (file, shard), text in read:
                with self._checks:
                    if isinstance(text, ConversionError):
                        raise text
                if isinstance(text, bytes):
                    yield file, shard, text

    def _opened(self, files: Iterable[str]) -> Iterator[tuple[str, Shard]]:
        for file in files:
            if self._checks.passes(self._open, file):
                yield file, self.shards[-1]

    def _open(self, file: str) -> None:
        self.shards.append(self._store.open(file))

    def _add(self, file: str, sources: list[Source]) -> None:
        for source in sources:
            if source.name in self.tensors:
                other = self.tensors[source.name].shard.name
                raise ConversionError(f"{self.folder}: tensor {source.name} is in {other} and in {file}")
            self.tensors[source.name] = source


def _try_header(opened: tuple[str, Shard]) -> bytes | ConversionError:
    try:
        return read_header(opened[1])
    except ConversionError as error:
        return error


def _note_left_out(files: set[str], why: str) -> None:
    """Some publishers add the same weights in another layout."""
    if files:
        log.warning("left out, %s: %s", why, listed(files))


def _find_index(folder: Path) -> Path | None:
    index = folder / INDEX_NAME
    if os.path.lexists(index):  # one that leads nowhere is an error, not a missing one
        return index
    others = sorted(folder.glob("*.safetensors.index*.json"))
    if len(others) > 1:
        raise ConversionError(f"{folder}: several indices and none is {INDEX_NAME}: {listed(p.name for p in others)}")
    return others[0] if others else None


def _read_index(index: Path) -> dict[str, list[str]]:
    """File -> sorted names of its tensors."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConversionError(f"{index}: weight_map is missing or empty")
    names: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not name.isprintable():
            raise ConversionError(f"{index}: {name!r} is no name of a tensor: it has characters that cannot be shown")
        if not isinstance(file, str) or (file not in names and not is_plain_name(file)):
            raise ConversionError(f"{index}: tensor {name}: {file!r} is not the name of a file in this folder")
        names.setdefault(file, []).append(name)
    for of_file in names.values():
        of_file.sort()
    return names


def _compare(file: str, names: list[str], sources: list[Source], lost: dict[str, str], extra: dict[str, str]) -> None:
    if names == [source.name for source in sources]:  # both are sorted
        for name, source in zip(names, sources, strict=True):
            source.name = name  # one string instead of two; a large model has half a million
        return
    found = {source.name for source in sources}
    lost |= dict.fromkeys(set(names) - found, file)
    extra |= dict.fromkeys(found - set(names), file)


def _disagreement(index: Path | None, lost: dict[str, str], extra: dict[str, str]) -> ConversionError:
    moved = lost.keys() & extra.keys()
    problems = []
    if missing := lost.keys() - moved:
        problems.append(f"listed but in no shard: {listed(missing)}")
    if unlisted := extra.keys() - moved:
        problems.append(f"in a shard but not listed: {listed(unlisted)}")
    if moved:
        where = listed(f"{name} (listed in {lost[name]}, found in {extra[name]})" for name in moved)
        problems.append(f"in another shard: {where}")
    return ConversionError(f"{index} and the shards disagree: " + "; ".join(problems))


def _shards_without_index(folder: Path, names: list[str]) -> list[str]:
    here = [name for name in names if "/" not in name]
    sets: dict[tuple[str, str], dict[int, str]] = {}
    for name in here or names:
        if match := _NUMBERED.fullmatch(name):
            sets.setdefault((match["stem"], match["count"]), {})[int(match["number"])] = name
        elif PurePosixPath(name).name == SINGLE_NAME:
            sets[name, ""] = {1: name}
    if not sets:
        raise ConversionError(
            f"{folder}: no {INDEX_NAME}, no {SINGLE_NAME} and no numbered shards; safetensors files are needed"
        )
    if len(sets) > 1:
        if (SINGLE_NAME, "") in sets:
            raise ConversionError(
                f"{folder}: {SINGLE_NAME} and numbered shards, and no {INDEX_NAME} that says which to use"
            )
        kinds = listed(f"{stem}-…-of-{count}" if count else stem for stem, count in sets)
        raise ConversionError(f"{folder}: several sets of shards ({kinds}), and no {INDEX_NAME} that says which to use")
    ((stem, count), shards) = next(iter(sets.items()))
    if not count:
        return list(shards.values())
    absent = [n for n in range(1, int(count) + 1) if n not in shards]
    if absent or len(shards) != int(count):
        wanted = listed(f"{stem}-{n:05d}-of-{count}.safetensors" for n in absent)
        raise ConversionError(f"{folder}: {len(shards)} of {int(count)} shards, missing: {wanted}")
    return [shards[number] for number in sorted(shards)]


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Half a million objects that stay are no garbage: searching them again and again costs a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
