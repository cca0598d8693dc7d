"""Packed routed experts: which scheme a checkpoint uses, checks, and the repack of MXFP4.

Scheme `mxfp4-pack-quantized` of compressed-tensors: per expert matrix `[rows, cols]`, `weight_packed` U8 `[rows,
cols/2]` (element 2b in the low nibble of byte b) and `weight_scale` U8 `[rows, cols/32]` (E8M0: 2^(byte-127), 255 is
not a number). A GGUF MXFP4 block holds the same 32 elements: the scale byte, then byte j with element j low and element
j+16 high. Only bits move; no value is decoded. (OCP Microscaling Formats v1.0; 255 is refused because decoders here
would take it for a number.)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gguf_ext import GGUFError, native

from .checkpoint import Source
from .config import Config
from .errors import ConversionError

PACKED, SCALE = "weight_packed", "weight_scale"
GROUP = 32  # elements that share a scale
BLOCK_BYTES = 17
_BLOCK = np.dtype([("scale", np.uint8), ("codes", "V16")])
SUPPORTED = "compressed-tensors mxfp4-pack-quantized (weight_packed with weight_scale, both U8, on routed experts)"

_LOW_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)
_NIBBLE = np.uint64(4)  # bits
_EXPECTED_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": GROUP, "symmetric": True}


def check_scheme(config: Config) -> bool:
    """Whether the configuration announces packed experts.

    Raises:
        ConversionError: it announces any other quantization.
    """
    scheme = config.get("quantization_config")
    if scheme is None:
        return False
    if not isinstance(scheme, dict):
        raise config.wrong("quantization_config", "an object")
    for key, expected in (("quant_method", "compressed-tensors"), ("format", "mxfp4-pack-quantized")):
        if scheme.get(key) != expected:
            raise ConversionError(
                f"{config.path}: quantization_config.{key} is {scheme.get(key)!r}, expected {expected!r}; "
                f"supported: {SUPPORTED}"
            )
    groups = scheme.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ConversionError(f"{config.path}: quantization_config.config_groups is missing or empty")
    for name, group in groups.items():
        _check_group(config, f"quantization_config.config_groups.{name}", group)
    return True


def _check_group(config: Config, where: str, group: Any) -> None:
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise ConversionError(f"{config.path}: {where}.weights is missing")
    for key, expected in _EXPECTED_WEIGHTS.items():
        if group["weights"].get(key) != expected:
            raise ConversionError(
                f"{config.path}: {where}.weights.{key} is {group['weights'].get(key)!r}, expected {expected!r}; "
                f"supported: {SUPPORTED}"
            )
    for key in ("input_activations", "output_activations"):
        if group.get(key) is not None:
            raise ConversionError(f"{config.path}: {where}.{key} is set; only weights may be quantized")


def check_pair(packed: Source, scale: Source, rows: int, cols: int) -> None:
    """Check dtypes and shapes of one packed matrix `[rows, cols]`.

    Raises:
        ConversionError: names the tensor, expected and found.
    """
    if cols % GROUP:
        raise ConversionError(f"tensor {packed.name}: rows of {cols} values are not whole MXFP4 groups of {GROUP}")
    for source, shape in ((packed, (rows, cols // 2)), (scale, (rows, cols // GROUP))):
        if source.dtype != "U8":
            raise ConversionError(f"tensor {source.name}: dtype {source.dtype}, expected U8")
        if source.shape != shape:
            raise ConversionError(f"tensor {source.name}: shape {list(source.shape)}, expected {list(shape)}")


class BadScaleError(Exception):
    """A scale byte is 255, which is not a number."""

    def __init__(self, row: int, block: int) -> None:
        super().__init__(row, block)
        self.row, self.block = row, block


def repack(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Reorder uint8 `[rows, cols/2]` and `[rows, cols/32]` to GGUF blocks, uint8 `[rows, cols/32 * 17]`: in the native
    library where there is one.

    Raises:
        BadScaleError: a scale byte is 255.
    """
    library = native.library()
    try:
        if library is not None:
            return library.repack_mxfp4(np.ascontiguousarray(packed), np.ascontiguousarray(scale), n_threads=1)
    except native.BadValueError as error:
        raise BadScaleError(*divmod(error.index, scale.shape[1])) from None
    return _repack_with_numpy(packed, scale)


def _repack_with_numpy(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    bad = np.argwhere(scale == 0xFF)
    if len(bad):
        raise BadScaleError(*bad[0].tolist())
    rows, n_groups = scale.shape
    # Eight bytes at a time: a group is a word of elements 0..15 and a word of elements 16..31.
    words = np.ascontiguousarray(packed).view("<u8").reshape(-1, 2)
    first, second = words[:, 0], words[:, 1]
    even, odd = first & _LOW_NIBBLES, first >> _NIBBLE  # bytes 0, 2, ... and 1, 3, ... of each block's codes
    odd &= _LOW_NIBBLES
    high = second & _LOW_NIBBLES  # in place from here on: new memory costs more than the operations
    high <<= _NIBBLE
    even |= high
    np.bitwise_and(second, ~_LOW_NIBBLES, out=high)
    odd |= high
    codes = odd.view(np.uint8).astype("<u2")
    codes <<= np.uint16(8)
    codes |= even.view(np.uint8)
    blocks = np.empty(rows * n_groups, dtype=_BLOCK)
    blocks["scale"] = scale.reshape(-1)
    blocks["codes"] = codes.view(_BLOCK["codes"])
    return blocks.view(np.uint8).reshape(rows, n_groups * BLOCK_BYTES)


def repack_rows(packed: Source, scale: Source, expert: int, first: int, count: int) -> np.ndarray:
    """Read `count` rows of an expert's matrix from row `first` and reorder them.

    Raises:
        GGUFError: a scale byte is 255; names tensor, expert, row and block.
    """
    half, n_groups = packed.shape[1], scale.shape[1]
    # In this order, since a remote scale comes with the weight that it lies behind.
    codes = packed.raw(first * half, count * half).reshape(count, half)
    scales = scale.raw(first * n_groups, count * n_groups).reshape(count, n_groups)
    try:
        return repack(codes, scales)
    except BadScaleError as error:
        raise GGUFError(
            f"tensor {scale.name}: expert {expert}, row {first + error.row}, block {error.block}: "
            "scale byte 255 is not a number"
        ) from None
