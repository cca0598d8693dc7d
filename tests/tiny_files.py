"""A Hugging Face checkpoint in memory and the raw safetensors bytes it is written as.

Used by ``tiny.py`` to write checkpoints and by ``tiny_defects.py`` to break them. It shares no code with the
converter's reader, so that a misreading of the format cannot hide on both sides.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ABSENT = object()  # stands for a config key that is left out
ITEM_SIZE = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "U8": 1, "I8": 1, "I32": 4, "I64": 8, "F8_E4M3": 1, "F8_E5M2": 1}


@dataclass
class HfTensor:
    """One stored tensor: safetensors dtype name, shape ``[out, in]`` and its little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def from_float(cls, values: np.ndarray, dtype: str = "BF16") -> HfTensor:
        """Round float values to ``dtype`` (BF16 to nearest even, as training frameworks do)."""
        if dtype == "BF16":
            return cls(dtype, values.shape, bf16_bits(values).tobytes())
        numpy_dtype = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype]
        return cls(dtype, values.shape, values.astype(numpy_dtype).tobytes())

    @classmethod
    def from_bytes(cls, values: np.ndarray) -> HfTensor:
        """Unsigned bytes, as packed weights and their scales are stored."""
        return cls("U8", values.shape, values.astype(np.uint8).tobytes())

    def bytes_array(self) -> np.ndarray:
        """A writable copy of an 8-bit tensor."""
        return np.frombuffer(self.data, np.uint8).reshape(self.shape).copy()

    def resized(self, axis: int, delta: int) -> HfTensor:
        """The same kind of tensor with ``delta`` more (or fewer) entries along ``axis``, filled by repetition."""
        shape = list(self.shape)
        shape[axis] += delta
        need = math.prod(shape) * ITEM_SIZE[self.dtype]
        data = (self.data * (need // max(len(self.data), 1) + 1))[:need]
        return HfTensor(self.dtype, tuple(shape), data)


@dataclass
class Checkpoint:
    """Everything ``write`` puts into a folder; defects edit it before it is written."""

    arch: str  # "kimi-k3" | "kimi-linear"
    config: dict[str, Any]  # config.json
    shards: list[dict[str, HfTensor]]  # one dict per file
    tiktoken: bytes  # tiktoken.model
    tokenizer_config: dict[str, Any]
    generation_config: dict[str, Any] | None
    prefix: str = ""  # "language_model." or nothing
    index: bool = True  # whether model.safetensors.index.json is written
    weight_map: dict[str, str] = field(default_factory=dict)  # additions to the index

    @property
    def text(self) -> dict[str, Any]:
        """The part of the config that describes the text model (``text_config`` where the config is nested)."""
        return self.config.get("text_config", self.config)

    def find(self, name: str) -> tuple[dict[str, HfTensor], str]:
        """The shard that holds ``name`` (without prefix) and the name as stored."""
        stored = self.prefix + name
        for shard in self.shards:
            if stored in shard:
                return shard, stored
        raise KeyError(stored)

    def get(self, name: str) -> HfTensor:
        shard, stored = self.find(name)
        return shard[stored]

    def set(self, name: str, tensor: HfTensor) -> None:
        """Replace a tensor, or add it to the first shard."""
        try:
            shard, stored = self.find(name)
        except KeyError:
            shard, stored = self.shards[0], self.prefix + name
        shard[stored] = tensor

    def delete(self, name: str) -> HfTensor:
        shard, stored = self.find(name)
        return shard.pop(stored)

    def layers(self, kind: str) -> list[int]:
        """0-based layers of ``kind``: "kda", "mla", "dense" or "moe"."""
        count = self.text["num_hidden_layers"]
        if kind in ("kda", "mla"):
            kda = set(self.text["linear_attn_config"]["kda_layers"])
            return [i for i in range(count) if ((i + 1) in kda) == (kind == "kda")]
        dense = self.text["first_k_dense_replace"] if self.text.get("num_experts") else count
        return [i for i in range(count) if (i < dense) == (kind == "dense")]

    def shard_name(self, number: int) -> str:
        """File name of shard ``number``; K3 counts its total in six digits, as the released files do."""
        if len(self.shards) == 1:
            return "model.safetensors"
        digits = 6 if self.arch == "kimi-k3" else 5
        return f"model-{number + 1:05d}-of-{len(self.shards):0{digits}d}.safetensors"

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        weight_map: dict[str, str] = {}
        total = 0
        for number, shard in enumerate(self.shards):
            name = self.shard_name(number)
            write_safetensors(folder / name, shard)
            for tensor_name, tensor in shard.items():
                weight_map[tensor_name] = name
                total += len(tensor.data)
        if self.index:
            weight_map.update(self.weight_map)
            write_json(
                folder / "model.safetensors.index.json",
                {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
            )
        write_json(folder / "config.json", self.config)
        (folder / "tiktoken.model").write_bytes(self.tiktoken)
        write_json(folder / "tokenizer_config.json", self.tokenizer_config)
        if self.generation_config is not None:
            write_json(folder / "generation_config.json", self.generation_config)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_safetensors(path: Path, tensors: dict[str, HfTensor]) -> None:
    """Write one safetensors file: wide dtypes first, then by name, header padded to 8 bytes."""
    order = sorted(tensors, key=lambda name: (-ITEM_SIZE[tensors[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        tensor = tensors[name]
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(tensor.data)],
        }
        offset += len(tensor.data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in order:
            file.write(tensors[name].data)


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """float -> uint16 bfloat16 bits, rounded to nearest even."""
    bits = np.ascontiguousarray(values, dtype="<f4").view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype("<u2")
