"""Read the JSON files of a checkpoint, and take values from its configuration with a check on each.

The raw JSON is all there is: no class of another library adds defaults. A field that changes mathematics is either in
the file or an error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from .errors import Checks, ConversionError

PREPROCESSOR = "preprocessor_config.json"  # beside config.json, where a model sees

_ABSENT = object()
_NO_LAYERS: list[int] = []
_SHOWN_CHARACTERS = 200
_LARGEST, _SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
_FIELD = re.compile(r"[a-z][a-z0-9_.]*")  # in a formula such as `num_shared_experts * moe_intermediate_size`


@dataclass(frozen=True)
class Width:
    """A number that tensors' axes must equal, and where it comes from: a formula of config fields.

    `at_least` allows a longer axis (K3 pads `A_log`).
    """

    value: int
    source: str
    at_least: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        """The config fields in the formula, each once."""
        return tuple(dict.fromkeys(_FIELD.findall(self.source)))


def read_bytes(path: Path) -> bytes:
    """What is in a file.

    Raises:
        ConversionError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConversionError(f"{path} cannot be read: {error.strerror}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ConversionError: the file is missing, not JSON, not an object, or names a key twice.
    """
    return parse_json(read_bytes(path), str(path))


def parse_json(text: bytes, what: str) -> dict[str, Any]:
    """`read_json` for bytes in memory; `what` names them in messages."""
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ConversionError(f"{what} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConversionError(f"{what} holds a JSON {type(value).__name__}, expected an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"{key!r} occurs twice")
            seen.add(key)
    return found


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _or(stand_in: Callable[[], _R], shapes: bool = True) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorates a check of a field: where problems are gathered, `stand_in()` takes the place of a wrong value.

    `shapes` says whether such fields decide which tensors there are, of which shape.
    """

    def decorate(check: Callable[_P, _R]) -> Callable[_P, _R]:
        @wraps(check)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            config = args[0]
            assert isinstance(config, Config)
            with config.checks:
                return check(*args, **kwargs)
            config.has_stand_ins |= shapes
            return stand_in()

        return checked

    return decorate


class Config:
    """`config.json` with `text_config` merged over it. Fields are named with dots: `linear_attn_config.head_dim`.

    `checks` decides whether the first wrong field ends it or all are gathered; in that case wrong values are replaced,
    and `has_stand_ins` says that tensors and vocabulary cannot be compared with the configuration any more.
    """

    def __init__(self, path: Path, checks: Checks | None = None) -> None:
        self.path = path
        self.checks = checks if checks is not None else Checks()
        self.has_stand_ins = False
        self.raw = read_json(path)
        text = self.raw.get("text_config", {})
        if not isinstance(text, dict):
            raise ConversionError(f"{path}: text_config is not an object")
        self.values = {**self.raw, **text}

    @property
    def architecture(self) -> str:
        """The outer `architectures` entry decides; K3's nested one names the older architecture."""
        for where in (self.raw, self.values):
            names = where.get("architectures")
            if names is not None:
                if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) and names[0].isprintable():
                    return names[0]
                raise ConversionError(f"{self.path}: architectures is {names!r}, expected a list of one name")
        raise ConversionError(f"{self.path}: no architectures entry, so the kind of model is unknown")

    def get(self, field: str) -> Any:
        """The value, or None when the field is absent or null."""
        value = self._find(field)
        return None if value is _ABSENT else value

    def add_missing(self, **fields: Any) -> None:
        """Give fields of the top level a value where they have none, as another spelling of the same file says it."""
        self.values |= {field: value for field, value in fields.items() if self.values.get(field) is None}

    @_or(lambda: 1)
    def integer(self, field: str, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
        """A required whole number from `minimum` to `maximum`."""
        value = self._required(field)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.wrong(field, f"a whole number of at least {minimum}")
        if value > maximum:
            raise self.wrong(field, f"at most {maximum}")
        return value

    @_or(lambda: 1.0, shapes=False)
    def number(self, field: str) -> float:
        """A required finite number, within what files keep: float32."""
        value = self._required(field)
        if not isinstance(value, int | float) or isinstance(value, bool) or value != value or abs(value) == math.inf:
            raise self.wrong(field, "a finite number")
        if abs(value) > _LARGEST or 0 < abs(value) < _SMALLEST:
            raise self.wrong(field, "a number that 32 bits can hold (float32)")
        return float(value)

    @_or(lambda: 1.0, shapes=False)
    def positive(self, field: str) -> float:
        """A required finite number above 0."""
        value = self.number(field)
        if value <= 0:
            raise self.wrong(field, "a number above 0")
        return value

    @_or(bool)
    def boolean(self, field: str) -> bool:
        """A required true or false."""
        value = self._required(field)
        if not isinstance(value, bool):
            raise self.wrong(field, "true or false")
        return value

    @_or(lambda: _NO_LAYERS.copy())
    def layer_list(self, field: str, n_layers: int) -> list[int]:
        """A required list of layer numbers, counted from 1 in the file and from 0 in the result."""
        value = self._required(field)
        if not isinstance(value, list) or not all(
            isinstance(item, int) and not isinstance(item, bool) and item >= 1 for item in value
        ):
            raise self.wrong(field, f"a list of layer numbers from 1 to {n_layers}")
        if max(value, default=0) > n_layers:
            self.refuse(field, f"a list of layer numbers from 1 to {n_layers}")
        if len(set(value)) != len(value):
            raise self.wrong(field, "each layer once")
        return [item - 1 for item in value]

    def must_be(self, field: str, *allowed: Any, absent: bool = False) -> None:
        """Refuse any value but `allowed`; `absent` says whether a missing or null field means the first of them."""
        value = self.get(field)
        if value is None and absent:
            return
        with self.checks:
            if value is None:
                self._required(field)
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
                raise self.wrong(field, " or ".join(json.dumps(one) for one in allowed) + ": nothing else is supported")

    def must_be_absent(self, field: str, why: str) -> None:
        """Refuse a field that is set (neither missing, null nor false)."""
        value = self.get(field)
        with self.checks:
            if value is not None and value is not False:
                raise ConversionError(f"{self.path}: {field} is {json.dumps(value)}: {why}")

    def refuse(self, field: str, expected: str) -> None:
        """Refuse a field whose value does not go with that of another. What a stand-in does not go with is no
        problem of the file."""
        with self.checks:
            if not self.has_stand_ins:
                raise self.wrong(field, expected)

    def shown(self, field: str) -> str:
        """A field's value for a message."""
        value = self._find(field)
        text = "missing" if value is _ABSENT else json.dumps(value)
        return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"

    def wrong(self, field: str, expected: str) -> ConversionError:
        """The error to raise for a field whose value is not what it must be."""
        return ConversionError(f"{self.path}: {field} is {self.shown(field)}, expected {expected}")

    def _required(self, field: str) -> Any:
        value = self._find(field)
        if value is _ABSENT:
            raise ConversionError(f"{self.path}: {field} is missing")
        return value

    def _find(self, field: str) -> Any:
        value: Any = self.values
        for part in field.split("."):
            if not isinstance(value, dict) or part not in value:
                return _ABSENT
            value = value[part]
        return value
