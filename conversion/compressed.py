"""Quantized checkpoints of compressed-tensors whose weights are dequantized: int4 `pack-quantized`, FP8
`float-quantized`.

The arithmetic is that of the package `compressed-tensors` itself (extra `compressed`, which brings torch): its
decompressors see the tensors of a module, cut to some rows, and what they return is the weight. Nothing of it is
imported for any other checkpoint.

Of a module `X` the file has, instead of `X.weight`:

    pack-quantized    X.weight_packed I32 [out, in / 8], X.weight_scale [out, groups], X.weight_shape [2], and unless
                      symmetric X.weight_zero_point I32 [out / 8, groups]
    float-quantized   X.weight F8_E4M3 [out, in], X.weight_scale [1], [out, 1] or one for each block

Everything else that the format can express is refused by name.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import packed
from .checkpoint import FLOAT_DTYPES, Source
from .config import Config
from .errors import ConversionError

MXFP4, PACK, FLOAT = "mxfp4-pack-quantized", "pack-quantized", "float-quantized"
SUPPORTED = (
    f"{packed.SUPPORTED}, pack-quantized (int4; groups, channels), float-quantized (FP8; tensor, channels, blocks)"
)

_PER_WORD = 8  # int4 values in an int32
_MAX_BLOCK = 1024  # a matrix is filled up to whole blocks when it is decoded
_WEIGHTS: dict[str, dict[str, tuple[Any, ...]]] = {  # key -> the values that are supported
    PACK: {
        "num_bits": (4,),
        "type": ("int",),
        "strategy": ("group", "channel"),
        "symmetric": (True, False),
        "dynamic": (False, None),
        "actorder": (None, False, "weight", "static"),  # these two order the calibration only
    },
    FLOAT: {
        "num_bits": (8,),
        "type": ("float",),
        "strategy": ("tensor", "channel", "block"),
        "symmetric": (True,),
        "dynamic": (False, None),
        "actorder": (None, False),
    },
}

log = logging.getLogger("conversion")


@dataclass(frozen=True)
class Scheme:
    """How all quantized modules of a checkpoint are stored; `weights` as in the configuration."""

    format: str
    weights: dict[str, Any]

    @property
    def strategy(self) -> str:
        return str(self.weights["strategy"])

    @property
    def symmetric(self) -> bool:
        return bool(self.weights["symmetric"])

    def scale_shape(self, rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
        """The shapes that the scale of a weight `[rows, columns]` may have."""
        if self.strategy == "tensor":
            return ((1,), ())
        if self.strategy == "channel":
            return ((rows, 1),)
        if self.strategy == "group":
            return ((rows, columns // self.weights["group_size"]),)
        height, width = self.weights["block_structure"]
        return ((-(-rows // height), -(-columns // width)),)

    def height(self, part: str) -> int:
        """How many rows of the weight a row of a part is for; 0: the part is for all of them."""
        if part == "weight_scale":
            return {"tensor": 0, "block": int(self.weights.get("block_structure", (0,))[0])}.get(self.strategy, 1)
        return _PER_WORD if part == "weight_zero_point" else 1

    def __str__(self) -> str:
        kind = "FP8" if self.format == FLOAT else "int4"
        unit = {"group": "group_size", "block": "block_structure"}.get(self.strategy)
        size = f" of {self.weights[unit]}" if unit else ""
        return f"{self.format}, {kind}, {self.strategy}{size}, {'' if self.symmetric else 'a'}symmetric"


def read_scheme(config: Config) -> Scheme | None:
    """The scheme that the configuration announces; None if there is none, or the one of `packed.py`.

    Raises:
        ConversionError: it announces any other quantization.
    """
    where = "quantization_config"
    announced = config.get(where)
    if announced is None:
        return None
    if not isinstance(announced, dict):
        raise config.wrong(where, "an object")
    _must_be(config, f"{where}.quant_method", announced.get("quant_method"), ("compressed-tensors",))
    format_: Any = announced.get("format")
    _must_be(config, f"{where}.format", format_, (MXFP4, PACK, FLOAT))
    if format_ == MXFP4:
        return None
    _must_be(config, f"{where}.quantization_status", announced.get("quantization_status"), ("compressed",))
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config", "moe_sparsity_config"):
        if announced.get(key):
            raise ConversionError(
                f"{config.path}: {where}.{key} is set, which is not supported; supported: {SUPPORTED}"
            )
    groups = announced.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ConversionError(f"{config.path}: {where}.config_groups is missing or empty")
    schemes = [_read_group(config, f"{where}.config_groups.{name}", group, format_) for name, group in groups.items()]
    if any(scheme != schemes[0] for scheme in schemes):
        raise ConversionError(f"{config.path}: {where}.config_groups quantize weights in different ways; expected one")
    return schemes[0]


def _read_group(config: Config, where: str, group: Any, format_: str) -> Scheme:
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise ConversionError(f"{config.path}: {where}.weights is missing")
    _must_be(config, f"{where}.format", group.get("format"), (None, format_))
    weights = {"symmetric": True, **group["weights"]}
    for key, allowed in _WEIGHTS[format_].items():
        _must_be(config, f"{where}.weights.{key}", weights.get(key), allowed)
    if weights["strategy"] == "group" and not _is_positive(weights.get("group_size")):
        raise ConversionError(f"{config.path}: {where}.weights.group_size is {weights.get('group_size')!r}")
    if weights["strategy"] == "block":
        block = weights.get("block_structure")
        if (
            not isinstance(block, list)
            or len(block) != 2
            or not all(_is_positive(n) and n <= _MAX_BLOCK for n in block)
        ):
            raise ConversionError(
                f"{config.path}: {where}.weights.block_structure is {block!r}, expected two numbers up to {_MAX_BLOCK}"
            )
    # Inputs that are quantized when the model runs leave no trace in the weights; here they stay as they are.
    inputs = group.get("input_activations")
    if inputs is not None and (not isinstance(inputs, dict) or inputs.get("dynamic") is not True):
        raise ConversionError(f"{config.path}: {where}.input_activations is not dynamic; supported: {SUPPORTED}")
    _must_be(config, f"{where}.output_activations", group.get("output_activations"), (None,))
    sizes = {"group": ("group_size",), "block": ("block_structure",)}.get(weights["strategy"], ())
    return Scheme(format_, {key: weights[key] for key in ("num_bits", "type", "strategy", "symmetric", *sizes)})


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _must_be(config: Config, where: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if not any(value == one and type(value) is type(one) for one in allowed):
        expected = " or ".join(repr(one) for one in allowed)
        raise ConversionError(f"{config.path}: {where} is {value!r}, expected {expected}; supported: {SUPPORTED}")


class Decoder:
    """The package's decompressor for a scheme, of use once it is loaded."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme
        self.version = ""

    def load(self) -> None:
        """Import the package.

        Raises:
            ConversionError: it is not installed, or its version knows no such scheme.
        """
        scheme = self.scheme
        try:
            import torch
            from compressed_tensors import __version__
            from compressed_tensors.compressors import BaseCompressor
            from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        except ImportError as error:
            raise ConversionError(
                f"the weights are quantized ({scheme}), and what decodes them is not installed ({error}): "
                "pip install 'deltallama[compressed]'"
            ) from None
        try:
            self._compressor: Any = BaseCompressor.get_value_from_registry(scheme.format)
            self._arguments = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**scheme.weights))
        except (KeyError, ValueError, NotImplementedError) as error:
            raise ConversionError(f"compressed-tensors {__version__} does not know {scheme}: {error}") from None
        self._torch: Any = torch
        self.version = str(__version__)

    def weight(self, parts: dict[str, tuple[str, tuple[int, ...], np.ndarray]]) -> np.ndarray:
        """The bytes of a weight from its parts: dtype, shape and bytes of each."""
        torch = self._torch
        types = {
            "BF16": torch.bfloat16,
            "F16": torch.float16,
            "F32": torch.float32,
            "F8_E4M3": torch.float8_e4m3fn,
            "I32": torch.int32,
            "I64": torch.int64,
        }
        state = {
            name: torch.from_numpy(np.require(data, requirements="W")).view(types[dtype]).reshape(shape)
            for name, (dtype, shape, data) in parts.items()
        }
        zero = "weight_zero_point"
        if zero in state:
            # It is read along its columns, as bytes; for a single row that needs a layout with whole columns.
            state[zero] = state[zero].t().clone(memory_format=torch.contiguous_format).t()
        weight = self._compressor.decompress(state, self._arguments)["weight"]
        result: np.ndarray = weight.contiguous().view(torch.uint8).numpy().reshape(-1)
        return result


class Dequantized(Source):
    """The weight `[rows, columns]` of a quantized module, in the float type of its scale, decoded when it is read."""

    __slots__ = ("decoder", "parts", "scheme")

    def __init__(
        self, name: str, shape: tuple[int, ...], parts: dict[str, Source], scheme: Scheme, decoder: Decoder
    ) -> None:
        scale = parts["weight_scale"]
        super().__init__(name, scale.dtype, shape, scale.shard, scale.offset)
        self.parts, self.scheme, self.decoder = parts, scheme, decoder

    def raw(self, first: int = 0, count: int | None = None) -> np.ndarray:
        """As of any source; decodes the rows that the elements lie in.

        Raises:
            ConversionError: `weight_shape` contradicts the shape that follows from the other parts.
        """
        rows, columns = self.shape
        count = self.n_elements - first if count is None else count
        step = max(self.scheme.height(part) for part in self.parts)  # rows that are decoded together
        begin = first // (columns * step) * step
        end = min(rows, -(-(first + count) // (columns * step)) * step)
        state = {part: self._some_rows(part, begin, end) for part in self.parts}
        decoded = self.decoder.weight(state).reshape((end - begin) * columns, -1)  # [elements, bytes of each]
        at = first - begin * columns
        return decoded[at : at + count].reshape(-1)

    def _some_rows(self, part: str, begin: int, end: int) -> tuple[str, tuple[int, ...], np.ndarray]:
        source, height = self.parts[part], self.scheme.height(part)
        if part == "weight_shape":
            stored = source.raw().view({"I64": "<i8", "I32": "<i4"}[source.dtype]).tolist()
            if stored != list(self.shape):
                raise ConversionError(f"tensor {source.name}: the shape is {stored}, expected {list(self.shape)}")
            return "I64", (2,), np.array([end - begin, self.shape[1]], "<i8").view(np.uint8)
        if height == 0:
            return source.dtype, source.shape, source.raw()
        first, last = begin // height, -(-end // height)
        length = source.n_elements // source.shape[0]
        return source.dtype, (last - first, *source.shape[1:]), source.raw(first * length, (last - first) * length)


def dequantized(tensors: dict[str, Source], scheme: Scheme) -> dict[str, Source]:
    """The tensors with one source for each quantized module in place of its parts.

    Raises:
        ConversionError: a part is missing or has a wrong type or shape.
    """
    modules: dict[str, tuple[str, dict[str, Source]]] = {}  # name of the quantized weight -> module, its parts
    consumed: set[str] = set()
    for name, source in tensors.items():
        if stem := _stem(name, source, scheme):
            parts = _parts(stem, tensors, scheme)
            modules[name] = stem, parts
            consumed |= {f"{stem}.{part}" for part in parts}
    if not modules:
        return tensors
    shapes = {name: _shape(parts, scheme) for name, (_, parts) in modules.items()}
    decoder = Decoder(scheme)
    result: dict[str, Source] = {}
    for name, source in tensors.items():
        if name in modules:
            stem, parts = modules[name]
            result[f"{stem}.weight"] = Dequantized(source.name, shapes[name], parts, scheme, decoder)
        elif name not in consumed:
            result[name] = source
    return result


def prepare(tensors: dict[str, Source]) -> None:
    """Make sources that decode fit for reading, and say in the log how many there are and what decodes them.

    Raises:
        ConversionError: the package that they need is not there.
    """
    decoded = [source for source in tensors.values() if isinstance(source, Dequantized)]
    if decoded:
        decoder = decoded[0].decoder  # one for all of them
        decoder.load()
        count, version = len(decoded), decoder.version
        log.warning("%d weights are dequantized as compressed-tensors %s does it: %s", count, version, decoder.scheme)


def _stem(name: str, source: Source, scheme: Scheme) -> str:
    """The module's name if this is its quantized weight, else nothing."""
    if scheme.format == PACK:
        return name.removesuffix(".weight_packed") if name.endswith(".weight_packed") else ""
    return name.removesuffix(".weight") if name.endswith(".weight") and source.dtype == "F8_E4M3" else ""


def _parts(stem: str, tensors: dict[str, Source], scheme: Scheme) -> dict[str, Source]:
    if scheme.format == FLOAT:
        names = ["weight", "weight_scale"]
    else:
        names = ["weight_packed", "weight_scale", "weight_shape"]
        names += [] if scheme.symmetric else ["weight_zero_point"]
    main = tensors[f"{stem}.{names[0]}"]
    for name in names:
        if f"{stem}.{name}" not in tensors:
            raise ConversionError(f"{main.name} has no {stem}.{name} beside it")
    return {name: tensors[f"{stem}.{name}"] for name in names}


def _shape(parts: dict[str, Source], scheme: Scheme) -> tuple[int, int]:
    """The shape `[rows, columns]` of a weight; checks the types and shapes of all its parts against it."""
    main = next(iter(parts.values()))
    if len(main.shape) != 2:
        raise ConversionError(f"tensor {main.name}: shape {list(main.shape)}, expected two axes")
    rows, columns = main.shape
    if scheme.format == PACK:
        columns *= _PER_WORD
    expected: dict[str, tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]] = {
        "weight": (("F8_E4M3",), ((rows, columns),)),
        "weight_packed": (("I32",), ((rows, columns // _PER_WORD),)),
        "weight_scale": (FLOAT_DTYPES, scheme.scale_shape(rows, columns)),
        "weight_shape": (("I64", "I32"), ((2,),)),
        "weight_zero_point": (("I32",), ((-(-rows // _PER_WORD), scheme.scale_shape(rows, columns)[0][-1]),)),
    }
    for name, source in parts.items():
        dtypes, shapes = expected[name]
        if source.dtype not in dtypes:
            raise ConversionError(f"tensor {source.name}: dtype {source.dtype}, expected {' or '.join(dtypes)}")
        if source.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise ConversionError(f"tensor {source.name}: shape {list(source.shape)}, expected {wanted} ({scheme})")
    if scheme.strategy == "group" and columns % scheme.weights["group_size"]:
        raise ConversionError(
            f"tensor {main.name}: rows of {columns} values are not whole groups of {scheme.weights['group_size']}"
        )
    return rows, columns
