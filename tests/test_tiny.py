"""The tiny checkpoints are what the other tests take them for."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken

import reference as ref
import tiny
import tiny_vocab
from reference import Model
from reference.moe import MoeFfn
from tiny_defects import defect_arch
from tiny_files import Checkpoint, HfTensor, bf16_bits


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def header(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])


def names(folder: Path) -> set[str]:
    return {name for path in folder.glob("*.safetensors") for name in header(path) if name != "__metadata__"}


# ---- good checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", tiny.PRESETS)
def test_preset_is_sane(tiny_checkpoint: Callable[..., Path], rng: np.random.Generator, preset: str) -> None:
    """Finite logits that spread, streams that keep their scale, experts chosen with the bias having its say."""
    folder = tiny_checkpoint(preset)
    model = Model.from_checkpoint(folder)
    trace: dict[str, np.ndarray] = {}
    tokens = 12 if len(model.layers) > 20 or model.config["vocab_size"] > 1000 else 40
    logits = model.forward(rng.integers(0, 512, tokens), trace=trace)
    assert np.isfinite(logits).all()
    assert 1 < logits.std() < 4
    for i in range(len(model.layers)):
        assert 0.05 < trace[f"layer.{i}.attn"].std() < 5, f"attention of layer {i}"
        assert 0.05 < trace[f"layer.{i}.ffn"].std() < 8, f"feed-forward of layer {i}"
        assert 0.3 < trace[f"layer.{i}.out"].std() < 12, f"stream after layer {i}"
    router = next((layer.ffn for layer in model.layers if isinstance(layer.ffn, MoeFfn)), None)
    if router is None:
        assert not model.config["num_experts"]
        return
    scores = ref.sigmoid(rng.standard_normal((200, router.w_router.shape[1])) @ router.w_router.T)
    with_bias = np.sort(ref.route(scores, router.bias, router.k, 1.0)[0])
    without = np.sort(ref.route(scores, 0 * router.bias, router.k, 1.0)[0])
    assert np.any(with_bias != without, axis=1).mean() > 0.2
    assert len(np.unique(with_bias)) > len(router.bias) // 2, "most experts are in use"


def test_decays_reach_both_ends() -> None:
    for preset, lowest in (("k3", -4.9), ("kl", -8.0)):
        checkpoint = tiny.build_checkpoint(tiny.preset_arch(preset), num_attention_heads=8)
        linear = checkpoint.text["linear_attn_config"]
        gates = []
        for layer in checkpoint.layers("kda"):
            p = f"model.layers.{layer}.self_attn."
            a_log = np.frombuffer(checkpoint.get(p + "A_log").data, "<f4")[:8]
            dt_bias = np.frombuffer(checkpoint.get(p + "dt_bias").data, "<f4").reshape(8, -1)
            f = np.random.default_rng(0).standard_normal((50, *dt_bias.shape))
            gates.append(ref.kda_gate(f, a_log, dt_bias, linear.get("gate_lower_bound")))
        g = np.concatenate(gates)
        assert g.min() < lowest and g.max() > -0.01
        assert np.median(g) < -0.02


def test_presets_hold_what_their_names_say(tiny_checkpoint: Callable[..., Path]) -> None:
    def config(preset: str) -> dict[str, Any]:
        return ref.Checkpoint(tiny_checkpoint(preset)).config

    for preset in ("k3-real-widths", "kl-real-widths"):
        c = config(preset)
        assert c["linear_attn_config"]["head_dim"] == c["qk_nope_head_dim"] == c["v_head_dim"] == 128
        assert (c["kv_lora_rank"], c["qk_rope_head_dim"]) == (512, 64)
    c = config("k3-93-layers")
    full = c["linear_attn_config"]["full_attn_layers"]
    assert full == [*range(4, 93, 4), 93] and len(c["linear_attn_config"]["kda_layers"]) == 69
    assert c["attn_res_block_size"] == 12
    c = config("k3-896-experts")
    assert (c["num_experts"], c["num_experts_per_token"]) == (896, 16)
    c = config("k3-full-vocab")
    assert (c["vocab_size"], c["bos_token_id"], c["eos_token_id"]) == (163840, 163584, 163586)
    for preset in ("k3-odd", "kl-odd"):
        c = config(preset)
        assert (c["num_attention_heads"], c["linear_attn_config"]["head_dim"]) == (3, 48)
        assert (c["kv_lora_rank"], c["num_experts"], c["num_experts_per_token"]) == (40, 7, 3)
    assert config("k3-odd")["routed_expert_hidden_size"] == 40


def test_released_names_and_dtypes(tmp_path: Path, golden: Path) -> None:
    """At the sizes of the golden checkpoints: the same tensors with the same shapes and dtypes (K3), and the same
    config keys with the same values but for the documented differences."""
    sizes: dict[str, Any] = {
        "num_hidden_layers": 7,
        "num_experts": 6,
        "linear_attn_config": {"full_attn_layers": [3, 6, 7], "kda_layers": [1, 2, 4, 5]},
    }
    folder = tiny.write_checkpoint(tmp_path / "k3", "kimi-k3", **sizes)
    ours = {n: e for p in folder.glob("*.safetensors") for n, e in header(p).items()}
    theirs = {n: e for p in (golden / "k3-mini").glob("*.safetensors") for n, e in header(p).items()}
    assert ours.keys() == theirs.keys()
    for name in ours.keys() - {"__metadata__"}:
        if not name.endswith("A_log"):  # padded by four there, to the head width here
            assert (ours[name]["dtype"], ours[name]["shape"]) == (theirs[name]["dtype"], theirs[name]["shape"]), name
    sizes["num_hidden_layers"] = 5
    sizes["linear_attn_config"] = {"full_attn_layers": [3, 5], "kda_layers": [1, 2, 4]}
    folder = tiny.write_checkpoint(tmp_path / "kl", "kimi-linear", **sizes)
    ours = {n: e for p in folder.glob("*.safetensors") for n, e in header(p).items()}
    theirs = {n: e for p in (golden / "kl-mini").glob("*.safetensors") for n, e in header(p).items()}
    assert ours.keys() == theirs.keys()
    for name in ours.keys() - {"__metadata__"}:
        assert ours[name]["shape"] == theirs[name]["shape"], name
        if not name.endswith("e_score_correction_bias"):  # BF16 as released, F32 there
            assert ours[name]["dtype"] == theirs[name]["dtype"], name
    config = json.loads((folder / "config.json").read_text())
    assert config == json.loads((golden / "kl-mini" / "config.json").read_text())


def test_seed_decides_everything(tmp_path: Path) -> None:
    first = digests(tiny.write_checkpoint(tmp_path / "a", seed=5))
    assert first == digests(tiny.write_checkpoint(tmp_path / "b", seed=5))
    other = digests(tiny.write_checkpoint(tmp_path / "c", seed=6))
    assert {name for name in first if first[name] != other[name]} == {n for n in first if n.endswith(".safetensors")}


SAME_MODEL: list[tuple[str, dict[str, Any]]] = [
    ("k3", {"packed": False}),
    ("k3", {"prefix": False}),
    ("k3", {"alog_padded": False}),
    ("k3", {"vision": True}),
    ("k3", {"shards": 1}),
    ("k3", {"shards": 6, "index": False}),
    ("kl", {"prefix": True}),
    ("kl", {"conv_rank": 2}),
    ("kl", {"added_tokens": False}),
]


@pytest.mark.parametrize(("preset", "switch"), SAME_MODEL, ids=str)
def test_switch_changes_the_files_only(
    tiny_checkpoint: Callable[..., Path], preset: str, switch: dict[str, Any]
) -> None:
    plain, switched = tiny_checkpoint(preset), tiny_checkpoint(preset, **switch)
    assert digests(plain) != digests(switched)
    ids = list(range(40, 60))
    assert np.array_equal(Model.from_checkpoint(plain).forward(ids), Model.from_checkpoint(switched).forward(ids))
    assert (switched / "model.safetensors.index.json").exists() is switch.get("index", True)
    assert len(list(switched.glob("*.safetensors"))) == switch.get("shards", 3)


def test_every_k3_mechanism_matters(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Reading a checkpoint without one of its mechanisms gives other logits: no test can pass by ignoring it."""
    folder = tiny_checkpoint("k3")
    ids = list(range(300, 330))
    logits = Model.from_checkpoint(folder).forward(ids)
    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        "gate bound": lambda c: c["linear_attn_config"].pop("gate_lower_bound"),
        "output gate": lambda c: c.update(mla_use_output_gate=False),
        "latent norm": lambda c: c.update(latent_moe_use_norm=False),
        "attention residuals": lambda c: c.update(attn_res_block_size=0),
        "block size": lambda c: c.update(attn_res_block_size=4),
        "shared experts": lambda c: c.update(num_shared_experts=0),
        "situ beta": lambda c: c.update(activation_situ_beta=1.0),
        "situ linear beta": lambda c: c.update(activation_situ_linear_beta=None),
        "silu": lambda c: c.update(hidden_act="silu"),
        "top k": lambda c: c.update(num_experts_per_token=3),
        "renormalisation": lambda c: c.update(moe_renormalize=False),
        "epsilon": lambda c: c.update(rms_norm_eps=1e-4),
    }
    for what, change in changes.items():
        checkpoint = ref.Checkpoint(folder)
        change(checkpoint.config)
        other = Model(checkpoint).forward(ids)
        difference = np.sqrt(np.mean((other - logits) ** 2)) / logits.std()
        # The latent norm undoes the scale of the expert sum, so renormalising only acts through its epsilon.
        assert difference > (1e-8 if what == "renormalisation" else 1e-6), f"{what}: {difference}"


def test_packed_experts_reach_the_ends_of_the_scale_range(tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoint = ref.Checkpoint(tiny_checkpoint("k3"))
    stem = "model.layers.1.block_sparse_moe.experts.0.w1"
    scales = checkpoint.stored(f"{stem}.weight_scale")
    assert {0, 1, 254} <= set(scales.flat) and 255 not in scales
    values = checkpoint.matrix(stem)
    assert np.isfinite(values.astype(np.float32)).all()
    assert np.array_equal(bf16_bits(values).astype(np.uint32) << 16, values.astype(np.float32).view(np.uint32))
    unpacked = tiny.unpack_mxfp4(checkpoint.stored(f"{stem}.weight_packed"), scales)
    np.testing.assert_array_equal(unpacked, values)


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown preset 'k4'"):
        tiny.write_checkpoint(tmp_path, preset="k4")
    with pytest.raises(ValueError, match="unknown defect 'rust'"):
        tiny.write_checkpoint(tmp_path, defect="rust")
    with pytest.raises(ValueError, match="unknown architecture 'llama'"):
        tiny.write_checkpoint(tmp_path, "llama")
    with pytest.raises(ValueError, match="kimi-k3 only"):
        tiny.write_checkpoint(tmp_path, "kimi-linear", defect="scale_255")
    with pytest.raises(ValueError, match="48 columns cannot be packed"):
        tiny.write_checkpoint(tmp_path, routed_expert_hidden_size=48)
    assert not list(tmp_path.iterdir())


# ---- vocabulary ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [512, 4096, 163840])
def test_vocabulary_is_a_real_merge_table(rng: np.random.Generator, vocab_size: int) -> None:
    lines = tiny_vocab.tiktoken_model(vocab_size).splitlines()
    tokens = [base64.b64decode(line.split()[0]) for line in lines]
    assert [int(line.split()[1]) for line in lines] == list(range(len(lines)))
    assert tokens[:256] == [bytes([i]) for i in range(256)]
    assert len(set(tokens)) == len(tokens) == vocab_size - tiny_vocab.special_count(vocab_size)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    sample = range(256, len(tokens)) if vocab_size < 10000 else rng.integers(256, len(tokens), 3000)
    for rank in sample:
        assert len(tiny_vocab.merge_bytes(tokens[rank], ranks, int(rank))) == 2, tokens[rank]


def test_vocabulary_makes_words_and_survives_any_bytes(rng: np.random.Generator) -> None:
    tokens = tiny_vocab.base_tokens(1024 - 64)
    encoding = tiktoken.Encoding(
        "tiny", pat_str=r" ?[^\W\d]+| ?\d{1,3}| ?[^\w\s]+|\s+",
        mergeable_ranks={token: rank for rank, token in enumerate(tokens)}, special_tokens={},
    )  # fmt: skip
    text = "The capital of France is 你好世界, isn't it? 1234"
    ids = encoding.encode(text)
    assert encoding.decode(ids) == text
    assert len(ids) < len(text.encode()) / 2
    noise = rng.integers(0, 256, 500).astype(np.uint8).tobytes()
    assert encoding.decode_bytes(encoding._encode_bytes(noise)) == noise


@pytest.mark.parametrize("arch", ["kimi-k3", "kimi-linear"])
def test_special_tokens_have_the_released_ids(arch: str) -> None:
    specials = tiny_vocab.special_tokens(arch, 163840)
    released = {
        "kimi-k3": {
            163584: "[BOS]", 163585: "[EOS]", 163586: "<|end_of_msg|>", 163587: "<|open|>", 163588: "<|close|>",
            163589: "<|sep|>", 163593: "[EOT]", 163605: "<|media_pad|>", 163649: "<osagent_mode>", 163839: "[PAD]",
        },
        "kimi-linear": {
            163584: "[BOS]", 163586: "<|im_end|>", 163587: "<|im_user|>", 163588: "<|im_assistant|>",
            163594: "<|im_system|>", 163599: "<|tool_call_end|>", 163601: "<|im_middle|>", 163838: "[UNK]",
        },
    }  # fmt: skip
    assert released[arch].items() <= specials.items()
    assert len(set(specials.values())) == len(specials)
    if arch == "kimi-k3":
        assert len(specials) == 16
        entries = tiny_vocab.tokenizer_config(arch, 163840)["added_tokens_decoder"].values()
        assert sorted(e["content"] for e in entries if not e["special"]) == ["<|close|>", "<|open|>", "<|sep|>"]
    small = tiny_vocab.special_tokens(arch, 512)
    assert small[448] == "[BOS]" and small[511] == "[PAD]" and max(small) == 511 and min(small) == 448


# ---- defects ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("defect", tiny.DEFECTS)
def test_defect_changes_a_good_checkpoint(tmp_path: Path, tiny_checkpoint: Callable[..., Path], defect: str) -> None:
    """Each defect writes a folder that differs from the good one, and has a description of its own."""
    arch = defect_arch(defect) or "kimi-k3"
    good = digests(tiny_checkpoint("k3" if arch == "kimi-k3" else "kl"))
    assert digests(tiny.write_checkpoint(tmp_path / "bad", defect=defect)) != good
    assert list(tiny.DEFECTS.values()).count(tiny.DEFECTS[defect]) == 1


def test_defects_are_what_they_say(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    """A sample, looked up in the files."""
    count = iter(range(1000))
    good = names(tiny_checkpoint("k3"))
    moe = "language_model.model.layers.1.block_sparse_moe."

    def bad(defect: str, arch: str | None = None) -> Path:
        return tiny.write_checkpoint(tmp_path / str(next(count)), arch, defect=defect)

    def entry(folder: Path, name: str) -> dict[str, Any]:
        return next(header(p)[name] for p in folder.glob("*.safetensors") if name in header(p))

    w2 = {f"{moe}experts.5.w2.weight_packed", f"{moe}experts.5.w2.weight_scale"}
    assert good - names(bad("missing_expert")) == w2
    assert "model.layers.1.block_sparse_moe.experts.5.w2.weight" not in names(bad("missing_expert", "kimi-linear"))
    assert len(names(bad("extra_expert")) - good) == 6
    assert good - names(bad("missing_scale")) == {f"{moe}experts.3.w1.weight_scale"}
    assert good - names(bad("unpaired_res")) == {"language_model.model.layers.1.mlp_res_proj.weight"}
    stray = names(bad("stray_packed"))
    assert {f"{moe}shared_experts.gate_proj.weight_packed", f"{moe}shared_experts.gate_proj.weight_scale"} <= stray
    scales = ref.Checkpoint(bad("scale_255")).stored(f"{moe}experts.2.w3.weight_scale".removeprefix("language_model."))
    assert np.argwhere(scales == 255).tolist() == [[4, 0]]
    a_log = ref.Checkpoint(bad("alog_tail")).tensor("model.layers.0.self_attn.A_log")
    assert a_log.shape == (32,) and np.flatnonzero(a_log[2:]).tolist() == [28]
    assert ref.Checkpoint(bad("alog_short")).tensor("model.layers.0.self_attn.A_log").shape == (1,)
    assert ref.Checkpoint(bad("f16_overflow")).tensor("model.layers.0.self_attn.q_proj.weight").max() > 65504
    folder = bad("g_proj_swapped")
    assert entry(folder, "language_model.model.layers.0.self_attn.g_proj.weight")["shape"] == [96, 64]
    assert entry(folder, "language_model.model.layers.3.self_attn.g_proj.weight")["shape"] == [64, 64]
    folder = bad("mxfp4_odd_width")
    assert entry(folder, f"{moe}experts.0.w1.weight_packed")["shape"] == [64, 24]
    assert entry(folder, f"{moe}experts.0.w2.weight_packed")["shape"] == [48, 32]
    assert entry(bad("scale_shape"), f"{moe}experts.1.w2.weight_scale")["shape"] == [32, 1]
    assert entry(bad("scale_int8"), f"{moe}experts.1.w2.weight_scale")["dtype"] == "I8"
    folder = bad("truncated_shard")
    last = folder / "model-00003-of-000003.safetensors"
    end = max(e["data_offsets"][1] for n, e in header(last).items() if n != "__metadata__")
    assert last.stat().st_size == 8 + int.from_bytes(last.read_bytes()[:8], "little") + end - 1
    folder = bad("duplicate_tensor")
    assert sum("language_model.model.embed_tokens.weight" in header(p) for p in folder.glob("*.safetensors")) == 2
    folder = bad("duplicate_key")
    last = folder / "model-00003-of-000003.safetensors"
    raw = last.read_bytes()[8 : 8 + int.from_bytes(last.read_bytes()[:8], "little")]
    pairs = json.loads(raw, object_pairs_hook=list)
    keys = [key for key, _ in pairs]
    assert len(keys) == len(set(keys)) + 1
    folder = bad("offset_overlap")
    last = folder / "model-00003-of-000003.safetensors"
    starts = [e["data_offsets"][0] for n, e in header(last).items() if n != "__metadata__"]
    assert len(starts) == len(set(starts)) + 1
    index = json.loads((bad("index_names_absent_tensor") / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) - good == {"model.extra.weight"}


def test_mutate_and_resized(tmp_path: Path) -> None:
    """The tool for defects without a name: one axis of one tensor off by one."""
    name = "model.layers.0.mlp.down_proj.weight"

    def wider(checkpoint: Checkpoint) -> None:
        checkpoint.set(name, checkpoint.get(name).resized(1, 1))

    folder = tiny.write_checkpoint(tmp_path / "m", mutate=wider)
    assert ref.Checkpoint(folder).tensor(name).shape == (64, 97)
    assert HfTensor.from_float(np.ones((3, 4)), "F32").resized(0, -1).shape == (2, 4)
