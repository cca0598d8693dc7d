"""Config values that contradict the tensors, the architecture or themselves."""

from __future__ import annotations

from pathlib import Path

from tiny_files import ABSENT, Checkpoint

from .registry import K3, KL, config_defect, defect, file_defect

NEEDED = (
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
    "linear_attn_config.short_conv_kernel_size",
    "linear_attn_config.kda_layers",
)
NEEDED_BY_K3 = (
    "activation_situ_beta",
    "activation_situ_linear_beta",
    "routed_expert_hidden_size",
    "attn_res_block_size",
    "latent_moe_use_norm",
    "mla_use_output_gate",
)
for _key in NEEDED:
    config_defect(f"no_{_key.split('.')[-1]}", f"the config lacks {_key}", _key, ABSENT)
for _key in NEEDED_BY_K3:
    config_defect(f"no_{_key}", f"the config lacks {_key}, the tensors that need it are there", _key, ABSENT, K3)

_KERNEL = "linear_attn_config.short_conv_kernel_size"
config_defect("conv_kernel_1", "short_conv_kernel_size 1 (needs at least 2)", _KERNEL, 1)
config_defect("conv_kernel_0", "short_conv_kernel_size 0", _KERNEL, 0)
config_defect("conv_kernel_negative", "short_conv_kernel_size -1", _KERNEL, -1)
config_defect("conv_kernel_differs", "short_conv_kernel_size 3, the weights have 4 taps", _KERNEL, 3)
config_defect(
    "heads_differ", "linear_attn_config.num_heads 4, num_attention_heads 2", "linear_attn_config.num_heads", 4
)
config_defect("heads_zero", "num_attention_heads 0", "num_attention_heads", 0)
config_defect("heads_negative", "num_attention_heads -2", "num_attention_heads", -2)
config_defect("kv_heads_differ", "num_key_value_heads 1, num_attention_heads 2", "num_key_value_heads", 1)
config_defect("head_dim_zero", "linear_attn_config.head_dim 0", "linear_attn_config.head_dim", 0)
config_defect("layers_zero", "num_hidden_layers 0", "num_hidden_layers", 0)
config_defect("layers_text", "num_hidden_layers is a string", "num_hidden_layers", "8")
config_defect("vocab_zero", "vocab_size 0", "vocab_size", 0)
config_defect("top_k_over_experts", "num_experts_per_token 9 of 8 experts", "num_experts_per_token", 9)
config_defect("top_k_zero", "num_experts_per_token 0", "num_experts_per_token", 0)
config_defect("scale_nan", "routed_scaling_factor NaN", "routed_scaling_factor", float("nan"))
config_defect("scale_zero", "routed_scaling_factor 0", "routed_scaling_factor", 0.0)
config_defect("eps_zero", "rms_norm_eps 0", "rms_norm_eps", 0.0)
config_defect(
    "gate_bound_positive", "gate_lower_bound 5: the state would grow", "linear_attn_config.gate_lower_bound", 5.0, K3
)
config_defect(
    "gate_bound_on_linear",
    "gate_lower_bound in a Kimi-Linear config, which a kimi-linear GGUF cannot state",
    "linear_attn_config.gate_lower_bound",
    -5.0,
    KL,
)
config_defect("situ_beta_zero", "activation_situ_beta 0", "activation_situ_beta", 0.0, K3)
config_defect("block_size_zero", "attn_res_block_size 0, the score vectors are there", "attn_res_block_size", 0, K3)
config_defect("latent_differs", "routed_expert_hidden_size 64, weights have 32", "routed_expert_hidden_size", 64, K3)
config_defect("softmax_router", "moe_router_activation_func softmax", "moe_router_activation_func", "softmax")
config_defect("not_renormalized", "moe_renormalize false", "moe_renormalize", False, KL)
config_defect("expert_groups", "num_expert_group 2", "num_expert_group", 2)
config_defect("moe_every_second", "moe_layer_freq 2", "moe_layer_freq", 2)
config_defect("mla_with_rope", "mla_use_nope false", "mla_use_nope", False)
config_defect("unknown_activation", "hidden_act gelu", "hidden_act", "gelu")
config_defect("silu_in_k3", "hidden_act silu in a K3 config", "hidden_act", "silu", K3)
config_defect("tied_embeddings", "tie_word_embeddings true", "tie_word_embeddings", True)
config_defect("mtp_layers", "num_nextn_predict_layers 1", "num_nextn_predict_layers", 1)


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
