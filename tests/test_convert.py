"""Conversion: the bytes of an independent converter, exact experts, output types, naming, metadata, memory."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conversion
import tiny
from conversion.base import EXPERTS
from conversion.checkpoint import Checkpoint
from conversion.config import Config
from conversion.packed import BadScaleError, _repack_with_numpy, repack
from gguf_ext import GGUFReader, PlannedTensor
from gguf_ext.constants import GGMLQuantizationType as T
from gguf_ext.metadata import Metadata
from tiny_files import Checkpoint as HfCheckpoint
from tiny_files import HfTensor, write_json

SCRIPT = Path(__file__).parent.parent / "convert_hf_to_gguf.py"

OUTTYPES = ("f32", "f16", "bf16", "q8_0")

# Where our files differ from the independent converter's on purpose: model, key -> its value, ours.
INTENDED = {
    ("kl-mini", "kimi-linear.attention.value_length"): (72, 32),  # theirs: a config field that nothing uses
    ("kl-mini", "tokenizer.ggml.eos_token_id"): (449, 450),  # theirs: end of document instead of end of turn
}


def shown(value: Any) -> Any:
    """A value as the golden files write it: long arrays as count and digest."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if not isinstance(value, list) or len(value) <= 64:
        return value
    compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return {"count": len(value), "sha256": hashlib.sha256(compact.encode()).hexdigest()}


# ---- the bytes of an independent converter ---------------------------------------------------------------------------


@pytest.mark.parametrize("outtype", OUTTYPES)
@pytest.mark.parametrize("model", ["k3-mini", "kl-mini"])
def test_golden_digests(golden: Path, tmp_path: Path, model: str, outtype: str) -> None:
    expected = json.loads((golden / "upstream" / f"{model}.{outtype}.json").read_text())
    with GGUFReader(conversion.convert(golden / model, tmp_path / "x.gguf", outtype)) as reader:
        left_out = ("general.name", "tokenizer.chat_template")
        keys = [key for key in reader.fields if key not in left_out]
        assert keys == list(expected["metadata"])
        for key, entry in expected["metadata"].items():
            assert [type_.name for type_ in reader.types[key]] == entry["types"], key
            theirs, ours = INTENDED.get((model, key), (entry["value"], entry["value"]))
            assert (entry["value"], shown(reader.fields[key])) == (theirs, ours), key
        assert list(reader.tensors) == list(expected["tensors"])
        for name, entry in expected["tensors"].items():
            info, data = reader.tensors[name], reader.data(name)
            assert (info.type.name, list(info.ne)) == (entry["type"], entry["ne"]), name
            if name.endswith("ssm_a"):
                ours, theirs = data.view(np.int32), np.array(entry["values"], np.float32).view(np.int32)
                assert np.abs(ours - theirs).max() <= 1, name
            else:
                assert hashlib.sha256(data).hexdigest() == entry["sha256"], name


def test_golden_files_hold_name_and_template(golden: Path, tmp_path: Path) -> None:
    with GGUFReader(conversion.convert(golden / "k3-mini", tmp_path / "k3.gguf")) as reader:
        assert reader.fields["general.name"] == "K3 Mini"
        assert reader.fields["tokenizer.chat_template"] == conversion.kimi_k3.CHAT_TEMPLATE
    with GGUFReader(conversion.convert(golden / "kl-mini", tmp_path / "kl.gguf")) as reader:
        theirs = json.loads((golden / "kl-mini" / "tokenizer_config.json").read_text())["chat_template"]
        assert reader.fields["tokenizer.chat_template"] == theirs


# ---- values ----------------------------------------------------------------------------------------------------------

FP4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


def decoded(packed: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """float64 [rows, cols] of a compressed-tensors MXFP4 matrix, written from its description."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    return np.array(FP4)[codes] * np.exp2(scale.astype(np.float64) - 127).repeat(32, axis=1)


def all_experts_are_exact(folder: Path, path: Path) -> int:
    """Compare every packed expert of a checkpoint with the file; the number of matrices compared."""
    compared = 0
    with Checkpoint(folder) as checkpoint, GGUFReader(path) as reader:
        for layer in range(reader.fields["kimi-k3.block_count"]):
            for projection, _, output in EXPERTS:
                name = f"blk.{layer}.{output}"
                if name not in reader.tensors:
                    continue
                assert reader.tensors[name].type == T.MXFP4
                stack = reader.dequantize(name)
                for expert in range(len(stack)):
                    p = f"language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{projection}."
                    parts = (checkpoint.tensors[p + kind].bytes_2d() for kind in ("weight_packed", "weight_scale"))
                    assert np.abs(stack[expert] - decoded(*parts)).max() == 0.0
                    compared += 1
    return compared


@pytest.mark.parametrize("outtype", OUTTYPES)
def test_packed_experts_are_exact(golden: Path, tmp_path: Path, outtype: str) -> None:
    path = conversion.convert(golden / "k3-mini", tmp_path / "x.gguf", outtype)
    assert all_experts_are_exact(golden / "k3-mini", path) == 6 * 3 * 6


@pytest.mark.parametrize("preset", ["k3", "k3-odd-packed"])
def test_packed_experts_of_tiny_models_are_exact(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, preset: str
) -> None:
    """Scale bytes 0, 1 and 254 among them."""
    folder = tiny_checkpoint(preset)
    assert all_experts_are_exact(folder, conversion.convert(folder, tmp_path / "x.gguf")) >= 7 * 7 * 3


@pytest.mark.parametrize("repack", [repack, _repack_with_numpy], ids=["native if there", "numpy"])
def test_repack_worked_example(repack: Callable[..., np.ndarray]) -> None:
    source = bytes.fromhex("21436587 A9CBED0F 10325476 98BADCFE")
    packed, scale = np.frombuffer(source, np.uint8)[None], np.array([[120]], np.uint8)
    assert repack(packed, scale).tobytes() == b"\x78" + bytes.fromhex("01122334 45566778 899AABBC CDDEEFF0")


@pytest.mark.parametrize("repack", [repack, _repack_with_numpy], ids=["native if there", "numpy"])
def test_a1_a_scale_that_is_no_number_is_found(repack: Callable[..., np.ndarray]) -> None:
    scale = np.full((3, 4), 120, np.uint8)
    scale[1, 2] = 255
    with pytest.raises(BadScaleError) as error:
        repack(np.zeros((3, 64), np.uint8), scale)
    assert (error.value.row, error.value.block) == (1, 2)


def test_packed_and_plain_experts_hold_the_same_weights(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    packed = conversion.convert(tiny_checkpoint("k3"), tmp_path / "a.gguf", "f32")
    plain = conversion.convert(tiny_checkpoint("k3-bf16-experts"), tmp_path / "b.gguf", "f32")
    with GGUFReader(packed) as a, GGUFReader(plain) as b:
        assert set(a.tensors) == set(b.tensors)
        for name in a.tensors:
            np.testing.assert_array_equal(a.dequantize(name), b.dequantize(name))


def test_ssm_a_is_the_rounded_exponential(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    for preset, ne in (("k3-odd", (3,)), ("kl-odd", (1, 3, 1, 1))):
        folder = tiny_checkpoint(preset)
        with Checkpoint(folder) as checkpoint, GGUFReader(conversion.convert(folder, tmp_path / f"{preset}.gguf")) as r:
            source = next(s for name, s in checkpoint.tensors.items() if name.endswith("layers.0.self_attn.A_log"))
            expected = [np.float32(-math.exp(float(x))) for x in source.floats()[:3]]
            assert r.tensors["blk.0.ssm_a"].ne == ne
            assert r.data("blk.0.ssm_a").view(np.float32).tolist() == expected


def test_residual_scores_are_products(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_checkpoint("k3")
    with Checkpoint(folder) as checkpoint, GGUFReader(conversion.convert(folder, tmp_path / "x.gguf")) as reader:
        p = "language_model.model."
        for output, name in (
            ("output_res_score.weight", "output_attn_res"),
            ("blk.3.attn_res_score.weight", "layers.3.self_attention_res"),
            ("blk.3.ffn_res_score.weight", "layers.3.mlp_res"),
        ):
            norm, projection = (checkpoint.tensors[f"{p}{name}_{part}.weight"].floats() for part in ("norm", "proj"))
            np.testing.assert_array_equal(reader.dequantize(output), norm * projection)


def test_convolutions_of_either_shape(tmp_path: Path) -> None:
    paths = [
        conversion.convert(
            tiny.write_checkpoint(tmp_path / str(rank) / "model", conv_rank=rank), tmp_path / f"{rank}.gguf"
        )
        for rank in (2, 3)
    ]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_text_prefix_may_be_missing_and_vision_is_left_out(tmp_path: Path) -> None:
    contents = set()
    for number, options in enumerate(({}, {"prefix": False}, {"vision": True})):
        folder = tiny.write_checkpoint(tmp_path / str(number) / "model", **options)
        contents.add(conversion.convert(folder, tmp_path / f"{number}.gguf").read_bytes())
    assert len(contents) == 1


@pytest.mark.parametrize("preset", sorted(tiny.PRESETS))
def test_every_preset_plans_or_converts(tiny_checkpoint: Callable[..., Path], tmp_path: Path, preset: str) -> None:
    with GGUFReader(conversion.convert(tiny_checkpoint(preset), tmp_path / "x.gguf", "bf16")) as reader:
        architecture = reader.fields["general.architecture"]
        assert architecture == tiny.preset_arch(preset)
        kinds = reader.fields[f"{architecture}.attention.head_count_kv"]
        assert len(kinds) == reader.fields[f"{architecture}.block_count"]
        for layer, kind in enumerate(kinds):
            assert (f"blk.{layer}.ssm_a" in reader.tensors) == (kind == 0)
            assert (f"blk.{layer}.attn_kv_a_mqa.weight" in reader.tensors) == (kind == 1)


def test_optional_keys_of_k3(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    def fields(preset: str, **options: Any) -> dict[str, Any]:
        path = conversion.convert(tiny_checkpoint(preset, **options), tmp_path / "x.gguf", force=True)
        with GGUFReader(path) as reader:
            return reader.fields

    full = fields("k3")
    assert full["kimi-k3.kda.gate_lower_bound"] == -5.0 and full["kimi-k3.attention.q_lora_rank"] == 48
    assert full["kimi-k3.expert_weights_norm"] is True and "kimi-k3.rope.freq_base" not in full
    assert "kimi-k3.kda.gate_lower_bound" not in fields("k3-softplus-gate")
    assert "kimi-k3.attention.q_lora_rank" not in fields("k3-no-q-lora")
    assert "kimi-k3.expert_latent_length" not in fields("k3-full-width-experts")
    assert fields("k3", moe_renormalize=False)["kimi-k3.expert_weights_norm"] is False


# ---- types and order -------------------------------------------------------------------------------------------------


def test_types_that_do_not_follow_the_output_type(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    with GGUFReader(conversion.convert(tiny_checkpoint("k3"), tmp_path / "x.gguf", "q8_0")) as reader:
        for name, info in reader.tensors.items():
            if len(info.ne) == 1 or "conv1d" in name or "ffn_gate_inp" in name:
                assert info.type == T.F32, name
            elif "_exps" in name:
                assert info.type == T.MXFP4, name
            else:  # rows of 48 values are no Q8_0 blocks
                assert info.type == (T.F16 if info.ne[0] % 32 else T.Q8_0), name


def test_order_of_tensors(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Packed experts by layer number; the rest by shard and name of the source, where layer 10 precedes layer 2."""
    folder = tiny.write_checkpoint(tmp_path / "model", num_hidden_layers=12, shards=1)
    with GGUFReader(conversion.convert(folder, tmp_path / "x.gguf")) as reader:
        names = list(reader.tensors)
        stacks = [f"blk.{layer}.{output}" for layer in range(1, 12) for _, _, output in EXPERTS]
        assert names[: len(stacks)] == stacks
        rest = names[len(stacks) :]
        assert rest[:2] == ["output.weight", "token_embd.weight"]
        layers = list(dict.fromkeys(name.split(".")[1] for name in rest if name.startswith("blk.")))
        assert layers == sorted(layers) and layers[:4] == ["0", "1", "10", "11"]


@pytest.mark.parametrize(
    ("dtype", "packed", "expected"), [("BF16", False, 32), ("F16", False, 1), ("F32", False, 1), ("BF16", True, 38)]
)
def test_auto_output_type(tmp_path: Path, dtype: str, packed: bool, expected: int) -> None:
    def retype(checkpoint: HfCheckpoint) -> None:
        for shard in checkpoint.shards:
            for name, tensor in shard.items():
                if tensor.dtype == "BF16":
                    values = (np.frombuffer(tensor.data, "<u2").astype(np.uint32) << 16).view(np.float32)
                    shard[name] = HfTensor.from_float(values.reshape(tensor.shape), dtype)

    folder = tiny.write_checkpoint(tmp_path / "model", packed=packed, mutate=retype)
    with GGUFReader(conversion.convert(folder, tmp_path / "x.gguf")) as reader:
        assert reader.fields["general.file_type"] == expected
        wanted = {32: T.BF16, 1: T.F16, 38: T.BF16}[expected]
        assert reader.tensors["output.weight"].type == wanted


def test_16_bit_sources_are_kept_bit_for_bit(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny_checkpoint("kl")
    with Checkpoint(folder) as checkpoint, GGUFReader(conversion.convert(folder, tmp_path / "x.gguf")) as reader:
        source = checkpoint.tensors["lm_head.weight"]
        assert reader.data("output.weight").tobytes() == bytes(source.raw())


# ---- names and metadata ----------------------------------------------------------------------------------------------


def default_name(tmp_path: Path, folder: str, shared: int, per_expert: int, n_experts: int, file_type: str) -> str:
    tensors = [
        PlannedTensor("x.weight", (shared,), T.F32, list),
        PlannedTensor("x_exps.weight", (per_expert, 1, n_experts), T.F32, list),
    ]
    (tmp_path / folder).mkdir()
    return Metadata(tmp_path / folder, "kimi-k3", tensors).file_name(file_type)


def test_default_names_of_the_released_models(tmp_path: Path) -> None:
    """A size in the folder's name counts when it fits the parameters; else it is computed."""
    linear = default_name(tmp_path, "Kimi-Linear-48B-A3B-Instruct", 2_012_259_200, 184_025_088, 256, "BF16")
    assert linear == "Kimi-Linear-48B-A3B-Instruct-BF16.gguf"
    k3 = default_name(tmp_path, "Kimi-K3", 56_743_648_000, 3_038_773_248, 896, "MXFP4_MOE")
    assert k3 == "Kimi-K3-896x60B-MXFP4_MOE.gguf"


def test_default_names_of_small_files(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "Kimi-K3")
    names = [conversion.convert(folder, outtype=outtype, force=True).name for outtype in ("f32", "q8_0")]
    assert re.fullmatch(r"Kimi-K3-8x\d+K-MXFP4_MOE\.gguf", names[0]) and names[0] == names[1]
    assert conversion.convert(folder, vocab_only=True).name == "Kimi-K3-vocab.gguf"


def test_size_label_is_computed(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    with GGUFReader(conversion.convert(tiny_checkpoint("k3"), tmp_path / "x.gguf")) as reader:
        total = sum(math.prod(info.ne) for info in reader.tensors.values())
        experts = sum(math.prod(info.ne) for name, info in reader.tensors.items() if "_exps." in name)
        per_token = total - experts + experts // 8
        assert reader.fields["general.size_label"] == f"8x{per_token / 1000:.0f}K"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("a-{ftype}.gguf", "a-bf16.gguf"),
        ("a-{outtype}.gguf", "a-bf16.gguf"),
        ("a-{FTYPE}.gguf", "a-BF16.gguf"),
        ("a-{OUTTYPE}.gguf", "a-BF16.gguf"),
        ("a-{}.gguf", "a-bf16.gguf"),
        ("a-{{}}.gguf", "a-{}.gguf"),
    ],
)
def test_output_templates(tiny_checkpoint: Callable[..., Path], tmp_path: Path, template: str, name: str) -> None:
    path = conversion.convert(tiny_checkpoint("kl"), tmp_path / template, "bf16", dry_run=True)
    assert path == tmp_path / name
    assert list(tmp_path.iterdir()) == []


def test_output_folder(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = conversion.convert(tiny_checkpoint("kl"), tmp_path, "bf16", model_name="My Model")
    assert path.parent == tmp_path and path.name.startswith("My-Model-") and path.name.endswith("-BF16.gguf")


def test_metadata_sources(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "Kimi-K3")
    card = """\
        ---
        license: [mit, other]
        base_model: moonshotai/Kimi-K3-Base
        tags: [a, b]
        language: en
        author: Somebody
        ---
        # Card
        """
    (folder / "README.md").write_text(textwrap.dedent(card))
    write_json(folder / "generation_config.json", {"temperature": 0.5, "top_k": 7, "repetition_penalty": 1.25})
    overrides = tmp_path / "metadata.json"
    write_json(overrides, {"general.author": "Nobody", "general.description": "Tiny", "general.name": "Overridden"})
    with GGUFReader(conversion.convert(folder, tmp_path / "x.gguf", metadata=overrides)) as reader:
        fields = reader.fields
    assert fields["general.name"] == "Overridden" and fields["general.author"] == "Nobody"
    assert fields["general.description"] == "Tiny" and fields["general.license"] == "mit,other"
    assert fields["general.base_model.count"] == 1 and fields["general.base_model.0.organization"] == "Moonshotai"
    assert fields["general.tags"] == ["a", "b"] and fields["general.languages"] == ["en"]
    assert fields["general.sampling.temp"] == 0.5 and fields["general.sampling.top_k"] == 7
    assert fields["general.sampling.penalty_repeat"] == 1.25
    assert list(fields)[:3] == ["general.architecture", "general.type", "general.sampling.top_k"]
    path = conversion.convert(folder, tmp_path / "y.gguf", metadata=overrides, model_name="Given")
    with GGUFReader(path) as reader:
        assert reader.fields["general.name"] == "Given"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("metadata.json", None, "metadata.json cannot be read"),
        ("metadata.json", "{", "metadata.json is not valid JSON"),
        ("metadata.json", "[]", "metadata.json holds a JSON list"),
        ("metadata.json", '{"general.nmae": "x"}', "'general.nmae' is not a key that can be set"),
        ("metadata.json", '{"general.name": 5}', "general.name: the value is not STRING"),
        ("model/README.md", "---\na: [\n---\n", "README.md: the front matter is not valid YAML"),
        ("model/README.md", "---\nlicense: [1, 2]\n---\n", "README.md: a value is not of the kind expected there"),
        ("model/generation_config.json", "{", "generation_config.json is not valid JSON"),
        ("model/generation_config.json", '{"top_k": "many"}', "general.sampling.top_k: the value is not INT32"),
    ],
)
def test_metadata_faults(tmp_path: Path, file: str, content: str | None, message: str) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model")
    if content is not None:
        (tmp_path / file).write_text(content)
    overrides = tmp_path / "metadata.json" if file == "metadata.json" else None
    with pytest.raises(ValueError, match=message):
        conversion.convert(folder, tmp_path / "x.gguf", metadata=overrides)


def test_names_that_would_play_with_a_terminal_are_no_file_names(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model")
    (folder / "README.md").write_text('---\nname: "../a\\x1b[2J\\nb"\n---\n')
    path = conversion.convert(folder, dry_run=True)
    assert path.parent == folder and path.name.startswith("..-a-[2J-b-")


def test_folders_whose_names_are_no_text(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / os.fsdecode(b"Kimi \xff\xfe"))
    with GGUFReader(conversion.convert(folder, vocab_only=True)) as reader:
        assert reader.fields["general.name"] == "Kimi \ufffd\ufffd"


def test_file_names_that_the_system_cannot_spell(tmp_path: Path) -> None:
    """Where the locale is switched off, file names are ASCII; files' contents are UTF-8 nevertheless."""
    folder = tiny.write_checkpoint(tmp_path / "Kimi-\u6708")
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    (folder / "README.md").write_text("---\nname: Kimi \u6708\n---\n", encoding="utf-8")
    command = [sys.executable, SCRIPT, folder, "--vocab-only"]
    subprocess.run(command, env=environment, check=True)
    (path,) = folder.glob("Kimi---*vocab.gguf")
    with GGUFReader(path) as reader:
        assert reader.fields["general.name"] == "Kimi \u6708"


def test_vocab_only(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model")
    whole = conversion.convert(folder, tmp_path / "whole.gguf")
    for shard in folder.glob("*.safetensors*"):
        shard.unlink()
    with GGUFReader(whole) as a, GGUFReader(conversion.convert(folder, tmp_path / "v.gguf", vocab_only=True)) as b:
        assert len(b.tensors) == 0
        for key, value in a.fields.items():
            if key.startswith(("tokenizer.", "kimi-k3.")):
                assert shown(b.fields[key]) == shown(value)


def test_chat_templates_of_the_checkpoint(tmp_path: Path) -> None:
    def templates(name: str, mutate: Callable[[HfCheckpoint], None], jinja: str | None = None) -> dict[str, Any]:
        folder = tiny.write_checkpoint(tmp_path / name, mutate=mutate)
        if jinja is not None:
            (folder / "chat_template.jinja").write_text(jinja)
        with GGUFReader(conversion.convert(folder, vocab_only=True)) as reader:
            return {key[10:]: value for key, value in reader.fields.items() if "chat_template" in key}

    def tokenizer(value: Any) -> Callable[[HfCheckpoint], None]:
        return lambda checkpoint: checkpoint.tokenizer_config.update(chat_template=value)

    several = [{"name": "default", "template": "D"}, {"name": "tool use", "template": "T"}]
    assert templates("text", tokenizer("X")) == {"chat_template": "X"}
    assert templates("file", tokenizer("X"), "J") == {"chat_template": "J"}
    found = templates("several", tokenizer(several))
    assert found == {"chat_template.tool_use": "T", "chat_templates": ["tool_use"], "chat_template": "D"}
    assert list(found) == ["chat_template.tool_use", "chat_templates", "chat_template"]
    without = templates("none", lambda checkpoint: None)
    assert without == {"chat_template": conversion.kimi_k3.CHAT_TEMPLATE}


# ---- what it needs ---------------------------------------------------------------------------------------------------


def test_b30_no_transformers_and_no_torch(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The whole path runs where importing them fails, and imports none of them where they are there."""
    blocked = ("torch", "transformers", "tokenizers", "sentencepiece", "safetensors", "tiktoken", "compressed_tensors")
    code = f"""
        import sys
        for name in {blocked!r}:
            sys.modules[name] = None  # importing it raises
        import conversion
        sys.exit(conversion.cli_main(sys.argv[1:]))
    """
    for preset in ("k3", "kl"):
        command = [sys.executable, "-c", textwrap.dedent(code), str(tiny_checkpoint(preset))]
        done = subprocess.run([*command, "--outfile", str(tmp_path)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.iterdir())) == 2


def sparse_checkpoint(folder: Path, arch: str, **overrides: Any) -> Path:
    """A checkpoint of any size in no time: every tensor is a hole in its shard, so all weights are zero."""
    small = tiny.build_checkpoint(arch, shards=1, vocab_size=512)
    checkpoint = HfCheckpoint(
        arch, tiny.config_for(arch, **overrides), [], small.tiktoken, small.tokenizer_config, None, small.prefix, False
    )
    checkpoint.write(folder)
    config = Config(folder / "config.json")
    converter = conversion.get_converter(config.architecture)(config)
    shapes = {row.hf: row.axes for row in converter.model_rows()}
    entries: dict[str, tuple[str, list[int]]] = {}
    for layer in range(converter.n_layers):
        p = f"model.layers.{layer}."
        shapes |= {p + row.hf: row.axes for row in converter.layer_rows(layer)}
        for expert in range(converter.n_experts) if converter.has_experts(layer) else ():
            for projection, axes, _ in EXPERTS:
                rows, cols = (converter.widths[axis].value for axis in axes)
                q = f"{checkpoint.prefix}{p}block_sparse_moe.experts.{expert}.{projection}."
                entries[q + "weight_packed"] = ("U8", [rows, cols // 2])
                entries[q + "weight_scale"] = ("U8", [rows, cols // 32])
    for name, axes in shapes.items():
        entries[checkpoint.prefix + name] = ("BF16", [converter.widths[axis].value for axis in axes])
    header: dict[str, Any] = {}
    offset = 0
    for name, (dtype, shape) in entries.items():
        end = offset + math.prod(shape) * (1 if dtype == "U8" else 2)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    return folder


def test_a1_a3_a6_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Expert stacks of 71 MB and matrices of 33 MB, 1 GB in all, converted within 160 MiB of resident memory."""
    folder = sparse_checkpoint(
        tmp_path / "model",
        "kimi-k3",
        num_hidden_layers=6,
        hidden_size=1024,
        intermediate_size=16384,
        routed_expert_hidden_size=1024,
        moe_intermediate_size=2048,
        num_experts=64,
    )
    assert (folder / "model.safetensors").stat().st_size > 1_000_000_000
    code = r"""
        import re, sys, conversion
        conversion.convert(sys.argv[1], sys.argv[2], "q8_0")
        # Not ru_maxrss: that one begins with the size of the process that started this one.
        print(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1])
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(folder), str(tmp_path / "x.gguf")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        assert (tmp_path / "x.gguf").stat().st_size > 900_000_000
    finally:
        shutil.rmtree(folder)
        (tmp_path / "x.gguf").unlink(missing_ok=True)
    assert int(done.stdout) < 160 * 1024, f"{int(done.stdout) // 1024} MiB"
