"""Checkpoints that are not laid out as the released ones: mechanisms left out, other names, other containers."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conversion
import reference as ref
import tiny
import tiny_layouts
from conversion import ConversionError
from engine import Engine
from gguf_ext import GGUFReader
from gguf_ext.constants import GGMLQuantizationType as T
from tiny_files import Checkpoint as HfCheckpoint
from tiny_files import HfTensor, write_json

sys.path.append(str(Path(__file__).resolve().parent.parent / "bench"))

from peer import Peer  # noqa: E402

EXACT = 1e-10  # normalised mean squared error of the logits of one position
N_TOKENS = 20


def logits_error(folder: Path, path: Path) -> float:
    """The worst position of a fixed text: the engine on the file against the float64 reference on the checkpoint."""
    model = ref.Model.from_checkpoint(folder)
    tokens = np.random.default_rng(1).integers(0, model.embedding.shape[0], N_TOKENS).tolist()
    expected = model.forward(tokens)
    with Engine(path, n_ctx=N_TOKENS) as engine:
        found = engine.logits(tokens).astype(np.float64)
    return float(np.max(np.sum((found - expected) ** 2, axis=1) / np.sum(expected**2, axis=1)))


def same_contents(one: Path, other: Path, but: tuple[str, ...] = ()) -> None:
    """Two files hold the same keys and tensors, but for some keys, in whatever order."""
    with GGUFReader(one) as a, GGUFReader(other) as b:
        fields = {key for key in a.fields if key not in but}
        assert fields == {key for key in b.fields if key not in but}
        for key in fields:
            np.testing.assert_array_equal(a.fields[key], b.fields[key])
        assert set(a.tensors) == set(b.tensors)
        for name, info in a.tensors.items():
            assert (info.type, info.ne) == (b.tensors[name].type, b.tensors[name].ne)
            assert a.data(name).tobytes() == b.data(name).tobytes(), name


def refusal(folder: Path) -> str:
    with pytest.raises(ConversionError) as caught:
        conversion.convert(folder, dry_run=True)
    return str(caught.value)


# ---- mechanisms that a model may lack --------------------------------------------------------------------------------

VARIANTS = ["k3-dense-only", "k3-tied", "k3-plain", "kl-dense-only", "kl-tied"]
VARIANTS += ["k3-no-q-lora", "k3-full-width-experts", "k3-bf16-experts"]


@pytest.mark.parametrize("preset", VARIANTS)
def test_variant_equals_the_reference(
    tiny_checkpoint: Callable[..., Path], gguf: Callable[..., Path], preset: str
) -> None:
    folder = tiny_checkpoint(preset)
    error = logits_error(folder, gguf(folder))
    assert error < EXACT, f"{error:.2e}"


# Without packed experts, whose inputs the other engine rounds.
@pytest.mark.parametrize("preset", ["k3-dense-only", "k3-plain", "k3-bf16-experts", "kl-dense-only", "kl-tied"])
def test_variant_runs_in_an_independent_engine(
    tiny_checkpoint: Callable[..., Path], gguf: Callable[..., Path], preset: str
) -> None:
    pytest.importorskip("xllamacpp", reason="the independent engine is not installed (extra `peer`)")
    folder, prompt = tiny_checkpoint(preset), [130, 379, 183, 407, 353, 430, 378]
    with Peer(gguf(folder), n_ctx=64, n_threads=1) as peer:
        found = peer.greedy(prompt, 8)
    assert len(found) > 0
    assert found == ref.Model.from_checkpoint(folder).greedy(prompt, len(found))


@pytest.mark.parametrize("outtype", ["f32", "bf16", "q8_0"])
@pytest.mark.parametrize("arch", tiny.ARCHS)
def test_tied_embeddings_are_written_twice(tmp_path: Path, arch: str, outtype: str) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model", arch, tie_word_embeddings=True)
    with GGUFReader(conversion.convert(folder, tmp_path / "x.gguf", outtype)) as reader:
        assert reader.data("token_embd.weight").tobytes() == reader.data("output.weight").tobytes()
        assert reader.tensors["token_embd.weight"].type == reader.tensors["output.weight"].type


def test_tied_embeddings_with_a_matrix_of_their_own(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "both", "kimi-linear", defect="tied_embeddings")
    assert "tie_word_embeddings is true; unexpected: lm_head.weight" in refusal(folder)
    folder = tiny.write_checkpoint(tmp_path / "neither", "kimi-linear", defect="missing_lm_head")
    assert "tie_word_embeddings is false; missing: lm_head.weight" in refusal(folder)

    def only_inside(checkpoint: HfCheckpoint) -> None:
        checkpoint.config["tie_word_embeddings"] = False

    folder = tiny.write_checkpoint(tmp_path / "half", tie_word_embeddings=True, mutate=only_inside)
    assert "tie_word_embeddings is false, but not in text_config" in refusal(folder)


@pytest.mark.parametrize("arch", tiny.ARCHS)
def test_models_without_experts_say_so(tmp_path: Path, arch: str) -> None:
    """By `num_experts`, or by leading dense layers that are all there are; the keys are the same."""
    packed = {"packed": False} if arch == "kimi-k3" else {}
    null = tiny.write_checkpoint(tmp_path / "null", arch, **packed, **tiny.NO_EXPERTS)
    zero = tiny.write_checkpoint(tmp_path / "zero", arch, **packed, **(tiny.NO_EXPERTS | {"num_experts": 0}))
    layers = {"kimi-k3": 8, "kimi-linear": 5}[arch]
    dense = tiny.write_checkpoint(tmp_path / "dense", arch, **packed, first_k_dense_replace=layers)
    paths = [conversion.convert(folder, tmp_path / f"{folder.name}.gguf") for folder in (null, zero, dense)]
    for other in paths[1:]:
        same_contents(paths[0], other, ("general.name", "general.basename", f"{arch}.expert_group_used_count"))
    with GGUFReader(paths[0]) as reader:
        fields = reader.fields
        assert not any("exp" in name for name in reader.tensors)
    assert fields[f"{arch}.expert_count"] == fields[f"{arch}.expert_used_count"] == 0
    assert fields[f"{arch}.leading_dense_block_count"] == fields[f"{arch}.block_count"] == layers


def test_a_count_of_experts_is_never_guessed(tmp_path: Path) -> None:
    for number, (value, message) in enumerate(
        ((tiny.ABSENT, "num_experts is missing"), (False, "num_experts is false, expected a whole number"))
    ):
        folder = tiny.write_checkpoint(tmp_path / str(number), "kimi-linear")
        config = tiny.config_for("kimi-linear", num_experts=value)
        write_json(folder / "config.json", config)
        assert message in refusal(folder)
    # Experts that the configuration denies are not dropped.
    folder = tiny.write_checkpoint(tmp_path / "denied", "kimi-linear")
    write_json(folder / "config.json", tiny.config_for("kimi-linear", num_experts=None))
    assert re.search(r"num_experts is null; missing: model\.layers\.1\.mlp\..*; unexpected: ", refusal(folder))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("arch", tiny.ARCHS)
def test_experts_of_every_float_type(tmp_path: Path, arch: str, dtype: str) -> None:
    """The values are exact in all three, so the files are equal; the sources are named when they do not fit."""

    def retype(checkpoint: HfCheckpoint) -> None:
        for shard in checkpoint.shards:
            for name, tensor in shard.items():
                if ".experts." in name:
                    values = (np.frombuffer(tensor.data, "<u2").astype(np.uint32) << 16).view(np.float32)
                    # The smallest magnitudes of the generated weights are no F16 numbers.
                    values = np.where(np.abs(values) < 2.0**-14, 0, values)
                    shard[name] = HfTensor.from_float(values.reshape(tensor.shape), dtype)

    small = {"num_hidden_layers": 4, "num_experts": 3, "packed": False}
    folder = tiny.write_checkpoint(tmp_path / "model", arch, mutate=retype, **small)
    path = conversion.convert(folder, tmp_path / "x.gguf", "f32")
    with GGUFReader(path) as reader:
        assert reader.tensors["blk.1.ffn_up_exps.weight"].type == T.F32
        stack = reader.dequantize("blk.1.ffn_up_exps.weight")
    model = ref.Checkpoint(folder)
    for expert in range(3):
        expected = model.tensor(f"model.layers.1.block_sparse_moe.experts.{expert}.w3.weight")
        np.testing.assert_array_equal(stack[expert], expected)
    assert logits_error(folder, path) < EXACT


# ---- other names and stacks ------------------------------------------------------------------------------------------


def test_legacy_names_of_k3(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model", mutate=tiny_layouts.legacy_names)
    published = conversion.convert(tiny_checkpoint("k3"), tmp_path / "a.gguf", model_name="X")
    same_contents(published, conversion.convert(folder, tmp_path / "b.gguf", model_name="X"))


SPELLINGS: dict[str, Callable[[HfCheckpoint], None]] = {
    "config": tiny_layouts.transformers_config,
    "dense names": tiny_layouts.transformers_dense_names,
    "tensors": tiny_layouts.transformers_tensors,
    "both": tiny_layouts.transformers_layout,
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("preset", ["kl", "kl-odd", "kl-q-lora", "kl-dense-only"])
def test_kimi_linear_as_transformers_saves_it(tmp_path: Path, preset: str, spelling: str) -> None:
    """The same tensors, bit for bit, and so the same logits. Keys differ in two that no program uses."""
    published = tiny.write_checkpoint(tmp_path / "published", preset=preset)
    folder = tiny.write_checkpoint(tmp_path / "other", preset=preset, mutate=SPELLINGS[spelling])
    a = conversion.convert(published, tmp_path / "a.gguf", "f32", model_name="X")
    b = conversion.convert(folder, tmp_path / "b.gguf", "f32", model_name="X")
    same_contents(a, b, ("kimi-linear.rope.freq_base",))
    assert logits_error(published, b) < EXACT


def small_transformers(folder: Path, change: Callable[[HfCheckpoint], None]) -> Path:
    def mutate(checkpoint: HfCheckpoint) -> None:
        tiny_layouts.transformers_layout(checkpoint)
        change(checkpoint)

    return tiny.write_checkpoint(folder, "kimi-linear", num_hidden_layers=3, num_experts=3, mutate=mutate)


@pytest.mark.parametrize(
    ("name", "axis", "expected"),
    [
        ("layers.0.self_attn.conv1d.weight", 0, r"192 \(3 \* linear_attn_config.num_heads"),
        ("layers.0.self_attn.conv1d.weight", 1, "1 "),
        ("layers.0.self_attn.conv1d.weight", 2, r"4 \(linear_attn_config.short_conv_kernel_size\)"),
        ("layers.1.mlp.experts.gate_up_proj", 0, r"3 \(num_experts\)"),
        ("layers.1.mlp.experts.gate_up_proj", 1, r"128 \(2 \* moe_intermediate_size\)"),
        ("layers.1.mlp.experts.gate_up_proj", 2, r"64 \(hidden_size\)"),
        ("layers.1.mlp.experts.down_proj", 0, r"3 \(num_experts\)"),
        ("layers.1.mlp.experts.down_proj", 1, r"64 \(hidden_size\)"),
        ("layers.1.mlp.experts.down_proj", 2, r"64 \(moe_intermediate_size\)"),
    ],
)
def test_axes_of_stacks_are_checked(tmp_path: Path, name: str, axis: int, expected: str) -> None:
    def grow(checkpoint: HfCheckpoint) -> None:
        checkpoint.set(f"model.{name}", checkpoint.get(f"model.{name}").resized(axis, 1))

    message = refusal(small_transformers(tmp_path, grow))
    assert message.startswith(f"tensor model.{name}: axis {axis} is ")
    assert re.search(f"expected {expected}", message), message


def test_stack_beside_its_parts(tmp_path: Path) -> None:
    def twice(checkpoint: HfCheckpoint) -> None:
        part = checkpoint.get("model.layers.0.self_attn.conv1d.weight").resized(0, -128)
        checkpoint.shards[0]["model.layers.0.self_attn.k_conv1d.weight"] = part

    message = refusal(small_transformers(tmp_path, twice))
    assert "k_conv1d.weight and model.layers.0.self_attn.k_conv1d.weight are the same tensor" in message.replace(
        "model.layers.0.self_attn.conv1d.weight (self_attn.k_conv1d.weight)", "k_conv1d.weight"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["linear_attention"] * 2}, "layer_types is .*, expected 3 times 'linear_attention' or"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types is .*, expected 3 times"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, 'mlp_layer_types is .*, expected every "dense" before'),
        ({"first_k_dense_replace": 2}, "first_k_dense_replace is 2, but the fields of transformers beside it say 1"),
        ({"linear_attn_config": {"head_dim": 16}}, "linear_attn_config.head_dim is 16, but .* say 32"),
        ({"linear_attn_config": {"kda_layers": [3]}}, r"kda_layers is \[3\], but .* say \[1, 2\]"),
        ({"linear_attn_config": 5}, "linear_attn_config is 5, expected an object"),
        ({"linear_head_dim": None}, "linear_attn_config.head_dim is null"),
        ({"mla_use_nope": False}, "mla_use_nope is false, expected true"),
        ({"num_expert_group": 2}, "num_expert_group is 2, expected 1"),
    ],
)
def test_transformers_configuration_is_checked(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = small_transformers(tmp_path, lambda checkpoint: checkpoint.config.update(change))
    with pytest.raises(ConversionError, match=message):
        conversion.convert(folder, dry_run=True)
