"""Prove a written file: make every byte again from its plan and compare it with what is on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .errors import GGUFError
from .pipeline import default_threads, in_order
from .plan import Piece
from .writer import Output, Progress

OnDigest = Callable[[str, str], None]  # tensor or file name, SHA-256 in hexadecimal

_SHOWN = 5  # differing tensors that a message names


class _Compared(NamedTuple):
    found: memoryview  # the piece as it is on disk, padding included
    difference: str  # the first one, or nothing


def verify_file(
    output: Output, *, on_digest: OnDigest | None = None, progress: Progress | None = None, threads: int | None = None
) -> None:
    """Compare a finished file with its plan: header, every tensor, padding, size.

    `on_digest` gets the SHA-256 of each tensor's bytes when it is proven, then that of the file.

    Raises:
        GGUFError: the file is not there, cannot be read, or differs; names tensors, offsets, expected and found.
    """
    path = output.path
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise GGUFError(f"{path} is not there and cannot be verified") from None
    except OSError as error:
        raise GGUFError(f"{path} cannot be read: {error.strerror}") from None
    try:
        _verify(handle, output, on_digest, progress, threads or default_threads())
    finally:
        os.close(handle)


def _verify(handle: int, output: Output, on_digest: OnDigest | None, progress: Progress | None, threads: int) -> None:
    path = output.path
    size = os.fstat(handle).st_size
    if size != output.size:
        raise GGUFError(f"{path} has {size} bytes, expected {output.size}")
    header = _read(handle, path, 0, len(output.header))
    problems: dict[str, str] = {}
    at = _first_difference(header, memoryview(output.header))
    if at is not None:
        problems["the header"] = _byte(at, header[at], output.header[at])
    file_digest, digest = sha256(header), sha256()
    compared = in_order(
        output.plan.pieces(len(header)),
        partial(_compare, handle, path),
        threads=threads,
        memory=lambda piece: piece.memory + piece.n_bytes,
    )
    with closing(compared), ThreadPoolExecutor(1, "digest") as pool:
        for piece, (found, difference) in compared:
            of_file = pool.submit(file_digest.update, found)
            name = piece.tensor.name
            digest.update(found[: piece.n_bytes])
            of_file.result()
            if difference:
                problems.setdefault(f"tensor {name}", difference)
            if piece.first + piece.n_rows == piece.tensor.n_rows:
                if on_digest is not None and f"tensor {name}" not in problems:
                    on_digest(name, digest.hexdigest())
                digest = sha256()
            if progress is not None:
                progress(name, piece.offset + len(found), size)
    if problems:
        shown = "; ".join(f"{what}: {difference}" for what, difference in list(problems.items())[:_SHOWN])
        more = f"; and {len(problems) - _SHOWN} more tensors" if len(problems) > _SHOWN else ""
        raise GGUFError(f"{path} is not what its source gives: {shown}{more}")
    if on_digest is not None:
        on_digest(str(path), file_digest.hexdigest())


def _compare(handle: int, path: Path, piece: Piece) -> _Compared:
    found = _read(handle, path, piece.offset, piece.n_bytes + piece.padding)
    expected = piece.produce()
    at = _first_difference(found[: piece.n_bytes], expected)
    if at is not None:
        row = piece.first + at * piece.n_rows // piece.n_bytes
        return _Compared(found, f"row {row}, {_byte(piece.offset + at, found[at], expected[at])}")
    at = next((n for n in range(piece.n_bytes, len(found)) if found[n]), None)
    if at is not None:
        return _Compared(found, f"padding after it, {_byte(piece.offset + at, found[at], 0)}")
    return _Compared(found, "")


def _first_difference(found: memoryview, expected: memoryview) -> int | None:
    a, b = np.frombuffer(found, np.uint8), np.frombuffer(expected, np.uint8)
    return None if np.array_equal(a, b) else int(np.argmax(a != b))


def _byte(offset: int, found: int, expected: int) -> str:
    return f"byte {offset} of the file is 0x{found:02x}, expected 0x{expected:02x}"


def _read(handle: int, path: Path, offset: int, n_bytes: int) -> memoryview:
    data = np.empty(n_bytes, np.uint8).data
    done = 0
    while done < n_bytes:
        try:
            n = os.preadv(handle, [data[done:]], offset + done)
        except OSError as error:
            raise GGUFError(f"{path}: reading failed at byte {offset + done}: {error.strerror}") from None
        if n == 0:
            raise GGUFError(f"{path}: ends at byte {offset + done}, expected {offset + n_bytes} or more")
        done += n
    return data
