"""What a measurement must know of the machine: what it is, and whether something else ran on it meanwhile.

The second is read from /proc, so the scripts that use it are for Linux.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MOST_SHARE = 0.05  # of one core, that another process may use


class BusyError(RuntimeError):
    """Another process used the machine; the message names the busiest one."""


@dataclass(frozen=True)
class Process:
    """`seconds` of processor time since it started; `start` tells processes of one number apart."""

    pid: int
    parent: int
    name: str
    start: int
    seconds: float


def processes(proc: Path = Path("/proc")) -> dict[int, Process]:
    """Every process but the kernel's own threads, which work for others."""
    tick = os.sysconf("SC_CLK_TCK")
    found = {}
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            text = (folder / "stat").read_text(errors="replace")
        except OSError:
            continue  # it has ended
        # The name is in parentheses and may contain them; fields are counted behind it (proc_pid_stat(5), from 3 on).
        name, fields = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
        pid, parent = int(folder.name), int(fields[1])
        if 2 not in (pid, parent):
            found[pid] = Process(pid, parent, name, int(fields[19]), (int(fields[11]) + int(fields[12])) / tick)
    return found


class Watch:
    """Processor time that processes other than this one and its descendants use from now on."""

    def __init__(self, look: Callable[[], dict[int, Process]] = processes, clock: Callable[[], float] = time.monotonic):
        self._look, self._clock = look, clock
        self._before, self._since = look(), clock()

    def busiest(self) -> tuple[float, Process] | None:
        """The one that used most since, and how much of a core that was; None if there is no other process."""
        now, elapsed = self._look(), max(self._clock() - self._since, 1e-9)
        used = []
        for process in now.values():
            before = self._before.get(process.pid)
            known = before is not None and before.start == process.start
            if not _is_ours(process, now):
                used.append(((process.seconds - (before.seconds if before and known else 0)) / elapsed, process))
        return max(used, key=lambda entry: entry[0], default=None)

    def check(self) -> None:
        """Raises BusyError if another process used more than MOST_SHARE of a core."""
        worst = self.busiest()
        if worst is not None and worst[0] > MOST_SHARE:
            share, process = worst
            raise BusyError(
                f"process {process.pid} ({process.name}) used {share:.0%} of a core, "
                f"at most {MOST_SHARE:.0%} leave a measurement alone"
            )


class Guard:
    """Watches from one check to the next.

    Attributes:
        busy: what was found, where that is no reason to stop.
    """

    def __init__(self, despite_load: bool = False) -> None:
        self.busy: list[str] = []
        self._despite_load = despite_load
        self._watch = Watch()

    def settle(self, seconds: float = 2.0) -> None:
        """A first look, before anything is measured. Raises BusyError as `check` does."""
        time.sleep(seconds)
        self.check()

    def check(self) -> None:
        """Raises BusyError if another process was busy since the last check, or notes it."""
        try:
            self._watch.check()
        except BusyError as error:
            if not self._despite_load:
                raise
            self.busy.append(str(error))
        self._watch = Watch()


def _is_ours(process: Process, every: dict[int, Process]) -> bool:
    while process.pid != os.getpid():
        parent = every.get(process.parent)
        if parent is None:
            return False
        process = parent
    return True


def describe() -> str:
    """Processor, usable processors, load averages, memory that is free."""
    info = Path("/proc/cpuinfo").read_text(errors="replace")
    names = [line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")]
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    processor = names[0] if names else platform.machine()
    return f"{processor}, {len(os.sched_getaffinity(0))} processors, load {load}, {free:.1f} GiB free"
