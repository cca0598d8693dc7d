"""Long native calls that Ctrl-C can end.

Python runs signal handlers between two of its own instructions, and in the main thread only: none while that thread is
inside the library. So the call is made by a thread of its own, and the main thread waits for it.
"""

from __future__ import annotations

import _thread
import contextlib
import threading
from collections.abc import Callable

_POLL_SECONDS = 0.02


def interruptible(work: Callable[[], None], cancel: Callable[[], None]) -> None:
    """Calls `work`; in other threads than the main one this is a plain call.

    An exception that a signal handler raises meanwhile, such as KeyboardInterrupt, calls `cancel` until `work` has
    ended, and is then raised again, whatever came of `work`.
    """
    if threading.current_thread() is not threading.main_thread():
        work()
        return
    # Bare locks: an exception of a signal handler inside threading.Event leaves its lock as it may not be, and another
    # error in the place of that exception.
    claim, done = threading.Lock(), threading.Lock()
    done.acquire()
    outcome: list[BaseException | None] = []

    def run() -> None:
        if not claim.acquire(blocking=False):
            return
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:
            error = raised
        finally:
            outcome.append(error)
            done.release()

    try:
        try:
            # Not threading.Thread: an exception of a signal handler that meets its weak references is lost.
            _thread.start_new_thread(run, ())
        except RuntimeError:  # no thread to be had: at the end of the interpreter, or at a limit
            run()
        done.acquire()
    except BaseException:
        if not claim.acquire(blocking=False):  # it has begun
            while not outcome:
                with contextlib.suppress(BaseException):  # a second Ctrl-C must not leave it running
                    cancel()
                    done.acquire(timeout=_POLL_SECONDS)
        raise
    if outcome[0] is not None:
        raise outcome[0]
