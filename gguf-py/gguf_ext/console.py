"""What every command line here needs: standard streams that cannot break it, and errors that end in one sentence."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable

OK, FAILED, INTERRUPTED = 0, 1, 130  # argparse itself exits with 2
_SAFE = (("utf-8", "surrogateescape"), ("utf-8", "backslashreplace"))  # the first gives the bytes of paths back


def run(command: Callable[[], int], errors: tuple[type[Exception], ...], prefix: str = "", unread: int = FAILED) -> int:
    """Runs `command` and returns its exit status; 1 after one of `errors`, which is printed; 130 when interrupted.

    Output that cannot be written is such an error too, but a reader that has gone (`| head`) is nothing to speak of:
    the status is then `unread`.
    """
    prepare_streams()
    try:
        return _run(command, errors, prefix, unread)
    except OSError:  # the sentence about an error could not be written either
        return FAILED
    finally:
        _give_up_on_unwritable()


def _run(command: Callable[[], int], errors: tuple[type[Exception], ...], prefix: str, unread: int) -> int:
    expected: tuple[type[Exception], ...] = (*errors, OSError)
    try:
        try:
            status = command()
        finally:  # argparse may have printed help before it exits
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return unread
    except expected as error:
        print(f"{prefix}error: {error}", file=sys.stderr)
        return FAILED


def prepare_streams() -> None:
    """Opens streams that the caller has closed, and makes text that an output cannot encode visible as escapes.

    Without the first, not only does `print` fail: the next file opened gets the stream's number, and what is printed to
    that number ends in the file. A closed standard input stays None, but its number is taken.
    """
    if sys.stdin is None:
        os.open(os.devnull, os.O_RDONLY)
    elif isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.errors == "strict":
        sys.stdin.reconfigure(errors="replace")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and (stream.encoding.lower(), stream.errors) not in _SAFE:
            stream.reconfigure(errors="backslashreplace")


def _give_up_on_unwritable() -> None:
    """What could not be written is dropped, so that the interpreter does not try again at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
