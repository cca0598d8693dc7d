"""Tensors that are missing, extra, unpaired, or have wrong values, shapes or dtypes."""

from __future__ import annotations

import json

import numpy as np

from tiny_files import Checkpoint, HfTensor

from .registry import K3, defect


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


@defect("weight_scale of expert 1 w2 is I8, not U8 (the bytes are right)", K3)
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


@defect("layer 0's q_proj holds about 1e5, beyond float16: an error only when F16 is written")
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
