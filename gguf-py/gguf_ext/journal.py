"""The journal beside an unfinished file: what it is made of, and how much of it is known to be on disk.

Text, one record per line: eight hex digits, the CRC-32 of the rest, a space, a JSON object.

    {"facts": {...}}                     first line: everything the file's bytes follow from, by name
    {"pieces": n, "digest": "..."}       pieces 0..n-1 are on disk; the digest is of those since the record before
    {"complete": true}                   the whole file is on disk; it has its final name or is about to get it
    {"set": "complete"}                  so is every other file of its split set

A record is appended only after what it speaks of has reached the disk, so a killed process can at worst leave a torn
last line, which is dropped. What a torn line would have said is done again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from .errors import GGUFError

SUFFIX = ".journal"
PLAN = "plan"  # the fact that sums up all that is planned

Facts = Mapping[str, str]  # "outtype", "shard model-00001-of-00002.safetensors", ... -> its value or fingerprint


class Record(NamedTuple):
    """Pieces before `end`, from the end of the record before, are on disk and have this digest."""

    end: int
    digest: str


class Journal:
    """The records of one journal. `facts` is None when there is none, or none that got as far as its first line."""

    def __init__(self, path: Path) -> None:
        """Read the journal.

        Raises:
            GGUFError: it cannot be read, or is damaged in another place than its last line.
        """
        self.path = path
        self.facts: dict[str, str] | None = None
        self.records: list[Record] = []
        self.is_complete = False
        self.set_is_complete = False
        self._length = 0  # bytes of whole records
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise GGUFError(f"{path} cannot be read: {error.strerror}") from None
        lines = content.split(b"\n")
        for number, line in enumerate(lines[:-1]):
            record = _parse(line)
            if record is None or not self._take(record, number):
                if number == len(lines) - 2:
                    break  # the last line, torn by a crash of the machine
                raise GGUFError(f"{path}: line {number + 1} is damaged; start over with --restart")
            self._length += len(line) + 1

    @property
    def n_pieces(self) -> int:
        """How many pieces are on disk."""
        return self.records[-1].end if self.records else 0

    def differences(self, facts: Facts) -> list[str]:
        """What is not as it was when the journal was begun, in words. The digest of the plan changes with whatever
        else does, and is named where nothing else has changed."""
        before = self.facts or {}
        found = {name: f"{name} is new" for name in facts if name not in before}
        found |= {name: f"{name} is gone" for name in before if name not in facts}
        for name in facts.keys() & before.keys():
            if before[name] != facts[name]:
                found[name] = f"{name} was {before[name] or 'not given'}, is {facts[name] or 'not given'}"
        if len(found) > 1:
            found.pop(PLAN, None)
        return [found[name] for name in sorted(found)]

    def begin(self, facts: Facts) -> None:
        """Start over with these facts."""
        self.facts, self.records, self.is_complete, self.set_is_complete = dict(facts), [], False, False
        self._length = 0
        self._append({"facts": self.facts})
        sync_folder(self.path.parent)

    def add(self, record: Record) -> None:
        self._append({"pieces": record.end, "digest": record.digest})
        self.records.append(record)

    def complete(self) -> None:
        self._append({"complete": True})
        self.is_complete = True

    def complete_set(self) -> None:
        self._append({"set": "complete"})
        self.set_is_complete = True

    def _append(self, value: dict[str, Any]) -> None:
        text = json.dumps(value, separators=(",", ":")).encode()
        line = b"%08x %s\n" % (crc32(text), text)
        # O_NOFOLLOW: a link under this name is not ours and must not lead the bytes elsewhere.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(self.path, flags, 0o666)
        try:
            os.ftruncate(handle, self._length)  # takes a torn line away
            if os.pwrite(handle, line, self._length) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # the only reason for a short write of a line
            os.fsync(handle)
        finally:
            os.close(handle)
        self._length += len(line)

    def _take(self, record: dict[str, Any], number: int) -> bool:
        """Add a record that was read; False if it makes no sense there."""
        if number == 0:
            facts = record.get("facts")
            if not isinstance(facts, dict):
                return False
            self.facts = {name: str(value) for name, value in facts.items()}
        elif "pieces" in record:
            end = record["pieces"]
            if not isinstance(end, int) or end <= self.n_pieces:
                return False
            self.records.append(Record(end, str(record.get("digest"))))
        elif "complete" in record:
            self.is_complete = True
        elif "set" in record:
            self.set_is_complete = True
        else:
            return False
        return True


def sync_folder(folder: Path) -> None:
    """Bring names in a folder to disk, on file systems that can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # not every file system can; the file itself is on disk
            os.fsync(handle)
    finally:
        os.close(handle)


def _parse(line: bytes) -> dict[str, Any] | None:
    digits, _, text = line.partition(b" ")
    try:
        value = json.loads(text)
        intact = int(digits, 16) == crc32(text)
    except ValueError:
        return None
    return value if intact and isinstance(value, dict) else None
