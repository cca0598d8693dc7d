"""Other spellings of the checkpoints of ``tiny.py``: each function is a ``mutate`` of ``write_checkpoint``.

The weights stay the same, so a checkpoint and its other spelling convert to the same tensors.
"""

from __future__ import annotations

import re
from typing import Any

from tiny_files import Checkpoint, HfTensor

# What `transformers` has no field for, and what it has other fields for.
_NOT_WRITTEN = (
    "auto_map",
    "first_k_dense_replace",
    "linear_attn_config",
    "mla_use_nope",
    "moe_layer_freq",
    "moe_router_activation_func",
    "num_nextn_predict_layers",
    "rope_scaling",
    "rope_theta",
    "use_grouped_topk",
)


def transformers_config(checkpoint: Checkpoint) -> None:
    """config.json as transformers 5.24.0 writes it for a `KimiLinearConfig` that was not read from a released file.

    One that was read from a file keeps the fields of the file beside these.
    """
    text = checkpoint.config
    linear, n_layers = text["linear_attn_config"], text["num_hidden_layers"]
    kda, dense = set(checkpoint.layers("kda")), set(checkpoint.layers("dense"))
    own: dict[str, Any] = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": text["qk_rope_head_dim"],
        "layer_types": ["linear_attention" if i in kda else "full_attention" for i in range(n_layers)],
        "linear_conv_kernel_dim": linear["short_conv_kernel_size"],
        "linear_head_dim": linear["head_dim"],
        "linear_num_heads": linear["num_heads"],
        "mlp_layer_types": ["dense" if i in dense else "sparse" for i in range(n_layers)],
        "output_router_logits": False,
        "pretraining_tp": 1,
        "qk_head_dim": text["qk_nope_head_dim"] + text["qk_rope_head_dim"],
        "transformers_version": "5.24.0",
    }
    for field in _NOT_WRITTEN:
        text.pop(field, None)
    text.update(own)


def transformers_dense_names(checkpoint: Checkpoint) -> None:
    """The names that transformers 5.24.0 writes by default: the published ones, but for those of dense layers."""
    for layer in checkpoint.layers("dense"):
        for name in ("gate_proj.weight", "up_proj.weight", "down_proj.weight"):
            tensor = checkpoint.delete(f"model.layers.{layer}.mlp.{name}")
            checkpoint.set(f"model.layers.{layer}.block_sparse_moe.{name}", tensor)


def transformers_tensors(checkpoint: Checkpoint) -> None:
    """The names and stacks that transformers 5.24.0 writes with `save_pretrained(save_original_format=False)`.

    Per KDA layer `self_attn.conv1d.weight` `[3 P, 1, taps]` (q, k, v) and the decay gate under `forget_gate.`; per MoE
    layer `mlp.experts.gate_up_proj` `[experts, 2 width, hidden]` (gate, then up, of each) and `mlp.experts.down_proj`
    `[experts, hidden, width]`; `mlp.` for `block_sparse_moe.`.
    """
    for layer in checkpoint.layers("kda"):
        p = f"model.layers.{layer}.self_attn."
        parts = [checkpoint.delete(f"{p}{stream}_conv1d.weight") for stream in "qkv"]
        checkpoint.set(f"{p}conv1d.weight", _joined(parts, (3 * parts[0].shape[0], *parts[0].shape[1:])))
        for name in ("A_log", "dt_bias", "f_a_proj.weight", "f_b_proj.weight"):
            checkpoint.set(f"{p}forget_gate.{name}", checkpoint.delete(p + name))
    n = checkpoint.text.get("num_experts") or 0
    for layer in checkpoint.layers("moe"):
        p, q = f"model.layers.{layer}.block_sparse_moe.", f"model.layers.{layer}.mlp."
        pairs = [checkpoint.delete(f"{p}experts.{e}.{w}.weight") for e in range(n) for w in ("w1", "w3")]
        downs = [checkpoint.delete(f"{p}experts.{e}.w2.weight") for e in range(n)]
        width, hidden = pairs[0].shape
        checkpoint.set(f"{q}experts.gate_up_proj", _joined(pairs, (n, 2 * width, hidden)))
        checkpoint.set(f"{q}experts.down_proj", _joined(downs, (n, hidden, width)))
        shared = [f"shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")]
        for name in ("gate.weight", "gate.e_score_correction_bias", *shared):
            checkpoint.set(q + name, checkpoint.delete(p + name))


def transformers_layout(checkpoint: Checkpoint) -> None:
    """Both: a model of transformers saved in its own format."""
    transformers_tensors(checkpoint)
    transformers_config(checkpoint)


def legacy_names(checkpoint: Checkpoint) -> None:
    """Residual vectors of older Kimi-K3 exports (the projection without its leading 1), the router bias outside of
    the router."""
    for shard in checkpoint.shards:
        for name in list(shard):
            tensor = shard[name]
            other = re.sub(r"_res_(norm|proj)\.weight$", r"_res.\1_weight", name)
            other = other.replace(".gate.e_score_correction_bias", ".e_score_correction_bias")
            if other.endswith("_res.proj_weight"):
                tensor = HfTensor(tensor.dtype, tensor.shape[1:], tensor.data)
            del shard[name]
            shard[other] = tensor


def _joined(parts: list[HfTensor], shape: tuple[int, ...]) -> HfTensor:
    return HfTensor(parts[0].dtype, shape, b"".join(part.data for part in parts))
