"""Which GGUF type each tensor of the output gets."""

from __future__ import annotations

from gguf_ext import constants as c
from gguf_ext.constants import GGMLQuantizationType
from gguf_ext.quants import can_quantize


class Types:
    """Which type each output tensor gets: a function of its name, its shape and the output type asked for."""

    def __init__(self, wanted: GGMLQuantizationType) -> None:
        self.wanted = wanted
        self.warnings: list[str] = []

    def of(self, prefix: str, name: str, ne: tuple[int, ...]) -> GGMLQuantizationType:
        """Vectors, norms, biases, router and convolutions stay F32; the rest gets the type asked for, or F16 where rows
        are not whole blocks of it."""
        if len(ne) == 1 or name in c.ALWAYS_F32 or name.endswith("_norm.weight") or not name.endswith(".weight"):
            return GGMLQuantizationType.F32
        if can_quantize(self.wanted, ne[0]):
            return self.wanted
        self.warnings.append(
            f"{prefix}{name}: rows of {ne[0]} values are not whole {self.wanted.name} blocks; written as F16"
        )
        return GGMLQuantizationType.F16
