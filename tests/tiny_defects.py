"""What can be wrong with a checkpoint: one named defect each, applied to an otherwise good one.

``DEFECTS`` maps each name to one line saying what is wrong. A defect either edits the checkpoint in memory or, where it
is about the files themselves, the folder after it was written.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tiny_files import Checkpoint, HfTensor, write_safetensors

Edit = Callable[[Checkpoint], None]
FileEdit = Callable[[Checkpoint, Path], None]


@dataclass
class Defect:
    arch: str | None  # the only architecture that can have it, or None
    edit: Edit | None = None
    file_edit: FileEdit | None = None


DEFECTS: dict[str, str] = {}
_DEFECTS: dict[str, Defect] = {}
K3 = "kimi-k3"
KL = "kimi-linear"


def defect(line: str, arch: str | None = None) -> Callable[[Edit], Edit]:
    """Register a function that edits the checkpoint in memory, under its own name."""

    def register(edit: Edit) -> Edit:
        DEFECTS[edit.__name__] = line
        _DEFECTS[edit.__name__] = Defect(arch, edit=edit)
        return edit

    return register


def file_defect(line: str, arch: str | None = None) -> Callable[[FileEdit], FileEdit]:
    """Register a function that edits the written folder, under its own name."""

    def register(edit: FileEdit) -> FileEdit:
        DEFECTS[edit.__name__] = line
        _DEFECTS[edit.__name__] = Defect(arch, file_edit=edit)
        return edit

    return register


def config_defect(name: str, line: str, arch: str | None = None, *, linear: bool = False, **values: Any) -> None:
    """Register a config key with a wrong value (``None`` removes it), the tensors staying as they were."""

    def edit(checkpoint: Checkpoint) -> None:
        config = checkpoint.text["linear_attn_config"] if linear else checkpoint.text
        for key, value in values.items():
            if value is None:
                del config[key]
            else:
                config[key] = value

    DEFECTS[name] = line
    _DEFECTS[name] = Defect(arch, edit=edit)


def find(name: str) -> Defect:
    if name not in _DEFECTS:
        raise ValueError(f"unknown defect {name!r}, expected one of {', '.join(sorted(_DEFECTS))}")
    return _DEFECTS[name]


def defect_arch(name: str) -> str | None:
    """The only architecture that can have this defect, or None when either can."""
    return find(name).arch


def apply_to_checkpoint(name: str, checkpoint: Checkpoint) -> None:
    entry = find(name)
    if entry.arch is not None and entry.arch != checkpoint.arch:
        raise ValueError(f"defect {name!r} exists for {entry.arch} only, not for {checkpoint.arch}")
    if entry.edit is not None:
        entry.edit(checkpoint)


def apply_to_files(name: str, checkpoint: Checkpoint, folder: Path) -> None:
    entry = find(name)
    if entry.file_edit is not None:
        entry.file_edit(checkpoint, folder)


# ---- tensors that are missing, extra or unpaired ---------------------------------------------------------------------


def expert(checkpoint: Checkpoint, number: int, projection: str) -> str:
    """Name of a routed expert's matrix in the first MoE layer, without ``.weight``."""
    return f"model.layers.{checkpoint.layers('moe')[0]}.block_sparse_moe.experts.{number}.{projection}"


def expert_entries(checkpoint: Checkpoint, stem: str) -> list[str]:
    suffixes = [".weight_packed", ".weight_scale"] if "quantization_config" in checkpoint.text else [".weight"]
    return [stem + suffix for suffix in suffixes]


@defect("model.layers.1.input_layernorm.weight is missing")
def missing_tensor(checkpoint: Checkpoint) -> None:
    checkpoint.delete("model.layers.1.input_layernorm.weight")


@defect("lm_head.weight is missing although the embeddings are not tied")
def missing_lm_head(checkpoint: Checkpoint) -> None:
    checkpoint.delete("lm_head.weight")


@defect("a tensor that no part of the model uses: model.layers.0.self_attn.rel_pos.weight")
def extra_tensor(checkpoint: Checkpoint) -> None:
    checkpoint.set("model.layers.0.self_attn.rel_pos.weight", HfTensor.from_float(np.ones((4, 4))))


@defect("a bias that the architecture does not have: g_b_proj.bias or q_proj.bias of layer 0")
def extra_bias(checkpoint: Checkpoint) -> None:
    name = "q_proj" if checkpoint.arch == K3 else "g_b_proj"
    weight = checkpoint.get(f"model.layers.0.self_attn.{name}.weight")
    checkpoint.set(f"model.layers.0.self_attn.{name}.bias", HfTensor.from_float(np.zeros(weight.shape[0])))


@defect("a whole layer beyond num_hidden_layers")
def extra_layer(checkpoint: Checkpoint) -> None:
    last = checkpoint.text["num_hidden_layers"]
    for shard in checkpoint.shards:
        for name in [name for name in shard if f".layers.{last - 1}." in name]:
            shard[name.replace(f".layers.{last - 1}.", f".layers.{last}.")] = shard[name]


@defect("expert 5 of the first MoE layer has no w2")
def missing_expert(checkpoint: Checkpoint) -> None:
    for name in expert_entries(checkpoint, expert(checkpoint, 5, "w2")):
        checkpoint.delete(name)


@defect("the first MoE layer has one expert more than num_experts")
def extra_expert(checkpoint: Checkpoint) -> None:
    count = checkpoint.text["num_experts"]
    for projection in ("w1", "w2", "w3"):
        source = expert_entries(checkpoint, expert(checkpoint, 0, projection))
        target = expert_entries(checkpoint, expert(checkpoint, count, projection))
        for old, new in zip(source, target, strict=True):
            checkpoint.set(new, checkpoint.get(old))


@defect("expert 3 w1 of the first MoE layer has weight_packed but no weight_scale", K3)
def missing_scale(checkpoint: Checkpoint) -> None:
    checkpoint.delete(expert(checkpoint, 3, "w1") + ".weight_scale")


@defect("expert 3 w1 of the first MoE layer has weight_scale but no weight_packed", K3)
def missing_packed(checkpoint: Checkpoint) -> None:
    checkpoint.delete(expert(checkpoint, 3, "w1") + ".weight_packed")


@defect("expert 2 w3 of the first MoE layer is there twice: packed and as a plain weight", K3)
def packed_and_plain(checkpoint: Checkpoint) -> None:
    stem = expert(checkpoint, 2, "w3")
    rows, half = checkpoint.get(stem + ".weight_packed").shape
    checkpoint.set(stem + ".weight", HfTensor.from_float(np.zeros((rows, 2 * half))))


@defect("model.layers.1.mlp_res_proj.weight is missing, its mlp_res_norm is there", K3)
def unpaired_res(checkpoint: Checkpoint) -> None:
    checkpoint.delete("model.layers.1.mlp_res_proj.weight")


@defect("a packed tensor outside the routed experts: shared_experts.gate_proj of the first MoE layer", K3)
def stray_packed(checkpoint: Checkpoint) -> None:
    stem = f"model.layers.{checkpoint.layers('moe')[0]}.block_sparse_moe.shared_experts.gate_proj"
    rows, cols = checkpoint.delete(stem + ".weight").shape
    checkpoint.set(stem + ".weight_packed", HfTensor.from_bytes(np.zeros((rows, cols // 2))))
    checkpoint.set(stem + ".weight_scale", HfTensor.from_bytes(np.full((rows, cols // 32), 127)))


@defect("a weight_scale_inv of another quantization scheme beside layer 0's q_proj")
def weight_scale_inv(checkpoint: Checkpoint) -> None:
    checkpoint.set("model.layers.0.self_attn.q_proj.weight_scale_inv", HfTensor.from_float(np.ones((1, 1)), "F32"))


@defect("embed_tokens is in two shards")
def duplicate_tensor(checkpoint: Checkpoint) -> None:
    shard, name = checkpoint.find("model.embed_tokens.weight")
    other = next(s for s in checkpoint.shards if s is not shard)
    other[name] = shard[name]


# ---- tensors with wrong values, shapes or dtypes ---------------------------------------------------------------------


@defect("E8M0 scale byte 255 (NaN) in expert 2 w3 of the first MoE layer, row 4, block 0", K3)
def scale_255(checkpoint: Checkpoint) -> None:
    name = expert(checkpoint, 2, "w3") + ".weight_scale"
    scales = checkpoint.get(name).bytes_array()
    scales[4, 0] = 255
    checkpoint.set(name, HfTensor.from_bytes(scales))


@defect("weight_scale of expert 1 w2 has one column too few", K3)
def scale_shape(checkpoint: Checkpoint) -> None:
    name = expert(checkpoint, 1, "w2") + ".weight_scale"
    checkpoint.set(name, checkpoint.get(name).resized(1, -1))


@defect("weight_scale of expert 1 w2 is I8, not U8", K3)
def scale_int8(checkpoint: Checkpoint) -> None:
    name = expert(checkpoint, 1, "w2") + ".weight_scale"
    checkpoint.get(name).dtype = "I8"


@defect("weight_packed of expert 1 w2 has one row too many", K3)
def packed_shape(checkpoint: Checkpoint) -> None:
    name = expert(checkpoint, 1, "w2") + ".weight_packed"
    checkpoint.set(name, checkpoint.get(name).resized(0, 1))


@defect("packed experts of 48 input columns, which is not a multiple of 32 (routed_expert_hidden_size 48)", K3)
def mxfp4_odd_width(checkpoint: Checkpoint) -> None:
    hidden, latent = checkpoint.text["hidden_size"], checkpoint.text["routed_expert_hidden_size"]
    checkpoint.text["routed_expert_hidden_size"] = 48
    for layer in checkpoint.layers("moe"):
        p = f"model.layers.{layer}.block_sparse_moe."
        checkpoint.set(p + "routed_expert_down_proj.weight", HfTensor.from_float(np.ones((48, hidden))))
        checkpoint.set(p + "routed_expert_up_proj.weight", HfTensor.from_float(np.ones((hidden, 48))))
        checkpoint.set(p + "routed_expert_norm.weight", HfTensor.from_float(np.ones(48)))
        for e in range(checkpoint.text["num_experts"]):
            for projection in ("w1", "w3"):
                stem = f"{p}experts.{e}.{projection}"
                packed = checkpoint.get(stem + ".weight_packed")
                checkpoint.set(stem + ".weight_packed", packed.resized(1, (48 - latent) // 2))
            for suffix in (".weight_packed", ".weight_scale"):
                stem = f"{p}experts.{e}.w2{suffix}"
                checkpoint.set(stem, checkpoint.get(stem).resized(0, 48 - latent))


@defect("packed experts, but the config has no quantization_config", K3)
def uint8_without_quant(checkpoint: Checkpoint) -> None:
    del checkpoint.text["quantization_config"]


@defect("quantization_config names a scheme we do not read: fp8", K3)
def unknown_quant_method(checkpoint: Checkpoint) -> None:
    checkpoint.text["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@defect("quantization_config has group_size 16 where MXFP4 has 32", K3)
def quant_group_size(checkpoint: Checkpoint) -> None:
    quantization = json.loads(json.dumps(checkpoint.text["quantization_config"]))
    quantization["config_groups"]["group_0"]["weights"]["group_size"] = 16
    checkpoint.text["quantization_config"] = quantization


@defect("A_log has a non-zero value beyond the head count", K3)
def alog_tail(checkpoint: Checkpoint) -> None:
    name = "model.layers.0.self_attn.A_log"
    values = np.frombuffer(checkpoint.get(name).data, "<f4").copy()
    values[-2] = 0.25
    checkpoint.set(name, HfTensor.from_float(values, "F32"))


@defect("A_log has one entry fewer than there are heads")
def alog_short(checkpoint: Checkpoint) -> None:
    heads = checkpoint.text["num_attention_heads"]
    shape = (heads - 1,) if checkpoint.arch == K3 else (1, 1, heads - 1, 1)
    checkpoint.set("model.layers.0.self_attn.A_log", HfTensor.from_float(np.full(shape, 0.5), "F32"))


@defect("layer 0's q_proj holds 100000, which float16 cannot")
def f16_overflow(checkpoint: Checkpoint) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tensor = checkpoint.get(name)
    bits = np.frombuffer(tensor.data, "<u2").copy()
    bits[7] = 0x47C3  # bfloat16 of about 1e5
    checkpoint.set(name, HfTensor("BF16", tensor.shape, bits.tobytes()))


@defect("the output gates of a KDA and an MLA layer are exchanged, their widths differ (v_head_dim 48)", K3)
def g_proj_swapped(checkpoint: Checkpoint) -> None:
    hidden, heads = checkpoint.text["hidden_size"], checkpoint.text["num_attention_heads"]
    kda, mla = checkpoint.layers("kda")[0], checkpoint.layers("mla")[0]
    checkpoint.text["v_head_dim"] = 48
    rows = heads * 48
    nope = checkpoint.text["qk_nope_head_dim"]
    for layer in checkpoint.layers("mla"):
        p = f"model.layers.{layer}.self_attn."
        rank = checkpoint.text["kv_lora_rank"]
        checkpoint.set(p + "g_proj.weight", HfTensor.from_float(np.full((rows, hidden), 0.1)))
        checkpoint.set(p + "o_proj.weight", HfTensor.from_float(np.full((hidden, rows), 0.1)))
        checkpoint.set(p + "kv_b_proj.weight", HfTensor.from_float(np.full((heads * (nope + 48), rank), 0.1)))
    names = [f"model.layers.{layer}.self_attn.g_proj.weight" for layer in (kda, mla)]
    tensors = [checkpoint.get(name) for name in names]
    for name, tensor in zip(names, reversed(tensors), strict=True):
        checkpoint.set(name, tensor)


@defect("layer 0's q_proj has one row too many for heads x head_dim")
def wrong_width(checkpoint: Checkpoint) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    checkpoint.set(name, checkpoint.get(name).resized(0, 1))


@defect("embed_tokens has one row more than vocab_size")
def vocab_rows(checkpoint: Checkpoint) -> None:
    name = "model.embed_tokens.weight"
    checkpoint.set(name, checkpoint.get(name).resized(0, 1))


@defect("layer 0's input_layernorm is stored as I32")
def integer_norm(checkpoint: Checkpoint) -> None:
    name = "model.layers.0.input_layernorm.weight"
    hidden = checkpoint.text["hidden_size"]
    checkpoint.set(name, HfTensor("I32", (hidden,), np.ones(hidden, "<i4").tobytes()))


# ---- config ----------------------------------------------------------------------------------------------------------

for _key in (
    "activation_situ_beta",
    "activation_situ_linear_beta",
    "routed_expert_hidden_size",
    "attn_res_block_size",
    "latent_moe_use_norm",
    "mla_use_output_gate",
):
    config_defect(f"no_{_key}", f"the config lacks {_key}, the tensors that need it are there", K3, **{_key: None})
for _key in (
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
):
    config_defect(f"no_{_key}", f"the config lacks {_key}", **{_key: None})
config_defect("conv_kernel_1", "short_conv_kernel_size 1 (needs at least 2)", linear=True, short_conv_kernel_size=1)
config_defect("conv_kernel_0", "short_conv_kernel_size 0", linear=True, short_conv_kernel_size=0)
config_defect("conv_kernel_negative", "short_conv_kernel_size -1", linear=True, short_conv_kernel_size=-1)
config_defect("conv_kernel_differs", "short_conv_kernel_size 3, the weights have 4 taps", linear=True,
              short_conv_kernel_size=3)  # fmt: skip
config_defect("heads_differ", "linear_attn_config.num_heads 4, num_attention_heads 2", linear=True, num_heads=4)
config_defect("heads_zero", "num_attention_heads 0", num_attention_heads=0, num_key_value_heads=0)
config_defect("heads_negative", "num_attention_heads -2", num_attention_heads=-2, num_key_value_heads=-2)
config_defect("kv_heads_differ", "num_key_value_heads 1, num_attention_heads 2", num_key_value_heads=1)
config_defect("head_dim_zero", "linear_attn_config.head_dim 0", linear=True, head_dim=0)
config_defect("layers_zero", "num_hidden_layers 0", num_hidden_layers=0)
config_defect("vocab_zero", "vocab_size 0", vocab_size=0)
config_defect("top_k_over_experts", "num_experts_per_token 9 of 8 experts", num_experts_per_token=9)
config_defect("top_k_zero", "num_experts_per_token 0", num_experts_per_token=0)
config_defect("scale_nan", "routed_scaling_factor NaN", routed_scaling_factor=float("nan"))
config_defect("scale_zero", "routed_scaling_factor 0", routed_scaling_factor=0.0)
config_defect("eps_zero", "rms_norm_eps 0", rms_norm_eps=0.0)
config_defect("gate_bound_positive", "gate_lower_bound 5, the gate would grow the state", K3, linear=True,
              gate_lower_bound=5.0)  # fmt: skip
config_defect("gate_bound_on_linear", "gate_lower_bound in a Kimi-Linear config: GGUF cannot state it", KL, linear=True,
              gate_lower_bound=-5.0)  # fmt: skip
config_defect("softmax_router", "moe_router_activation_func softmax", moe_router_activation_func="softmax")
config_defect("not_renormalized", "moe_renormalize false", KL, moe_renormalize=False)
config_defect("expert_groups", "num_expert_group 2", num_expert_group=2)
config_defect("moe_every_second", "moe_layer_freq 2", moe_layer_freq=2)
config_defect("mla_with_rope", "mla_use_nope false", mla_use_nope=False)
config_defect("unknown_activation", "hidden_act gelu", hidden_act="gelu")
config_defect("situ_linear_exchanged", "hidden_act silu in a K3 config", K3, hidden_act="silu")
config_defect("tied_embeddings", "tie_word_embeddings true", tie_word_embeddings=True)
config_defect("mtp_layers", "num_nextn_predict_layers 1", num_nextn_predict_layers=1)


@defect("layer 1 is in full_attn_layers and in kda_layers")
def layer_in_both_lists(checkpoint: Checkpoint) -> None:
    linear = checkpoint.text["linear_attn_config"]
    linear["full_attn_layers"] = [1, *linear["full_attn_layers"]]


@defect("layer 1 is in neither full_attn_layers nor kda_layers")
def layer_in_no_list(checkpoint: Checkpoint) -> None:
    checkpoint.text["linear_attn_config"]["kda_layers"].remove(1)


@defect("the layer lists count from 0, so the last layer is in none and layer 0 does not exist")
def layers_from_zero(checkpoint: Checkpoint) -> None:
    linear = checkpoint.text["linear_attn_config"]
    for key in ("full_attn_layers", "kda_layers"):
        linear[key] = [i - 1 for i in linear[key]]


@defect("an architecture we do not convert: LlamaForCausalLM")
def unknown_architecture(checkpoint: Checkpoint) -> None:
    checkpoint.config["architectures"] = ["LlamaForCausalLM"]


@defect("the outer architecture is KimiLinearForCausalLM, the mechanisms are K3's", K3)
def wrong_outer_architecture(checkpoint: Checkpoint) -> None:
    checkpoint.config["architectures"] = ["KimiLinearForCausalLM"]


@defect("the outer architecture is KimiK3ForConditionalGeneration, the mechanisms are Kimi-Linear's", KL)
def linear_named_k3(checkpoint: Checkpoint) -> None:
    checkpoint.config["architectures"] = ["KimiK3ForConditionalGeneration"]


@file_defect("config.json is missing")
def config_missing(checkpoint: Checkpoint, folder: Path) -> None:
    (folder / "config.json").unlink()


@file_defect("config.json is cut in the middle")
def config_not_json(checkpoint: Checkpoint, folder: Path) -> None:
    path = folder / "config.json"
    path.write_bytes(path.read_bytes()[:100])


# ---- shards and index ------------------------------------------------------------------------------------------------


def last_shard(checkpoint: Checkpoint, folder: Path) -> Path:
    return folder / checkpoint.shard_name(len(checkpoint.shards) - 1)


def edit_header(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the JSON header of a safetensors file, leaving the payload as it is."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    edit(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


def tensor_names(header: dict[str, Any]) -> list[str]:
    return [name for name in header if name != "__metadata__"]


@file_defect("the last shard is cut by one byte")
def truncated_shard(checkpoint: Checkpoint, folder: Path) -> None:
    path = last_shard(checkpoint, folder)
    path.write_bytes(path.read_bytes()[:-1])


@file_defect("the last shard has four bytes after the last tensor")
def trailing_bytes(checkpoint: Checkpoint, folder: Path) -> None:
    with last_shard(checkpoint, folder).open("ab") as file:
        file.write(b"\0\0\0\0")


@file_defect("the last shard is empty")
def empty_shard(checkpoint: Checkpoint, folder: Path) -> None:
    last_shard(checkpoint, folder).write_bytes(b"")


@file_defect("the last shard's header length is 2^63 - 1")
def header_len_huge(checkpoint: Checkpoint, folder: Path) -> None:
    path = last_shard(checkpoint, folder)
    path.write_bytes((2**63 - 1).to_bytes(8, "little") + path.read_bytes()[8:])


@file_defect("the last shard's header is said to be one byte longer than the file")
def header_past_end(checkpoint: Checkpoint, folder: Path) -> None:
    path = last_shard(checkpoint, folder)
    raw = path.read_bytes()
    path.write_bytes((len(raw) - 7).to_bytes(8, "little") + raw[8:])


@file_defect("the last shard's header is not JSON")
def header_not_json(checkpoint: Checkpoint, folder: Path) -> None:
    path = last_shard(checkpoint, folder)
    raw = bytearray(path.read_bytes())
    raw[8] = ord("[")
    path.write_bytes(raw)


@file_defect("one name is in the last shard's header twice")
def duplicate_key(checkpoint: Checkpoint, folder: Path) -> None:
    path = last_shard(checkpoint, folder)
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    text = raw[8 : 8 + size].rstrip()
    header = json.loads(text)
    name = tensor_names(header)[0]
    again = json.dumps({name: header[name]}, separators=(",", ":")).encode()[1:]
    text = text[:-1] + b"," + again
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


@file_defect("two tensors of the last shard share bytes")
def offset_overlap(checkpoint: Checkpoint, folder: Path) -> None:
    def edit(header: dict[str, Any]) -> None:
        first, second = tensor_names(header)[:2]
        length = header[second]["data_offsets"][1] - header[second]["data_offsets"][0]
        start = header[first]["data_offsets"][0]
        header[second]["data_offsets"] = [start, start + length]

    edit_header(last_shard(checkpoint, folder), edit)


@file_defect("a tensor of the last shard ends near 2^63")
def offset_huge(checkpoint: Checkpoint, folder: Path) -> None:
    def edit(header: dict[str, Any]) -> None:
        offsets = header[tensor_names(header)[-1]]["data_offsets"]
        offsets[0] += 2**63 - 4096
        offsets[1] += 2**63 - 4096

    edit_header(last_shard(checkpoint, folder), edit)


@file_defect("a tensor of the last shard ends before it starts")
def offset_reversed(checkpoint: Checkpoint, folder: Path) -> None:
    def edit(header: dict[str, Any]) -> None:
        header[tensor_names(header)[-1]]["data_offsets"].reverse()

    edit_header(last_shard(checkpoint, folder), edit)


@file_defect("a tensor of the last shard has a negative dimension")
def shape_negative(checkpoint: Checkpoint, folder: Path) -> None:
    def edit(header: dict[str, Any]) -> None:
        header[tensor_names(header)[-1]]["shape"][0] *= -1

    edit_header(last_shard(checkpoint, folder), edit)


@file_defect("a BF16 tensor of the last shard is described as F32, so its byte count does not fit")
def dtype_lies(checkpoint: Checkpoint, folder: Path) -> None:
    def edit(header: dict[str, Any]) -> None:
        name = next(n for n in tensor_names(header) if header[n]["dtype"] == "BF16")
        header[name]["dtype"] = "F32"

    edit_header(last_shard(checkpoint, folder), edit)


@file_defect("a tensor of the last shard has a dtype that does not exist: F13")
def dtype_unknown(checkpoint: Checkpoint, folder: Path) -> None:
    def edit(header: dict[str, Any]) -> None:
        header[tensor_names(header)[0]]["dtype"] = "F13"

    edit_header(last_shard(checkpoint, folder), edit)


@file_defect("the last shard's header entry of a tensor has no data_offsets")
def header_entry_incomplete(checkpoint: Checkpoint, folder: Path) -> None:
    def edit(header: dict[str, Any]) -> None:
        del header[tensor_names(header)[0]]["data_offsets"]

    edit_header(last_shard(checkpoint, folder), edit)


@file_defect("a shard file that the index does not list lies in the folder")
def unlisted_shard(checkpoint: Checkpoint, folder: Path) -> None:
    write_safetensors(folder / "model-extra.safetensors", {"model.extra.weight": HfTensor.from_float(np.ones((2, 2)))})


@defect("the index names a file that is not there")
def index_names_absent_file(checkpoint: Checkpoint) -> None:
    checkpoint.weight_map["model.extra.weight"] = "model-00099-of-00099.safetensors"


@defect("the index lists a tensor that is not in its shard")
def index_names_absent_tensor(checkpoint: Checkpoint) -> None:
    checkpoint.weight_map["model.extra.weight"] = checkpoint.shard_name(0)


@defect("the index places embed_tokens in another shard than the one that holds it")
def index_names_wrong_file(checkpoint: Checkpoint) -> None:
    shard, name = checkpoint.find("model.embed_tokens.weight")
    other = next(i for i, s in enumerate(checkpoint.shards) if s is not shard)
    checkpoint.weight_map[name] = checkpoint.shard_name(other)


@defect("the index points outside of the folder")
def index_leaves_folder(checkpoint: Checkpoint) -> None:
    checkpoint.weight_map["model.extra.weight"] = "../model.safetensors"


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    edit(index)
    path.write_text(json.dumps(index), encoding="utf-8")


@file_defect("a tensor of the first shard is not in the index")
def index_omits_tensor(checkpoint: Checkpoint, folder: Path) -> None:
    name = checkpoint.prefix + "model.layers.0.input_layernorm.weight"
    edit_index(folder, lambda index: index["weight_map"].pop(name))


@file_defect("the index has no weight_map")
def index_without_map(checkpoint: Checkpoint, folder: Path) -> None:
    edit_index(folder, lambda index: index.pop("weight_map"))


@file_defect("the index is cut in the middle")
def index_not_json(checkpoint: Checkpoint, folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_bytes(path.read_bytes()[:200])


@file_defect("no index, and the second of the numbered shards is missing")
def numbered_shard_missing(checkpoint: Checkpoint, folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    (folder / checkpoint.shard_name(1)).unlink()


@file_defect("there is no safetensors file at all")
def no_shards(checkpoint: Checkpoint, folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    for path in folder.glob("*.safetensors"):
        path.unlink()


# ---- tokenizer -------------------------------------------------------------------------------------------------------


@file_defect("tiktoken.model is missing")
def tiktoken_missing(checkpoint: Checkpoint, folder: Path) -> None:
    (folder / "tiktoken.model").unlink()


@defect("tiktoken.model skips rank 300")
def tiktoken_gap(checkpoint: Checkpoint) -> None:
    lines = checkpoint.tiktoken.splitlines(keepends=True)
    checkpoint.tiktoken = b"".join(lines[:300] + lines[301:])


@defect("tiktoken.model has one token under two ranks")
def tiktoken_duplicate(checkpoint: Checkpoint) -> None:
    lines = checkpoint.tiktoken.splitlines(keepends=True)
    lines[300] = lines[299].split()[0] + b" 300\n"
    checkpoint.tiktoken = b"".join(lines)


@defect("line 11 of tiktoken.model is not base64")
def tiktoken_not_base64(checkpoint: Checkpoint) -> None:
    lines = checkpoint.tiktoken.splitlines(keepends=True)
    lines[10] = b"!!!! 10\n"
    checkpoint.tiktoken = b"".join(lines)


@defect("tiktoken.model has more tokens than vocab_size")
def tiktoken_too_long(checkpoint: Checkpoint) -> None:
    lines = checkpoint.tiktoken.splitlines(keepends=True)
    extra = [b"%s %d\n" % (b"AAAAAAA" + bytes([65 + i % 26, 65 + i // 26]), len(lines) + i) for i in range(100)]
    checkpoint.tiktoken = b"".join(lines + extra)


@defect("two special tokens have the same text")
def special_text_twice(checkpoint: Checkpoint) -> None:
    entries = checkpoint.tokenizer_config["added_tokens_decoder"]
    ids = sorted(entries, key=int)
    entries[ids[1]]["content"] = entries[ids[0]]["content"]


@defect("a special token id beyond vocab_size")
def special_beyond_vocab(checkpoint: Checkpoint) -> None:
    entries = checkpoint.tokenizer_config["added_tokens_decoder"]
    entries[str(checkpoint.text["vocab_size"])] = {"content": "<|beyond|>", "special": True}
