"""Random Hugging Face checkpoints of both architectures, written in about a second.

    tiny.write_checkpoint(folder, "kimi-k3", seed=3, num_experts=7, num_experts_per_token=3)
    tiny.write_checkpoint(folder, preset="k3-93-layers")
    tiny.write_checkpoint(folder, defect="missing_scale")

Names, nesting and dtypes are those of the released checkpoints; sizes are small. Weights are random but not degenerate:
activations keep their scale through depth, logits spread, decays reach from almost 1 down to exp(-5) and below, and the
router's correction bias changes which experts are chosen. Each tensor depends on the seed and its own name only, so
switches change nothing but what they name: a packed and an unpacked checkpoint of one seed hold the same weights.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import tiny_vocab
from tiny_defects import DEFECTS, apply_to_checkpoint, apply_to_files, defect_arch
from tiny_files import ABSENT, Checkpoint, HfTensor

__all__ = ["ABSENT", "DEFECTS", "PRESETS", "build_checkpoint", "config_for", "preset_arch", "write_checkpoint"]

ARCHS = ("kimi-k3", "kimi-linear")

COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "first_k_dense_replace": 1,
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "kv_lora_rank": 32,
    "mla_use_nope": True,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 64,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 2,
    "num_expert_group": 1,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "num_nextn_predict_layers": 0,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 32,
    "vocab_size": 512,
}
K3_TEXT: dict[str, Any] = {
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "architectures": ["KimiLinearForCausalLM"],
    "attn_res_block_size": 3,
    "hidden_act": "situ",
    "latent_moe_use_norm": True,
    "max_length": 20,
    "max_position_embeddings": 1048576,
    "mla_use_output_gate": True,
    "num_hidden_layers": 8,
    "num_shared_experts": 2,
    "q_lora_rank": 48,
    "routed_expert_hidden_size": 32,
    "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc",
}
KL_TEXT: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_kimi.KimiLinearConfig",
        "AutoModel": "modeling_kimi.KimiLinearModel",
        "AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM",
    },
    "head_dim": 72,  # in the released config too, and used by nothing
    "hidden_act": "silu",
    "model_max_length": 1048576,
    "num_hidden_layers": 5,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
}
QUANTIZATION: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
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
            },
        }
    },
    "format": "mxfp4-pack-quantized",
    "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
REAL_WIDTHS: dict[str, Any] = {
    "linear_attn_config": {"head_dim": 128},
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
}
ODD: dict[str, Any] = {
    "hidden_size": 72,
    "num_attention_heads": 3,
    "linear_attn_config": {"head_dim": 48, "short_conv_kernel_size": 3},
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 10,
    "v_head_dim": 20,
    "kv_lora_rank": 40,
    "intermediate_size": 88,
    "num_experts": 7,
    "num_experts_per_token": 3,
    "moe_intermediate_size": 56,
}
# What a model without experts does not need is left out.
NO_EXPERTS: dict[str, Any] = {
    "num_experts": None,
    **dict.fromkeys(
        (
            "first_k_dense_replace",
            "latent_moe_use_norm",
            "moe_intermediate_size",
            "moe_renormalize",
            "moe_router_activation_func",
            "num_experts_per_token",
            "num_shared_experts",
            "routed_expert_hidden_size",
            "routed_scaling_factor",
        ),
        ABSENT,
    ),
}

# name -> arguments of write_checkpoint
PRESETS: dict[str, dict[str, Any]] = {
    "k3": {"arch": "kimi-k3"},
    "kl": {"arch": "kimi-linear"},
    # K3 mechanisms that a file may leave out
    "k3-bf16-experts": {"arch": "kimi-k3", "packed": False},
    "k3-no-q-lora": {"arch": "kimi-k3", "q_lora_rank": None},
    "k3-full-width-experts": {"arch": "kimi-k3", "routed_expert_hidden_size": ABSENT},
    "k3-no-latent-norm": {"arch": "kimi-k3", "latent_moe_use_norm": False},
    "k3-no-output-gate": {"arch": "kimi-k3", "mla_use_output_gate": False},
    "k3-softplus-gate": {"arch": "kimi-k3", "linear_attn_config": {"gate_lower_bound": ABSENT}},
    "k3-dense-only": {"arch": "kimi-k3", "packed": False, "num_hidden_layers": 5, **NO_EXPERTS},
    "k3-tied": {"arch": "kimi-k3", "tie_word_embeddings": True},
    "k3-plain": {
        "arch": "kimi-k3",
        "packed": False,
        "q_lora_rank": None,
        "routed_expert_hidden_size": ABSENT,
        "tie_word_embeddings": True,
        "mla_use_output_gate": False,
        "conv_rank": 2,
    },
    "kl-q-lora": {"arch": "kimi-linear", "q_lora_rank": 40},
    "kl-dense-only": {"arch": "kimi-linear", **NO_EXPERTS},
    "kl-tied": {"arch": "kimi-linear", "tie_word_embeddings": True},
    # widths and counts of the released models
    "k3-real-widths": {"arch": "kimi-k3", "num_hidden_layers": 4, "q_lora_rank": 96, **REAL_WIDTHS},
    "kl-real-widths": {"arch": "kimi-linear", "num_hidden_layers": 4, **REAL_WIDTHS},
    "k3-93-layers": {
        "arch": "kimi-k3",
        "num_hidden_layers": 93,
        "attn_res_block_size": 12,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "num_shared_experts": 1,
        "q_lora_rank": 24,
    },
    "k3-896-experts": {
        "arch": "kimi-k3",
        "num_hidden_layers": 3,
        "attn_res_block_size": 2,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "moe_intermediate_size": 32,
    },
    "k3-full-vocab": {"arch": "kimi-k3", "num_hidden_layers": 3, "hidden_size": 32, "vocab_size": 163840},
    # sizes that are multiples of nothing; experts of 40 columns cannot be packed
    "k3-odd": {"arch": "kimi-k3", "packed": False, "q_lora_rank": 44, "routed_expert_hidden_size": 40, **ODD},
    "k3-odd-packed": {
        "arch": "kimi-k3",
        "q_lora_rank": 44,
        **ODD,
        "routed_expert_hidden_size": 96,
        "moe_intermediate_size": 160,
    },
    "kl-odd": {"arch": "kimi-linear", **ODD},
}


def preset_arch(preset: str) -> str:
    return PRESETS[preset]["arch"]


def default_layers(count: int, arch: str) -> tuple[list[int], list[int]]:
    """1-based (MLA, KDA) layers: every fourth is MLA, and the last (K3: the last two) as in the released models."""
    mla = {i for i in range(1, count + 1) if i % 4 == 0}
    if count > 1:
        mla.add(count)
    if arch == "kimi-k3" and count >= 4:
        mla.add(count - 1)
    return sorted(mla), [i for i in range(1, count + 1) if i not in mla]


def config_for(arch: str, *, packed: bool = True, vision: bool = False, **overrides: Any) -> dict[str, Any]:
    """config.json of a small model. ``overrides`` are Hugging Face keys; ``linear_attn_config`` is merged; a value of
    ``ABSENT`` removes the key. Head counts and layer lists follow from ``num_attention_heads`` and
    ``num_hidden_layers`` unless given. Raises ValueError for an unknown architecture."""
    if arch not in ARCHS:
        raise ValueError(f"unknown architecture {arch!r}, expected one of {', '.join(ARCHS)}")
    text = {**COMMON, **(K3_TEXT if arch == "kimi-k3" else KL_TEXT)}
    given_linear = overrides.pop("linear_attn_config", {})
    text.update(overrides)
    heads = text["num_attention_heads"]
    text.setdefault("num_key_value_heads", heads)
    mla, kda = default_layers(text["num_hidden_layers"], arch)
    linear: dict[str, Any] = {
        "full_attn_layers": mla,
        "head_dim": 32,
        "kda_layers": kda,
        "num_heads": heads,
        "short_conv_kernel_size": 4,
    }
    if arch == "kimi-k3":
        linear.update(gate_lower_bound=-5.0, use_full_rank_gate=True)
    linear.update(given_linear)
    text["linear_attn_config"] = without_absent(linear)
    text = without_absent(text)

    vocab = text["vocab_size"]
    first = vocab - tiny_vocab.special_count(vocab)
    ids = {"bos_token_id": first, "eos_token_id": first + 2, "pad_token_id": vocab - 1}
    for key, value in ids.items():
        text.setdefault(key, value)
    if arch == "kimi-linear":
        return dict(sorted(text.items()))
    if packed:
        text["quantization_config"] = QUANTIZATION
    outer = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_kimi_k3.KimiK3Config",
            "AutoModelForCausalLM": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
        },
        **{key: text[key] for key in ids},
        "dtype": "bfloat16",
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": first + 21,
        "model_type": "kimi_k3",
        "text_config": dict(sorted(text.items())),
        "tie_word_embeddings": text["tie_word_embeddings"],
    }
    if vision:
        outer["vision_config"] = {"patch_size": 14, "vt_hidden_size": 32, "vt_num_hidden_layers": 1}
    return outer


def without_absent(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not ABSENT}


# ---- tensors ---------------------------------------------------------------------------------------------------------


class Weights:
    """Random values for one checkpoint: every tensor has its own generator, keyed by seed and name."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def normal(self, name: str, shape: tuple[int, ...], std: float) -> np.ndarray:
        return self.rng(name).standard_normal(shape, np.float32) * np.float32(std)

    def linear(self, name: str, rows: int, cols: int, gain: float = 1.0) -> np.ndarray:
        """[rows, cols]; with gain 1 the output has the scale of the input."""
        return self.normal(name, (rows, cols), gain / math.sqrt(cols))

    def uniform(self, name: str, shape: tuple[int, ...], low: float, high: float) -> np.ndarray:
        return self.rng(name).uniform(low, high, shape).astype(np.float32)

    def mxfp4(self, name: str, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
        """Packed codes [rows, cols / 2] and E8M0 scales [rows, cols / 32] of a linear weight with gain near 1."""
        rng = self.rng(name)
        codes = rng.integers(0, 256, (rows, cols // 2), np.uint8)
        middle = round(-math.log2(2.93 * math.sqrt(cols)))  # 2.93: root mean square of the 16 code values
        scales = (127 + middle + rng.integers(-1, 2, (rows, cols // 32))).astype(np.uint8)
        # The ends of the scale range: the two smallest scales, and the largest one over a block of zeros.
        scales[0, 0], scales[1 % rows, 0] = 0, 1
        codes[-1, -16:] &= 0x88
        scales[-1, -1] = 254
        return codes, scales


FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float64)


def unpack_mxfp4(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 [rows, cols] of packed codes; exact, also in bfloat16."""
    rows, half = codes.shape
    values = np.empty((rows, 2 * half))
    values[:, 0::2] = FP4_VALUES[codes & 15]
    values[:, 1::2] = FP4_VALUES[codes >> 4]
    return (values * np.exp2(scales.repeat(32, axis=1).astype(np.float64) - 127)).astype(np.float32)


Entry = tuple[str, HfTensor]


def kda_tensors(
    w: Weights, p: str, text: dict[str, Any], *, k3: bool, alog_padded: bool, conv_rank: int
) -> Iterator[Entry]:
    hidden, linear = text["hidden_size"], text["linear_attn_config"]
    heads, dim, kernel = linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]
    inner = heads * dim
    wide = "F32" if k3 else "BF16"
    for s in "qkv":
        yield f"{p}{s}_proj.weight", HfTensor.from_float(w.linear(f"{p}{s}_proj", inner, hidden))
    for s in "qkv":
        taps = w.normal(f"{p}{s}_conv1d", (inner, kernel), 0.6)
        yield f"{p}{s}_conv1d.weight", HfTensor.from_float(taps if conv_rank == 2 else taps[:, None, :], wide)
    yield f"{p}f_a_proj.weight", HfTensor.from_float(w.linear(f"{p}f_a_proj", dim, hidden))
    yield f"{p}f_b_proj.weight", HfTensor.from_float(w.linear(f"{p}f_b_proj", inner, dim))
    if linear.get("use_full_rank_gate"):
        yield f"{p}g_proj.weight", HfTensor.from_float(w.linear(f"{p}g_proj", inner, hidden))
    else:
        yield f"{p}g_a_proj.weight", HfTensor.from_float(w.linear(f"{p}g_a_proj", dim, hidden))
        yield f"{p}g_b_proj.weight", HfTensor.from_float(w.linear(f"{p}g_b_proj", inner, dim))
    yield f"{p}b_proj.weight", HfTensor.from_float(w.linear(f"{p}b_proj", heads, hidden, 1.5))
    a_log = w.uniform(f"{p}A_log", (heads,), -1.5, 1.5)
    if not k3:
        a_log = a_log.reshape(1, 1, heads, 1)
    elif alog_padded:
        a_log = np.concatenate([a_log, np.zeros(max(dim, heads + 1) - heads, np.float32)])
    yield f"{p}A_log", HfTensor.from_float(a_log, "F32")
    # From decays of about exp(-0.002) to the strongest the gate can give.
    yield f"{p}dt_bias", HfTensor.from_float(w.uniform(f"{p}dt_bias", (inner,), -6.0, 2.0), "F32")
    yield f"{p}o_norm.weight", HfTensor.from_float(w.uniform(f"{p}o_norm", (dim,), 0.5, 1.5), wide)
    yield f"{p}o_proj.weight", HfTensor.from_float(w.linear(f"{p}o_proj", hidden, inner, 1.5))


def mla_tensors(w: Weights, p: str, text: dict[str, Any]) -> Iterator[Entry]:
    hidden, heads, latent = text["hidden_size"], text["num_attention_heads"], text["kv_lora_rank"]
    nope, rope, value = text["qk_nope_head_dim"], text["qk_rope_head_dim"], text["v_head_dim"]
    rank = text.get("q_lora_rank")
    if rank:
        yield f"{p}q_a_proj.weight", HfTensor.from_float(w.linear(f"{p}q_a_proj", rank, hidden))
        yield f"{p}q_a_layernorm.weight", HfTensor.from_float(w.uniform(f"{p}q_a_layernorm", (rank,), 0.5, 1.5))
        yield f"{p}q_b_proj.weight", HfTensor.from_float(w.linear(f"{p}q_b_proj", heads * (nope + rope), rank, 1.5))
    else:
        yield f"{p}q_proj.weight", HfTensor.from_float(w.linear(f"{p}q_proj", heads * (nope + rope), hidden, 1.5))
    yield (
        f"{p}kv_a_proj_with_mqa.weight",
        HfTensor.from_float(w.linear(f"{p}kv_a_proj_with_mqa", latent + rope, hidden)),
    )
    yield f"{p}kv_a_layernorm.weight", HfTensor.from_float(w.uniform(f"{p}kv_a_layernorm", (latent,), 0.5, 1.5))
    yield f"{p}kv_b_proj.weight", HfTensor.from_float(w.linear(f"{p}kv_b_proj", heads * (nope + value), latent))
    if text.get("mla_use_output_gate"):
        yield f"{p}g_proj.weight", HfTensor.from_float(w.linear(f"{p}g_proj", heads * value, hidden))
    yield f"{p}o_proj.weight", HfTensor.from_float(w.linear(f"{p}o_proj", hidden, heads * value, 2.0))


def moe_tensors(w: Weights, p: str, text: dict[str, Any], *, packed: bool, bias_dtype: str) -> Iterator[Entry]:
    hidden, experts, width = text["hidden_size"], text["num_experts"], text["moe_intermediate_size"]
    latent = text.get("routed_expert_hidden_size")
    yield f"{p}gate.weight", HfTensor.from_float(w.linear(f"{p}gate", experts, hidden, 1.5))
    # Smaller with many experts: it shall change the order, not keep most of them out for good.
    bias = w.normal(f"{p}gate.bias", (experts,), 0.6 / math.sqrt(experts))
    yield f"{p}gate.e_score_correction_bias", HfTensor.from_float(bias, bias_dtype)
    if latent:
        yield f"{p}routed_expert_down_proj.weight", HfTensor.from_float(w.linear(f"{p}routed_down", latent, hidden))
        if text.get("latent_moe_use_norm"):
            norm = w.uniform(f"{p}routed_norm", (latent,), 0.5, 1.5)
            yield f"{p}routed_expert_norm.weight", HfTensor.from_float(norm)
        yield f"{p}routed_expert_up_proj.weight", HfTensor.from_float(w.linear(f"{p}routed_up", hidden, latent))
    inner = latent or hidden
    for e in range(experts):
        for name, rows, cols in (("w1", width, inner), ("w2", inner, width), ("w3", width, inner)):
            q = f"{p}experts.{e}.{name}"
            if packed and cols % 32:
                raise ValueError(f"{q}: {cols} columns cannot be packed as MXFP4; use packed=False")
            if cols % 32:
                yield f"{q}.weight", HfTensor.from_float(w.linear(q, rows, cols))
                continue
            codes, scales = w.mxfp4(q, rows, cols)
            if packed:
                yield f"{q}.weight_packed", HfTensor.from_bytes(codes)
                yield f"{q}.weight_scale", HfTensor.from_bytes(scales)
            else:
                yield f"{q}.weight", HfTensor.from_float(unpack_mxfp4(codes, scales))
    if text["num_shared_experts"]:
        yield from ffn_tensors(w, f"{p}shared_experts.", hidden, width * text["num_shared_experts"])


def ffn_tensors(w: Weights, p: str, hidden: int, width: int) -> Iterator[Entry]:
    yield f"{p}gate_proj.weight", HfTensor.from_float(w.linear(f"{p}gate_proj", width, hidden, 1.5))
    yield f"{p}up_proj.weight", HfTensor.from_float(w.linear(f"{p}up_proj", width, hidden, 1.5))
    yield f"{p}down_proj.weight", HfTensor.from_float(w.linear(f"{p}down_proj", hidden, width))


def layer_tensors(w: Weights, layer: int, text: dict[str, Any], *, k3: bool, packed: bool, alog_padded: bool,
                  conv_rank: int, bias_dtype: str) -> Iterator[Entry]:  # fmt: skip
    p, hidden = f"model.layers.{layer}.", text["hidden_size"]
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{p}{name}.weight", HfTensor.from_float(w.uniform(f"{p}{name}", (hidden,), 0.5, 1.5))
    if text.get("attn_res_block_size"):
        yield from mix_tensors(w, f"{p}self_attention_res", hidden)
        yield from mix_tensors(w, f"{p}mlp_res", hidden)
    if layer + 1 in text["linear_attn_config"]["kda_layers"]:
        yield from kda_tensors(w, f"{p}self_attn.", text, k3=k3, alog_padded=alog_padded, conv_rank=conv_rank)
    else:
        yield from mla_tensors(w, f"{p}self_attn.", text)
    if not text.get("num_experts") or layer < text["first_k_dense_replace"]:
        yield from ffn_tensors(w, f"{p}mlp.", hidden, text["intermediate_size"])
    else:
        yield from moe_tensors(w, f"{p}block_sparse_moe.", text, packed=packed, bias_dtype=bias_dtype)


def mix_tensors(w: Weights, p: str, hidden: int) -> Iterator[Entry]:
    yield f"{p}_norm.weight", HfTensor.from_float(w.uniform(f"{p}_norm", (hidden,), 0.5, 1.5))
    yield f"{p}_proj.weight", HfTensor.from_float(w.linear(f"{p}_proj", 1, hidden, 1.5))


def top_tensors(w: Weights, text: dict[str, Any]) -> Iterator[Entry]:
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    tied = text.get("tie_word_embeddings")
    std = 2 / math.sqrt(hidden) if tied else 1.0
    yield "model.embed_tokens.weight", HfTensor.from_float(w.normal("embed_tokens", (vocab, hidden), std))
    if not tied:
        yield "lm_head.weight", HfTensor.from_float(w.linear("lm_head", vocab, hidden, 2.0))
    yield "model.norm.weight", HfTensor.from_float(w.uniform("model.norm", (hidden,), 0.5, 1.5))
    if text.get("attn_res_block_size"):
        yield from mix_tensors(w, "model.output_attn_res", hidden)


def vision_tensors(w: Weights) -> Iterator[Entry]:
    """A few tensors of a vision tower: enough to check that text conversion leaves them out."""
    yield "vision_tower.patch_embed.proj.weight", HfTensor.from_float(w.normal("v.patch", (32, 3, 14, 14), 0.02))
    yield "vision_tower.encoder.final_layernorm.weight", HfTensor.from_float(w.uniform("v.norm", (32,), 0.5, 1.5))
    yield "mm_projector.post_norm.weight", HfTensor.from_float(w.uniform("v.post", (64,), 0.5, 1.5))


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def build_checkpoint(
    arch: str,
    *,
    seed: int = 0,
    packed: bool | None = None,
    shards: int = 3,
    index: bool = True,
    prefix: bool | None = None,
    alog_padded: bool = True,
    conv_rank: int = 3,
    bias_dtype: str | None = None,
    added_tokens: bool = True,
    vision: bool = False,
    **config_overrides: Any,
) -> Checkpoint:
    """The checkpoint of ``write_checkpoint`` in memory, without a defect."""
    k3 = arch == "kimi-k3"
    packed = k3 if packed is None else packed
    config = config_for(arch, packed=packed, vision=vision, **config_overrides)
    text = config.get("text_config", config)
    w = Weights(seed)
    start = "language_model." if (k3 if prefix is None else prefix) else ""
    layers = [
        {
            start + name: tensor
            for name, tensor in layer_tensors(
                w, layer, text, k3=k3, packed=packed, alog_padded=alog_padded, conv_rank=conv_rank,
                bias_dtype=bias_dtype or ("F32" if k3 else "BF16"),
            )
        }
        for layer in range(text["num_hidden_layers"])
    ]  # fmt: skip
    top = {start + name: tensor for name, tensor in top_tensors(w, text)}
    if vision:
        top.update(vision_tensors(w))
    files: list[dict[str, HfTensor]] = [{} for _ in range(shards)]
    for number, group in enumerate([*layers, top]):
        files[number * shards // (len(layers) + 1)].update(group)
    return Checkpoint(
        arch=arch,
        config=config,
        shards=files,
        tiktoken=tiny_vocab.tiktoken_model(text["vocab_size"]),
        tokenizer_config=tiny_vocab.tokenizer_config(arch, text["vocab_size"], added_tokens),
        generation_config={"do_sample": False, "eos_token_id": text["eos_token_id"]},
        prefix=start,
        index=index,
    )


def write_checkpoint(
    folder: Path,
    arch: str | None = None,
    *,
    preset: str | None = None,
    seed: int = 0,
    defect: str | None = None,
    mutate: Callable[[Checkpoint], None] | None = None,
    **options: Any,
) -> Path:
    """Write a random checkpoint into ``folder`` and return it.

    ``preset``     a name of PRESETS; further arguments override its own; without one ``arch`` is "kimi-k3"
    ``defect``     a name of DEFECTS: the one thing that is wrong with the checkpoint
    ``mutate``     called with the ``Checkpoint`` before it is written, for a change that has no name
    ``options``    either a Hugging Face config key (see ``config_for``) or one of the switches
        ``packed``        routed experts as MXFP4 (K3's default) or BF16 (Kimi-Linear's default)
        ``shards``        number of safetensors files (3); 1 writes model.safetensors
        ``index``         whether model.safetensors.index.json is written (True)
        ``prefix``        whether text tensors start with ``language_model.`` (K3 only by default)
        ``alog_padded``   K3's A_log with zeros beyond the head count (True)
        ``conv_rank``     convolution weights [inner, 1, kernel] (3) or [inner, kernel] (2)
        ``bias_dtype``    of e_score_correction_bias: "F32" (K3) or "BF16" (Kimi-Linear)
        ``added_tokens``  False leaves most special tokens out of tokenizer_config.json
        ``vision``        add a few vision tensors and a vision_config (K3)

    Raises ValueError for unknown names and for a defect that the architecture cannot have."""
    arguments: dict[str, Any] = {"arch": "kimi-k3"}
    if preset is not None:
        if preset not in PRESETS:
            raise ValueError(f"unknown preset {preset!r}, expected one of {', '.join(PRESETS)}")
        arguments.update(PRESETS[preset])
    elif defect is not None:
        arguments["arch"] = defect_arch(defect) or "kimi-k3"
    if arch is not None:
        arguments["arch"] = arch
    if "linear_attn_config" in options:
        options["linear_attn_config"] = {**arguments.get("linear_attn_config", {}), **options["linear_attn_config"]}
    arguments.update(options)
    checkpoint = build_checkpoint(arguments.pop("arch"), seed=seed, **arguments)
    if mutate is not None:
        mutate(checkpoint)
    if defect is not None:
        apply_to_checkpoint(defect, checkpoint)
    checkpoint.write(Path(folder))
    if defect is not None:
        apply_to_files(defect, checkpoint, Path(folder))
    return Path(folder)
