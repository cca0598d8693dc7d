"""The reference model with the constants that a GGUF file holds.

Conversion folds a few constants into float32: `-exp(A_log)`, the score vectors of attention residuals (a norm times a
projection), and numbers of the configuration. What this costs is a property of the format; with it taken out, an engine
that computes in float64 must equal the reference to the rounding of its logits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import reference as ref


def as_the_file_holds(model: ref.Model) -> ref.Model:
    """Changes the model in place and returns it."""
    _round(model, "eps", "output_score")
    for layer in model.layers:
        _round(layer, "attn_score", "ffn_score")
        _round(layer.attn, "eps", "lower_bound")
        _round(layer.ffn, "eps", "scale")
        if hasattr(layer.attn, "a_log"):
            layer.attn.a_log = np.log(_float32(np.exp(layer.attn.a_log)))
    return model


def _round(owner: Any, *names: str) -> None:
    for name in names:
        value = getattr(owner, name, None)
        if value is not None:
            setattr(owner, name, _float32(value) if isinstance(value, np.ndarray) else float(np.float32(value)))


def _float32(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).astype(np.float64)
