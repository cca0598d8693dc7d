"""The shipped small model, as files: what a converter and a reader of the documentation may rely on. No torch."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
NANO = ROOT / "models" / "kimi-k3-nano"
K3_SPECIALS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return json.loads((NANO / "config.json").read_text())


@pytest.fixture(scope="module")
def tensors() -> dict[str, tuple[str, list[int], bytes]]:
    """Name to (dtype, shape, bytes), read from the shards that exist."""
    found = {}
    for path in sorted(NANO.glob("*.safetensors")):
        blob = path.read_bytes()
        (n,) = struct.unpack("<Q", blob[:8])
        for name, entry in json.loads(blob[8 : 8 + n]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                assert name not in found, f"{name} is in two shards"
                found[name] = (entry["dtype"], entry["shape"], blob[8 + n + begin : 8 + n + end])
    return found


@pytest.fixture(scope="module")
def training() -> Iterator[None]:
    """The modules of models/train can be imported."""
    sys.path.insert(0, str(ROOT / "models" / "train"))
    yield
    sys.path.remove(str(ROOT / "models" / "train"))


@pytest.fixture(scope="module")
def world(training: None) -> Any:
    import world

    return world


@pytest.fixture(scope="module")
def pictures(training: None) -> Any:
    import pictures

    return pictures


def test_size_and_files() -> None:
    files = {path.name: path.stat().st_size for path in NANO.iterdir()}
    assert sum(files.values()) <= 48 * 2**20
    assert {"config.json", "generation_config.json", "tiktoken.model", "tokenizer_config.json"} < set(files)
    assert {"preprocessor_config.json", "heldout.jsonl", "heldout_vision.jsonl"} < set(files)
    assert not [name for name in files if name.endswith((".jinja", ".py", ".bin"))]
    assert len([name for name in files if name.endswith(".safetensors")]) > 1


def test_config_is_nested_like_the_release(config: dict[str, Any]) -> None:
    text = config["text_config"]
    assert config["architectures"] == ["KimiK3ForConditionalGeneration"] and config["model_type"] == "kimi_k3"
    assert text["architectures"] == ["KimiLinearForCausalLM"] and text["model_type"] == "kimi_linear"
    assert "quantization_config" not in config and text["quantization_config"]["format"] == "mxfp4-pack-quantized"
    assert "rope_theta" not in text and "head_dim" not in text
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert config[key] == text[key]


def test_shape_has_every_mechanism(config: dict[str, Any]) -> None:
    text = config["text_config"]
    linear = text["linear_attn_config"]
    n_layer = text["num_hidden_layers"]
    kda, mla = linear["kda_layers"], linear["full_attn_layers"]
    assert n_layer >= 8 and sorted(kda + mla) == list(range(1, n_layer + 1))
    assert mla[-2:] == [n_layer - 1, n_layer] and len(kda) >= 2 * len(mla)
    assert linear["gate_lower_bound"] == -5.0 and linear["use_full_rank_gate"] is True
    assert text["first_k_dense_replace"] == 1 and text["num_shared_experts"] >= 1
    assert len(range(0, n_layer, text["attn_res_block_size"])) >= 3  # two boundaries beyond layer 0
    assert text["mla_use_output_gate"] and text["latent_moe_use_norm"] and text["q_lora_rank"]
    assert text["routed_expert_hidden_size"] < text["hidden_size"] and text["hidden_size"] % 256 == 0


def test_vision_has_every_mechanism(config: dict[str, Any]) -> None:
    vision = config["vision_config"]
    assert vision["text_hidden_size"] == config["text_config"]["hidden_size"]
    assert vision["qkv_hidden_size"] != vision["vt_hidden_size"] == vision["mm_hidden_size"]
    assert vision["norm_type"] == "rmsnorm" and vision["pos_emb_interpolation_mode"] == "bilinear"
    assert vision["activation_func"] == "gelu_pytorch_tanh" and vision["projector_hidden_act"] == "gelu"
    assert vision["mm_projector_type"] == "patchmergerv2" and vision["merge_kernel_size"] == [2, 2]
    assert not (vision["attn_bias"] or vision["linear_bias"] or vision["patch_embed_proj_bias"])
    ignored = config["text_config"]["quantization_config"]["ignore"]
    assert {"re:.*vision_tower.*", "re:.*mm_projector.*"} <= set(ignored)
    media = json.loads((NANO / "preprocessor_config.json").read_text())["media_proc_cfg"]
    assert media["patch_size"] == vision["patch_size"] and media["merge_kernel_size"] == 2


def test_vision_lies_in_a_shard_of_its_own(config: dict[str, Any]) -> None:
    index = json.loads((NANO / "model.safetensors.index.json").read_text())["weight_map"]
    shards = [{s for name, s in index.items() if name.startswith("language_model.") == text} for text in (True, False)]
    assert not shards[0] & shards[1] and shards[1] == {max(index.values())}
    per_block = [name for name in index if name.startswith("vision_tower.encoder.blocks.")]
    assert len(per_block) == 6 * config["vision_config"]["vt_num_hidden_layers"]
    assert len([name for name in index if not name.startswith("language_model.")]) == len(per_block) + 6


def test_index_and_shards_agree(tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    index = json.loads((NANO / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    assert set(index["weight_map"].values()) == {path.name for path in NANO.glob("*.safetensors")}
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in tensors.values())


def test_tensor_names_and_types(config: dict[str, Any], tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    float32 = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")
    for name, (dtype, _, _) in tensors.items():
        assert name.startswith(("language_model.", "vision_tower.", "mm_projector."))
        packed = name.endswith((".weight_packed", ".weight_scale"))
        assert dtype == ("U8" if packed else "F32" if name.endswith(float32) else "BF16"), name
        assert packed == (".experts." in name), name
    text = config["text_config"]
    moe_layers = text["num_hidden_layers"] - text["first_k_dense_replace"]
    assert sum(".experts." in name for name in tensors) == moe_layers * text["num_experts"] * 6


def test_weights_are_finite(tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    for name, (dtype, _, data) in tensors.items():
        if dtype == "F32":
            assert np.isfinite(np.frombuffer(data, np.float32)).all(), name
        elif dtype == "BF16":  # all exponent bits set would be an infinity or NaN
            assert ((np.frombuffer(data, np.uint16) & 0x7F80) != 0x7F80).all(), name


def test_expert_scales(tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """No NaN scale; packed columns and scale columns belong to the same 32-element groups."""
    n = 0
    for name, (_, shape, data) in tensors.items():
        if name.endswith(".weight_scale"):
            assert 0xFF not in data, name
            _, packed_shape, packed = tensors[name.replace("_scale", "_packed")]
            assert packed_shape == [shape[0], shape[1] * 16] and any(packed), name
            n += 1
    assert n > 0


def test_a_log_padding(config: dict[str, Any], tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    linear = config["text_config"]["linear_attn_config"]
    names = [name for name in tensors if name.endswith("A_log")]
    assert len(names) == len(linear["kda_layers"])
    for name in names:
        values = np.frombuffer(tensors[name][2], np.float32)
        assert len(values) > linear["num_heads"], name
        assert (values[: linear["num_heads"]] != 0).all() and (values[linear["num_heads"] :] == 0).all(), name


def test_tokenizer(config: dict[str, Any]) -> None:
    lines = (NANO / "tiktoken.model").read_text().splitlines()
    n_base = len(lines)
    assert [int(line.split()[1]) for line in lines] == list(range(n_base))
    assert n_base + 256 == config["text_config"]["vocab_size"]
    listed = json.loads((NANO / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert {int(i) - n_base: entry["content"] for i, entry in listed.items()} == K3_SPECIALS
    shown = {entry["content"] for entry in listed.values() if not entry["special"]}
    assert shown == {"<|open|>", "<|close|>", "<|sep|>"}
    assert config["bos_token_id"] == n_base and config["pad_token_id"] == n_base + 255
    assert config["eos_token_id"] == n_base + 2  # the end of a turn, not [EOS]
    assert config["media_placeholder_token_id"] == n_base + 21


def test_held_out_prompts_share_no_pair_with_training(world: Any) -> None:
    training, dev, held = world.split()
    assert len(held) == 500
    seen = {pair.key for pair in training} | {pair.key for pair in dev}
    assert not [pair.key for pair in held if pair.key in seen]
    # Nor is the text of a single question shown under another name, also not inside a longer conversation.
    asked = {pair.messages[0]["content"] for pair in held if len(pair.messages) == 1}
    for pair in training:
        assert not [m for m in pair.messages if m["role"] == "user" and m["content"] in asked], pair.key


def test_held_out_items_are_learnable(world: Any) -> None:
    """Every item and every phrasing of a closed kind is in training, only not together."""
    training, _, held = world.split()
    items = {(pair.kind, pair.item) for pair in training}
    phrasings = {(pair.kind, pair.phrasing) for pair in training}
    for pair in held:
        assert (pair.kind, pair.phrasing) in phrasings
        # A tool's answer is copied from the prompt, so those items need not be seen.
        assert pair.kind == "result" or (pair.kind, pair.item) in items, pair.key


def test_held_out_file_is_the_drawn_set(world: Any) -> None:
    rows = [json.loads(line) for line in (NANO / "heldout.jsonl").read_text().splitlines()]
    assert rows == world.held_out_rows()
    assert len({(row["kind"], row["item"], row["phrasing"]) for row in rows}) == 500
    assert {row["kind"] for row in rows} == set(world.HELD_OUT)
    assert 0.4 < sum(row["thinking"] for row in rows) / 500 < 0.8


def test_held_out_pictures_are_the_drawn_set(pictures: Any) -> None:
    rows = [json.loads(line) for line in (NANO / "heldout_vision.jsonl").read_text().splitlines()]
    assert rows == json.loads(json.dumps(pictures.held_out_rows()))
    assert len(rows) == 500 and {row["kind"] for row in rows} == set(pictures.HELD_OUT)
    assert len({json.dumps(row["scene"]) for row in rows}) == 500
    for row in rows:
        assert row["answer"] == row["scene"]["truth"][row["kind"]]
        assert pictures.Scene.from_json(row["scene"]).to_json() == json.loads(
            json.dumps(row["scene"]), object_hook=tupled
        )


def tupled(value: dict[str, Any]) -> dict[str, Any]:
    """Lists that a scene has as tuples."""
    return {key: tuple(entry) if isinstance(entry, list) else entry for key, entry in value.items()}


def test_held_out_pictures_are_varied(pictures: Any) -> None:
    """Odd aspect ratios, sides that need padding, grids below, at and above the native one, both kinds of files."""
    config = json.loads((NANO / "config.json").read_text())["vision_config"]
    native = config["init_pos_emb_height"], config["init_pos_emb_width"]
    scenes = [pictures.Scene.from_json(row["scene"]) for row in pictures.held_out_rows()]
    grids = [(-(-s.height // 28) * 2, -(-s.width // 28) * 2) for s in scenes]
    assert native in grids and any(h < native[0] for h, _ in grids) and any(w > native[1] for _, w in grids)
    assert any(s.width > 2 * s.height for s in scenes) and any(s.height > 2 * s.width for s in scenes)
    assert 150 < sum(s.quality > 0 for s in scenes) < 350
    for kind in pictures.ASKS:
        answers = {s.truth[kind] for s in scenes if kind in s.truth}
        assert len(answers) >= {"size": 2, "place": 4, "count": 5}.get(kind, 8), kind


def test_pictures_are_drawn_the_same_again(pictures: Any) -> None:
    scenes = [pictures.Scene.from_json(row["scene"]) for row in pictures.held_out_rows()[::25]]
    for scene in scenes:
        file = pictures.encoded(scene)
        assert file == pictures.encoded(scene)
        assert file.startswith(b"\xff\xd8" if scene.quality else b"\x89PNG")
        image = pictures.picture(scene)
        assert image.size == (scene.width, scene.height) and image.mode == "RGB"


def test_pictures_show_what_they_say(pictures: Any) -> None:
    """The colour covers enough of each picture to be seen, and the figures of a place lie there."""
    for row in pictures.held_out_rows()[::3]:
        scene = pictures.Scene.from_json(row["scene"])
        pixels = np.asarray(pictures.picture(scene)).astype(int)
        wanted = np.array(scene.items[0].colour)
        near = np.abs(pixels - wanted).max(axis=-1) < 40
        assert 0.01 < near.mean() < 0.7, row
        if row["kind"] == "place":
            y, x = (at.mean() / side for at, side in zip(near.nonzero(), near.shape, strict=True))
            off = {"Left.": -(x - 0.5), "Right.": x - 0.5, "Up.": -(y - 0.5), "Down.": y - 0.5}[row["answer"]]
            assert off > 0.15 and off >= max(abs(x - 0.5), abs(y - 0.5)), row
