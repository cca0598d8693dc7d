"""Every fault of a checkpoint is a named error and leaves no file.

Tests named `test_bN_…`, `test_cN_…` hold a row of the list of known faults; the table covers all defects of `tiny.py`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conversion
import tiny
from conversion import ConversionError
from conversion.checkpoint import Checkpoint
from gguf_ext import GGUFError, GGUFReader
from tiny_files import Checkpoint as HfCheckpoint
from tiny_files import HfTensor, write_safetensors

# Defect of tiny.py -> a pattern of what the message must say.
MESSAGES = {
    # configuration: the field by name
    **{
        f"no_{name}": rf"config\.json: (linear_attn_config\.)?{name} is missing"
        for name in [
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "kv_lora_rank",
            "num_experts",
            "num_experts_per_token",
            "rms_norm_eps",
            "routed_scaling_factor",
            "vocab_size",
            "first_k_dense_replace",
            "short_conv_kernel_size",
            "kda_layers",
            "activation_situ_beta",
            "activation_situ_linear_beta",
            "attn_res_block_size",
            "latent_moe_use_norm",
            "mla_use_output_gate",
        ]
    },
    "no_routed_expert_hidden_size": r"routed_expert_hidden_size is missing; unexpected: .*routed_expert_down_proj",
    "conv_kernel_1": "short_conv_kernel_size is 1, expected a whole number of at least 2",
    "conv_kernel_0": "short_conv_kernel_size is 0",
    "conv_kernel_negative": "short_conv_kernel_size is -1",
    "conv_kernel_differs": r"layers\.0\.self_attn\.q_conv1d\.weight: axis 2 is 4, expected 3",
    "heads_differ": "linear_attn_config.num_heads is 4, expected 2 as num_attention_heads",
    "heads_zero": "num_attention_heads is 0",
    "heads_negative": "num_attention_heads is -2",
    "kv_heads_differ": "num_key_value_heads is 1, expected 2",
    "head_dim_zero": "linear_attn_config.head_dim is 0",
    "layers_zero": "num_hidden_layers is 0",
    "layers_text": 'num_hidden_layers is "8"',
    "vocab_zero": "vocab_size is 0",
    "top_k_over_experts": "num_experts_per_token is 9, expected at most num_experts 8",
    "top_k_zero": "num_experts_per_token is 0",
    "scale_nan": "routed_scaling_factor is NaN, expected a finite number",
    "scale_zero": r"routed_scaling_factor is 0\.0, expected a number above 0",
    "eps_zero": r"rms_norm_eps is 0\.0",
    "gate_bound_positive": r"gate_lower_bound is 5\.0, expected a number below 0",
    "gate_bound_on_linear": r"gate_lower_bound is -5\.0: a mechanism of Kimi-K3",
    "situ_beta_zero": r"activation_situ_beta is 0\.0",
    "block_size_zero": "attn_res_block_size is 0",
    "latent_differs": r"routed_expert_down_proj\.weight: axis 0 is 32, expected 64 \(routed_expert_hidden_size\)",
    "softmax_router": 'moe_router_activation_func is "softmax", expected "sigmoid"',
    "not_renormalized": "moe_renormalize is false, expected true",
    "expert_groups": "num_expert_group is 2, expected 1",
    "moe_every_second": "moe_layer_freq is 2, expected 1",
    "mla_with_rope": "mla_use_nope is false, expected true",
    "unknown_activation": 'hidden_act is "gelu", expected "s',
    "silu_in_k3": 'hidden_act is "silu", expected "situ"',
    "tied_embeddings": "tie_word_embeddings is (true; unexpected: lm_head|false, but not in text_config)",
    "mtp_layers": "num_nextn_predict_layers is 1, expected 0",
    "layer_in_both_lists": "kda_layers is .*, expected no layer that full_attn_layers has too, such as 1",
    "layer_in_no_list": "kda_layers is .*, expected layer 1, which is in no list",
    "layers_from_zero": "kda_layers is .*, expected a list of layer numbers from 1 to",
    "unknown_architecture": "LlamaForCausalLM is not supported; supported: KimiK3ForConditionalGeneration, KimiLinear",
    "wrong_outer_architecture": "attn_res_block_size is 3: a mechanism of Kimi-K3",
    "linear_named_k3": 'hidden_act is "silu", expected "situ"',
    "config_missing": r"config\.json cannot be read: No such file",
    "config_not_json": r"config\.json is not valid JSON",
    # shards: the file and the tensor
    "truncated_shard": r"model-00003-of-0+3\.safetensors is truncated: \d+ bytes, expected \d+",
    "trailing_bytes": r"model-00003-of-0+3\.safetensors is longer than its header says",
    "empty_shard": r"model-00003-of-0+3\.safetensors: 0 bytes, too short",
    "header_len_huge": r"model-00003-of-0+3\.safetensors: header of 9223372036854775807 bytes announced",
    "header_past_end": r"model-00003-of-0+3\.safetensors: header of \d+ bytes announced, but the file has \d+",
    "header_not_json": r"header of .*model-00003-of-0+3\.safetensors is not valid JSON",
    "duplicate_key": r"header of .*model-00003-of-0+3\.safetensors is not valid JSON: '.*' occurs twice",
    "offset_overlap": r"model-00003-of-0+3\.safetensors: tensor .* overlaps the tensor before it",
    "offset_huge": r"model-00003-of-0+3\.safetensors: tensor .*: impossible data_offsets",
    "offset_reversed": r"model-00003-of-0+3\.safetensors: tensor .* takes \d+ bytes, but -\d+ are announced",
    "shape_negative": r"model-00003-of-0+3\.safetensors: tensor .* impossible shape \[-",
    "dtype_lies": r"model-00003-of-0+3\.safetensors: tensor .* F32 .* takes \d+ bytes, but \d+ are announced",
    "dtype_unknown": r"model-00003-of-0+3\.safetensors: tensor .* unknown dtype 'F13'",
    "header_entry_incomplete": r"model-00003-of-0+3\.safetensors: tensor .* impossible data_offsets None",
    # index
    "unlisted_shard": r"in the folder but not listed: model-extra\.safetensors",
    "index_names_absent_file": r"listed but not in the folder: model-00099-of-00099\.safetensors",
    "index_names_absent_tensor": r"listed but in no shard: model\.extra\.weight",
    "index_names_wrong_file": r"in another shard: .*embed_tokens\.weight \(listed in .*, found in .*\)",
    "index_leaves_folder": r"tensor model\.extra\.weight: '\.\./model\.safetensors' is not the name of a file",
    "index_omits_tensor": r"in a shard but not listed: .*model\.layers\.0\.input_layernorm\.weight",
    "index_without_map": "weight_map is missing or empty",
    "index_not_json": r"model\.safetensors\.index\.json is not valid JSON",
    "numbered_shard_missing": r"2 of 3 shards, missing: model-00002-of-0+3\.safetensors",
    "no_shards": r"no model\.safetensors\.index\.json, no model\.safetensors and no numbered shards",
    # vocabulary
    "tiktoken_missing": r"tiktoken\.model is missing",
    "tiktoken_gap": r"tiktoken\.model: ranks do not count from 0 without gaps: found 301, expected 300",
    "tiktoken_duplicate": r"tiktoken\.model: line 301: the token b'.*' occurs twice, first with rank 299",
    "tiktoken_not_base64": r"tiktoken\.model: line 11 is not a base64 token and a rank",
    "tiktoken_too_long": r"tiktoken\.model has \d+ tokens, but vocab_size is 512",
    "special_text_twice": r"tokens 448 and 449 have the same text '\[BOS\]'",
    "special_beyond_vocab": r"token '<\|beyond\|>' has id 512, expected 448 to 511",
    # tensors
    "missing_tensor": r"missing: .*model\.layers\.1\.input_layernorm\.weight",
    "missing_lm_head": r"missing: .*lm_head\.weight",
    "extra_tensor": r"unexpected: .*model\.layers\.0\.self_attn\.rel_pos\.weight",
    "extra_bias": r"unexpected: .*model\.layers\.0\.self_attn\.(q_proj|g_b_proj)\.bias",
    "extra_layer": r"num_hidden_layers is \d, but there are later layers: .*layers\.\d\.",
    "missing_expert": r"layer 1, w2: expert 5 is missing: num_experts is 8",
    "extra_expert": r"layer 1, w1: expert 8 is too many: num_experts is 8",
    "missing_scale": r"layer 1, w1: weight_scale of expert 3 is missing",
    "missing_packed": r"layer 1, w1: weight_packed of expert 3 is missing",
    "packed_and_plain": r"layer 1: experts are partly packed: .*experts\.2\.w3\.weight beside .*weight_packed",
    "unpaired_res": r"layers\.1\.mlp_res_norm\.weight has no .*layers\.1\.mlp_res_proj\.weight beside it",
    "stray_packed": r"quantized where nothing may be: .*shared_experts\.gate_proj\.weight_packed.*; supported: compr",
    "weight_scale_inv": r"quantized where nothing may be: .*q_proj\.weight_scale_inv; supported: compressed-tensors",
    "duplicate_tensor": r"tensor .*embed_tokens\.weight is in model-00001-.* and in model-00003-",
    "scale_255": r"tensor .*layers\.1\..*experts\.2\.w3\.weight_scale: expert 2, row 4, block 0: scale byte 255",
    "scale_shape": r"tensor .*experts\.1\.w2\.weight_scale: shape \[32, 1\], expected \[32, 2\]",
    "scale_int8": r"tensor .*experts\.1\.w2\.weight_scale: dtype I8, expected U8",
    "packed_shape": r"tensor .*experts\.1\.w2\.weight_packed: shape \[33, 32\], expected \[32, 32\]",
    "mxfp4_odd_width": r"tensor .*experts\.0\.w1\.weight_packed: rows of 48 values are not whole MXFP4 groups of 32",
    "uint8_without_quant": r"weight_packed: an integer weight without a known packing: .* has no quantization_config",
    "unknown_quant_method": r"quantization_config\.quant_method is 'fp8', expected 'compressed-tensors'; supported:",
    "quant_group_size": r"config_groups\.group_0\.weights\.group_size is 16, expected 32",
    "alog_tail": r"tensor .*layers\.0\.self_attn\.A_log: element 30 is 0\.25, expected 0: the model has 2 heads",
    "alog_short": r"tensor .*layers\.0\.self_attn\.A_log: axis \d is 1, expected at least 2",
    "f16_overflow": r"tensor .*layers\.0\.self_attn\.q_proj\.weight: row 0, column 7: 99840 does not fit F16",
    "g_proj_swapped": r"tensor .*layers\.0\.self_attn\.g_proj\.weight: axis 0 is 96, expected 64",
    "wrong_width": r"tensor .*q_proj\.weight: axis 0 is 65, expected 64 \(linear_attn_config\.num_heads \* lin",
    "vocab_rows": r"tensor .*embed_tokens\.weight: axis 0 is 513, expected 512 \(vocab_size\)",
    "integer_norm": r"tensor .*input_layernorm\.weight: dtype I32 is an integer weight without a known packing",
}
ARCHS = ("kimi-k3", "kimi-linear")
CASES = [(name, arch) for name in tiny.DEFECTS for arch in ARCHS if tiny.defect_arch(name) in (None, arch)]


def refusal(folder: Path, outtype: str = "f16", **options: Any) -> str:
    """The message of the named error that converting `folder` gives; fails when it converts or leaves a file behind."""
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises((ConversionError, GGUFError)) as caught:
        conversion.convert(folder, outtype=outtype, **options)
    assert sorted(path.name for path in folder.iterdir()) == before
    return str(caught.value)


def refused(tmp_path: Path, pattern: str, outtype: str = "f16", **options: Any) -> str:
    """Write a checkpoint with `tiny` and check that its refusal matches `pattern`."""
    message = refusal(tiny.write_checkpoint(tmp_path / "model", **options), outtype)
    assert re.search(pattern, message), message
    return message


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_defect_is_named(tmp_path: Path, name: str, arch: str) -> None:
    refused(tmp_path, MESSAGES[name], arch=arch, defect=name)


def test_every_defect_has_its_message() -> None:
    assert set(MESSAGES) == set(tiny.DEFECTS)


# ---- A, B: rows of the list of known faults --------------------------------------------------------------------------


def test_a7_late_failure_leaves_no_file(tmp_path: Path) -> None:
    """The bad byte sits in the last expert: most of the file is written by then."""

    def last_scale(checkpoint: HfCheckpoint) -> None:
        layer = checkpoint.layers("moe")[-1]
        name = f"model.layers.{layer}.block_sparse_moe.experts.7.w3.weight_scale"
        scales = checkpoint.get(name).bytes_array()
        scales[-1, -1] = 255
        checkpoint.set(name, HfTensor.from_bytes(scales))

    refused(tmp_path, r"layers\.7\..*experts\.7\.w3\.weight_scale: expert 7, row 63, block 0", mutate=last_scale)


def test_b1_e8m0_nan_is_named(tmp_path: Path) -> None:
    message = refused(tmp_path, MESSAGES["scale_255"], defect="scale_255")
    assert "language_model.model.layers.1.block_sparse_moe.experts.2.w3.weight_scale" in message


def test_b2_packed_weights_without_packing(tmp_path: Path) -> None:
    refused(tmp_path, MESSAGES["uint8_without_quant"], defect="uint8_without_quant")


@pytest.mark.parametrize(("dtype", "numpy_dtype"), [("U8", "u1"), ("I8", "i1"), ("I32", "<i4"), ("I64", "<i8")])
def test_b2_integer_weight_without_packing(tmp_path: Path, dtype: str, numpy_dtype: str) -> None:
    def integers(checkpoint: HfCheckpoint) -> None:
        name = "model.layers.1.block_sparse_moe.experts.0.w1.weight"
        shape = checkpoint.get(name).shape
        checkpoint.set(name, HfTensor(dtype, shape, np.ones(shape, numpy_dtype).tobytes()))

    pattern = rf"experts\.0\.w1\.weight: dtype {dtype} is an integer weight without a known packing"
    refused(tmp_path, pattern, arch="kimi-linear", mutate=integers)


def test_b3_other_quantization_schemes_are_named(tmp_path: Path) -> None:
    for number, name in enumerate(
        ("weight_scale_inv", "weight._scale", "weight_zero_point", "qweight", "weight_packed")
    ):

        def stray(checkpoint: HfCheckpoint, name: str = name) -> None:
            checkpoint.set(f"model.layers.0.self_attn.q_proj.{name}", HfTensor.from_float(np.ones((1, 1)), "F32"))

        pattern = rf"quantized where nothing may be: .*q_proj\.{re.escape(name)}; supported: compressed-tensors mxfp4"
        refused(tmp_path / str(number), pattern, mutate=stray)


def test_b4_packed_tensor_outside_the_experts(tmp_path: Path) -> None:
    refused(tmp_path, MESSAGES["stray_packed"], defect="stray_packed")


def test_b5_missing_expert_extra_expert_missing_scale_differ(tmp_path: Path) -> None:
    names = ("missing_expert", "extra_expert", "missing_scale")
    messages = {refused(tmp_path / name, MESSAGES[name], defect=name) for name in names}
    assert len(messages) == 3


@pytest.mark.parametrize(
    "field",
    ["routed_expert_hidden_size", "attn_res_block_size", "activation_situ_beta", "activation_situ_linear_beta"],
)
def test_b6_config_without_a_k3_number(tmp_path: Path, field: str) -> None:
    refused(tmp_path / "absent", f"{field} is missing", defect=f"no_{field}")
    refused(tmp_path / "null", f"{field} is null", **{field: None}, mutate=keep_k3_tensors)


def keep_k3_tensors(checkpoint: HfCheckpoint) -> None:
    """Tensors that `tiny` leaves out when the config lacks their field."""
    text = checkpoint.text
    for layer in checkpoint.layers("moe") if text["routed_expert_hidden_size"] is None else ():
        name = f"model.layers.{layer}.block_sparse_moe.routed_expert_norm.weight"
        checkpoint.set(name, HfTensor.from_float(np.ones(32)))


def test_b7_outer_architecture_decides(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "k3")
    config = json.loads((folder / "config.json").read_text())
    assert config["text_config"]["architectures"] == ["KimiLinearForCausalLM"]
    with GGUFReader(conversion.convert(folder)) as reader:
        assert reader.fields["general.architecture"] == "kimi-k3"
    # Without the outer name the inner one is all there is, and its class does not have K3's mechanisms.
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "attn_res_block_size is 3: a mechanism of Kimi-K3" in refusal(folder)
    del config["text_config"]["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "no architectures entry" in refusal(folder)


def test_b8_a_log_padding(tmp_path: Path) -> None:
    padded = conversion.convert(tiny.write_checkpoint(tmp_path / "a"), tmp_path / "a.gguf")
    plain = conversion.convert(tiny.write_checkpoint(tmp_path / "b", alog_padded=False), tmp_path / "b.gguf")
    with GGUFReader(padded) as a, GGUFReader(plain) as b:
        assert a.tensors["blk.0.ssm_a"].ne == b.tensors["blk.0.ssm_a"].ne == (2,)
        np.testing.assert_array_equal(a.data("blk.0.ssm_a"), b.data("blk.0.ssm_a"))
    refused(tmp_path / "c", MESSAGES["alog_tail"], defect="alog_tail")
    refused(tmp_path / "d", MESSAGES["alog_short"], defect="alog_short")


@pytest.mark.parametrize("kernel", [1, 0, -1])
def test_b9_convolution_kernel_below_two(tmp_path: Path, kernel: int) -> None:
    name = {1: "conv_kernel_1", 0: "conv_kernel_0", -1: "conv_kernel_negative"}[kernel]
    refused(tmp_path, f"short_conv_kernel_size is {kernel}", defect=name)


@pytest.mark.parametrize(
    "name",
    ["heads_differ", "heads_zero", "heads_negative", "top_k_over_experts", "top_k_zero", "scale_nan", "scale_zero"],
)
def test_b10_counts_and_scales(tmp_path: Path, name: str) -> None:
    refused(tmp_path, MESSAGES[name], defect=name)


def test_b11_kv_b_is_split_and_k_transposed(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model", "kimi-linear", preset="kl-odd")
    text = json.loads((folder / "config.json").read_text())
    heads, nope, v = text["num_attention_heads"], text["qk_nope_head_dim"], text["v_head_dim"]
    layer = text["linear_attn_config"]["full_attn_layers"][0] - 1
    with Checkpoint(folder) as checkpoint, GGUFReader(conversion.convert(folder, outtype="f32")) as reader:
        source = checkpoint.tensors[f"model.layers.{layer}.self_attn.kv_b_proj.weight"]
        w = source.floats().reshape(heads, nope + v, -1)
        np.testing.assert_array_equal(reader.dequantize(f"blk.{layer}.attn_k_b.weight"), w[:, :nope].transpose(0, 2, 1))
        np.testing.assert_array_equal(reader.dequantize(f"blk.{layer}.attn_v_b.weight"), w[:, nope:])


def test_b11_kv_b_that_is_split_already(tmp_path: Path) -> None:
    def split(checkpoint: HfCheckpoint) -> None:
        p = f"model.layers.{checkpoint.layers('mla')[0]}.self_attn."
        whole = checkpoint.delete(p + "kv_b_proj.weight")
        checkpoint.set(p + "k_b_proj.weight", whole)
        checkpoint.set(p + "v_b_proj.weight", whole)

    refused(tmp_path, r"missing: .*kv_b_proj\.weight; unexpected: .*k_b_proj\.weight, .*v_b_proj\.weight", mutate=split)


def test_b13_one_name_two_tensors(tmp_path: Path) -> None:
    refused(tmp_path, MESSAGES["g_proj_swapped"], defect="g_proj_swapped")


@pytest.mark.parametrize("part", ["self_attention_res", "mlp_res"])
@pytest.mark.parametrize("lost", ["norm", "proj"])
def test_b14_unpaired_residual_tensor(tmp_path: Path, part: str, lost: str) -> None:
    kept = {"norm": "proj", "proj": "norm"}[lost]

    def drop(checkpoint: HfCheckpoint) -> None:
        checkpoint.delete(f"model.layers.2.{part}_{lost}.weight")

    pattern = rf"layers\.2\.{part}_{kept}\.weight has no .*layers\.2\.{part}_{lost}\.weight beside it"
    refused(tmp_path, pattern, mutate=drop)


def test_b23_missing_index(tmp_path: Path) -> None:
    whole = conversion.convert(tiny.write_checkpoint(tmp_path / "whole"), tmp_path / "whole.gguf")
    single = tiny.write_checkpoint(tmp_path / "single", shards=1, index=False)
    numbered = tiny.write_checkpoint(tmp_path / "numbered", index=False)
    assert conversion.convert(numbered, tmp_path / "numbered.gguf").stat().st_size == whole.stat().st_size
    with (
        GGUFReader(whole) as a,
        GGUFReader(conversion.convert(single, tmp_path / "single.gguf")) as b,
        GGUFReader(tmp_path / "numbered.gguf") as c,
    ):
        assert list(a.tensors) == list(c.tensors)
        assert set(a.tensors) == set(b.tensors)
        for name in a.tensors:
            assert a.data(name).tobytes() == b.data(name).tobytes() == c.data(name).tobytes()


def test_b23_ambiguous_shards_without_index(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model", index=False)
    shutil.copy(folder / "model-00001-of-000003.safetensors", folder / "model.safetensors")
    assert "model.safetensors and numbered shards" in refusal(folder)
    (folder / "model.safetensors").rename(folder / "other-00001-of-00001.safetensors")
    assert "several sets of shards (model-…-of-000003, other-…-of-00001)" in refusal(folder)


def test_b23_dangling_index_is_not_a_missing_index(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model", index=False)
    (folder / "model.safetensors.index.json").symlink_to(tmp_path / "nowhere")
    assert "index.json cannot be read" in refusal(folder)


@pytest.mark.parametrize("name", ["truncated_shard", "header_len_huge", "offset_overlap", "offset_huge", "dtype_lies"])
def test_b24_truncated_reads_and_lying_descriptors(tmp_path: Path, name: str) -> None:
    refused(tmp_path, MESSAGES[name], defect=name)


def test_b24_shard_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model")
    with Checkpoint(folder) as checkpoint:
        source = max(checkpoint.tensors.values(), key=lambda s: s.offset if "00003" in s.shard.path.name else 0)
        os.truncate(source.shard.path, source.offset + 1)
        with pytest.raises(ConversionError, match=rf"{source.shard.path.name}: ends at byte {source.offset + 1}"):
            source.raw()


def test_b24_shard_that_is_no_file(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model")
    shard = folder / "model-00002-of-000003.safetensors"
    shard.unlink()
    os.mkfifo(shard)  # opening one would wait forever
    assert "not in the folder: model-00002-of-000003.safetensors" in refusal(folder)


def test_b27_packed_widths_and_dtypes(tmp_path: Path) -> None:
    for name in ("mxfp4_odd_width", "scale_shape", "scale_int8", "packed_shape"):
        refused(tmp_path / name, MESSAGES[name], defect=name)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"shape": [2**62] * 3_000_000}, r"tensor x: impossible shape \[4611.{50,100}…$"),
        ({"shape": [10**4000] * 2}, r"tensor x: impossible shape \[10.{50,100}…$"),
        ({"data_offsets": [0, 10**4000]}, r"tensor x: impossible data_offsets \[0, 10.{50,100}…$"),
        ({"dtype": "F" * 1000}, r"tensor x: unknown dtype 'F{50,100}…$"),
    ],
    ids=["axes", "lengths", "offsets", "dtype"],
)
def test_b24_headers_of_a_size_that_would_take_for_ever(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model", index=False, shards=1)
    write_header(folder / "model.safetensors", {"x": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0], **entry}})
    assert re.search(message, refusal(folder))


@pytest.mark.parametrize("where", ["header", "index"])
def test_names_that_would_play_with_a_terminal_are_escaped(tmp_path: Path, where: str) -> None:
    name = "model\x1b[2J\n\u202e"
    folder = tiny.write_checkpoint(tmp_path / "model", index=where == "index", shards=1)
    if where == "header":
        write_header(folder / "model.safetensors", {name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}})
    else:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {name: "model.safetensors"}}))
    message = refusal(folder)
    assert message.isprintable() and "'model\\x1b[2J\\n\\u202e' is no name of a tensor" in message


@pytest.mark.parametrize("file", ["model.safetensors", "tiktoken.model"])
def test_files_that_git_lfs_has_not_fetched(tmp_path: Path, file: str) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model", shards=1)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 1561161520896\n"
    (folder / file).write_text(pointer)
    assert f"{file} is a pointer of Git LFS, not the file itself" in refusal(folder)


def write_header(path: Path, header: dict[str, Any]) -> None:
    """A shard with a header and nothing else."""
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def test_b29_mixed_storage_is_refused_not_requantized(tmp_path: Path) -> None:
    refused(tmp_path, MESSAGES["packed_and_plain"], defect="packed_and_plain")


# ---- C: the vocabulary -----------------------------------------------------------------------------------------------


def test_c7_merges_in_another_file_are_refused(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model", defect="tiktoken_missing")
    merges = {"model": {"type": "BPE", "merges": [["a", "b"]]}}
    (folder / "tokenizer.json").write_text(json.dumps(merges))
    assert re.search(r"tiktoken\.model is missing \(tokenizer\.json is there", refusal(folder))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"tokenizer_config\.json cannot be read"),
        ("[]", r"tokenizer_config\.json holds a JSON list"),
        ('{"added_tokens_decoder": []}', "added_tokens_decoder is not an object"),
        ('{"added_tokens_decoder": {"x": {"content": "a"}}}', "entry 'x' is not a token id with its content"),
        ('{"added_tokens_decoder": {"450": {}}}', "entry '450' is not a token id with its content"),
        ('{"added_tokens_decoder": {"5": {"content": "a"}}}', "token 'a' has id 5, expected 448 to 511"),
        ('{"chat_template": 5}', "chat_template is neither text nor a list"),
        ('{"chat_template": [{"name": "a"}]}', "chat_template is neither text nor a list"),
    ],
)
def test_tokenizer_config_faults(tmp_path: Path, content: str | None, message: str) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model")
    path = folder / "tokenizer_config.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    assert re.search(message, refusal(folder))


# ---- configuration, beyond the defects of tiny -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_experts", True, "num_experts is true, expected a whole number"),
        ("num_experts", 10**12, "num_experts is 1000000000000, expected at most 65536"),
        ("num_hidden_layers", 10**12, "num_hidden_layers is 1000000000000, expected at most 4096"),
        ("vocab_size", 10**12, "vocab_size is 1000000000000, expected at most"),
        ("hidden_size", 10**30, "hidden_size is 10*, expected at most 2147483647"),
        ("rms_norm_eps", "1e-5", 'rms_norm_eps is "1e-5", expected a finite number'),
        ("rms_norm_eps", float("nan"), "rms_norm_eps is NaN, expected a finite number"),
        ("rms_norm_eps", 10**400, "rms_norm_eps is 10*…, expected a number that 32 bits can hold"),
        ("rms_norm_eps", 1e-46, "rms_norm_eps is 1e-46, expected a number that 32 bits can hold"),
        ("activation_situ_beta", 1e39, r"activation_situ_beta is 1e\+39, expected a number that 32 bits can hold"),
        ("mla_use_nope", 1, "mla_use_nope is 1, expected true"),
        ("mla_use_output_gate", 1, "mla_use_output_gate is 1, expected true or false"),
        ("first_k_dense_replace", 9, "first_k_dense_replace is 9, expected at most num_hidden_layers 8"),
        ("rope_scaling", {"type": "yarn"}, "rope_scaling is .*: these models have no rotary embedding"),
        ("topk_group", 2, "topk_group is 2, expected 1"),
        ("topk_method", "greedy", 'topk_method is "greedy", expected "noaux_tc"'),
        ("num_shared_experts", 0, "num_shared_experts is 0"),
        ("max_position_embeddings", 0, "max_position_embeddings is 0"),
        ("eos_token_id", 512, "eos_token_id is 512, expected a token id below vocab_size 512"),
        ("eos_token_id", tiny.ABSENT, "eos_token_id is missing"),
        ("linear_attn_config", 5, "linear_attn_config"),
    ],
)
def test_config_value_is_refused_by_name(tmp_path: Path, field: str, value: Any, message: str) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config["text_config"]):
        part.pop(field, None)
        if value is not tiny.ABSENT:
            part[field] = value
    (folder / "config.json").write_text(json.dumps(config))
    assert re.search(message, refusal(folder))


@pytest.mark.parametrize("value", ["KimiK3ForConditionalGeneration", [], ["a", "b"], [1], ["\x1b[2J"]])
def test_architectures_entry_of_a_wrong_kind(tmp_path: Path, value: Any) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model", mutate=lambda c: c.config.update(architectures=value))
    assert "architectures is" in refusal(folder)


def test_config_key_twice_is_refused(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model", "kimi-linear")
    path = folder / "config.json"
    path.write_text(path.read_text().replace("{", '{"hidden_size": 32,', 1))
    assert "'hidden_size' occurs twice" in refusal(folder)


def test_values_that_are_not_finite_are_named(tmp_path: Path) -> None:
    def infinite(checkpoint: HfCheckpoint) -> None:
        name = "model.layers.0.self_attn.q_proj.weight"
        tensor = checkpoint.get(name)
        bits = np.frombuffer(tensor.data, "<u2").copy()
        bits[64 * 3 + 5] = 0x7F80
        checkpoint.set(name, HfTensor("BF16", tensor.shape, bits.tobytes()))

    for outtype in ("f32", "f16", "bf16", "q8_0"):
        pattern = r"layers\.0\.self_attn\.q_proj\.weight: row 3, column 5.* not a finite number"
        refused(tmp_path / outtype, pattern, outtype, mutate=infinite)


def test_same_tensor_with_and_without_prefix(tmp_path: Path) -> None:
    def twice(checkpoint: HfCheckpoint) -> None:
        checkpoint.shards[0]["model.norm.weight"] = checkpoint.get("model.norm.weight")

    refused(tmp_path, r"model\.norm\.weight and .*model\.norm\.weight are the same tensor", mutate=twice)


SMALL: dict[str, Any] = {"num_hidden_layers": 4, "num_experts": 2, "shards": 1}


def width_cases(checkpoint: HfCheckpoint) -> list[tuple[str, int]]:
    """Every axis of every kind of tensor, once for KDA and once for MLA layers."""
    cases = []
    seen = set()
    for name, tensor in checkpoint.shards[0].items():
        layer = re.search(r"layers\.(\d+)\.", name)
        mla = layer is not None and int(layer[1]) in checkpoint.layers("mla")
        kind = (re.sub(r"\d+", "N", name), mla)
        if kind not in seen and not name.endswith("A_log"):
            seen.add(kind)
            cases += [(name, axis) for axis in range(len(tensor.shape))]
    return cases


@pytest.mark.parametrize("arch", ARCHS)
def test_every_width_is_checked_on_every_axis(tmp_path: Path, arch: str) -> None:
    """One tensor at a time gets one more entry along one axis; each is refused with the tensor's name."""
    checkpoint = tiny.build_checkpoint(arch, **SMALL)
    folder = tiny.write_checkpoint(tmp_path / "model", arch, **SMALL)
    shard = checkpoint.shards[0]
    cases = width_cases(checkpoint)
    assert len(cases) > 50
    for name, axis in cases:
        tensor = shard[name]
        shard[name] = tensor.resized(axis, 1)
        write_safetensors(folder / "model.safetensors", shard)
        message = refusal(folder, outtype="bf16", dry_run=True)
        assert f"tensor {name}: " in message and "expected" in message, (name, axis, message)
        shard[name] = tensor
