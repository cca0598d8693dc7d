"""Kimi-K3 (text model): Kimi-Linear plus attention residuals, latent experts, SiTU, output gates and the bounded decay
gate."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gguf_ext import Plan
from gguf_ext import constants as c
from gguf_ext.constants import GGUFValueType, LlamaFileType

from .base import ONE, Row, register
from .folds import Copy, NegativeExp, Product
from .kimi_linear import _KDA, KimiLinear
from .layouts import LEGACY, Stack

CHAT_TEMPLATE = (Path(__file__).parent / "templates" / "kimi-k3.jinja").read_text(encoding="utf-8")


def _mixing_point(norm: str, projection: str, output: str) -> tuple[Row, Row]:
    return (
        Row(norm, ("hidden_size",), Product(output)),
        Row(projection, (ONE, "hidden_size"), Product(output), (("hidden_size",),)),
    )


_MODEL = _mixing_point("model.output_attn_res_norm.weight", "model.output_attn_res_proj.weight", c.OUTPUT_RES_SCORE)
_EVERY_LAYER = (
    *_mixing_point("self_attention_res_norm.weight", "self_attention_res_proj.weight", c.ATTN_RES_SCORE),
    *_mixing_point("mlp_res_norm.weight", "mlp_res_proj.weight", c.FFN_RES_SCORE),
)
# One name in the checkpoint, two tensors: the output gate of a KDA layer and that of an MLA layer.
_KDA_GATE = Row("self_attn.g_proj.weight", ("kda_width", "hidden_size"), Copy(c.SSM_G))
_MLA_GATE = Row("self_attn.g_proj.weight", ("mla_v_width", "hidden_size"), Copy(c.ATTN_GATE))
_LATENT = (
    Row("block_sparse_moe.routed_expert_down_proj.weight", ("expert_input", "hidden_size"), Copy(c.FFN_ROUTED_DOWN)),
    Row("block_sparse_moe.routed_expert_up_proj.weight", ("hidden_size", "expert_input"), Copy(c.FFN_ROUTED_UP)),
)
_LATENT_NORM = Row("block_sparse_moe.routed_expert_norm.weight", ("expert_input",), Copy(c.FFN_ROUTED_NORM))


@register("KimiK3ForConditionalGeneration")
class KimiK3(KimiLinear):
    """The text model of `KimiK3ForConditionalGeneration` to `kimi-k3`; vision tensors are left out."""

    architecture = c.ARCH_KIMI_K3
    prefix = "language_model."
    ignored = ("vision_tower.", "mm_projector.")
    chat_template = CHAT_TEMPLATE
    renames = LEGACY  # transformers has no class of its own for it, so it writes the published names
    deciding_fields = KimiLinear.deciding_fields | {
        "routed_expert_norm": "latent_moe_use_norm",
        "routed_expert_": "routed_expert_hidden_size",
        "g_proj": "mla_use_output_gate",
    }

    def read_config(self) -> None:
        self._read_common()
        config = self.config
        config.must_be("hidden_act", "situ")
        config.must_be("linear_attn_config.use_full_rank_gate", True)
        self.situ_beta = config.positive("activation_situ_beta")
        self.situ_linear_beta = config.positive("activation_situ_linear_beta")
        self.block_size = config.integer("attn_res_block_size")
        field = "routed_expert_hidden_size"
        has_latent = self.n_experts and config.get(field) is not None
        self.latent = config.integer(field) if has_latent else None  # without it experts work at full width
        self.width("expert_input", self.latent or self.hidden, field if self.latent else "hidden_size")
        self.renormalize = bool(self.n_experts) and config.boolean("moe_renormalize")
        self.latent_norm = bool(self.n_experts) and config.boolean("latent_moe_use_norm")
        self.output_gate = config.boolean("mla_use_output_gate")
        bound = "linear_attn_config.gate_lower_bound"
        if config.get(bound) is not None and config.number(bound) >= 0:
            config.refuse(bound, "a number below 0, or null for the softplus gate")

    def model_rows(self) -> Iterable[Row]:
        return (*super().model_rows(), *_MODEL)

    def stacks(self) -> Iterable[Stack]:
        return ()

    def layer_rows(self, layer: int) -> Iterable[Row]:
        yield from super().layer_rows(layer)
        yield from _EVERY_LAYER
        if self.latent is not None and self.has_experts(layer):
            yield from _LATENT
            if self.latent_norm:
                yield _LATENT_NORM

    def kda_rows(self) -> Iterable[Row]:
        yield from _KDA
        fold = NegativeExp(c.SSM_A, self.heads, (self.heads,))
        yield Row("self_attn.A_log", ("kda_heads_or_more",), fold, ((ONE, ONE, "kda_heads_or_more", ONE),))
        yield _KDA_GATE

    def mla_rows(self) -> Iterable[Row]:
        yield from super().mla_rows()
        if self.output_gate:
            yield _MLA_GATE

    def add_fields(self, plan: Plan, file_type: LlamaFileType) -> None:
        super().add_fields(plan, file_type)
        u32, f32 = GGUFValueType.UINT32, GGUFValueType.FLOAT32
        add = self.field_adder(plan)
        add(c.KEY_EXPERT_WEIGHTS_NORM, self.renormalize, GGUFValueType.BOOL)
        if self.latent is not None:
            add(c.KEY_EXPERT_LATENT_LENGTH, self.latent, u32)
        add(c.KEY_SITU_BETA, self.situ_beta, f32)
        add(c.KEY_SITU_LINEAR_BETA, self.situ_linear_beta, f32)
        add(c.KEY_ATTN_RES_BLOCK_SIZE, self.block_size, u32)
