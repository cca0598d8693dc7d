"""The converter that the model files fill in: check the configuration, match every tensor, plan the file.

A model class gives a table of rows (tensor, the config width of each axis, fold), the widths the rows speak of, and its
keys. Everything here is the same for all models. Until the whole file is planned, nothing is read but headers and a few
bytes per layer (`A_log`, so that a wrong one is found before hours of writing).
"""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from sys import intern
from typing import Any, ClassVar, TypeVar

from gguf_ext import Plan, PlannedTensor
from gguf_ext import constants as c
from gguf_ext.constants import GGMLQuantizationType, GGUFValueType, LlamaFileType

from . import compressed, packed
from .checkpoint import FLOAT_DTYPES, Checkpoint, Source
from .config import Config, Width
from .errors import ConversionError, listed
from .folds import Fold, stack_packed, stack_plain
from .layouts import LEGACY, Stack, cut, published_name
from .types import OUTTYPES, Override, Types

log = logging.getLogger("conversion")

ONE = "1"  # an axis of length one
MAX_LAYERS, MAX_EXPERTS = 4096, 65536  # far beyond any model; a damaged count must not become a loop without end

_EXPERT = re.compile(
    r"model\.layers\.(\d+)\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.(weight|weight_packed|weight_scale)"
)
_BUFFERS = (".rotary_emb.inv_freq", ".pos_emb.time_weight")  # endings of what some exports keep and the code computes
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_QUANTIZED = re.compile(
    r".*(_scale|\.scales?|_scale_inv|_zero_point|_packed|_shape|\.qzeros|\.qweight|\.g_idx)", re.DOTALL
)


@dataclass(frozen=True)
class Row:
    """A tensor of the checkpoint: the width of each axis by name (slowest first) and what becomes of it.

    `hf` is the name within its layer, or within the model. Rows with equal folds feed the same output. `also` gives
    other shapes under which the same bytes are stored.
    """

    hf: str
    axes: tuple[str, ...]
    fold: Fold
    also: tuple[tuple[str, ...], ...] = ()


# Projections of a routed expert in file order: gate, down, up. Checkpoint name, axes, output.
EXPERTS = (
    ("w1", ("expert_width", "expert_input"), c.FFN_GATE_EXPS),
    ("w2", ("expert_input", "expert_width"), c.FFN_DOWN_EXPS),
    ("w3", ("expert_width", "expert_input"), c.FFN_UP_EXPS),
)

ExpertKey = tuple[int, str, str]  # expert, projection, "weight" | "weight_packed" | "weight_scale"
Experts = dict[int, dict[ExpertKey, Source]]  # by layer
Groups = dict[tuple[int | None, Fold], dict[str, Source]]  # layer and fold -> sources by name


@dataclass(frozen=True)
class Dependence:
    """An axis of a tensor whose length follows from a config field, alone or together with others."""

    field: str
    tensor: str
    axis: int


class Converter(ABC):
    """Base of the model classes. The configuration is checked here completely.

    Raises:
        ConversionError: the configuration lacks a field, or asks for a mechanism this class does not have.
    """

    architecture: ClassVar[str]  # the GGUF name
    kind: ClassVar[str] = c.TYPE_MODEL  # general.type
    outtypes: ClassVar[tuple[str, ...]] = tuple(OUTTYPES)
    prefix: ClassVar[str] = ""  # of the model's tensor names; may be missing in a checkpoint
    wanted: ClassVar[tuple[str, ...]] = ("",)  # beginnings of the names that may be of this model
    ignored: ClassVar[tuple[str, ...]] = ()  # and of those that are of another part nevertheless
    layers_field: ClassVar[str] = "num_hidden_layers"
    layer_prefix: ClassVar[str] = "model.layers."  # what a layer's number follows in the checkpoint
    block: ClassVar[str] = c.BLOCK  # and what it begins with in the file
    renames: ClassVar[tuple[tuple[str, str], ...]] = LEGACY  # from other layouts to the published one
    chat_template: ClassVar[str | None] = None  # for checkpoints that ship none
    # Part of a tensor's name -> the config field that says whether such tensors exist, for messages.
    deciding_fields: ClassVar[dict[str, str]] = {}

    def __init__(self, config: Config) -> None:
        self.config = config
        self.compressed: compressed.Scheme | None = None
        self.announces_packed = True  # also with a scheme that is refused
        self.n_experts = 0
        self.kda_layers: set[int] = set()
        with config.checks:
            self.read_quantization()
        self.n_layers = config.integer(self.layers_field, maximum=MAX_LAYERS)
        self.widths: dict[str, Width] = {ONE: Width(1, "1")}
        self.read_config()

    # --- what a model class provides ----------------------------------------------------------------------------------
    @abstractmethod
    def read_config(self) -> None:
        """Check the configuration; set `n_experts` and `kda_layers` if there are any, fill `widths`."""

    @abstractmethod
    def model_rows(self) -> Iterable[Row]:
        """Tensors outside the layers."""

    @abstractmethod
    def layer_rows(self, layer: int) -> Iterable[Row]:
        """Tensors of a layer, routed experts apart."""

    @abstractmethod
    def add_fields(self, plan: Plan, file_type: LlamaFileType) -> None:
        """Add the architecture's keys in file order, `general.file_type` in its place among them."""

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward is a mixture of experts."""
        return False

    def read_quantization(self) -> None:
        """Find out how the checkpoint's matrices are stored, if not as floats."""
        self.compressed = compressed.read_scheme(self.config)
        self.announces_packed = self.compressed is None and packed.check_scheme(self.config)

    def types(self, outtype: str, overrides: Sequence[Override]) -> Types:
        """Which type each tensor gets."""
        return Types(OUTTYPES[outtype], overrides, self.n_layers, self.kda_layers)

    def stacks(self) -> Iterable[Stack]:
        """Tensors that another layout has in place of several of a layer's; the names within the layer."""
        return ()

    # --- for model classes --------------------------------------------------------------------------------------------
    def width(self, name: str, value: int, source: str, at_least: bool = False) -> int:
        """Define a width that table rows may name."""
        self.widths[name] = Width(value, source, at_least)
        return value

    def field_adder(self, plan: Plan) -> Callable[[str, Any, GGUFValueType], None]:
        """A function that adds keys under the architecture's prefix; lists become arrays."""

        def add(key: str, value: Any, type_: GGUFValueType) -> None:
            name = f"{self.architecture}.{key}"
            if isinstance(value, list):
                plan.add_field(name, value, GGUFValueType.ARRAY, type_)
            else:
                plan.add_field(name, value, type_)

        return add

    # --- the contract -------------------------------------------------------------------------------------------------
    def tensor_axes(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Every tensor of the published layout (experts unpacked), without prefix, with the width of each axis."""
        for row in self.model_rows():
            yield row.hf, row.axes
        for layer in range(self.n_layers):
            block = f"{self.layer_prefix}{layer}."
            for row in self.layer_rows(layer):
                yield block + row.hf, row.axes
            for expert in range(self.n_experts) if self.has_experts(layer) else ():
                for projection, axes, _ in EXPERTS:
                    yield f"{block}block_sparse_moe.experts.{expert}.{projection}.weight", axes

    def contract(self) -> Iterator[Dependence]:
        """Which axis of which tensor follows from which config field: what `plan_tensors` compares."""
        for tensor, axes in self.tensor_axes():
            for axis, width in enumerate(axes):
                for field in self.widths[width].fields:
                    yield Dependence(field, tensor, axis)

    # --- the plan -----------------------------------------------------------------------------------------------------
    def auto_outtype(self, checkpoint: Checkpoint) -> str:
        """The type of the checkpoint's first float matrix if that is 16 bits wide, else f16."""
        as_stored = self.compressed is None
        for source in self._stored(checkpoint) if as_stored else self._published_tensors(checkpoint).values():
            if len(source.shape) >= 2 and source.dtype in FLOAT_DTYPES:
                return "bf16" if source.dtype == "BF16" else "f16"
        return "f16"

    def plan_tensors(self, checkpoint: Checkpoint, types: Types) -> list[PlannedTensor]:
        """Match every tensor of the checkpoint, check closure, shapes and dtypes, and plan the outputs in file order.

        The order is that of existing files: packed experts by layer; then by shard and name of the source, an output
        with several sources where the last of them is, plain experts where the layer's last one is.

        Raises:
            ConversionError: tensors are missing, unexpected or unpaired, or have a wrong shape or dtype.
        """
        tensors = self._published_tensors(checkpoint)
        groups, experts = self._match(tensors)
        compressed.prepare(tensors)
        # Packed experts, nearly all tensors of a large model, have their place anyway.
        order = {source.name: number for number, source in enumerate(tensors.values()) if source.dtype != "U8"}

        def last(sources: Iterable[Source]) -> int:
            return max(order[source.name] for source in sources)

        first: list[PlannedTensor] = []
        rest: list[tuple[int, list[PlannedTensor]]] = []
        for layer, sources in sorted(experts.items()):
            outputs = list(self._plan_experts(layer, sources, types))
            _note(sources.values(), outputs)
            if outputs[0].type == GGMLQuantizationType.MXFP4:
                first += outputs
            else:
                rest.append((last(sources.values()), outputs))
        for (layer_or_none, fold), named in groups.items():
            block = "" if layer_or_none is None else self.block.format(layer=layer_or_none)
            with self.config.checks:
                outputs = fold.plan(block, named, types)
                _note(named.values(), outputs)
                rest.append((last(named.values()), outputs))
        rest.sort(key=lambda entry: entry[0])
        return first + [output for _, outputs in rest for output in outputs]

    def _stored(self, checkpoint: Checkpoint) -> Iterator[Source]:
        """The model's tensors as they are stored, in checkpoint order."""
        for name, source in checkpoint.tensors.items():
            if name.startswith(self.wanted) and not name.startswith(self.ignored) and not name.endswith(_BUFFERS):
                yield source

    def _published_tensors(self, checkpoint: Checkpoint) -> dict[str, Source]:
        """The model's tensors by their published names without prefix, in checkpoint order."""
        stacks = {stack.hf: stack for stack in self.stacks()}
        endings = tuple(stacks)
        text: dict[str, Source] = {}
        for source in self._stored(checkpoint):
            short = published_name(source.name.removeprefix(self.prefix), self.renames)
            parts = [(short, source)]
            if short.endswith(endings) and (match := _LAYER.match(short)):
                stack = stacks.get(short[match.end() :])
                parts = parts if stack is None else self._cut(match[0], stack, source)
            for part, piece in parts:
                if part in text:
                    raise ConversionError(f"{text[part].name} and {piece.name} are the same tensor under two names")
                text[part] = piece
        return text if self.compressed is None else compressed.dequantized(text, self.compressed)

    def _cut(self, block: str, stack: Stack, source: Source) -> list[tuple[str, Source]]:
        self._check(source, stack.axes)
        shape = tuple(self.widths[axis].value for axis in stack.part_axes)
        names = [block + part for part in stack.parts]
        return list(zip(names, cut(source, stack.parts, shape), strict=True))

    def _match(self, text: dict[str, Source]) -> tuple[Groups, Experts]:
        rows: dict[str, tuple[int | None, Row]] = {row.hf: (None, row) for row in self.model_rows()}
        for layer in range(self.n_layers):
            rows |= {f"{self.layer_prefix}{layer}.{row.hf}": (layer, row) for row in self.layer_rows(layer)}
        experts: Experts = {layer: {} for layer in range(self.n_layers) if self.has_experts(layer)}
        unexpected = []
        for name, source in text.items():
            if name in rows:
                continue
            match = _EXPERT.fullmatch(name)
            if match and int(match[1]) in experts:
                part = int(match[2]), intern(match[3]), intern(match[4])  # else half a million strings
                experts[int(match[1])][part] = source
            else:
                unexpected.append(source)
        missing = [name for name in rows if name not in text]
        checks = self.config.checks
        with checks:
            if missing or unexpected:
                raise self._closure_error(missing, unexpected, rows, text)
        groups: Groups = {}
        unfit = set()  # outputs that cannot be made; there are none unless problems are gathered
        for name, (layer_or_none, row) in rows.items():
            key = layer_or_none, row.fold
            if name in text and checks.passes(self._check, text[name], row.axes, *row.also):
                groups.setdefault(key, {})[row.hf] = text[name]
            else:
                unfit.add(key)
        groups = {key: named for key, named in groups.items() if key not in unfit}
        return groups, {layer: sources for layer, sources in experts.items() if self._experts_fit(layer, sources)}

    def _closure_error(
        self,
        missing: list[str],
        unexpected: list[Source],
        rows: dict[str, tuple[int | None, Row]],
        text: dict[str, Source],
    ) -> ConversionError:
        what = f"{self.config.architecture} with {self.n_layers} layers"
        names = {source.name for source in unexpected}
        numbered = re.compile(re.escape(self.layer_prefix) + r"(\d+)\.")
        beyond = {name for name in names if (match := numbered.search(name)) and int(match[1]) >= self.n_layers}
        quantized = {name for name in names - beyond if _QUANTIZED.fullmatch(name)}
        present = {(layer, row.fold): text[name] for name, (layer, row) in rows.items() if name in text}
        partners = {name: present.get((rows[name][0], rows[name][1].fold)) for name in missing}
        unpaired = {name: partner for name, partner in partners.items() if partner is not None}
        lone = {self.prefix + name for name in missing if name not in unpaired}
        others = names - beyond - quantized
        fields = {field for name in lone | others for part, field in self.deciding_fields.items() if part in name}
        problems = [f"{field} is {self.config.shown(field)}" for field in sorted(fields)]
        problems += [f"{partner.name} has no {self.prefix}{name} beside it" for name, partner in unpaired.items()]
        if beyond:
            problems.append(f"{self.layers_field} is {self.n_layers}, but there are later layers: {listed(beyond)}")
        if quantized:
            problems.append(f"quantized where nothing may be: {listed(quantized)}; supported: {compressed.SUPPORTED}")
        if lone:
            problems.append(f"missing: {listed(lone)}")
        if others:
            problems.append(f"unexpected: {listed(others)}")
        return ConversionError(f"the tensors are not those of {what}: " + "; ".join(problems))

    def _check(self, source: Source, *shapes: tuple[str, ...]) -> None:
        """Check dtype and shape; `shapes` are alternatives, each a list of width names."""
        if source.dtype not in FLOAT_DTYPES:
            what = "an integer weight without a known packing" if source.dtype[0] in "UIB" else "not read"
            raise ConversionError(
                f"tensor {source.name}: dtype {source.dtype} is {what}; supported: {', '.join(FLOAT_DTYPES)}, "
                f"and {compressed.SUPPORTED}"
            )
        for axes in shapes:
            widths = [self.widths[axis] for axis in axes]
            if len(widths) == len(source.shape) and all(
                length >= width.value if width.at_least else length == width.value
                for length, width in zip(source.shape, widths, strict=True)
            ):
                return
        raise ConversionError(f"tensor {source.name}: " + self._shape_problem(source.shape, shapes))

    def _shape_problem(self, shape: tuple[int, ...], shapes: tuple[tuple[str, ...], ...]) -> str:
        axes = next((axes for axes in shapes if len(axes) == len(shape)), shapes[0])
        widths = [self.widths[axis] for axis in axes]
        if len(shape) != len(widths):
            expected = ", ".join(str(width.value) for width in widths)
            return f"shape {list(shape)}, expected [{expected}]"
        for axis, (length, width) in enumerate(zip(shape, widths, strict=True)):
            if length < width.value or (length > width.value and not width.at_least):
                least = "at least " if width.at_least else ""
                return f"axis {axis} is {length}, expected {least}{width.value} ({width.source}); shape {list(shape)}"
        raise AssertionError("called for a shape that fits")

    # --- routed experts -----------------------------------------------------------------------------------------------
    def _experts_fit(self, layer: int, sources: dict[ExpertKey, Source]) -> bool:
        """Whether the experts of a layer are complete and of the right kind, shape and dtype."""
        checks = self.config.checks
        with checks:
            wanted = self._expert_kinds(layer, sources)
            fits = [
                checks.passes(self._check_projection, layer, sources, wanted, projection, axes)
                for projection, axes, _ in EXPERTS
            ]
            return all(fits)
        return False

    def _expert_kinds(self, layer: int, sources: dict[ExpertKey, Source]) -> tuple[str, ...]:
        """What each expert of a layer must have."""
        where = f"layer {layer}"
        kinds = {kind for _, _, kind in sources}
        if "weight" in kinds and len(kinds) > 1:
            plain = next(source.name for (_, _, kind), source in sources.items() if kind == "weight")
            other = next(source.name for (_, _, kind), source in sources.items() if kind != "weight")
            raise ConversionError(f"{where}: experts are partly packed: {plain} beside {other}")
        wanted = ("weight",) if "weight" in kinds or not kinds else (packed.PACKED, packed.SCALE)
        if packed.PACKED in wanted and not self.announces_packed:
            source = next(iter(sources.values()))
            raise ConversionError(
                f"tensor {source.name}: an integer weight without a known packing: {self.config.path} has no "
                f"quantization_config; supported: {compressed.SUPPORTED}"
            )
        return wanted

    def _check_projection(
        self,
        layer: int,
        sources: dict[ExpertKey, Source],
        wanted: tuple[str, ...],
        projection: str,
        axes: tuple[str, ...],
    ) -> None:
        where = f"layer {layer}"
        ids = {expert for expert, other, _ in sources if other == projection}
        extra = sorted(ids - set(range(self.n_experts)))
        if extra:
            raise ConversionError(
                f"{where}, {projection}: expert {extra[0]} is too many: num_experts is {self.n_experts}, counted from 0"
            )
        for kind in wanted:
            absent = [n for n in range(self.n_experts) if (n, projection, kind) not in sources]
            if absent:
                more = f" (and {len(absent) - 1} more experts)" if len(absent) > 1 else ""
                lone = absent[0] in ids  # its other half is there
                what = f"{kind} of expert {absent[0]}" if lone else f"expert {absent[0]}"
                raise ConversionError(
                    f"{where}, {projection}: {what} is missing{more}: num_experts is {self.n_experts}"
                )
        for expert in range(self.n_experts):
            if wanted == ("weight",):
                self._check(sources[expert, projection, "weight"], axes)
            else:
                weight = sources[expert, projection, packed.PACKED]
                scale = sources[expert, projection, packed.SCALE]
                packed.check_pair(weight, scale, self.widths[axes[0]].value, self.widths[axes[1]].value)

    def _plan_experts(self, layer: int, sources: dict[ExpertKey, Source], types: Types) -> Iterator[PlannedTensor]:
        block = c.BLOCK.format(layer=layer)
        is_packed = (0, "w1", packed.PACKED) in sources
        for projection, _, name in EXPERTS:
            numbers = range(self.n_experts)
            if is_packed:
                pairs = [(sources[n, projection, packed.PACKED], sources[n, projection, packed.SCALE]) for n in numbers]
                yield stack_packed(block, name, pairs)
            else:
                yield stack_plain(block, name, [sources[n, projection, "weight"] for n in numbers], types)


def _note(sources: Iterable[Source], outputs: Iterable[PlannedTensor]) -> None:
    """A line per output for the curious: where it comes from and what it becomes."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    names = [source.name for source in sources]
    origin = " + ".join(names) if len(names) <= 2 else f"{names[0]} … {names[-1]} ({len(names)} tensors)"
    for output in outputs:
        log.debug("%s -> %s, ne %s, %s", origin, output.name, list(output.ne), output.type.name)


_CONVERTERS: dict[tuple[str, str], type[Converter]] = {}  # by what they make (general.type) and architecture
_C = TypeVar("_C", bound=type[Converter])


def register(*names: str) -> Callable[[_C], _C]:
    """Class decorator: the class converts these Hugging Face architectures."""

    def add(cls: _C) -> _C:
        for name in names:
            if (cls.kind, name) in _CONVERTERS:
                raise ValueError(f"{name} is registered twice")
            _CONVERTERS[cls.kind, name] = cls
        return cls

    return add


def get_converter(name: str, kind: str = c.TYPE_MODEL) -> type[Converter]:
    """The class for a Hugging Face architecture: of its text model, or of its vision part.

    Raises:
        ConversionError: there is none; lists those there are.
    """
    if (kind, name) in _CONVERTERS:
        return _CONVERTERS[kind, name]
    if kind == c.TYPE_MMPROJ and name in supported_architectures():
        what = "has no vision part; architectures with one: "
    else:
        what = "is not supported; supported: "
    raise ConversionError(f"architecture {name} {what}{', '.join(supported_architectures(kind))}")


def supported_architectures(kind: str = c.TYPE_MODEL) -> list[str]:
    return sorted(name for of, name in _CONVERTERS if of == kind)
