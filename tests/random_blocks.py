"""Random rows of every tensor type: all codes occur, scales are those of weights."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES

# Bytes of a block that hold an f16: its scale, and what else there is.
HALVES: dict[Type, list[int]] = {
    Type.Q4_0: [0],
    Type.Q4_1: [0, 2],
    Type.Q5_0: [0],
    Type.Q5_1: [0, 2],
    Type.Q8_0: [0],
    Type.Q2_K: [80, 82],
    Type.Q3_K: [108],
    Type.Q4_K: [0, 2],
    Type.Q5_K: [0, 2],
    Type.Q6_K: [208],
    Type.TQ1_0: [52],
    Type.TQ2_0: [64],
    **{kind: [0] for kind in (Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S, Type.IQ1_S)},
    Type.IQ4_NL: [0],
    Type.IQ4_XS: [0],
}
PLAIN = [Type.F32, Type.F16, Type.BF16]
# Every type that the engine reads.
TYPES = [*PLAIN, *HALVES, Type.IQ1_M, Type.MXFP4, Type.NVFP4]


def random_rows(rng: np.random.Generator, kind: Type, shape: tuple[int, ...], std: float) -> tuple[np.ndarray, ...]:
    """Bytes [..., bytes of a row] and the values [..., columns] they stand for, float32, of about this size.

    Of types with blocks all bytes are random but for the scales, which vary by block and have both signs.
    """
    if kind in PLAIN:
        raw = quants.quantize((rng.standard_normal(shape) * std).astype(np.float32), kind)
        raw = np.ascontiguousarray(raw).view(np.uint8)
    else:
        columns, size = GGML_QUANT_SIZES[kind]
        blocks = rng.integers(0, 256, (int(np.prod(shape)) // columns, size), np.uint8)
        _set_scales(blocks, kind, np.ones(len(blocks)))
        # With scales of one the values have the size of the codes.
        codes = quants.dequantize(blocks, kind).astype(np.float64)
        scales = rng.choice([-1, 1], len(blocks)) * rng.uniform(0.5, 1.4, len(blocks))
        _set_scales(blocks, kind, scales * std / np.sqrt(np.mean(codes**2)))
        raw = blocks.reshape(*shape[:-1], -1)
    values = quants.dequantize(raw, kind).reshape(shape).astype(np.float32)
    return raw, values


def _set_scales(blocks: np.ndarray, kind: Type, scales: np.ndarray) -> None:
    """Gives each block [n, bytes] its scale; where a type has powers of two or no sign, the nearest below."""
    halves = scales.astype("<f2")
    if kind == Type.IQ1_M:  # a half in the upper four bits of four 16-bit numbers, lowest first
        words = blocks[:, 48:].view("<u2")
        for i in range(4):
            words[:, i] = (words[:, i] & 0x0FFF) | (halves.view("<u2") >> (4 * i) & 15) << 12
    elif kind == Type.MXFP4:  # an exponent
        blocks[:, 0] = 127 + np.floor(np.log2(np.abs(scales)))
    elif kind == Type.NVFP4:  # four of four bits of exponent and three of fraction
        blocks[:, :4] = (np.clip(np.floor(np.log2(np.abs(scales))) + 7, 1, 14).astype(np.uint8) << 3)[:, None]
        blocks[:, :4] |= np.arange(4, dtype=np.uint8)
    else:
        for at in HALVES[kind]:
            blocks[:, at : at + 2] = halves[:, None].view(np.uint8)
