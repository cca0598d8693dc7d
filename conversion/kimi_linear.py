"""Kimi-Linear: KDA and MLA layers, plain residuals, experts at full width.

The tables here also serve Kimi-K3 (`kimi_k3.py`), which adds to them. Names, folds and keys are those of existing GGUF
files of the architecture; the mathematics behind the required values is in the published model code.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from gguf_ext import Plan, PlannedTensor
from gguf_ext import constants as c
from gguf_ext.constants import GGUFValueType, LlamaFileType

from .base import EXPERTS, MAX_EXPERTS, ONE, Converter, Row, register
from .errors import ConversionError
from .folds import Copy, NegativeExp, Sources, SplitKvB
from .layouts import LEGACY, TRANSFORMERS, Stack, complete_config
from .types import Types

# Where a context length may stand, in the order of precedence of existing converters.
_CONTEXT_LENGTH = (
    "max_position_embeddings",
    "n_ctx",
    "n_positions",
    "max_length",
    "max_sequence_length",
    "model_max_length",
)


@dataclass(frozen=True)
class _Both:
    """Two outputs with the same values. Readers of these architectures want `output.weight` also where it is tied."""

    first: str
    second: str

    def plan(self, prefix: str, sources: Sources, types: Types) -> list[PlannedTensor]:
        return Copy(self.first).plan(prefix, sources, types) + Copy(self.second).plan(prefix, sources, types)


_MATRIX = ("vocab_size", "hidden_size")
_EMBEDDING = Row("model.embed_tokens.weight", _MATRIX, Copy(c.TOKEN_EMBD))
_HEAD = Row("lm_head.weight", _MATRIX, Copy(c.OUTPUT))
_TIED_EMBEDDING = Row("model.embed_tokens.weight", _MATRIX, _Both(c.TOKEN_EMBD, c.OUTPUT))
_OUTPUT_NORM = Row("model.norm.weight", ("hidden_size",), Copy(c.OUTPUT_NORM))
_EVERY_LAYER = (
    Row("input_layernorm.weight", ("hidden_size",), Copy(c.ATTN_NORM)),
    Row("post_attention_layernorm.weight", ("hidden_size",), Copy(c.FFN_NORM)),
)
_CONV_AXES = ("kda_width", ONE, "short_conv_kernel_size")
_CONV_STACK_AXES = ("kda_width_of_qkv", ONE, "short_conv_kernel_size")
_CONV_ALSO = (("kda_width", "short_conv_kernel_size"),)
_KDA = (
    Row("self_attn.q_proj.weight", ("kda_width", "hidden_size"), Copy(c.ATTN_Q)),
    Row("self_attn.k_proj.weight", ("kda_width", "hidden_size"), Copy(c.ATTN_K)),
    Row("self_attn.v_proj.weight", ("kda_width", "hidden_size"), Copy(c.ATTN_V)),
    Row("self_attn.q_conv1d.weight", _CONV_AXES, Copy(c.SSM_CONV1D_Q, conv=True), _CONV_ALSO),
    Row("self_attn.k_conv1d.weight", _CONV_AXES, Copy(c.SSM_CONV1D_K, conv=True), _CONV_ALSO),
    Row("self_attn.v_conv1d.weight", _CONV_AXES, Copy(c.SSM_CONV1D_V, conv=True), _CONV_ALSO),
    Row("self_attn.f_a_proj.weight", ("kda_head_dim", "hidden_size"), Copy(c.SSM_F_A)),
    Row("self_attn.f_b_proj.weight", ("kda_width", "kda_head_dim"), Copy(c.SSM_F_B)),
    Row("self_attn.b_proj.weight", ("kda_heads", "hidden_size"), Copy(c.SSM_BETA)),
    Row("self_attn.dt_bias", ("kda_width",), Copy(c.SSM_DT)),
    Row("self_attn.o_norm.weight", ("kda_head_dim",), Copy(c.SSM_NORM)),
    Row("self_attn.o_proj.weight", ("hidden_size", "kda_width"), Copy(c.ATTN_OUTPUT)),
)
_KDA_LOW_RANK_GATE = (
    Row("self_attn.g_a_proj.weight", ("kda_head_dim", "hidden_size"), Copy(c.SSM_G_A)),
    Row("self_attn.g_b_proj.weight", ("kda_width", "kda_head_dim"), Copy(c.SSM_G_B)),
)
_MLA = (
    Row("self_attn.kv_a_proj_with_mqa.weight", ("mla_cache_width", "hidden_size"), Copy(c.ATTN_KV_A_MQA)),
    Row("self_attn.kv_a_layernorm.weight", ("kv_lora_rank",), Copy(c.ATTN_KV_A_NORM)),
    Row("self_attn.o_proj.weight", ("hidden_size", "mla_v_width"), Copy(c.ATTN_OUTPUT)),
)
_MLA_PLAIN_Q = (Row("self_attn.q_proj.weight", ("mla_q_width", "hidden_size"), Copy(c.ATTN_Q)),)
_MLA_LORA_Q = (
    Row("self_attn.q_a_proj.weight", ("q_lora_rank", "hidden_size"), Copy(c.ATTN_Q_A)),
    Row("self_attn.q_a_layernorm.weight", ("q_lora_rank",), Copy(c.ATTN_Q_A_NORM)),
    Row("self_attn.q_b_proj.weight", ("mla_q_width", "q_lora_rank"), Copy(c.ATTN_Q_B)),
)
_DENSE = (
    Row("mlp.gate_proj.weight", ("intermediate_size", "hidden_size"), Copy(c.FFN_GATE)),
    Row("mlp.up_proj.weight", ("intermediate_size", "hidden_size"), Copy(c.FFN_UP)),
    Row("mlp.down_proj.weight", ("hidden_size", "intermediate_size"), Copy(c.FFN_DOWN)),
)
_MOE = (
    Row("block_sparse_moe.gate.weight", ("num_experts", "hidden_size"), Copy(c.FFN_GATE_INP)),
    Row("block_sparse_moe.gate.e_score_correction_bias", ("num_experts",), Copy(c.EXP_PROBS_B)),
    Row("block_sparse_moe.shared_experts.gate_proj.weight", ("shared_width", "hidden_size"), Copy(c.FFN_GATE_SHEXP)),
    Row("block_sparse_moe.shared_experts.up_proj.weight", ("shared_width", "hidden_size"), Copy(c.FFN_UP_SHEXP)),
    Row("block_sparse_moe.shared_experts.down_proj.weight", ("hidden_size", "shared_width"), Copy(c.FFN_DOWN_SHEXP)),
)

_TEMPLATES = Path(__file__).parent / "templates"


@register("KimiLinearForCausalLM", "KimiLinearModel")
class KimiLinear(Converter):
    """`KimiLinearForCausalLM` to `kimi-linear`."""

    architecture = c.ARCH_KIMI_LINEAR
    chat_template = (_TEMPLATES / "kimi-linear.jinja").read_text(encoding="utf-8")
    renames: ClassVar[tuple[tuple[str, str], ...]] = (*LEGACY, *TRANSFORMERS)
    deciding_fields = {
        "q_a_": "q_lora_rank",
        "q_b_proj": "q_lora_rank",
        "lm_head": "tie_word_embeddings",
        ".experts.": "num_experts",
        ".mlp.": "first_k_dense_replace",
        ".block_sparse_moe.gate.": "first_k_dense_replace",
        "_conv1d.": "linear_attn_config.kda_layers",
        ".kv_a_": "linear_attn_config.full_attn_layers",
    }

    # --- configuration ------------------------------------------------------------------------------------------------
    def read_config(self) -> None:
        complete_config(self.config)
        self._read_common()
        self._refuse_what_only_k3_has()
        self.width("expert_input", self.hidden, "hidden_size")

    def _read_common(self) -> None:
        """Fields and widths both models share."""
        config = self.config
        self._refuse_unsupported()
        self.hidden = self.width("hidden_size", config.integer("hidden_size"), "hidden_size")
        self.vocab = self.width("vocab_size", config.integer("vocab_size"), "vocab_size")
        self._read_layers()
        self._read_kda()
        self._read_mla()
        self._read_ffn()
        self.context_length = config.integer(
            next((f for f in _CONTEXT_LENGTH if config.get(f) is not None), _CONTEXT_LENGTH[0])
        )
        self.eps = config.positive("rms_norm_eps")
        self.tied = self._is_tied()

    def _is_tied(self) -> bool:
        """Whether the output matrix is the embedding. A nested configuration says it twice."""
        config, field = self.config, "tie_word_embeddings"
        said = {part[field] for part in (config.raw, config.values) if isinstance(part.get(field), bool)}
        if len(said) == 2:
            raise ConversionError(f"{config.path}: {field} is {json.dumps(config.raw[field])}, but not in text_config")
        return config.get(field) is not None and config.boolean(field)

    def _refuse_unsupported(self) -> None:
        """Mechanisms that neither the keys of the file nor the graph of these architectures have."""
        config = self.config
        config.must_be("mla_use_nope", True)
        config.must_be("moe_layer_freq", 1, absent=True)
        config.must_be("num_expert_group", 1, absent=True)
        config.must_be("topk_group", 1, absent=True)
        # Kimi-Linear's configuration has none: with one group the published router knows this method only.
        config.must_be("topk_method", "noaux_tc", absent=True)
        config.must_be("num_nextn_predict_layers", 0, absent=True)
        config.must_be_absent("rope_scaling", "these models have no rotary embedding to scale")

    def _refuse_what_only_k3_has(self) -> None:
        config = self.config
        why = "a mechanism of Kimi-K3; the outer architectures entry must then be KimiK3ForConditionalGeneration"
        for field in (
            "attn_res_block_size",
            "routed_expert_hidden_size",
            "latent_moe_use_norm",
            "activation_situ_beta",
            "activation_situ_linear_beta",
            "mla_use_output_gate",
            "linear_attn_config.gate_lower_bound",
            "linear_attn_config.use_full_rank_gate",
        ):
            config.must_be_absent(field, why)
        config.must_be("hidden_act", "silu")
        config.must_be("moe_renormalize", True, absent=not self.n_experts)  # the format has no key for another value

    def _read_layers(self) -> None:
        """Layer kinds; the config's two lists count from 1 and must share out the layers."""
        config = self.config
        self.kda_layers = set(config.layer_list("linear_attn_config.kda_layers", self.n_layers))
        full = set(config.layer_list("linear_attn_config.full_attn_layers", self.n_layers))
        if both := self.kda_layers & full:
            config.refuse(
                "linear_attn_config.kda_layers", f"no layer that full_attn_layers has too, such as {min(both) + 1}"
            )
        if neither := set(range(self.n_layers)) - self.kda_layers - full:
            config.refuse("linear_attn_config.kda_layers", f"layer {min(neither) + 1}, which is in no list")

    def _read_kda(self) -> None:
        config = self.config
        heads = config.integer("linear_attn_config.num_heads")
        self.heads = config.integer("num_attention_heads")
        if heads != self.heads:  # the file has one head count
            config.refuse("linear_attn_config.num_heads", f"{self.heads} as num_attention_heads")
        self.kda_head_dim = config.integer("linear_attn_config.head_dim")
        self.kernel = config.integer("linear_attn_config.short_conv_kernel_size", minimum=2)
        dim, heads_source = "linear_attn_config.head_dim", "linear_attn_config.num_heads"
        self.width("kda_heads", heads, heads_source)
        self.width("kda_heads_or_more", heads, heads_source, at_least=True)
        self.width("kda_head_dim", self.kda_head_dim, dim)
        self.width("kda_width", heads * self.kda_head_dim, f"{heads_source} * {dim}")
        self.width("kda_width_of_qkv", 3 * heads * self.kda_head_dim, f"3 * {heads_source} * {dim}")
        self.width("short_conv_kernel_size", self.kernel, "linear_attn_config.short_conv_kernel_size")

    def _read_mla(self) -> None:
        config = self.config
        if config.get("num_key_value_heads") is not None and config.integer("num_key_value_heads") != self.heads:
            config.refuse("num_key_value_heads", f"{self.heads} as num_attention_heads")
        self.kv_lora_rank = config.integer("kv_lora_rank")
        self.nope, self.rope = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
        self.v_head_dim = config.integer("v_head_dim")
        self.q_lora_rank = None if config.get("q_lora_rank") is None else config.integer("q_lora_rank")
        self.width("kv_lora_rank", self.kv_lora_rank, "kv_lora_rank")
        self.width("mla_cache_width", self.kv_lora_rank + self.rope, "kv_lora_rank + qk_rope_head_dim")
        head = "num_attention_heads"
        self.width(
            "mla_q_width", self.heads * (self.nope + self.rope), f"{head} * (qk_nope_head_dim + qk_rope_head_dim)"
        )
        self.width(
            "mla_kv_b_width", self.heads * (self.nope + self.v_head_dim), f"{head} * (qk_nope_head_dim + v_head_dim)"
        )
        self.width("mla_v_width", self.heads * self.v_head_dim, f"{head} * v_head_dim")
        if self.q_lora_rank is not None:
            self.width("q_lora_rank", self.q_lora_rank, "q_lora_rank")

    def _read_ffn(self) -> None:
        config = self.config
        self.dense_width = self.width("intermediate_size", config.integer("intermediate_size"), "intermediate_size")
        if self._is_dense_only():
            self.n_experts = self.n_used = self.n_shared = self.expert_width = 0
            self.n_dense, self.routed_scale = self.n_layers, 1.0
            return
        config.must_be("moe_router_activation_func", "sigmoid")
        self.n_experts = self.width("num_experts", config.integer("num_experts", maximum=MAX_EXPERTS), "num_experts")
        self.n_used = config.integer("num_experts_per_token")
        if self.n_used > self.n_experts:
            config.refuse("num_experts_per_token", f"at most num_experts {self.n_experts}")
        self.n_dense = config.integer("first_k_dense_replace", minimum=0)
        if self.n_dense > self.n_layers:
            config.refuse("first_k_dense_replace", f"at most num_hidden_layers {self.n_layers}")
        self.n_shared = config.integer("num_shared_experts")
        self.expert_width = self.width("expert_width", config.integer("moe_intermediate_size"), "moe_intermediate_size")
        self.width("shared_width", self.n_shared * self.expert_width, "num_shared_experts * moe_intermediate_size")
        self.width("expert_gate_and_up_width", 2 * self.expert_width, "2 * moe_intermediate_size")
        self.routed_scale = config.positive("routed_scaling_factor")

    def _is_dense_only(self) -> bool:
        """Whether no layer has experts: `num_experts` is null or 0, or every layer is a leading dense one."""
        config = self.config
        all_dense = config.shown("first_k_dense_replace") == str(self.n_layers)
        return all_dense or config.shown("num_experts") in ("null", "0")

    # --- tensors ------------------------------------------------------------------------------------------------------
    def has_experts(self, layer: int) -> bool:
        return self.n_dense <= layer < self.n_layers

    def model_rows(self) -> Iterable[Row]:
        yield from (_TIED_EMBEDDING,) if self.tied else (_EMBEDDING, _HEAD)
        yield _OUTPUT_NORM

    def layer_rows(self, layer: int) -> Iterable[Row]:
        yield from _EVERY_LAYER
        yield from self.kda_rows() if layer in self.kda_layers else self.mla_rows()
        yield from _MOE if self.has_experts(layer) else _DENSE

    def stacks(self) -> Iterable[Stack]:
        """Those of `transformers`: convolutions of q, k and v; gate and up of all experts; down of all experts."""
        convolutions = tuple(f"self_attn.{stream}_conv1d.weight" for stream in "qkv")
        yield Stack("self_attn.conv1d.weight", _CONV_STACK_AXES, convolutions, _CONV_AXES)
        if self.n_experts:
            axes = {projection: axes for projection, axes, _ in EXPERTS}

            def parts(*projections: str) -> tuple[str, ...]:
                return tuple(
                    f"block_sparse_moe.experts.{expert}.{projection}.weight"
                    for expert in range(self.n_experts)
                    for projection in projections
                )

            stack = ("num_experts", "expert_gate_and_up_width", "expert_input")
            yield Stack("block_sparse_moe.experts.gate_up_proj", stack, parts("w1", "w3"), axes["w1"])
            yield Stack("block_sparse_moe.experts.down_proj", ("num_experts", *axes["w2"]), parts("w2"), axes["w2"])

    def kda_rows(self) -> Iterable[Row]:
        yield from _KDA
        fold = NegativeExp(c.SSM_A, self.heads, (1, self.heads, 1, 1))
        yield Row("self_attn.A_log", (ONE, ONE, "kda_heads_or_more", ONE), fold, (("kda_heads_or_more",),))
        yield from _KDA_LOW_RANK_GATE

    def mla_rows(self) -> Iterable[Row]:
        yield from _MLA
        yield from _MLA_PLAIN_Q if self.q_lora_rank is None else _MLA_LORA_Q
        fold = SplitKvB(self.heads, self.nope, self.v_head_dim)
        yield Row("self_attn.kv_b_proj.weight", ("mla_kv_b_width", "kv_lora_rank"), fold)

    # --- keys ---------------------------------------------------------------------------------------------------------
    def add_fields(self, plan: Plan, file_type: LlamaFileType) -> None:
        u32, i32, f32 = GGUFValueType.UINT32, GGUFValueType.INT32, GGUFValueType.FLOAT32
        config, add = self.config, self.field_adder(plan)
        add(c.KEY_BLOCK_COUNT, self.n_layers, u32)
        add(c.KEY_CONTEXT_LENGTH, self.context_length, u32)
        add(c.KEY_EMBEDDING_LENGTH, self.hidden, u32)
        add(c.KEY_FEED_FORWARD_LENGTH, self.dense_width, u32)
        add(c.KEY_HEAD_COUNT, self.heads, u32)
        add(c.KEY_HEAD_COUNT_KV, [0 if layer in self.kda_layers else 1 for layer in range(self.n_layers)], i32)
        if config.get("rope_theta") is not None:  # used by nothing; existing files have it when the config has it
            add(c.KEY_ROPE_FREQ_BASE, config.number("rope_theta"), f32)
        add(c.KEY_RMS_EPS, self.eps, f32)
        add(c.KEY_EXPERT_COUNT, self.n_experts, u32)
        add(c.KEY_EXPERT_USED_COUNT, self.n_used, u32)
        if config.get("topk_group") is not None:
            add(c.KEY_EXPERT_GROUP_USED_COUNT, config.integer("topk_group"), u32)
        add(c.KEY_EXPERT_GATING_FUNC, c.EXPERT_GATING_SIGMOID, u32)
        # The position of this pair in existing files depends on a leftover field of the config.
        early = config.get("head_dim") is not None
        if early:
            self._add_cache_lengths(plan)
        plan.add_field(c.KEY_FILE_TYPE, int(file_type), u32)
        add(c.KEY_VOCAB_SIZE, self.vocab, u32)
        add(c.KEY_CONV_KERNEL, self.kernel, u32)
        add(c.KEY_KDA_HEAD_DIM, self.kda_head_dim, u32)
        if config.get("linear_attn_config.gate_lower_bound") is not None:
            add(c.KEY_KDA_GATE_LOWER_BOUND, config.number("linear_attn_config.gate_lower_bound"), f32)
        if self.q_lora_rank is not None:
            add(c.KEY_Q_LORA_RANK, self.q_lora_rank, u32)
        add(c.KEY_KV_LORA_RANK, self.kv_lora_rank, u32)
        add(c.KEY_ROPE_DIMENSION_COUNT, self.rope, u32)
        if not early:
            self._add_cache_lengths(plan)
        add(c.KEY_KEY_LENGTH_MLA, self.nope + self.rope, u32)
        add(c.KEY_VALUE_LENGTH_MLA, self.v_head_dim, u32)
        add(c.KEY_EXPERT_FEED_FORWARD_LENGTH, self.expert_width, u32)
        add(c.KEY_EXPERT_SHARED_COUNT, self.n_shared, u32)
        add(c.KEY_LEADING_DENSE_BLOCK_COUNT, self.n_dense, u32)
        add(c.KEY_EXPERT_WEIGHTS_SCALE, self.routed_scale, f32)

    def _add_cache_lengths(self, plan: Plan) -> None:
        """Width of a cached row, and of the part that V is made of: what the absorbed form keeps per token."""
        add = self.field_adder(plan)
        add(c.KEY_KEY_LENGTH, self.kv_lora_rank + self.rope, GGUFValueType.UINT32)
        add(c.KEY_VALUE_LENGTH, self.kv_lora_rank, GGUFValueType.UINT32)
