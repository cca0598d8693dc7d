"""Files of a checkpoint changed at random: a conversion is planned or refused in one printable sentence, never a trace.

Another seed, more cases: DELTALLAMA_TEST_SEED, or more of `CASES`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conversion
import tiny
from conversion import ConversionError
from conversion.run import Request
from conversion.validate import validate
from gguf_ext import GGUFError

CASES = 100
ODD_VALUES: list[Any] = [
    *(None, True, False, "", "x", "4", "\x00", "\ud800", [], [1], ["a"], [[]], [None], {}, {"a": 1}),
    *(0, -1, 1, 2, 3, 5, 63, 65, 512, 1.5, 2**31, 2**63, 2**64, 10**400, 1e308, -1e-320, float("nan"), float("inf")),
]
ODD_KEYS = ["", "x", "\x1b", "model.norm.weight", "rope_scaling", "quantization_config"]


class Mutator:
    """Random changes of values in JSON and of bytes."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def one_of(self, values: Any) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def json(self, value: Any) -> Any:
        """`value` with something in it replaced, removed or added."""
        parent, key = None, None
        inner = value
        while isinstance(inner, dict | list) and inner and self.rng.random() < 0.8:
            parent, key = inner, self.one_of(list(inner) if isinstance(inner, dict) else range(len(inner)))
            inner = parent[key]
        if parent is None:
            return self.one_of(ODD_VALUES)
        kind = self.rng.random()
        if kind < 0.6 or isinstance(parent, list):
            parent[key] = self.one_of(ODD_VALUES)
        elif kind < 0.8:
            del parent[key]
        else:
            parent[self.one_of(ODD_KEYS)] = self.one_of(ODD_VALUES)
        return value

    def bytes(self, content: bytes) -> bytes:
        """A byte changed, some taken away, some put in, or the rest cut off, near the beginning."""
        changed = bytearray(content)
        at = int(self.rng.integers(min(len(changed), 4000)))
        kind, length = self.rng.integers(4), int(self.one_of([1, 8, 100]))
        if kind == 0:
            changed[at] = self.rng.integers(256)
        elif kind == 1:
            del changed[at : at + length]
        elif kind == 2:
            changed[at:at] = self.rng.bytes(length)
        else:
            del changed[at:]
        return bytes(changed)

    def file(self, name: str, content: bytes) -> bytes:
        if self.rng.random() < 0.2 or name.endswith((".model", ".md", ".jinja")):
            return self.bytes(content)
        if name.endswith(".json"):
            return json.dumps(self.json(json.loads(content))).encode()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.dumps(self.json(json.loads(content[8:end]))).encode()
        return len(header).to_bytes(8, "little") + header + content[end:]


@pytest.mark.parametrize("arch", tiny.ARCHS)
def test_changed_files_are_planned_or_refused_in_words(tmp_path: Path, rng: np.random.Generator, arch: str) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model", arch, shards=2)
    (folder / "README.md").write_text("---\nname: Kimi\nlicense: mit\nbase_model: a/b\ntags: [x]\n---\n")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    mutator = Mutator(rng)
    n_refused = 0
    for _ in range(CASES):
        name = mutator.one_of(list(files))
        (folder / name).write_bytes(mutator.file(name, files[name]))
        messages: list[str] = validate(Request(folder)).problems
        messages += refusal(lambda: conversion.convert(folder, dry_run=True))
        assert all(message.isprintable() for message in messages), (name, messages)
        n_refused += bool(messages)
        (folder / name).write_bytes(files[name])
    assert CASES // 4 < n_refused < CASES
    assert refusal(lambda: conversion.convert(folder, dry_run=True)) == []


def refusal(work: Callable[[], object]) -> list[str]:
    try:
        work()
    except (ConversionError, GGUFError) as error:
        return [str(error)]
    return []
