"""The contract between configuration and tensors: every field that sets a width, on every axis of every tensor.

The table is `Converter.contract()`; what it lists is what a conversion compares, and here each entry is broken once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import conversion
import tiny
from conversion import ConversionError
from conversion.base import Converter, Dependence
from conversion.checkpoint import Checkpoint
from conversion.config import Config
from conversion.types import OUTTYPES, Types
from tiny_files import Checkpoint as HfCheckpoint
from tiny_files import write_json, write_safetensors

LINEAR = "linear_attn_config."
BOTH = {
    "hidden_size",
    "intermediate_size",
    "kv_lora_rank",
    "moe_intermediate_size",
    "num_attention_heads",
    "num_experts",
    "num_shared_experts",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "vocab_size",
    LINEAR + "head_dim",
    LINEAR + "num_heads",
    LINEAR + "short_conv_kernel_size",
    "q_lora_rank",
}
# The numbers of the released configurations that lengths of tensors follow from.
FIELDS = {"kimi-linear": BOTH, "kimi-k3": BOTH | {"routed_expert_hidden_size"}}
CASES = [(arch, field) for arch in tiny.ARCHS for field in sorted(FIELDS[arch])]
# The heads of both kinds of layers are one number in a file, and given three times.
HEADS = ("num_attention_heads", "num_key_value_heads", LINEAR + "num_heads")

SMALL: dict[str, Any] = {"num_hidden_layers": 4, "num_experts": 2, "shards": 1, "packed": False, "q_lora_rank": 48}


def model(arch: str) -> HfCheckpoint:
    """A small model with every mechanism of the architecture; experts unpacked, so that axes are in elements."""
    return tiny.build_checkpoint(arch, **SMALL)


def converter_of(folder: Path) -> Converter:
    config = Config(folder / "config.json")
    return conversion.get_converter(config.architecture)(config)


def problem(folder: Path) -> str:
    """What planning says, without a vocabulary or an output."""
    with pytest.raises(ConversionError) as caught, Checkpoint(folder) as checkpoint:
        converter_of(folder).plan_tensors(checkpoint, Types(OUTTYPES["f32"]))
    return str(caught.value)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder for each architecture; a test that changes it puts it back."""

    @lru_cache
    def write(arch: str) -> Path:
        folder = tmp_path_factory.mktemp(arch)
        model(arch).write(folder)
        return folder

    return write


def kinds(arch: str, table: Iterator[Dependence]) -> Iterator[Dependence]:
    """One of the equal entries of different layers and experts."""
    mla, dense = model(arch).layers("mla"), model(arch).layers("dense")
    seen = set()
    for entry in table:
        layer = re.search(r"layers\.(\d+)\.", entry.tensor)
        number = int(layer[1]) if layer else -1
        kind = (re.sub(r"\d+", "N", entry.tensor), number in mla, number in dense, entry.axis, entry.field)
        if kind not in seen:
            seen.add(kind)
            yield entry


@pytest.mark.parametrize("arch", tiny.ARCHS)
def test_table_has_every_field_and_every_tensor(written: Callable[[str], Path], arch: str) -> None:
    table = list(converter_of(written(arch)).contract())
    assert {entry.field for entry in table} == FIELDS[arch]
    checkpoint = model(arch)
    names = {name.removeprefix(checkpoint.prefix) for name in checkpoint.shards[0]}
    assert {entry.tensor for entry in table} == names
    for name in names:  # every axis but those of length one
        shape = checkpoint.get(name).shape
        axes = {entry.axis for entry in table if entry.tensor == name}
        assert axes == {axis for axis, length in enumerate(shape) if length > 1}, name


@pytest.mark.parametrize(("arch", "field"), CASES)
def test_each_axis_that_follows_from_a_field(written: Callable[[str], Path], arch: str, field: str) -> None:
    """One axis at a time is one too long (`A_log`, which may be padded: too short)."""
    folder, checkpoint = written(arch), model(arch)
    shard, path = checkpoint.shards[0], folder / "model.safetensors"
    entries = [entry for entry in kinds(arch, converter_of(folder).contract()) if entry.field == field]
    assert entries
    try:
        for entry in entries:
            name = checkpoint.prefix + entry.tensor
            tensor = shard[name]
            length = tensor.shape[entry.axis]
            found = 1 if name.endswith("A_log") else length + 1
            write_safetensors(path, shard | {name: tensor.resized(entry.axis, found - length)})
            message = problem(folder)
            pattern = (
                rf"tensor {re.escape(name)}: axis {entry.axis} is {found}, expected (at least )?(\d+) \((.*)\); shape"
            )
            match = re.fullmatch(pattern + r" \[.*\]", message)
            assert match and field in re.findall(r"[\w.]+", match[3]), (entry, message)
            assert int(match[2]) == (2 if name.endswith("A_log") else length)
    finally:
        write_safetensors(path, shard)


def change(config: dict[str, Any], field: str, value: Any) -> None:
    text = config.get("text_config", config)
    *outer, last = field.split(".")
    for part in outer:
        text = text[part]
    text[last] = value


@pytest.mark.parametrize(("arch", "field"), CASES)
def test_a_field_that_is_wrong(written: Callable[[str], Path], arch: str, field: str) -> None:
    """All tensors agree with each other, and one number of the configuration does not agree with them."""
    folder, checkpoint = written(arch), model(arch)
    table = list(converter_of(folder).contract())
    changed = HEADS if field in HEADS else (field,)
    value = Config(folder / "config.json").integer(field)
    config = json.loads(json.dumps(checkpoint.config))
    for name in changed:
        change(config, name, value + 1)
    try:
        write_json(folder / "config.json", config)
        match = re.match(r"tensor (\S+): axis (\d+) is \d+, expected (at least )?\d+ \(", problem(folder))
        assert match
        found = {Dependence(name, match[1].removeprefix(checkpoint.prefix), int(match[2])) for name in changed}
        assert found & set(table), match[0]
    finally:
        write_json(folder / "config.json", checkpoint.config)


EXISTENCE = [
    ("first_k_dense_replace", 2, ("kimi-linear", "kimi-k3")),
    ("first_k_dense_replace", 0, ("kimi-linear", "kimi-k3")),
    ("num_experts", None, ("kimi-linear", "kimi-k3")),
    ("q_lora_rank", None, ("kimi-linear", "kimi-k3")),
    ("tie_word_embeddings", True, ("kimi-linear",)),
    ("routed_expert_hidden_size", None, ("kimi-k3",)),
    ("latent_moe_use_norm", False, ("kimi-k3",)),
    ("mla_use_output_gate", False, ("kimi-k3",)),
]


@pytest.mark.parametrize(
    ("arch", "field", "value"), [(arch, field, value) for field, value, archs in EXISTENCE for arch in archs]
)
def test_a_field_that_says_which_tensors_there_are(
    written: Callable[[str], Path], arch: str, field: str, value: Any
) -> None:
    """The message has the field with its value, and tensors that are missing or too many."""
    folder, checkpoint = written(arch), model(arch)
    config = json.loads(json.dumps(checkpoint.config))
    change(config, field, value)
    try:
        write_json(folder / "config.json", config)
        message = problem(folder)
        assert f"{field} is {json.dumps(value)}" in message
        assert re.search(r"(missing|unexpected): \S*model\.layers\.|unexpected: lm_head", message), message
    finally:
        write_json(folder / "config.json", checkpoint.config)


@pytest.mark.parametrize("arch", tiny.ARCHS)
def test_layers_of_the_other_kind(written: Callable[[str], Path], arch: str) -> None:
    """The two lists decide which tensors a layer has, and both are shown."""
    folder, checkpoint = written(arch), model(arch)
    config = json.loads(json.dumps(checkpoint.config))
    linear = config.get("text_config", config)["linear_attn_config"]
    linear["kda_layers"], linear["full_attn_layers"] = linear["full_attn_layers"], linear["kda_layers"]
    try:
        write_json(folder / "config.json", config)
        message = problem(folder)
        for field in ("kda_layers", "full_attn_layers"):
            assert f"linear_attn_config.{field} is {linear[field]}" in message
    finally:
        write_json(folder / "config.json", checkpoint.config)
