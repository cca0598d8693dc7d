"""Whether the files of an open model are still what they were.

Weights stay mapped from the file. Where a file has been cut short, reading its map ends the process with SIGBUS; where
it has been written over, the model would answer with other weights. Nothing but a signal handler, which a library must
not install, helps against a change during a computation; this finds those between two.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from .errors import ArgumentError, StateError


class _Stamp(NamedTuple):
    """What identifies a file and its content, without reading it."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str) -> _Stamp:
        status = os.stat(path)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class OpenFiles:
    """The files of a model, as they were when this was made."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._stamps = {path: _Stamp.of(path) for path in map(os.path.abspath, paths)}

    def add(self, paths: Iterable[Path]) -> None:
        """More files of the same model."""
        self._stamps.update((path, _Stamp.of(path)) for path in map(os.path.abspath, paths))

    def refuse(self, path: bytes) -> None:
        """Raises ArgumentError if something is about to be written to one of these files."""
        try:
            status = os.stat(path)
        except OSError:
            return
        if (status.st_dev, status.st_ino) in {(stamp.device, stamp.inode) for stamp in self._stamps.values()}:
            raise ArgumentError(f"{os.fsdecode(path)} is a file of the model itself")

    def check(self) -> None:
        """Raises StateError if one was changed in place. One that was replaced or removed lives on in its map."""
        for path, before in self._stamps.items():
            try:
                now = _Stamp.of(path)
            except OSError:
                continue
            if now != before and now[:2] == before[:2]:
                size = "" if now.size == before.size else f" ({before.size} bytes then, {now.size} now)"
                raise StateError(f"{path} was changed after it was opened{size}: open the model again")
