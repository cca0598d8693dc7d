"""Run something in a child process and kill it there: at a chosen system call, at a chosen time, or not at all."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

# What changes files. Each call counts as one operation; a write that is killed is half done.
OPERATIONS = ("pwrite", "ftruncate", "fsync", "fdatasync", "link", "rename", "replace", "unlink")


def _kill_at(operation: int) -> None:
    """Make the `operation`-th call that changes files, from 1, the last thing this process does."""
    count = 0

    def counted(real: Callable[..., Any], is_write: bool) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == operation:
                if is_write:
                    handle, data, offset = arguments
                    real(handle, data[: len(data) // 2], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    for name in OPERATIONS:
        setattr(os, name, counted(getattr(os, name), name == "pwrite"))


def run_in_child(work: Callable[[], None], *, kill_at: int = 0, kill_after: float = 0.0) -> int:
    """Run `work` in a fork: 0 when it returned, 1 when it raised (the trace is printed), -9 when it was killed, before
    operation `kill_at` or `kill_after` seconds from its start."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if kill_at:
                _kill_at(kill_at)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    if kill_after:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)  # not yet waited for, so the number is still the child's
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def delays(seconds: float, count: int, seed: int) -> list[float]:
    """Random times to kill at within `seconds`."""
    generator = random.Random(seed)
    return [generator.uniform(0, seconds) for _ in range(count)]
