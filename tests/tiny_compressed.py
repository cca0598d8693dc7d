"""Checkpoints quantized in the formats of compressed-tensors that are dequantized, and the weights they stand for.

Written from the definition of the formats in numpy; nothing here is shared with the converter or with the package.
Each function is a ``mutate`` of ``tiny.write_checkpoint``. With ``plain`` it writes, instead of the quantized weights,
the BF16 weights that they decode to: both checkpoints must convert to the same file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tiny_files import Checkpoint, HfTensor, bf16_bits

Mutate = Callable[[Checkpoint], None]

_LINEAR = re.compile(r".*(_proj|_proj_with_mqa|\.w[123])\.weight")
_NOT = re.compile(r".*_res_proj\.weight|vision_tower.*|mm_projector.*")  # of one row, and not quantized in practice


def int4(group_size: int | None = 32, symmetric: bool = True, plain: bool = False) -> Mutate:
    """`pack-quantized` with 4 bits: eight values of a row in an int32, the first in the lowest bits, each plus 8.

    ``group_size`` None is one scale for a row. The value is (q - zero point) * scale, rounded to BF16.
    """

    def mutate(checkpoint: Checkpoint) -> None:
        for shard, name, w in _weights(checkpoint):
            rows, columns = w.shape
            size = columns if group_size is None else group_size
            groups = w.reshape(rows, columns // size, size)
            if symmetric:
                scale = _bf16(np.abs(groups).max(axis=2, keepdims=True) / 7 + 1e-8)
                zero = np.zeros_like(scale)
            else:
                low, high = groups.min(axis=2, keepdims=True), groups.max(axis=2, keepdims=True)
                scale = _bf16((high - low) / 15 + 1e-8)
                zero = np.clip(np.round(-8 - low / scale), -8, 7)
            q = np.clip(np.round(groups / scale) + zero, -8, 7)
            if plain:
                shard[name] = HfTensor.from_float(_bf16((q - zero) * scale).reshape(rows, columns))
                continue
            del shard[name]
            stem = name.removesuffix(".weight")
            shard[f"{stem}.weight_packed"] = _words(q.reshape(rows, columns))
            shard[f"{stem}.weight_scale"] = HfTensor.from_float(scale[:, :, 0])
            shard[f"{stem}.weight_shape"] = HfTensor("I64", (2,), np.array([rows, columns], "<i8").tobytes())
            if not symmetric:  # packed along the rows
                words = _words(zero[:, :, 0].T)
                data = np.ascontiguousarray(np.frombuffer(words.data, "<i4").reshape(words.shape).T).tobytes()
                shard[f"{stem}.weight_zero_point"] = HfTensor("I32", words.shape[::-1], data)
        strategy = {"strategy": "channel"} if group_size is None else {"strategy": "group", "group_size": group_size}
        weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, **strategy}
        _announce(checkpoint, "pack-quantized", weights, None, plain)

    return mutate


def fp8(strategy: str = "channel", block: tuple[int, int] = (24, 20), plain: bool = False) -> Mutate:
    """`float-quantized`: an E4M3 code for each value and a scale for a tensor, a row or a block of 2 axes."""

    def mutate(checkpoint: Checkpoint) -> None:
        table = e4m3_values()
        order = np.setdiff1d(np.arange(256), NOT_NUMBERS)
        order = order[np.argsort(table[order])]
        for shard, name, w in _weights(checkpoint):
            rows, columns = w.shape
            height, width = {"tensor": w.shape, "channel": (1, columns), "block": block}[strategy]
            n_rows, n_columns = -(-rows // height), -(-columns // width)
            scale = np.empty((n_rows, n_columns), np.float32)
            for i in range(n_rows):
                for j in range(n_columns):
                    part = w[i * height : (i + 1) * height, j * width : (j + 1) * width]
                    scale[i, j] = np.abs(part).max() / 448 + 1e-8
            scale = _bf16(scale)
            each = scale.repeat(height, axis=0)[:rows].repeat(width, axis=1)[:, :columns]
            middle = (table[order][1:] + table[order][:-1]) / 2
            codes = order[np.searchsorted(middle, w / each)].astype(np.uint8)
            if plain:
                shard[name] = HfTensor.from_float(_bf16(table[codes].astype(np.float32) * each))
                continue
            shard[name] = HfTensor("F8_E4M3", w.shape, codes.tobytes())
            stored = scale.reshape(1) if strategy == "tensor" else scale
            shard[name.removesuffix(".weight") + ".weight_scale"] = HfTensor.from_float(stored)
        weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
        if strategy == "block":
            weights["block_structure"] = list(block)
        inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
        _announce(checkpoint, "float-quantized", weights, inputs, plain)

    return mutate


NOT_NUMBERS = [0x7F, 0xFF]  # codes of E4M3


def e4m3_values() -> np.ndarray:
    """float64 [256]: sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinity, and NaN (here 0) where all 7
    bits are set (OCP 8-bit Floating Point Specification 1.0)."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value[NOT_NUMBERS] = 0
    return np.where(code >> 7, -value, value)


def _weights(checkpoint: Checkpoint) -> Iterator[tuple[dict[str, HfTensor], str, np.ndarray]]:
    """The linear weights as float32, with the shard and the name that each has."""
    for shard in checkpoint.shards:
        for name in list(shard):
            if _LINEAR.fullmatch(name) and not _NOT.fullmatch(name):
                tensor = shard[name]
                bits = np.frombuffer(tensor.data, "<u2").astype(np.uint32) << 16
                yield shard, name, bits.view(np.float32).reshape(tensor.shape)


def _bf16(values: np.ndarray) -> np.ndarray:
    """float32 rounded to BF16."""
    return (bf16_bits(values).astype(np.uint32) << 16).view(np.float32).reshape(values.shape)


def _words(q: np.ndarray) -> HfTensor:
    """int32 [rows, ceil(columns / 8)] of values from -8 to 7."""
    rows, columns = q.shape
    padded = np.zeros((rows, -(-columns // 8) * 8), np.uint32)
    padded[:, :columns] = q + 8
    words = np.zeros((rows, padded.shape[1] // 8), np.uint32)
    for place in range(8):
        words |= padded[:, place::8] << np.uint32(4 * place)
    return HfTensor("I32", words.shape, words.astype("<u4").tobytes())


def _announce(
    checkpoint: Checkpoint, format_: str, weights: dict[str, Any], inputs: dict[str, Any] | None, plain: bool
) -> None:
    if plain:
        return
    checkpoint.text["quantization_config"] = {
        "config_groups": {
            "group_0": {
                "format": format_,
                "input_activations": inputs,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {"actorder": None, "dynamic": False, "observer": "minmax", **weights},
            }
        },
        "format": format_,
        "ignore": ["lm_head", "re:.*block_sparse_moe.gate$"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
