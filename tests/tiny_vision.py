"""Random Kimi-K3 checkpoints that see: those of ``tiny.py`` with a whole vision tower and projector.

    tiny_vision_checkpoint(folder)
    tiny_vision_checkpoint(folder, vision={"vt_num_hidden_layers": 1}, num_hidden_layers=3, packed=False)

No width equals another by accident: hidden 32, three heads of 16 (so that attention is 48 wide), MLP 72, an 8 x 8 table
of positions, projector 128 wide; the text width is that of ``tiny.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tiny
from tiny import ABSENT, Weights, without_absent
from tiny_files import Checkpoint, HfTensor, write_json

PATCH = 14
VISION: dict[str, Any] = {
    "_attn_implementation": "flash_attention_2",
    "activation_func": "gelu_pytorch_tanh",
    "attn_bias": False,
    "init_pos_emb_height": 8,
    "init_pos_emb_time": 4,
    "init_pos_emb_width": 8,
    "linear_bias": False,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mlp_type": "mlp2",
    "mm_hidden_size": 32,
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "patch_embed_proj_bias": False,
    "patch_size": PATCH,
    "pos_emb_interpolation_mode": "bilinear",
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-05,
    "qkv_hidden_size": 48,
    "vt_hidden_size": 32,
    "vt_intermediate_size": 72,
    "vt_num_attention_heads": 3,
    "vt_num_hidden_layers": 2,
}
PREPROCESSOR: dict[str, Any] = {
    "media_proc_cfg": {
        "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
        "fixed_output_tokens": None,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "in_patch_limit": 65536,
        "in_patch_limit_each_frame": 16384,
        "merge_kernel_size": 2,
        "patch_limit_on_one_side": 512,
        "patch_size": PATCH,
        "sample_fps": 8.0,
        "temporal_merge_kernel_size": 4,
        "transparent_bg_config": {
            "chessboard_gray_value": 180,
            "chessboard_square_on_top_left": True,
            "chessboard_square_size": 8,
            "chessboard_white_value": 255,
            "pattern": "chessboard",
        },
        "transparent_bg_fill_stage": "after_resize",
    }
}


def vision_tensors(w: Weights, vision: dict[str, Any], dtype: str) -> Iterator[tuple[str, HfTensor]]:
    """Every tensor of tower and projector. Features keep their scale through depth, and positions weigh as much as
    pixels do."""
    hidden, inner, mlp = vision["vt_hidden_size"], vision["qkv_hidden_size"], vision["vt_intermediate_size"]
    merged = hidden * math.prod(vision["merge_kernel_size"])
    grid = (vision["init_pos_emb_height"], vision["init_pos_emb_width"], hidden)

    def norm(name: str, width: int) -> tuple[str, HfTensor]:
        return f"{name}.weight", HfTensor.from_float(w.uniform(name, (width,), 0.5, 1.5), dtype)

    def linear(name: str, rows: int, columns: int, gain: float = 1.0) -> tuple[str, HfTensor]:
        return f"{name}.weight", HfTensor.from_float(w.linear(name, rows, columns, gain), dtype)

    patch = w.linear("v.patch", hidden, 3 * PATCH * PATCH, 2.0).reshape(hidden, 3, PATCH, PATCH)
    yield "vision_tower.patch_embed.proj.weight", HfTensor.from_float(patch, dtype)
    yield "vision_tower.patch_embed.pos_emb.weight", HfTensor.from_float(w.normal("v.positions", grid, 1.0), dtype)
    for block in range(vision["vt_num_hidden_layers"]):
        p = f"vision_tower.encoder.blocks.{block}."
        yield norm(f"{p}norm0", hidden)
        yield norm(f"{p}norm1", hidden)
        yield linear(f"{p}wqkv", 3 * inner, hidden, 1.5)
        yield linear(f"{p}wo", hidden, inner, 1.5)
        yield linear(f"{p}mlp.fc0", mlp, hidden, 1.5)
        yield linear(f"{p}mlp.fc1", hidden, mlp, 1.5)
    yield norm("vision_tower.encoder.final_layernorm", hidden)
    yield linear("mm_projector.proj.0", merged, merged, 1.5)
    yield linear("mm_projector.proj.2", vision["text_hidden_size"], merged, 1.5)
    yield norm("mm_projector.post_norm", vision["text_hidden_size"])


def tiny_vision_checkpoint(
    folder: Path,
    *,
    seed: int = 0,
    vision: dict[str, Any] | None = None,
    preprocessor: dict[str, Any] | None = None,
    dtype: str = "BF16",
    mutate: Callable[[Checkpoint], None] | None = None,
    **options: Any,
) -> Path:
    """Write a random K3 checkpoint with a vision part into ``folder`` and return it.

    ``vision``        keys of ``vision_config`` that differ from ``VISION``; ``ABSENT`` removes one
    ``preprocessor``  likewise keys of ``media_proc_cfg``
    ``dtype``         of the vision tensors
    ``mutate``        called with the ``Checkpoint`` before it is written
    ``options``       config keys and switches of the text model, as ``tiny.build_checkpoint`` takes them

    The vision tensors lie in the last shard, as in the released checkpoint. They depend on seed and name only."""
    checkpoint = tiny.build_checkpoint("kimi-k3", seed=seed, **options)
    described = VISION | {"text_hidden_size": checkpoint.text["hidden_size"]} | (vision or {})
    checkpoint.config["vision_config"] = without_absent(described)
    sizes = VISION | {key: value for key, value in described.items() if value is not ABSENT}
    checkpoint.shards[-1].update(vision_tensors(Weights(seed), sizes, dtype))
    if mutate is not None:
        mutate(checkpoint)
    checkpoint.write(Path(folder))
    media = without_absent(PREPROCESSOR["media_proc_cfg"] | (preprocessor or {}))
    write_json(Path(folder) / "preprocessor_config.json", {"media_proc_cfg": media})
    return Path(folder)
