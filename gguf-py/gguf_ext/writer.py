"""Write one GGUF file from its plan: in parallel, resumably, and under its final name only when whole and on disk.

The pieces of the plan are made by several threads and written where they belong. Until everything is there, the bytes
are in `NAME.partial`, and `NAME.journal` says how many of its pieces are known to be on disk (`journal.py`). A run that
was killed, interrupted or out of disk is continued by the next one with the same facts; the header is written last, so
that an unfinished file is not taken for a GGUF file even when it is renamed by hand.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import resource
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from zlib import crc32

from . import buffers
from .errors import GGUFError, UnwritableError
from .journal import SUFFIX as JOURNAL_SUFFIX
from .journal import Facts, Journal, Record, sync_folder
from .pipeline import default_threads, in_order
from .plan import Piece, Plan

Progress = Callable[[str, int, int], None]  # tensor name, bytes done so far, bytes in all
Confirm = Callable[[], None]

PARTIAL_SUFFIX = ".partial"

_SYNC_BYTES = 128 << 20  # brought to disk and into the journal at a time,
_SYNC_SECONDS = 5.0  # or after so long

log = logging.getLogger("gguf_ext")


def write_file(
    plan: Plan, path: Path, *, force: bool = False, progress: Progress | None = None, threads: int | None = None
) -> int:
    """Write a file in one go and return its size in bytes.

    On any failure nothing is left; only a process that is killed leaves `path` + ".partial", and the next run replaces
    it.

    Raises:
        GGUFError: `path` exists and `force` is false; another process is writing it; the disk or the process's file
            size limit is too small for the planned size, or a write fails; a producer gave more or fewer bytes than
            planned.
    """
    output = Output(plan, path)
    check_target(output.path, force)
    output.write(force=force, progress=progress, threads=threads)
    return output.size


class Output:
    """A file to be written.

    With `facts`, everything its bytes follow from by name, an unfinished file is kept when a run fails and continued by
    the next. Without, it cannot be known whether what is there belongs to this plan.
    """

    def __init__(self, plan: Plan, path: Path, facts: Facts | None = None) -> None:
        self.plan, self.path, self.facts = plan, Path(path), facts
        self.partial = self.path.with_name(self.path.name + PARTIAL_SUFFIX)
        self.journal_path = self.path.with_name(self.path.name + JOURNAL_SUFFIX)

    @cached_property
    def header(self) -> bytes:
        return self.plan.header()

    @cached_property
    def size(self) -> int:
        """Of the finished file, in bytes."""
        return len(self.header) + self.plan.data_bytes

    def journal(self) -> Journal:
        """The journal as it is on disk.

        Raises:
            GGUFError: it is damaged, or the file was begun from other facts; says which.
        """
        journal = Journal(self.journal_path)
        if journal.facts is not None and (differences := journal.differences(self.facts or {})):
            raise GGUFError(
                f"{self.path} was begun from something else: {'; '.join(differences)}. Use what it was begun from, "
                f"or start over with --restart"
            )
        return journal

    def is_finished(self) -> bool:
        """Whether an earlier run has finished this file, wherever it is now: it may have been moved away.

        Raises:
            GGUFError: as `journal`; or the file is there and does not have its size.
        """
        if not self.journal().is_complete:
            return False
        if os.path.lexists(self.partial):
            if not _is_published(self.partial):
                return False  # that run was killed before it gave the file its name
            self.partial.unlink(missing_ok=True)
        if self.path.exists() and self.path.stat().st_size != self.size:
            raise GGUFError(
                f"{self.path} has {self.path.stat().st_size} bytes, expected {self.size}: it was changed since it was "
                "finished; write it again with --restart --force"
            )
        return True

    def bytes_there(self) -> int:
        """How many bytes of the unfinished file take up disk space already."""
        with contextlib.suppress(FileNotFoundError):
            return os.stat(self.partial, follow_symlinks=False).st_blocks * 512
        return 0

    def write(
        self,
        *,
        force: bool = False,
        restart: bool = False,
        progress: Progress | None = None,
        threads: int | None = None,
        confirm: Confirm | None = None,
    ) -> None:
        """Write or continue the file and give it its name. With `facts`, the journal stays and says so: the caller
        removes it when nobody needs to know any more. `confirm` is called before the file gets its name and raises when
        it must not.

        Raises:
            GGUFError: as `write_file` and `journal`; or the unfinished file is damaged.
        """
        threads = threads or default_threads()
        with _locked_partial(self.partial) as handle:
            if restart or self.facts is None:
                self.journal_path.unlink(missing_ok=True)
            journal = self.journal() if self.facts is not None else None
            if journal is not None and journal.is_complete and os.fstat(handle).st_size == 0:
                self.partial.unlink()  # another process has finished the file since we looked
                return
            n_bytes = self._check_partial(handle, journal, progress, threads) if journal is not None else 0
            sync = _Sync(handle, journal, n_bytes)
            try:
                self._begin(handle, journal)
                self._stream(handle, sync, progress, threads)
                if confirm is not None:
                    confirm()
                self._complete(handle, sync.journal)
                _publish(self.partial, self.path, force)
            except BaseException as error:
                self._stop(sync, error)
                if isinstance(error, _WriteError):
                    raise GGUFError(f"{self.path}: {error}: {sync.n_bytes} of {self.size} bytes were written") from None
                raise
            finally:
                sync.close()
        sync_folder(self.path.parent)

    def _begin(self, handle: int, journal: Journal | None) -> None:
        """Make the partial file ready: as it is when the journal knows it, else empty and of full size."""
        if journal is not None and journal.n_pieces:
            check_space(self.path, self.size, self.size - self.bytes_there())
            return
        with _writing():
            os.ftruncate(handle, 0)
        check_space(self.path, self.size, self.size)
        with _writing():
            os.ftruncate(handle, self.size)
            if journal is not None:
                journal.begin(self.facts or {})

    def _check_partial(self, handle: int, journal: Journal, progress: Progress | None, threads: int) -> int:
        """Compare what is on disk with the checksums of the journal; how many bytes of the file are there."""
        if not journal.n_pieces:
            return 0
        ways = f"start over with --restart, or remove it and {self.journal_path.name}"
        size = os.fstat(handle).st_size
        if size != self.size:
            raise GGUFError(f"{self.partial} is damaged: {size} bytes, expected {self.size}; {ways}")
        if journal.n_pieces > (n_pieces := self.plan.n_pieces):
            raise GGUFError(f"{journal.path}: {journal.n_pieces} pieces are said to be there, of {n_pieces}; {ways}")
        pieces = islice(self.plan.pieces(len(self.header)), journal.n_pieces)
        checked = in_order(pieces, partial(_checksum, handle), threads=threads, memory=lambda piece: piece.n_bytes)
        n_bytes = begin = 0
        with contextlib.closing(checked):
            for record in journal.records:
                digest, names = sha256(), []
                for piece, checksum in islice(checked, record.end - begin):
                    digest.update(checksum)
                    names.append(piece.tensor.name)
                    n_bytes = piece.offset + piece.n_bytes + piece.padding
                    if progress is not None:
                        progress(piece.tensor.name, n_bytes, self.size)
                if digest.hexdigest() != record.digest:
                    where = names[0] if names[0] == names[-1] else f"{names[0]} or a later one up to {names[-1]}"
                    raise GGUFError(f"{self.partial} is damaged in tensor {where}; {ways}")
                begin = record.end
        log.info("%s: continued, %d of %d bytes are there", self.path, n_bytes, self.size)
        return n_bytes

    def _stream(self, handle: int, sync: _Sync, progress: Progress | None, threads: int) -> None:
        pieces = islice(self.plan.pieces(len(self.header)), sync.n_pieces, None)
        written = in_order(pieces, partial(_write_piece, handle), threads=threads, memory=lambda piece: piece.memory)
        with contextlib.closing(written):  # also when the caller's progress raises: the handle is closed then
            for piece, checksum in written:
                sync.add(piece, checksum)
                if progress is not None:
                    progress(piece.tensor.name, sync.n_bytes, self.size)
        sync.finish()

    def _complete(self, handle: int, journal: Journal | None) -> None:
        with _writing():
            _pwrite(handle, memoryview(self.header), 0)
            os.fsync(handle)
            if journal is not None and not journal.is_complete:
                journal.complete()

    def _stop(self, sync: _Sync, error: BaseException) -> None:
        """After a failure: keep what can be continued, else leave nothing."""
        with contextlib.suppress(_WriteError):
            sync.finish()
        journal = sync.journal
        if journal is not None and journal.n_pieces and not isinstance(error, UnwritableError):
            share = f"{journal.n_pieces} of {self.plan.n_pieces} pieces"
            log.warning("%s: %s are kept in %s; run the same again to continue", self.path, share, self.partial.name)
            return
        self.journal_path.unlink(missing_ok=True)
        self.partial.unlink(missing_ok=True)


class _WriteError(Exception):
    """An OSError of writing, not of a producer's reading."""

    def __init__(self, error: OSError) -> None:
        known = {
            errno.ENOSPC: "the disk is full",
            errno.EDQUOT: "the disk quota is used up",
            errno.EFBIG: "the file size limit is reached",
        }
        super().__init__(known.get(error.errno or 0, os.strerror(error.errno or 0)))


@contextlib.contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _WriteError(error) from None


class _Sync:
    """Brings what is written to disk, then into the journal, while more is being written."""

    def __init__(self, handle: int, journal: Journal | None, n_bytes: int) -> None:
        self.journal = journal
        self.n_pieces = 0 if journal is None else journal.n_pieces  # all before are written
        self.n_bytes = n_bytes  # of the file up to there
        self._handle = handle
        self._digest = sha256()
        self._new_bytes = 0
        self._since = time.monotonic()
        self._pool = ThreadPoolExecutor(1, "sync")
        self._pending: Future[None] | None = None
        self._failed = False

    def add(self, piece: Piece, checksum: bytes) -> None:
        """The next piece is written.

        Raises:
            _WriteError: something before did not reach the disk.
        """
        self.n_pieces += 1
        self.n_bytes = piece.offset + piece.n_bytes + piece.padding
        self._digest.update(checksum)
        self._new_bytes += piece.n_bytes
        is_time = self._new_bytes >= _SYNC_BYTES or time.monotonic() - self._since >= _SYNC_SECONDS
        if is_time and (self._pending is None or self._pending.done()):
            self._start()

    def finish(self) -> None:
        """Wait until everything added is on disk and in the journal."""
        if self._new_bytes and not self._failed:
            self._start()
        self._wait()

    def close(self) -> None:
        self._pool.shutdown()

    def _start(self) -> None:
        self._wait()
        record = Record(self.n_pieces, self._digest.hexdigest())
        self._digest, self._new_bytes, self._since = sha256(), 0, time.monotonic()
        self._pending = self._pool.submit(self._sync, record)

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _sync(self, record: Record) -> None:
        # After a failed sync the system may call the lost pages clean, so nothing may be recorded any more.
        try:
            with _writing():
                os.fdatasync(self._handle)
                if self.journal is not None:
                    self.journal.add(record)
        except BaseException:
            self._failed = True
            raise


def _write_piece(handle: int, piece: Piece) -> bytes:
    """Make a piece and write it; its checksum. The padding after it is there since the file got its size."""
    data = piece.produce()
    with _writing():
        _pwrite(handle, data, piece.offset)
    return _crc(data, piece.padding)


def _checksum(handle: int, piece: Piece) -> bytes:
    data = buffers.empty(piece.n_bytes + piece.padding).data
    done = 0
    while done < len(data) and (n := os.preadv(handle, [data[done:]], piece.offset + done)):
        done += n
    return _crc(data[:done], 0)


def _crc(data: memoryview, padding: int) -> bytes:
    return crc32(bytes(padding), crc32(data)).to_bytes(4, "little")


def _pwrite(handle: int, data: memoryview, offset: int) -> None:
    while data:
        n = os.pwrite(handle, data, offset)
        data, offset = data[n:], offset + n


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


def check_space(path: Path, size: int, missing: int) -> None:
    """Refuse a file of `size` bytes, `missing` of which are still to be written, that the disk cannot hold.

    Raises:
        GGUFError: names both sizes.
    """
    free = shutil.disk_usage(path.parent).free
    if missing > free:
        raise GGUFError(f"{path}: {missing} bytes are needed, but only {free} are free on that disk")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and size > limit:
        raise GGUFError(f"{path}: {size} bytes are needed, but this process may write files of {limit} bytes at most")


@contextlib.contextmanager
def _locked_partial(partial: Path) -> Iterator[int]:
    """Open and lock the partial file. A leftover of a killed run is taken over as it is; a running one is not."""
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
            except OSError as error:
                raise GGUFError(f"{partial}: this file system cannot lock it: {error.strerror}") from None
            opened = os.fstat(handle)
            if opened.st_nlink > 1 and _is_published(partial):
                partial.unlink(
                    missing_ok=True
                )  # a run was killed after it had published this file and before it took the name away
                continue
            if not stat.S_ISREG(opened.st_mode) or opened.st_nlink > 1:
                raise GGUFError(f"{partial} is in the way: not a regular file of its own")
            try:
                current = os.stat(partial, follow_symlinks=False)
            except FileNotFoundError:
                continue  # its writer finished between our open and our lock
            if (current.st_dev, current.st_ino) != (opened.st_dev, opened.st_ino):
                continue
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
        partial.unlink(missing_ok=True)  # `is_finished` of another process may have done it
