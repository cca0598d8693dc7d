"""Which GGUF type each tensor of the output gets."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from gguf_ext import constants as c
from gguf_ext.constants import GGMLQuantizationType as T
from gguf_ext.constants import LlamaFileType
from gguf_ext.quants import QUANTIZABLE, can_quantize, check_available

from .errors import ConversionError


@dataclass(frozen=True)
class Graded:
    """A type for some first layers, another for the rest. `n_first` gives their number from that of all layers."""

    first: T
    n_first: Callable[[int], int]
    rest: T | None = None


@dataclass(frozen=True)
class OutType:
    """What an `--outtype` makes of the matrices; None means as `matrices` says.

    Attributes:
        file_type: `general.file_type`.
        experts: routed experts that are not packed.
        better: `attn_v` and `ffn_down` of the layers where `matters_more`.
        attn_output: the last projection of KDA and MLA.
        attn_v, ffn_down: those by layer, before `better`. `attn_v` counts the layers that have one.
    """

    matrices: T
    file_type: LlamaFileType
    token_embd: T | None = None
    output: T | None = None
    experts: T | None = None
    better: T | None = None
    attn_output: T | None = None
    attn_v: Graded | None = None
    ffn_down: Graded | None = None


def _all(type_: T) -> Graded:
    return Graded(type_, lambda n: n)


def _first_eighth(type_: T) -> Graded:
    return Graded(type_, lambda n: n // 8)


# The mixes are those of existing files. Plain K-quants count as their small mix, which they are nearest to.
OUTTYPES = {
    "f32": OutType(T.F32, LlamaFileType.ALL_F32),
    "f16": OutType(T.F16, LlamaFileType.MOSTLY_F16),
    "bf16": OutType(T.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": OutType(T.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q6_k": OutType(T.Q6_K, LlamaFileType.MOSTLY_Q6_K),
    "q5_0": OutType(T.Q5_0, LlamaFileType.MOSTLY_Q5_0, output=T.Q6_K),
    "q5_1": OutType(T.Q5_1, LlamaFileType.MOSTLY_Q5_1, output=T.Q6_K),
    "q5_k": OutType(T.Q5_K, LlamaFileType.MOSTLY_Q5_K_S, output=T.Q6_K),
    "q5_k_m": OutType(T.Q5_K, LlamaFileType.MOSTLY_Q5_K_M, output=T.Q6_K, better=T.Q6_K),
    "q4_k": OutType(T.Q4_K, LlamaFileType.MOSTLY_Q4_K_S, output=T.Q6_K),
    "q4_k_m": OutType(T.Q4_K, LlamaFileType.MOSTLY_Q4_K_M, output=T.Q6_K, better=T.Q6_K),
    "q4_k_s": OutType(
        T.Q4_K,
        LlamaFileType.MOSTLY_Q4_K_S,
        output=T.Q6_K,
        attn_v=Graded(T.Q5_K, lambda n: 4),
        ffn_down=_first_eighth(T.Q5_K),
    ),
    "q4_0": OutType(T.Q4_0, LlamaFileType.MOSTLY_Q4_0, output=T.Q6_K),
    "q4_1": OutType(T.Q4_1, LlamaFileType.MOSTLY_Q4_1, output=T.Q6_K),
    "iq4_nl": OutType(T.IQ4_NL, LlamaFileType.MOSTLY_IQ4_NL, output=T.Q6_K, ffn_down=_first_eighth(T.Q5_K)),
    "iq4_xs": OutType(T.IQ4_XS, LlamaFileType.MOSTLY_IQ4_XS, output=T.Q6_K, ffn_down=_first_eighth(T.Q5_K)),
    "q3_k_l": OutType(
        T.Q3_K,
        LlamaFileType.MOSTLY_Q3_K_L,
        output=T.Q6_K,
        attn_output=T.Q5_K,
        attn_v=_all(T.Q5_K),
        ffn_down=_all(T.Q5_K),
    ),
    "q3_k_m": OutType(
        T.Q3_K,
        LlamaFileType.MOSTLY_Q3_K_M,
        output=T.Q6_K,
        attn_output=T.Q4_K,
        attn_v=Graded(T.Q5_K, lambda n: 2, T.Q4_K),
        ffn_down=Graded(T.Q5_K, lambda n: n // 16, T.Q4_K),
    ),
    "q3_k_s": OutType(T.Q3_K, LlamaFileType.MOSTLY_Q3_K_S, output=T.Q6_K),
    "q2_k": OutType(
        T.Q2_K,
        LlamaFileType.MOSTLY_Q2_K,
        output=T.Q6_K,
        attn_output=T.Q3_K,
        attn_v=_all(T.Q3_K),
        ffn_down=_all(T.Q3_K),
    ),
    "q2_k_s": OutType(T.Q2_K, LlamaFileType.MOSTLY_Q2_K_S, output=T.Q6_K, ffn_down=_first_eighth(T.Q4_K)),
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

    def asked_for(self, name: str) -> T | None:
        """The type that an override gives this tensor, by its full name."""
        for override in self.overrides:
            if override.pattern.search(name):
                self._used.add(override.text)
                return override.type
        return None

    def _wanted(self, prefix: str, name: str) -> T:
        asked = self.asked_for(prefix + name)
        if asked is not None:
            return asked
        kind = self.outtype
        special: T | None = None
        if name == c.TOKEN_EMBD:
            special = kind.token_embd
        elif name == c.OUTPUT:
            special = kind.output
        elif name in _EXPERTS and kind.experts is not None:
            special = kind.experts
        elif name == c.ATTN_OUTPUT:
            special = kind.attn_output
        elif name == c.ATTN_V or name in _DOWN:
            special = self._by_layer(prefix, name)
        return kind.matrices if special is None else special

    def _by_layer(self, prefix: str, name: str) -> T | None:
        kind, index, count = self.outtype, int(prefix.split(".")[1]), self.n_layers
        graded = kind.ffn_down
        if name == c.ATTN_V:
            graded = kind.attn_v
            index, count = sorted(self.kda_layers).index(index), len(self.kda_layers)
        if graded is not None:
            return graded.first if index < graded.n_first(count) else graded.rest
        return kind.better if kind.better is not None and matters_more(index, count) else None
