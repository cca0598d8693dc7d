"""Checkpoints that spell the published tensors differently, brought to the published layout before anything is matched.

Three layouts are known besides that of the released files:

- older exports of Kimi-K3, as `mlx-lm` reads them too: `mlp_res.norm_weight` for `mlp_res_norm.weight`;
- exports that keep the router's correction bias beside the router instead of in it;
- Kimi-Linear as `transformers` saves it (seen with 5.24.0). By default it writes the published names, but for dense
  layers, whose `mlp` becomes `block_sparse_moe`; with `save_original_format=False` its own: the decay gate in a module
  of its own, the three convolutions stacked, all experts of a layer in two tensors. Either way its configuration has
  lists of layer kinds, in place of `linear_attn_config` and `first_k_dense_replace` or beside them.

A stack lies in the file as its parts, one after another, so a part is a range of the same bytes: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .checkpoint import Source
from .config import Config
from .errors import ConversionError

# Part of a tensor's name -> what the published layout has in its place.
LEGACY = (
    ("_res.norm_weight", "_res_norm.weight"),
    ("_res.proj_weight", "_res_proj.weight"),
    (".block_sparse_moe.e_score_correction_bias", ".block_sparse_moe.gate.e_score_correction_bias"),
)
TRANSFORMERS = (
    (".self_attn.forget_gate.", ".self_attn."),
    # The feed-forward of a dense layer has the same prefix there, and keeps it.
    (".mlp.gate.", ".block_sparse_moe.gate."),
    (".mlp.experts.", ".block_sparse_moe.experts."),
    (".mlp.shared_experts.", ".block_sparse_moe.shared_experts."),
    # Its way back to the published names takes dense layers for layers of experts.
    *((f".block_sparse_moe.{name}_proj.", f".mlp.{name}_proj.") for name in ("gate", "up", "down")),
)


@dataclass(frozen=True)
class Stack:
    """Tensors of the published layout that are stored as one, whole tensor after whole tensor.

    `hf` and `axes` are as in a table row. `parts` are the published names within the layer, in the order in which they
    lie in the stack, `part_axes` the widths of each.
    """

    hf: str
    axes: tuple[str, ...]
    parts: tuple[str, ...]
    part_axes: tuple[str, ...]


def published_name(name: str, renames: tuple[tuple[str, str], ...]) -> str:
    """A tensor's name in the published layout."""
    for part, replacement in renames:
        if part in name:
            name = name.replace(part, replacement)
    return name


def cut(source: Source, parts: tuple[str, ...], shape: tuple[int, ...]) -> Iterator[Source]:
    """The parts of a stack, each of `shape`, as ranges of its bytes."""
    step = source.n_bytes // len(parts)
    for number, part in enumerate(parts):
        name = f"{source.name} ({part})"
        yield Source(name, source.dtype, shape, source.shard, source.offset + number * step)


def complete_config(config: Config) -> None:
    """Add the published fields that a configuration of `transformers` expresses by `layer_types` and its like.

    That class has neither rotary embedding nor another router than sigmoids, so its configuration does not say so.

    Raises:
        ConversionError: the lists are malformed, or both spellings are there and disagree.
    """
    if config.get("layer_types") is None or config.get("mlp_layer_types") is None:
        return
    attention = _kinds(config, "layer_types", "linear_attention", "full_attention")
    dense = _kinds(config, "mlp_layer_types", "dense", "sparse")
    if dense != sorted(dense, reverse=True):
        raise config.wrong("mlp_layer_types", 'every "dense" before the first "sparse"')
    linear = {
        "kda_layers": [number for number, is_linear in enumerate(attention, start=1) if is_linear],
        "full_attn_layers": [number for number, is_linear in enumerate(attention, start=1) if not is_linear],
        "num_heads": config.get("linear_num_heads"),
        "head_dim": config.get("linear_head_dim"),
        "short_conv_kernel_size": config.get("linear_conv_kernel_dim"),
    }
    present = config.get("linear_attn_config")
    present = {} if present is None else present
    if not isinstance(present, dict):
        raise config.wrong("linear_attn_config", "an object")
    for field, value in linear.items():
        _agree(config, f"linear_attn_config.{field}", present.get(field), value)
    _agree(config, "first_k_dense_replace", config.get("first_k_dense_replace"), sum(dense))
    config.add_missing(
        linear_attn_config=linear | {field: value for field, value in present.items() if value is not None},
        first_k_dense_replace=sum(dense),
        mla_use_nope=True,
        moe_router_activation_func="sigmoid",
    )


def _kinds(config: Config, field: str, first: str, second: str) -> list[bool]:
    """Per layer, whether its kind is `first`."""
    n_layers, kinds = config.integer("num_hidden_layers"), config.get(field)
    if not isinstance(kinds, list) or len(kinds) != n_layers or any(kind not in (first, second) for kind in kinds):
        raise config.wrong(field, f"{n_layers} times {first!r} or {second!r}")
    return [kind == first for kind in kinds]


def _agree(config: Config, field: str, present: Any, derived: Any) -> None:
    if present is None or derived is None:
        return
    same = present == derived
    if isinstance(present, list) and isinstance(derived, list):  # layers, in any order
        same = len(present) == len(derived) and all(layer in present for layer in derived)
    if not same:
        raise ConversionError(
            f"{config.path}: {field} is {config.shown(field)}, but the fields of transformers beside it say {derived}"
        )
