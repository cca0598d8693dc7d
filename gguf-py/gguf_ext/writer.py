"""Write a GGUF file: plan everything, then stream it.

A `Plan` holds every key, and for every tensor its name, shape, type and a producer. All offsets and the file's size
follow from the plan alone, so they are known before a byte is written. `write` then runs the producers in order and
writes each chunk as it comes: memory holds one chunk, disk the output only. The bytes go to a temporary name beside the
output, which gets its final name in one step, once complete and on disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from . import constants as c
from .constants import GGML_QUANT_SIZES, SCALAR_FORMATS, GGMLQuantizationType, GGUFValueType
from .errors import GGUFError

Chunk = np.ndarray | bytes | bytearray | memoryview
Producer = Callable[[], Iterable[Chunk]]
Progress = Callable[[str, int, int], None]  # tensor name, bytes written so far, bytes in all

PARTIAL_SUFFIX = ".partial"


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written: `ne` fastest dimension first; `produce()` yields its bytes in order, in chunks of any
    size."""

    name: str
    ne: tuple[int, ...]
    type: GGMLQuantizationType
    produce: Producer = field(repr=False, compare=False)

    @property
    def n_bytes(self) -> int:
        return c.type_size(self.type, prod(self.ne))


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

    def write(self, path: Path, *, force: bool = False, progress: Progress | None = None) -> int:
        """Write the file and return its size in bytes.

        The bytes go to `path` + ".partial" first. On any failure that name is removed and nothing appears under `path`;
        only a process that is killed leaves the ".partial" behind, and the next run replaces it.

        Raises:
            GGUFError: `path` exists and `force` is false; another process is writing it; the disk or the process's file
                size limit is too small for the planned size, or a write fails; a producer gave more or fewer bytes than
                planned.
        """
        path = Path(path)
        header = self.header()
        size = len(header) + self.data_bytes
        check_target(path, force)
        _check_space(path, size)
        partial = path.with_name(path.name + PARTIAL_SUFFIX)
        with _locked_partial(partial) as handle:
            try:
                self._stream(handle, path, header, size, progress)
                _publish(partial, path, force)
            except BaseException:
                with contextlib.suppress(FileNotFoundError):
                    partial.unlink()
                raise
        _sync_folder(path.parent)
        return size

    def _stream(self, handle: int, path: Path, header: bytes, size: int, progress: Progress | None) -> None:
        sink = _Sink(handle, path, size)
        sink.write(header)
        for tensor in self.tensors.values():
            begin = sink.n_written
            for chunk in tensor.produce():
                view = _as_bytes(chunk)
                found = sink.n_written - begin + len(view)
                if found > tensor.n_bytes:
                    raise GGUFError(f"tensor {tensor.name}: {tensor.n_bytes} bytes planned, at least {found} produced")
                sink.write(view)
                if progress is not None:
                    progress(tensor.name, sink.n_written, size)
            if sink.n_written - begin != tensor.n_bytes:
                raise GGUFError(
                    f"tensor {tensor.name}: {tensor.n_bytes} bytes planned, {sink.n_written - begin} produced"
                )
            sink.write(bytes(_padded(tensor.n_bytes) - tensor.n_bytes))
        try:
            os.fsync(handle)
        except OSError as error:
            raise sink.failure(error) from None


class _Sink:
    """Unbuffered writes to the partial file: short writes are continued, errors say what was being written."""

    def __init__(self, handle: int, path: Path, size: int) -> None:
        self.handle, self.path, self.size, self.n_written = handle, path, size, 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            try:
                n = os.write(self.handle, view)
            except OSError as error:
                raise self.failure(error) from None
            view = view[n:]
            self.n_written += n

    def failure(self, error: OSError) -> GGUFError:
        what = {
            errno.ENOSPC: "the disk is full",
            errno.EDQUOT: "the disk quota is used up",
            errno.EFBIG: "the file size limit is reached",
        }.get(error.errno or 0, os.strerror(error.errno or 0))
        return GGUFError(
            f"{self.path}: {what}: {self.n_written} of {self.size} bytes were written; the unfinished file is removed"
        )


def check_target(path: Path, force: bool) -> None:
    """Refuse an output that exists (unless `force`), that is no regular file, or whose folder does not exist.

    Raises:
        GGUFError: names the path.
    """
    if path.is_dir():
        raise GGUFError(f"{path} is a folder, expected the name of a file")
    if not path.parent.is_dir():
        raise GGUFError(f"{path}: the folder {path.parent} does not exist")
    if not os.path.lexists(path):
        return
    mode = os.lstat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):  # replacing a device or a pipe would destroy it
        raise GGUFError(f"{path} exists and is not a regular file")
    if not force:  # a dangling link counts: writing would follow or replace it
        raise GGUFError(f"{path} already exists; it is replaced only with --force")


def _check_space(path: Path, size: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if size > free:
        raise GGUFError(f"{path}: {size} bytes are needed, but only {free} are free on that disk")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and size > limit:
        raise GGUFError(f"{path}: {size} bytes are needed, but this process may write files of {limit} bytes at most")


@contextlib.contextmanager
def _locked_partial(partial: Path) -> Iterator[int]:
    """Open and lock the partial file, empty. A leftover of a killed run is taken over; a running one is not."""
    while True:
        try:
            # O_NOFOLLOW: a link under this name is not ours and must not lead the bytes elsewhere.
            handle = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise GGUFError(f"{partial}: cannot be created: {error.strerror}") from None
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise GGUFError(f"{partial}: another process is writing this file") from None
            opened = os.fstat(handle)
            if opened.st_nlink > 1 and _is_published(partial):
                partial.unlink()  # a run was killed after it had published this file and before it took the name away
                continue
            if not stat.S_ISREG(opened.st_mode) or opened.st_nlink > 1:
                raise GGUFError(f"{partial} is in the way: not a regular file of its own")
            try:
                current = os.stat(partial, follow_symlinks=False)
            except FileNotFoundError:
                continue  # its writer finished between our open and our lock
            if (current.st_dev, current.st_ino) != (opened.st_dev, opened.st_ino):
                continue
            os.ftruncate(handle, 0)
            yield handle
            return
        finally:
            os.close(handle)


def _is_published(partial: Path) -> bool:
    """Whether the partial file is another name of the finished one."""
    with contextlib.suppress(FileNotFoundError):
        return partial.samefile(partial.with_suffix(""))
    return False


def _publish(partial: Path, path: Path, force: bool) -> None:
    if force:
        try:
            os.replace(partial, path)  # replaces a link itself, never what it points to
        except OSError as error:
            raise GGUFError(f"{path}: cannot be replaced: {error.strerror}") from None
        return
    try:
        os.link(partial, path)  # fails if the name has appeared meanwhile, where a rename would replace it
    except FileExistsError:
        raise GGUFError(f"{path} appeared while it was being written; it is replaced only with --force") from None
    except OSError:  # no hard links on this file system
        check_target(path, force)
        os.rename(partial, path)
    else:
        partial.unlink()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # not every file system can; the file itself is on disk
            os.fsync(handle)
    finally:
        os.close(handle)


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
    head += struct.pack("<IQ", int(element), len(value))
    return head + b"".join(_encode_item(item, element) for item in value)


def _encode_item(value: Any, type_: GGUFValueType) -> bytes:
    if type_ == GGUFValueType.STRING:
        return _encode_string(value)
    if type_ == GGUFValueType.BOOL and not isinstance(value, bool):
        raise TypeError(f"{value!r} is not true or false")
    return struct.pack("<" + SCALAR_FORMATS[type_], value)
