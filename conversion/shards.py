"""Files of tensors, read by range: on a disk here, over a network in `remote.py`.

Payloads are read with `pread`, never mapped, so memory holds what a caller asks for and a file that shrinks meanwhile
is an error, not a crash.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from hashlib import blake2b
from pathlib import Path, PurePath
from typing import Protocol

import numpy as np

from gguf_ext import buffers

from .errors import ConversionError


class Shard(ABC):
    """One safetensors file, open. Reads are safe from several threads at once.

    `name` is its path within the model, as an index has it; `path` names it in messages.
    """

    def __init__(self, name: str, path: PurePath) -> None:
        self.name, self.path = name, path
        self._header_digest = ""

    @abstractmethod
    def size(self) -> int:
        """The file's size in bytes, as it is now."""

    @abstractmethod
    def read(self, offset: int, n_bytes: int) -> np.ndarray:
        """Exactly `n_bytes` from `offset`, uint8.

        Raises:
            ConversionError: the file ends before, cannot be read or has been replaced.
        """

    @abstractmethod
    def version(self) -> str:
        """What changes when the file is written anew, apart from its size."""

    @abstractmethod
    def close(self) -> None: ...

    def header_was_read(self, header: bytes, ends: np.ndarray) -> None:
        """Told once: the header's bytes, and where the header and each tensor end in the file, int64 ascending."""
        self._header_digest = blake2b(header, digest_size=16).hexdigest()

    def fingerprint(self) -> str:
        """Size, version and a digest of the header (once read): equal before and after means nobody changed the
        file."""
        return f"{self.size()} {self.version()} {self._header_digest}"


class LocalShard(Shard):
    """A file on a disk, held open, so that it stays the same file when its name is given to another."""

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name, path)
        self._handle = -1
        if not path.is_file():  # opening a pipe would wait for ever
            raise ConversionError(f"{path} is not a file")
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConversionError(f"{path} cannot be opened: {error.strerror}") from None

    def size(self) -> int:
        return os.fstat(self._handle).st_size

    def version(self) -> str:
        return str(os.fstat(self._handle).st_mtime_ns)

    def read(self, offset: int, n_bytes: int) -> np.ndarray:
        buffer = buffers.empty(n_bytes)
        view = buffer.data
        done = 0
        while done < n_bytes:
            try:
                n = os.preadv(self._handle, [view[done:]], offset + done)
            except OSError as error:
                raise ConversionError(
                    f"{self.path}: reading failed at byte {offset + done}: {error.strerror}"
                ) from None
            if n == 0:
                raise ConversionError(f"{self.path}: ends at byte {offset + done}, expected {offset + n_bytes} or more")
            done += n
        return buffer

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class Store(Protocol):
    """Where the shards of a model are."""

    n_parallel: int  # files to ask for at once while only headers are read

    def names(self) -> list[str]:
        """The safetensors files, sorted: paths within the model, with `/` between folders."""
        ...

    def open(self, name: str) -> Shard: ...


class LocalStore:
    """A folder and its sub-folders, apart from hidden ones. Links to files are followed, as a download cache needs;
    links to folders are not, so nothing outside is taken for a part of the model."""

    n_parallel = 1

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def names(self) -> list[str]:
        found = []
        for folder, folders, files in os.walk(self.folder):
            folders[:] = [name for name in folders if not name.startswith(".")]
            paths = (Path(folder, name) for name in files if name.endswith(".safetensors"))
            found += [path.relative_to(self.folder).as_posix() for path in paths if path.is_file()]
        return sorted(found)

    def open(self, name: str) -> Shard:
        return LocalShard(name, self.folder / name)


def is_plain_name(file: str) -> bool:
    """Whether a name stays in the folder and is spelled in the one plain way: `shard` or `sub/shard`, no `..`, no `.`,
    no `//`, no control characters."""
    parts = file.split("/")
    return file.isprintable() and "\\" not in file and not any(part in ("", ".", "..") for part in parts)
