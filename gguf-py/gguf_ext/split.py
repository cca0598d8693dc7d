"""Split a plan over several files, as the programs of this family do, and write the set, each file on its own.

`NAME-00001-of-0000N.gguf` and so on. Tensors stay in order; a file is closed when the next tensor would exceed one of
the limits. The first file has all keys of the model, each file `split.no` (from 0), `split.count` and
`split.tensors.count` (of the whole set).

While the set is unfinished, the `.journal` of each finished file stays beside it and says so. Finished files can then
be moved away at any time, and several processes, also on several machines that share the folder, can write one set.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import constants as c
from .constants import GGUFValueType
from .errors import GGUFError
from .journal import PLAN, Facts
from .plan import Plan, PlannedTensor
from .writer import Confirm, Output, Progress, check_space, check_target

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
_SIZE = re.compile(r"([0-9]+)([KMG]?)")
MAX_FILES = 65535  # split.count is 16 bits wide

log = logging.getLogger("gguf_ext")


@dataclass(frozen=True)
class Limits:
    """Of one file; 0 is none. `max_bytes` counts tensor data only; a larger tensor gets a file of its own."""

    max_bytes: int = 0
    max_tensors: int = 0
    first_without_tensors: bool = False

    def __bool__(self) -> bool:
        return bool(self.max_bytes or self.max_tensors or self.first_without_tensors)


def parse_size(text: str) -> int:
    """`500M` -> 500,000,000; the units K, M, G are decimal.

    Raises:
        GGUFError: it is nothing of this kind.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise GGUFError(f"size {text!r}, expected a number of bytes, or of K, M or G: 500M, 48G")
    return int(match[1]) * _UNITS[match[2]]


def split(plan: Plan, limits: Limits) -> list[Plan]:
    """The plan of each file: `plan` itself if everything fits in one.

    Raises:
        GGUFError: more files than the format can count.
    """
    groups: list[list[PlannedTensor]] = [[]]
    if limits.first_without_tensors and plan.tensors:
        groups.append([])
    n_bytes = 0
    for tensor in plan.tensors.values():
        group = groups[-1]
        too_many = limits.max_tensors and len(group) >= limits.max_tensors
        too_large = limits.max_bytes and n_bytes + tensor.n_bytes > limits.max_bytes
        if group and (too_many or too_large):
            groups.append([])
            n_bytes = 0
        groups[-1].append(tensor)
        n_bytes += tensor.n_bytes
    if len(groups) == 1:
        return [plan]
    if len(groups) > MAX_FILES:
        raise GGUFError(f"{len(groups)} files, {MAX_FILES} are the most: the limits of the split are too small")
    parts = []
    for number, group in enumerate(groups):
        part = plan.part(group, with_fields=number == 0)
        part.add_field(c.KEY_SPLIT_NO, number, GGUFValueType.UINT16)
        part.add_field(c.KEY_SPLIT_COUNT, len(groups), GGUFValueType.UINT16)
        part.add_field(c.KEY_SPLIT_TENSORS_COUNT, len(plan.tensors), GGUFValueType.INT32)
        parts.append(part)
    return parts


class OutputSet:
    """The files of a conversion, one or several, known by the facts they follow from."""

    def __init__(self, plan: Plan, path: Path, facts: Facts, limits: Limits | None = None) -> None:
        limits = limits if limits is not None else Limits()
        parts = split(plan, limits)
        if len(parts) == 1 and limits:
            log.warning("%s is within the limits of the split and is written as one file", path)
        facts = {**facts, PLAN: plan.digest()[:16]}
        self.path = path
        self.outputs = [Output(parts[0], path, facts)]
        if len(parts) > 1:
            self.outputs = [
                Output(part, _name(path, number, len(parts)), {**facts, "file": f"{number} of {len(parts)}"})
                for number, part in enumerate(parts, start=1)
            ]

    def select(self, numbers: Sequence[int] | None) -> list[Output]:
        """The files with these numbers, from 1; all by default.

        Raises:
            GGUFError: there is no such file, or none is asked for.
        """
        if numbers is None:
            return self.outputs
        if not numbers:
            raise GGUFError(f"no file is asked for: the split has {len(self.outputs)}, counted from 1")
        for number in numbers:
            if not 1 <= number <= len(self.outputs):
                raise GGUFError(f"there is no file {number}: the split has {len(self.outputs)}, counted from 1")
        return [self.outputs[number - 1] for number in sorted(set(numbers))]

    def write(
        self,
        outputs: Sequence[Output],
        *,
        force: bool = False,
        restart: bool = False,
        progress: Progress | None = None,
        threads: int | None = None,
        confirm: Confirm | None = None,
    ) -> bool:
        """Write the files that are not finished yet; whether the whole set is complete then. `confirm` is called before
        a file gets its name.

        Raises:
            GGUFError: as `check` and `Output.write`; a single file does not fit on the disk.
        """
        unfinished = self.check(outputs, force=force, restart=restart)
        missing, free = self.room(unfinished, restart=restart)
        if len(unfinished) == 1:
            check_space(unfinished[0].path, unfinished[0].size, missing)
        elif missing > free:
            log.warning("%d bytes are needed, but only %d are free: move finished files away in time", missing, free)
        total = sum(output.size for output in outputs)
        done = total - sum(output.size for output in unfinished)
        for output in unfinished:
            part = _from(progress, done, total)
            output.write(force=force, restart=restart, progress=part, threads=threads, confirm=confirm)
            done += output.size
            if len(self.outputs) > 1:
                log.info("finished: %s", output.path)
        return self._finish(outputs[0])

    def check(self, outputs: Sequence[Output], *, force: bool, restart: bool) -> list[Output]:
        """Those of the files that are to be written.

        Raises:
            GGUFError: an output exists, or was begun from other facts.
        """
        if not restart and self.outputs[0].journal().set_is_complete:
            return []  # that run was killed while it took the journals away
        unfinished = []
        for output in self.outputs:
            is_ours = output in outputs
            finished = not (restart and is_ours) and output.is_finished()
            if is_ours and not finished:
                check_target(output.path, force)
                unfinished.append(output)
        return unfinished

    def room(self, unfinished: Sequence[Output], *, restart: bool = False) -> tuple[int, int]:
        """How many bytes these files still need on the disk, and how many are free."""
        missing = sum(output.size - (0 if restart else output.bytes_there()) for output in unfinished)
        return missing, shutil.disk_usage(self.path.parent).free

    def _finish(self, ours: Output) -> bool:
        """Whether every file of the set is finished; then nobody needs the journals any more. `ours` is one that is."""
        first = self.outputs[0].journal()
        if not first.set_is_complete:
            missing = [n for n, output in enumerate(self.outputs, start=1) if not output.is_finished()]
            if missing and ours.journal_path.exists():  # else another process has just taken all journals away
                count = len(self.outputs)
                log.info("%d of %d files are finished; missing: %s", count - len(missing), count, _ranges(missing))
                return False
            if len(self.outputs) > 1:
                with contextlib.suppress(OSError):  # it only matters if we are killed between the next lines
                    first.complete_set()
        for output in reversed(self.outputs):
            output.journal_path.unlink(missing_ok=True)
        return True


def _name(path: Path, number: int, count: int) -> Path:
    return path.with_name(c.SPLIT_NAME.format(stem=path.stem, number=number, count=count))


def _ranges(numbers: Sequence[int]) -> str:
    """[1, 2, 3, 7] -> "1-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def _from(progress: Progress | None, before: int, total: int) -> Progress | None:
    """The progress of a file as part of the set's."""
    if progress is None:
        return None
    return lambda name, done, _: progress(name, before + done, total)
