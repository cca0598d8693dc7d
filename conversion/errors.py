"""The exception of the conversion, and how several of them are gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from gguf_ext import GGUFError

SHOWN_NAMES = 8


class ConversionError(ValueError):
    """The checkpoint, its configuration or an argument is wrong; the message names the thing, expected and found."""


def listed(names: Iterable[str]) -> str:
    """Names for a message: sorted, the first few and how many more."""
    ordered = sorted(names)
    rest = len(ordered) - SHOWN_NAMES
    return ", ".join(ordered[:SHOWN_NAMES]) + (f" and {rest} more" if rest > 0 else "")


class Checks:
    """Runs checks that do not depend on one another, each in a `with` block: the first problem ends it all, or, when
    they are gathered, ends its block only and is kept in `problems`."""

    def __init__(self, *, gather: bool = False) -> None:
        self.gather = gather
        self.problems: list[str] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> bool:
        if not self.gather or not isinstance(value, ConversionError | GGUFError):
            return False
        if str(value) not in self.problems:  # one check may begin with what another is about
            self.problems.append(str(value))
        return True

    def passes(self, check: Callable[..., object], *args: Any) -> bool:
        """Run one check; whether it found nothing, if problems are gathered."""
        with self:
            check(*args)
            return True
        return False
