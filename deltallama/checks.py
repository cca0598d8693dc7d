"""Checks of arguments: what is not what it should be is an `ArgumentError` that names the argument and shows the value.

Python converts generously: 1.9 to 1, True to 1, "5" to 5. Here that would run a model on something nobody asked for.
"""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Mapping, Sequence, Set
from operator import index
from typing import Any

import numpy as np

from .errors import ArgumentError

_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 80


def brief(value: object) -> str:
    """A short `repr` in one line, whatever the value: huge, nested without end, or with a `repr` that raises."""
    try:
        return re.sub(r"\s*\n\s*", " ", _SHOWN.repr(value))
    except Exception:  # an integer of more digits than Python converts, for one
        return f"a value of type {type(value).__name__}"


def whole(name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """An integer of any kind, not a bool and not a float; within bounds where they are given."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ArgumentError(f"{name} must be an integer, got {brief(value)}") from None
    if (least is not None and number < least) or (most is not None and number > most):
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise ArgumentError(f"{name} must be {bounds}, got {brief(number)}")
    return number


def real(name: str, value: object) -> float:
    """A number of any kind, not a bool and not text; may be infinite or NaN."""
    try:
        if isinstance(value, bool | np.bool_ | str | bytes | bytearray):
            raise TypeError
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(f"{name} must be a number, got {brief(value)}") from None


def flag(name: str, value: object) -> bool:
    """True or False itself: any other value would silently count as one of them."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be True or False, got {brief(value)}")
    return value


def function(name: str, value: Any) -> Any:
    """Something that can be called, or None."""
    if value is not None and not callable(value):
        raise ArgumentError(f"{name} must be a function or None, got {brief(value)}")
    return value


def choice(name: str, value: object, choices: Mapping[str, int]) -> int:
    """What `choices` has for the name `value`."""
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(f"{name} must be one of {', '.join(choices)}, got {brief(value)}")
    return choices[value]


def path_bytes(path: str | os.PathLike[str]) -> bytes:
    """A path as the system takes it."""
    try:
        encoded = os.fsencode(path)
    except (TypeError, UnicodeEncodeError) as error:
        raise ArgumentError(f"not a path: {brief(path)}: {error}") from None
    if not encoded:
        raise ArgumentError("the path is empty")
    if b"\0" in encoded:
        raise ArgumentError(f"a path cannot contain a zero byte: {brief(path)}")
    return encoded


def token_ids(tokens: Sequence[int]) -> list[int]:
    """A list or array of token ids, as int."""
    if isinstance(tokens, str | bytes | bytearray | memoryview | Mapping | Set):  # can be iterated, but are no ids
        raise ArgumentError(f"tokens must be a list of ids, got {brief(tokens)}")
    if isinstance(tokens, np.ndarray) and tokens.ndim == 1 and tokens.dtype.kind in "iu":
        return [int(token) for token in tokens.tolist()]
    try:
        items = list(tokens)
    except TypeError:
        raise ArgumentError(f"tokens must be a list of ids, got {brief(tokens)}") from None
    if all(type(token) is int for token in items):  # nearly always, and quick
        return items
    return [whole(f"token {position}", token) for position, token in enumerate(items)]


def texts(name: str, value: str | Sequence[str] | None) -> list[str]:
    """One text, several, or None for none; empty ones are refused."""
    items: object = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(items, list | tuple | Set) or not all(isinstance(item, str) and item for item in items):
        raise ArgumentError(f"{name} must be a non-empty str or a list of them, got {brief(value)}")
    return list(items)
