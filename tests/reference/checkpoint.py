"""Just enough safetensors reading to get every tensor of a good checkpoint as floating point.

Separate from the converter's reader on purpose: the same mistake would otherwise be on both sides of every comparison.
It trusts its files; refusing bad ones is the converter's work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

PREFIX = "language_model."
NUMPY_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "U8": "u1", "I8": "i1", "I32": "<i4", "I64": "<i8"}

# E2M1: sign, two exponent bits, one mantissa bit (OCP Microscaling Formats 1.0, section 5.3.3).
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def dequantize_mxfp4(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float64 [rows, cols] from codes [rows, cols / 2] and E8M0 scales [rows, cols / 32], both bytes.

    Byte b of a row holds element 2b in its low and 2b + 1 in its high half; 32 neighbours share 2^(scale - 127).
    """
    values = np.stack([FP4[packed & 15], FP4[packed >> 4]], axis=-1).reshape(packed.shape[0], -1)
    return np.ldexp(values, scales.astype(np.int32).repeat(32, axis=1) - 127)


class Checkpoint:
    """A Hugging Face model folder: ``config`` (of the text model) and tensors by name, without ``language_model.``."""

    def __init__(self, folder: Path | str, dtype: type = np.float64) -> None:
        folder = Path(folder)
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.config: dict[str, Any] = {**config, **config.get("text_config", {})}
        self.dtype = dtype
        self._tensors: dict[str, tuple[str, np.ndarray]] = {}  # name -> dtype name, array as stored
        for path in sorted(folder.glob("*.safetensors")):
            self._read_shard(path)

    def _read_shard(self, path: Path) -> None:
        raw = np.asarray(np.memmap(path, np.uint8, "r"))
        size = int.from_bytes(raw[:8].tobytes(), "little")
        header = json.loads(raw[8 : 8 + size].tobytes())
        payload = raw[8 + size :]
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            stored = payload[start:end].view("<u2" if entry["dtype"] == "BF16" else NUMPY_TYPES[entry["dtype"]])
            self._tensors[name.removeprefix(PREFIX)] = entry["dtype"], stored.reshape(entry["shape"])

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def stored(self, name: str) -> np.ndarray:
        """The array as it lies in the file (BF16 as uint16)."""
        return self._tensors[name][1]

    def tensor(self, name: str) -> np.ndarray:
        """A tensor in ``dtype``, shape as stored."""
        kind, stored = self._tensors[name]
        if kind == "BF16":
            stored = (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(self.dtype)

    def matrix(self, stem: str) -> np.ndarray:
        """The weight ``[out, in]`` of a linear layer, stored as ``.weight`` or as packed MXFP4."""
        if f"{stem}.weight" in self:
            return self.tensor(f"{stem}.weight")
        packed, scales = self.stored(f"{stem}.weight_packed"), self.stored(f"{stem}.weight_scale")
        return dequantize_mxfp4(packed, scales).astype(self.dtype)
