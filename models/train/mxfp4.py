"""MXFP4 rounding of expert weights, as the format "mxfp4-pack-quantized" of compressed-tensors stores them.

Groups of 32 consecutive input columns share one E8M0 scale byte; elements are E2M1. The scale exponent is
``floor(log2(pow2round(max|x|))) - 2`` where ``pow2round`` sends mantissas of 1.75 and above to the next power of two.
"""

from __future__ import annotations

import torch

GROUP = 32
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# Halfway points between neighbouring magnitudes; `bucketize` sends a tie to the smaller one.
BORDERS = (VALUES[1:] + VALUES[:-1]) / 2


def _scale_exponent(weight: torch.Tensor) -> torch.Tensor:
    """Unbiased scale exponent per group, int32 ``[..., cols / 32, 1]``; an all-zero group gets -127."""
    peak = weight.reshape(*weight.shape[:-1], -1, GROUP).abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(peak)  # peak = mantissa * 2^exponent, mantissa in [0.5, 1)
    exponent = exponent - 1 + (mantissa >= 0.875).to(exponent.dtype)
    return torch.where(peak > 0, exponent - 2, torch.full_like(exponent, -127)).clamp(-127, 127)


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (uint8, one per element, 0..15) and E8M0 scale bytes ``[..., cols / 32]`` of ``weight [..., cols]``."""
    exponent = _scale_exponent(weight)
    scaled = torch.ldexp(weight.reshape(*weight.shape[:-1], -1, GROUP), -exponent)
    code = torch.bucketize(scaled.abs(), BORDERS.to(scaled)) + 8 * (scaled < 0)
    return code.to(torch.uint8).reshape(weight.shape), (exponent.squeeze(-1) + 127).to(torch.uint8)


def dequantize(code: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The float32 weight that codes and scale bytes stand for."""
    magnitude = VALUES[(code & 7).long()]
    signed = torch.where(code >= 8, -magnitude, magnitude)
    exponent = scale.to(torch.int32).unsqueeze(-1) - 127
    return torch.ldexp(signed.reshape(*code.shape[:-1], -1, GROUP), exponent).reshape(code.shape)


def pack(code: torch.Tensor) -> torch.Tensor:
    """Two codes per byte, the even column in the low nibble."""
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`pack`."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def straight_through(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` rounded to MXFP4 in the forward pass; the gradient passes as if it had not been."""
    with torch.no_grad():
        rounded = dequantize(*quantize(weight))
    return weight + (rounded - weight).detach()
