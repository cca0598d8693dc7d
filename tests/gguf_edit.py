"""Variants of a GGUF file: read one, change keys and tensors, write another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType, quants

from gguf_ext import GGUFReader, Plan, PlannedTensor, write_file


@dataclass
class Tensor:
    ne: tuple[int, ...]  # fastest dimension first
    type: Type
    data: np.ndarray  # bytes


class Edit:
    """All keys and tensors of a small file in memory, in order."""

    def __init__(self, source: Path) -> None:
        with GGUFReader(source) as reader:
            self.fields: dict[str, Any] = {
                key: (value, tuple(reader.types[key])) for key, value in reader.fields.items()
            }
            self.tensors = {
                name: Tensor(info.ne, info.type, np.array(reader.data(name))) for name, info in reader.tensors.items()
            }

    @property
    def arch(self) -> str:
        return str(self.fields["general.architecture"][0])

    def set(self, key: str, value: Any, type_: GGUFValueType | None = None) -> Edit:
        """Changes a key of the architecture, or adds one of the given type."""
        full = key if key.startswith(("general.", "tokenizer.")) else f"{self.arch}.{key}"
        self.fields[full] = (value, (type_,) if type_ is not None else self.fields[full][1])
        return self

    def drop(self, key: str) -> Edit:
        del self.fields[key if key.startswith(("general.", "tokenizer.")) else f"{self.arch}.{key}"]
        return self

    def values(self, name: str) -> np.ndarray:
        """Of a tensor, float32, slowest dimension first."""
        tensor = self.tensors[name]
        return quants.dequantize(tensor.data.reshape(-1), tensor.type).reshape(tensor.ne[::-1])

    def put(self, name: str, values: np.ndarray, type_: Type = Type.F32) -> Edit:
        """Adds or replaces a tensor; `values` slowest dimension first."""
        data = quants.quantize(np.ascontiguousarray(values, np.float32), type_)
        self.tensors[name] = Tensor(values.shape[::-1], type_, np.frombuffer(data.tobytes(), np.uint8))
        return self

    def write(self, target: Path) -> Path:
        plan = Plan()
        for key, (value, types) in self.fields.items():
            plan.add_field(key, value, *types)
        for name, tensor in self.tensors.items():
            plan.add_tensor(PlannedTensor(name, tensor.ne, tensor.type, partial(_whole, tensor.data)))
        write_file(plan, target)
        return target


def _whole(data: np.ndarray, first: int, count: int) -> np.ndarray:
    return data
