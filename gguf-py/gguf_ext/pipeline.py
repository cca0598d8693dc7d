"""Jobs done by several threads, their results in the order of the jobs, memory bounded.

Python threads run in parallel here because what the jobs spend their time in (reading, numpy, the native library,
checksums, writing) releases the interpreter's lock.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

_J = TypeVar("_J")
_R = TypeVar("_R")

MEMORY = 128 << 20  # bytes that jobs may hold together

_of_thread = threading.local()  # `stop` of a thread that does jobs: set when nobody wants their results any more


class Stopped(Exception):
    """A job that was waiting was told to stop; whoever told it does not see this."""


def wait(seconds: float) -> None:
    """Sleep; within a job no longer than its result is wanted. Long jobs may ask with 0 seconds.

    Raises:
        Stopped: the job's result is not wanted any more.
    """
    stop: threading.Event | None = getattr(_of_thread, "stop", None)
    if stop is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        raise Stopped


def default_threads() -> int:
    """One per processor this process may use, and one that waits for the disk meanwhile."""
    return len(os.sched_getaffinity(0)) + 1


def in_order(
    jobs: Iterable[_J],
    work: Callable[[_J], _R],
    *,
    threads: int,
    memory: Callable[[_J], int],
    limit: int = MEMORY,
) -> Generator[tuple[_J, _R], None, None]:
    """Yield (job, `work(job)`) in the order of `jobs`.

    Jobs that are begun and not yet yielded hold `limit` bytes at most by `memory(job)`, a single larger one apart.
    `jobs` is only advanced as far as that. The first failure in the order of jobs is raised, however the threads are
    scheduled. When this returns, raises or is closed, no job is running any more (one that is in `wait` ends at once):
    whoever may leave it early closes it.
    """
    jobs = iter(jobs)
    window: deque[tuple[_J, Future[_R], int]] = deque()
    held = 0
    stop = threading.Event()
    with ThreadPoolExecutor(threads, "piece", setattr, (_of_thread, "stop", stop)) as pool:
        try:
            waiting = next(jobs, None)
            while waiting is not None or window:
                # Twice as many jobs as threads keep all of them busy while the oldest job is a slow one.
                while waiting is not None and len(window) < 2 * threads:
                    cost = memory(waiting)
                    if window and held + cost > limit:
                        break
                    held += cost
                    window.append((waiting, pool.submit(work, waiting), cost))
                    waiting = next(jobs, None)
                job, future, cost = window.popleft()
                yield job, future.result()
                held -= cost
        finally:
            stop.set()
            for _, future, _ in window:
                future.cancel()
