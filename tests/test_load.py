"""The load contract of the engine: every key and tensor is required, checked and used; a wrong file is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType

import native
from engine import Engine
from gguf_edit import Edit

TOKENS = list(range(5, 45))


@pytest.fixture
def k3(golden: Path, gguf: Callable[..., Path]) -> Path:
    return gguf(golden / "k3-mini")


@pytest.fixture
def kl(golden: Path, gguf: Callable[..., Path]) -> Path:
    return gguf(golden / "kl-mini")


def refusal(path: Path, **params: int) -> native.NativeError:
    with pytest.raises(native.NativeError) as error:
        Engine(path, device="ref", n_ctx=64, **params).close()
    return error.value


def logits(path: Path) -> np.ndarray:
    with Engine(path, n_ctx=64) as engine:
        return engine.logits(TOKENS)


REQUIRED = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.layer_norm_rms_epsilon",
    "expert_count",
    "expert_used_count",
    "expert_gating_func",
    "ssm.conv_kernel",
    "kda.head_dim",
    "attention.kv_lora_rank",
    "rope.dimension_count",
    "attention.key_length_mla",
    "attention.value_length_mla",
    "expert_feed_forward_length",
    "expert_shared_count",
    "leading_dense_block_count",
    "expert_weights_scale",
]
REQUIRED_K3 = [
    "expert_weights_norm",
    "expert_latent_length",
    "activation.situ_beta",
    "activation.situ_linear_beta",
    "attn_res.block_size",
]


@pytest.mark.parametrize("key", REQUIRED + REQUIRED_K3)
def test_b6_a_missing_key_is_named_k3(k3: Path, tmp_path: Path, key: str) -> None:
    error = refusal(Edit(k3).drop(key).write(tmp_path / "x.gguf"))
    assert error.name == "FORMAT" and f"kimi-k3.{key}" in error.message


@pytest.mark.parametrize("key", REQUIRED)
def test_b6_a_missing_key_is_named_kl(kl: Path, tmp_path: Path, key: str) -> None:
    error = refusal(Edit(kl).drop(key).write(tmp_path / "x.gguf"))
    assert error.name == "FORMAT" and f"kimi-linear.{key}" in error.message


def test_a_missing_vocabulary_is_named(k3: Path, tmp_path: Path) -> None:
    assert "tokenizer.ggml.tokens" in refusal(Edit(k3).drop("tokenizer.ggml.tokens").write(tmp_path / "x.gguf")).message


def tensor_names(preset_file: str) -> list[str]:
    """One tensor of each kind: a KDA dense, a KDA expert and an MLA expert layer are among the first three."""
    common = ["token_embd.weight", "output.weight", "output_norm.weight"]
    every = ["attn_norm.weight", "ffn_norm.weight", "attn_output.weight"]
    kda = [
        *("attn_q.weight", "attn_k.weight", "attn_v.weight", "ssm_conv1d_q.weight", "ssm_conv1d_k.weight"),
        *("ssm_conv1d_v.weight", "ssm_f_a.weight", "ssm_f_b.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias"),
        "ssm_norm.weight",
    ]
    mla = ["attn_kv_a_mqa.weight", "attn_kv_a_norm.weight", "attn_k_b.weight", "attn_v_b.weight"]
    dense = ["ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"]
    moe = [
        *("ffn_gate_inp.weight", "exp_probs_b.bias", "ffn_gate_exps.weight", "ffn_up_exps.weight"),
        *("ffn_down_exps.weight", "ffn_gate_shexp.weight", "ffn_up_shexp.weight", "ffn_down_shexp.weight"),
    ]
    if preset_file == "k3":
        common += ["output_res_score.weight"]
        every += ["attn_res_score.weight", "ffn_res_score.weight"]
        kda += ["ssm_g.weight"]
        mla += ["attn_q_a.weight", "attn_q_a_norm.weight", "attn_q_b.weight"]
        moe += ["ffn_routed_down.weight", "ffn_routed_up.weight"]
    else:
        kda += ["ssm_g_a.weight", "ssm_g_b.weight"]
        mla += ["attn_q.weight"]
    names = (
        common + [f"blk.0.{n}" for n in every + kda + dense] + [f"blk.2.{n}" for n in mla] + [f"blk.1.{n}" for n in moe]
    )
    return names


CASES = [(file, name) for file in ("k3", "kl") for name in tensor_names(file)]


@pytest.mark.parametrize("file,name", CASES)
def test_a_missing_tensor_is_named(request: pytest.FixtureRequest, tmp_path: Path, file: str, name: str) -> None:
    edit = Edit(request.getfixturevalue(file))
    del edit.tensors[name]
    error = refusal(edit.write(tmp_path / "x.gguf"))
    assert error.name == "FORMAT" and f"{name} is missing" in error.message


@pytest.mark.parametrize("file,name", CASES)
def test_b13_a_tensor_of_another_shape_is_named(
    request: pytest.FixtureRequest, tmp_path: Path, file: str, name: str
) -> None:
    """One column (of packed tensors one row) too few; B13 is `ssm_g` and `attn_gate` of another width."""
    edit = Edit(request.getfixturevalue(file))
    values = edit.values(name)
    type_ = Type.F32
    smaller = values[..., :-1] if values.shape[-1] > 1 else values[..., :-1, :]
    edit.put(name, smaller, type_)
    error = refusal(edit.write(tmp_path / "x.gguf"))
    assert error.name == "FORMAT" and name in error.message and "expected" in error.message, error.message


def test_b13_gates_do_not_trade_places(k3: Path, tmp_path: Path) -> None:
    """The output gate of an MLA layer under the name of a KDA layer's, and the other way round."""
    edit = Edit(k3)
    edit.tensors["blk.2.ssm_g.weight"] = edit.tensors.pop("blk.2.attn_gate.weight")
    assert "blk.2.ssm_g.weight" in refusal(edit.write(tmp_path / "x.gguf")).message


@pytest.mark.parametrize("name", ["blk.0.extra.weight", "blk.7.attn_norm.weight", "blk.0.ffn_gate_inp.weight"])
def test_a_tensor_without_a_place_is_named(k3: Path, tmp_path: Path, name: str) -> None:
    error = refusal(Edit(k3).put(name, np.zeros((2, 32))).write(tmp_path / "x.gguf"))
    assert error.name == "FORMAT" and name in error.message


@pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "blk.0.ssm_a", "blk.1.ffn_gate_inp.weight"])
def test_what_must_be_f32_is_not_taken_in_less(k3: Path, tmp_path: Path, name: str) -> None:
    edit = Edit(k3)
    edit.put(name, edit.values(name), Type.BF16)
    error = refusal(edit.write(tmp_path / "x.gguf"))
    assert name in error.message and "BF16" in error.message and "F32" in error.message


BAD_VALUES = [
    ("block_count", 0),
    ("block_count", 6),
    ("embedding_length", 0),
    ("attention.head_count", 0),
    ("attention.head_count", 3),
    ("attention.layer_norm_rms_epsilon", 0.0),
    ("attention.layer_norm_rms_epsilon", float("nan")),
    ("expert_used_count", 0),
    ("expert_used_count", 7),
    ("expert_gating_func", 1),
    ("expert_weights_scale", 0.0),
    ("expert_weights_scale", float("inf")),
    ("ssm.conv_kernel", 0),
    ("ssm.conv_kernel", 1),
    ("ssm.conv_kernel", 5),
    ("kda.head_dim", 0),
    ("kda.gate_lower_bound", 0.0),
    ("kda.gate_lower_bound", 5.0),
    ("attention.kv_lora_rank", 0),
    ("attention.key_length_mla", 16),
    ("attention.value_length_mla", 0),
    ("leading_dense_block_count", 8),
    ("leading_dense_block_count", 2),
    ("activation.situ_beta", 0.0),
    ("activation.situ_linear_beta", float("nan")),
    ("attn_res.block_size", 0),
    ("expert_latent_length", 33),
    ("vocab_size", 511),
    ("attention.head_count_kv", [0, 0, 1]),
    ("attention.head_count_kv", [0, 0, 2, 0, 0, 1, 1]),
    ("attention.head_count_kv", [0, 1, 0, 0, 0, 1, 1]),
]


@pytest.mark.parametrize("key,value", BAD_VALUES, ids=lambda x: str(x))
def test_a_value_that_cannot_be_is_refused(k3: Path, tmp_path: Path, key: str, value: object) -> None:
    error = refusal(Edit(k3).set(key, value).write(tmp_path / "x.gguf"))
    # A count that is possible by itself is caught by the tensors it does not fit.
    assert error.name == "FORMAT" and (
        f"kimi-k3.{key}" in error.message or "expected" in error.message or "no place" in error.message
    )


def test_expert_groups_are_refused(k3: Path, tmp_path: Path) -> None:
    edit = Edit(k3).set("expert_group_count", 2, GGUFValueType.UINT32)
    assert "expert_group_count" in refusal(edit.write(tmp_path / "x.gguf")).message


def test_an_unknown_architecture_is_named(k3: Path, tmp_path: Path) -> None:
    edit = Edit(k3)
    edit.fields["general.architecture"] = ("llama", (GGUFValueType.STRING,))
    error = refusal(edit.write(tmp_path / "x.gguf"))
    assert error.name == "UNSUPPORTED" and "llama" in error.message and "kimi-k3" in error.message


def fuse_kv_b(edit: Edit, layer: int) -> np.ndarray:
    """[heads * (nope + v), latent], K rows first in each head."""
    k_b = edit.values(f"blk.{layer}.attn_k_b.weight")  # [heads, latent, nope]
    v_b = edit.values(f"blk.{layer}.attn_v_b.weight")  # [heads, v, latent]
    del edit.tensors[f"blk.{layer}.attn_k_b.weight"], edit.tensors[f"blk.{layer}.attn_v_b.weight"]
    fused = np.concatenate([k_b.transpose(0, 2, 1), v_b], axis=1)
    return fused.reshape(-1, fused.shape[-1])


@pytest.mark.parametrize("file", ["k3", "kl"])
def test_b12_fused_kv_b_gives_the_same_logits(request: pytest.FixtureRequest, tmp_path: Path, file: str) -> None:
    """B11, B12: files of the first releases carry the unsplit projection."""
    source = request.getfixturevalue(file)
    edit = Edit(source)
    for layer in [i for i, kind in enumerate(edit.fields[f"{edit.arch}.attention.head_count_kv"][0]) if kind]:
        edit.put(f"blk.{layer}.attn_kv_b.weight", fuse_kv_b(edit, layer))
    assert np.array_equal(logits(edit.write(tmp_path / "fused.gguf")), logits(source))


def test_b11_quantized_fused_kv_b_is_split_by_rows_not_by_blocks(kl: Path, tmp_path: Path) -> None:
    """Q8_0: equal to the file whose parts hold the decoded values of the fused tensor."""
    fused, split = Edit(kl), Edit(kl)
    for layer in [i for i, kind in enumerate(fused.fields["kimi-linear.attention.head_count_kv"][0]) if kind]:
        heads, nope = (
            fused.tensors[f"blk.{layer}.attn_k_b.weight"].ne[2],
            fused.tensors[f"blk.{layer}.attn_k_b.weight"].ne[0],
        )
        name = f"blk.{layer}.attn_kv_b.weight"
        fused.put(name, fuse_kv_b(fused, layer), Type.Q8_0)
        decoded = fused.values(name).reshape(heads, -1, fused.values(name).shape[-1])
        split.put(f"blk.{layer}.attn_k_b.weight", decoded[:, :nope].transpose(0, 2, 1))
        split.put(f"blk.{layer}.attn_v_b.weight", decoded[:, nope:])
    a, b = logits(fused.write(tmp_path / "fused.gguf")), logits(split.write(tmp_path / "split.gguf"))
    # Exact activations: Q8_0 rows and their decoded values differ in the order of sums alone.
    assert np.allclose(a, b, rtol=1e-4, atol=1e-5)


def test_fused_and_split_kv_b_together_are_refused(kl: Path, tmp_path: Path) -> None:
    edit = Edit(kl)
    parts = {name: edit.tensors[f"blk.2.{name}.weight"] for name in ("attn_k_b", "attn_v_b")}
    edit.put("blk.2.attn_kv_b.weight", fuse_kv_b(edit, 2))
    edit.tensors.update({f"blk.2.{name}.weight": tensor for name, tensor in parts.items()})
    assert "blk.2.attn_k_b.weight" in refusal(edit.write(tmp_path / "x.gguf")).message


def test_fused_qkv_gives_the_same_logits(kl: Path, tmp_path: Path) -> None:
    edit = Edit(kl)
    for layer in [i for i, kind in enumerate(edit.fields["kimi-linear.attention.head_count_kv"][0]) if not kind]:
        names = [f"blk.{layer}.attn_{s}.weight" for s in "qkv"]
        edit.put(f"blk.{layer}.attn_qkv.weight", np.concatenate([edit.values(n) for n in names]))
        for n in names:
            del edit.tensors[n]
    assert np.array_equal(logits(edit.write(tmp_path / "fused.gguf")), logits(kl))


def test_dimensions_of_one_may_vanish(kl: Path, tmp_path: Path) -> None:
    """Quantizing tools drop trailing dimensions of one: convolutions become {4, 1, n}, `ssm_a` {1, n}."""
    edit = Edit(kl)
    for name, tensor in edit.tensors.items():
        if "ssm_conv1d" in name or name.endswith("ssm_a"):
            while tensor.ne[-1] == 1:
                tensor.ne = tensor.ne[:-1]
    assert np.array_equal(logits(edit.write(tmp_path / "short.gguf")), logits(kl))


def test_nan_weights_end_in_an_error(k3: Path, tmp_path: Path) -> None:
    """NaN or infinite logits are never handed out."""
    edit = Edit(k3)
    values = edit.values("blk.3.attn_q.weight")
    values[0, 0] = np.nan
    path = edit.put("blk.3.attn_q.weight", values).write(tmp_path / "nan.gguf")
    for device in ("ref", "cpu"):
        with Engine(path, device=device, n_ctx=64) as engine, pytest.raises(native.NativeError) as error:
            engine.logits(TOKENS)
        assert error.value.name == "NUMERIC"


def test_d14_a_latent_beyond_float16_is_an_error_not_a_number(kl: Path, tmp_path: Path) -> None:
    """D14: the caches of wider range run the same file; float16 overflows to infinity, which must not pass as text."""
    edit = Edit(kl)
    edit.put("blk.2.attn_kv_a_norm.weight", edit.values("blk.2.attn_kv_a_norm.weight") * 1e6)
    path = edit.write(tmp_path / "large.gguf")
    for cache_type in ("f32", "bf16"):
        with Engine(path, n_ctx=64, cache_type=cache_type) as engine:
            assert np.isfinite(engine.logits(TOKENS)).all()
    with Engine(path, n_ctx=64, cache_type="f16") as engine, pytest.raises(native.NativeError) as error:
        engine.logits(TOKENS)
    assert error.value.name == "NUMERIC"


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    assert "nothing.gguf" in refusal(tmp_path / "nothing.gguf").message
    (tmp_path / "empty.gguf").touch()
    assert "empty.gguf" in refusal(tmp_path / "empty.gguf").message
    assert refusal(tmp_path).name in ("IO", "FORMAT")


def test_parameters_out_of_range_are_named(k3: Path) -> None:
    with pytest.raises(native.NativeError) as error:
        Engine(k3, device="ref", n_ctx=1 << 30).close()
    assert error.value.name == "ARG" and "n_ctx" in error.value.message
    with pytest.raises(native.NativeError) as error:
        Engine(k3, device="abacus", n_ctx=64).close()
    assert error.value.name == "ARG" and "abacus" in error.value.message
