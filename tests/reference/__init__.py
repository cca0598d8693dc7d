"""The mathematics of Kimi-Linear and Kimi-K3 in plain numpy: the definition every other part is compared with.

    model = Model.from_checkpoint(folder)        # float64, on Hugging Face tensor names
    logits = model.forward(ids)                  # [n, vocab]
    text = model.greedy(ids, 50, stop_ids)

Written from the formulas of the published models, one small file per mechanism, and readable before fast. It shares no
code with the converter or the engine and needs numpy only.
"""

from .checkpoint import Checkpoint, dequantize_mxfp4
from .kda import gated_norm, kda_chunked, kda_gate, kda_recurrent, short_conv
from .mix import mix
from .mla import attention_absorbed, attention_expanded, expand_latent
from .model import Model, State
from .moe import DenseFfn, experts, glu, route, router_gap, situ, swiglu
from .norm import l2_norm, rms_norm, sigmoid, softplus

__all__ = [
    "Checkpoint",
    "DenseFfn",
    "Model",
    "State",
    "attention_absorbed",
    "attention_expanded",
    "dequantize_mxfp4",
    "expand_latent",
    "experts",
    "gated_norm",
    "glu",
    "kda_chunked",
    "kda_gate",
    "kda_recurrent",
    "l2_norm",
    "mix",
    "rms_norm",
    "route",
    "router_gap",
    "short_conv",
    "sigmoid",
    "situ",
    "softplus",
    "swiglu",
]
