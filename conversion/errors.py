"""The exception of the conversion."""

from __future__ import annotations

from collections.abc import Iterable

SHOWN_NAMES = 8


class ConversionError(ValueError):
    """The checkpoint, its configuration or an argument is wrong; the message names the thing, expected and found."""


def listed(names: Iterable[str]) -> str:
    """Names for a message: sorted, the first few and how many more."""
    ordered = sorted(names)
    rest = len(ordered) - SHOWN_NAMES
    return ", ".join(ordered[:SHOWN_NAMES]) + (f" and {rest} more" if rest > 0 else "")
