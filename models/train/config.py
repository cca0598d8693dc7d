"""The configuration of Kimi-K3-nano, nested like the released ``config.json``."""

from __future__ import annotations

from typing import Any

N_BASE = 1792  # BPE tokens below the 256 special ids
FULL_ATTENTION = (4, 8, 9)  # 1-based, as in the release: every fourth layer, and the last two both MLA


def hf_config() -> dict[str, Any]:
    """The whole ``config.json``."""
    ids = {"bos_token_id": N_BASE, "eos_token_id": N_BASE + 2, "pad_token_id": N_BASE + 255}
    n_layer = FULL_ATTENTION[-1]
    weights: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": 32,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": "torch.uint8",
        "strategy": "group",
        "symmetric": True,
        "type": "float",
        "zp_dtype": None,
    }
    group = {
        "format": "mxfp4-pack-quantized",
        "input_activations": None,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": weights,
    }
    text = {
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "architectures": ["KimiLinearForCausalLM"],
        "attn_res_block_size": 3,
        **ids,
        "dtype": "bfloat16",
        "first_k_dense_replace": 1,
        "hidden_act": "situ",
        "hidden_size": 256,
        "initializer_range": 0.02,
        "intermediate_size": 512,
        "kv_lora_rank": 64,
        "latent_moe_use_norm": True,
        "linear_attn_config": {
            "full_attn_layers": list(FULL_ATTENTION),
            "gate_lower_bound": -5.0,
            "head_dim": 64,
            "kda_layers": [i for i in range(1, n_layer + 1) if i not in FULL_ATTENTION],
            "num_heads": 4,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
        },
        "max_position_embeddings": 4096,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "model_type": "kimi_linear",
        "moe_intermediate_size": 64,
        "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 4,
        "num_expert_group": 1,
        "num_experts": 16,
        "num_experts_per_token": 4,
        "num_hidden_layers": n_layer,
        "num_key_value_heads": 4,
        "num_nextn_predict_layers": 0,
        "num_shared_experts": 2,
        "q_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "quantization_config": {
            "config_groups": {"group_0": group},
            "format": "mxfp4-pack-quantized",
            "global_compression_ratio": None,
            "ignore": [
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
                "re:.*lm_head.*",
            ],
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        },
        "rms_norm_eps": 1e-05,
        "routed_expert_hidden_size": 128,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_cache": True,
        "use_grouped_topk": True,
        "v_head_dim": 64,
        "vocab_size": N_BASE + 256,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        **ids,
        "dtype": "bfloat16",
        "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": N_BASE + 21,
        "model_type": "kimi_k3",
        "text_config": text,
        "tie_word_embeddings": False,
    }
