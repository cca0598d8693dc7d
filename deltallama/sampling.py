"""How the next token is chosen. The defaults are those of the library, the same everywhere."""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Mapping
from typing import Any, TypedDict

from ._ffi import ffi, fill, lib, struct_values
from .checks import brief, real, whole
from .errors import ArgumentError


class SamplingOptions(TypedDict, total=False):
    """Keyword arguments of everything that generates.

    Order: logit bias, penalties, then temperature 0 takes the best token; otherwise temperature, top-k, top-p, min-p,
        draw.
    """

    temperature: float
    """Divides the logits; 0 is greedy."""
    top_k: int
    """Keep this many best tokens; 0 keeps all."""
    top_p: float
    """Keep the fewest best tokens whose probabilities reach this sum; 1 keeps all."""
    min_p: float
    """Keep tokens at least this fraction as probable as the best; 0 keeps all."""
    repetition_penalty: float
    """Divides positive and multiplies negative logits of tokens seen before; 1 is off."""
    repeat_penalty: float
    """Another spelling of `repetition_penalty`."""
    presence_penalty: float
    """Subtracted once from tokens seen before."""
    frequency_penalty: float
    """Subtracted for each time a token was seen before."""
    penalty_last_n: int
    """How many tokens, the prompt included, the penalties look back on; -1 all, 0 none."""
    logit_bias: Mapping[int, float]
    """Token id -> number added to its logit."""
    seed: int | None
    """The same seed, text and options give the same result. None draws a new one, which the result reports."""


_ALIASES = {"repeat_penalty": "repetition_penalty"}
_OWN = ("seed", "logit_bias")


def default_options() -> dict[str, float | int]:
    """The defaults of all options but `seed` and `logit_bias`, from the library."""
    params = ffi.new("delta_sampling_params *")
    lib.delta_sampling_params_init(params)
    fields = struct_values(params)
    return {name: fields[name] for name in SamplingOptions.__annotations__ if name in fields and name not in _OWN}


def check_seed(seed: int | None) -> int | None:
    """The seed, if it is one."""
    return None if seed is None else whole("seed", seed, 0, 2**64 - 1)


class Sampler:
    """Checked options in the library's form.

    Attributes:
        params: `delta_sampling_params *`.
        seed: the seed in use.
    """

    def __init__(self, options: Mapping[str, Any], default_seed: int | None = None) -> None:
        """Raises ArgumentError for a value, TypeError for a name that is not an option."""
        values = dict(options)
        for alias, name in _ALIASES.items():
            if alias in values:
                if name in values:
                    raise TypeError(f"{alias} and {name} are the same option; give one")
                values[name] = values.pop(alias)
        known = SamplingOptions.__annotations__
        for name in values:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                raise TypeError(
                    f"unexpected keyword argument {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")
                )
        seed = values.pop("seed", None)
        seed = check_seed(default_seed if seed is None else seed)
        self.seed = secrets.randbits(63) if seed is None else seed
        bias = values.pop("logit_bias", None)
        bias = {} if bias is None else bias
        if not isinstance(bias, Mapping):
            raise ArgumentError(f"logit_bias maps token ids to numbers, got {brief(bias)}")
        items = [(whole("a token of logit_bias", t), real(f"logit_bias of {brief(t)}", x)) for t, x in bias.items()]
        try:
            self._bias = ffi.new("delta_token_bias[]", items)
        except OverflowError as error:
            raise ArgumentError(f"logit_bias maps token ids to numbers: {error}") from None
        self.params = ffi.new("delta_sampling_params *")
        lib.delta_sampling_params_init(self.params)
        fill(self.params, **values, seed=self.seed, n_logit_bias=len(self._bias))
        self.params.logit_bias = self._bias  # borrowed: this object keeps it alive
