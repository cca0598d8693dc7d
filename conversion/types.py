"""Which GGUF type each tensor of the output gets."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from gguf_ext import constants as c
from gguf_ext.constants import GGMLQuantizationType as T
from gguf_ext.constants import LlamaFileType
from gguf_ext.quants import QUANTIZABLE, can_quantize, check_available

from .errors import ConversionError


@dataclass(frozen=True)
class OutType:
    """What an `--outtype` makes of the matrices; None means as `matrices` says.

    Attributes:
        file_type: `general.file_type`.
        experts: routed experts that are not packed.
        better: `attn_v` and `ffn_down` of the layers where `matters_more`.
    """

    matrices: T
    file_type: LlamaFileType
    token_embd: T | None = None
    output: T | None = None
    experts: T | None = None
    better: T | None = None


# The mixes are those of existing files. Plain K-quants count as their small mix, which they are nearest to.
OUTTYPES = {
    "f32": OutType(T.F32, LlamaFileType.ALL_F32),
    "f16": OutType(T.F16, LlamaFileType.MOSTLY_F16),
    "bf16": OutType(T.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": OutType(T.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q6_k": OutType(T.Q6_K, LlamaFileType.MOSTLY_Q6_K),
    "q5_k": OutType(T.Q5_K, LlamaFileType.MOSTLY_Q5_K_S, output=T.Q6_K),
    "q5_k_m": OutType(T.Q5_K, LlamaFileType.MOSTLY_Q5_K_M, output=T.Q6_K, better=T.Q6_K),
    "q4_k": OutType(T.Q4_K, LlamaFileType.MOSTLY_Q4_K_S, output=T.Q6_K),
    "q4_k_m": OutType(T.Q4_K, LlamaFileType.MOSTLY_Q4_K_M, output=T.Q6_K, better=T.Q6_K),
    "q4_0": OutType(T.Q4_0, LlamaFileType.MOSTLY_Q4_0, output=T.Q6_K),
    "mxfp4": OutType(T.Q8_0, LlamaFileType.MOSTLY_MXFP4_MOE, experts=T.MXFP4),
    "tq1_0": OutType(T.TQ1_0, LlamaFileType.MOSTLY_TQ1_0, token_embd=T.F16, output=T.F16),
    "tq2_0": OutType(T.TQ2_0, LlamaFileType.MOSTLY_TQ2_0, token_embd=T.F16, output=T.F16),
}

# For rows that are whole blocks of 32 but not of 256: the next type that loses less. All else becomes F16.
_FOR_SHORT_ROWS = {
    T.Q2_K: T.Q4_0,
    T.Q3_K: T.Q4_0,
    T.Q4_K: T.Q5_0,
    T.Q5_K: T.Q5_1,
    T.Q6_K: T.Q8_0,
    T.IQ4_XS: T.IQ4_NL,
}

_EXPERTS = frozenset({c.FFN_GATE_EXPS, c.FFN_UP_EXPS, c.FFN_DOWN_EXPS})
_DOWN = frozenset({c.FFN_DOWN, c.FFN_DOWN_EXPS, c.FFN_DOWN_SHEXP})


def matters_more(index: int, count: int) -> bool:
    """Layers that a mix spends more bits on: the first and the last eighth, and every third between."""
    return index < count // 8 or index >= 7 * count // 8 or (index - count // 8) % 3 == 2


@dataclass(frozen=True)
class Override:
    """`PATTERN=TYPE`: tensors in whose name the regular expression is found get the type."""

    text: str
    pattern: re.Pattern[str]
    type: T


def parse_override(text: str) -> Override:
    """Raises:
    ConversionError: the text is not PATTERN=TYPE, the pattern no regular expression or the type not written here.
    """
    pattern, separator, name = text.rpartition("=")
    if not separator or not pattern or not name:
        raise ConversionError(f"tensor type {text!r}, expected PATTERN=TYPE")
    possible = {type_.name.lower(): type_ for type_ in QUANTIZABLE}
    if name.lower() not in possible:
        raise ConversionError(f"tensor type {text!r}: no type {name!r}, expected one of {', '.join(possible)}")
    try:
        return Override(text, re.compile(pattern), possible[name.lower()])
    except re.error as error:
        raise ConversionError(f"tensor type {text!r}: {pattern!r} is no regular expression: {error}") from None


@dataclass
class Types:
    """Which type each output tensor gets: a function of its name, its shape, the output type and the overrides.

    Attributes:
        overrides: the first one whose pattern is found in a name decides. They choose among types of matrices: what
            must stay F32 and packed experts are not theirs.
        n_layers, kda_layers: of the model, for mixes.
    """

    outtype: OutType
    overrides: Sequence[Override] = ()
    n_layers: int = 0
    kda_layers: Collection[int] = ()
    _used: set[str] = field(default_factory=set)
    _short: dict[tuple[str, int, T, T], list[str]] = field(default_factory=dict)

    def of(self, prefix: str, name: str, ne: tuple[int, ...]) -> T:
        """Vectors, norms, biases, router and convolutions stay F32; the rest gets what is asked for, or a type of
        smaller blocks where rows are not whole ones. `prefix` is "blk.N." or empty.

        Raises:
            GGUFError: this installation cannot write the type.
        """
        if len(ne) == 1 or name in c.ALWAYS_F32 or name.endswith("_norm.weight") or not name.endswith(".weight"):
            return T.F32
        wanted = self._wanted(prefix, name)
        type_ = wanted
        if not can_quantize(type_, ne[0]):
            type_ = _FOR_SHORT_ROWS.get(wanted, T.F16)
            if not can_quantize(type_, ne[0]):
                type_ = T.F16
            self._short.setdefault((name, ne[0], wanted, type_), []).append(prefix)
        check_available(type_)
        return type_

    @property
    def warnings(self) -> list[str]:
        """Sentences about tensors that got another type than asked for."""
        found = []
        for (name, length, wanted, type_), prefixes in self._short.items():
            where = f"{prefixes[0]}{name}" + (f" and {len(prefixes) - 1} like it" if len(prefixes) > 1 else "")
            found.append(
                f"{where}: rows of {length} values are not whole {wanted.name} blocks; written as {type_.name}"
            )
        return found

    def check_overrides(self, names: Iterable[str]) -> None:
        """Check, once all tensors are planned, that every override decided about one.

        Raises:
            ConversionError: one did not.
        """
        unused = [override for override in self.overrides if override.text not in self._used]
        if not unused:
            return
        override = unused[0]
        matching = [name for name in names if override.pattern.search(name)]
        if not matching:
            raise ConversionError(f"tensor type {override.text!r} matches no tensor")
        why = "an earlier pattern decides about them, or their type is fixed (F32 tensors, packed experts)"
        raise ConversionError(
            f"tensor type {override.text!r} decides about no tensor; it matches {len(matching)}, such as "
            f"{matching[0]}: {why}"
        )

    def _wanted(self, prefix: str, name: str) -> T:
        for override in self.overrides:
            if override.pattern.search(prefix + name):
                self._used.add(override.text)
                return override.type
        kind = self.outtype
        special: T | None = None
        if name == c.TOKEN_EMBD:
            special = kind.token_embd
        elif name == c.OUTPUT:
            special = kind.output
        elif name in _EXPERTS and kind.experts is not None:
            special = kind.experts
        elif kind.better is not None and self._is_better(prefix, name):
            special = kind.better
        return kind.matrices if special is None else special

    def _is_better(self, prefix: str, name: str) -> bool:
        if name not in _DOWN and name != c.ATTN_V:
            return False
        layer = int(prefix.split(".")[1])
        if name in _DOWN:
            return matters_more(layer, self.n_layers)
        return matters_more(sorted(self.kda_layers).index(layer), len(self.kda_layers))
