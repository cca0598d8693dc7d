"""Add the trained tower and projector to a checkpoint: ``export_vision.py RUN_DIR CHECKPOINT_DIR``.

Writes one more shard, preprocessor_config.json and heldout_vision.jsonl, and adds to the index and to config.json. The
shards of the text model keep their bytes; their names count one file more. An earlier vision part is replaced.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import pictures
import vision_data
from export import PREFIX, read_tensors, write_json
from vision import Vision

INDEX = "model.safetensors.index.json"
# What the release says of its image processor; the entries for video are as unused here as there.
PREPROCESSOR: dict[str, Any] = {
    "media_proc_cfg": {
        "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
        "fixed_output_tokens": None,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "in_patch_limit": 65536,
        "in_patch_limit_each_frame": 16384,
        "merge_kernel_size": vision_data.MERGE,
        "patch_limit_on_one_side": 512,
        "patch_size": vision_data.PATCH,
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
# Modules that the quantization of the checkpoint leaves alone.
IGNORED = ["re:.*vision_tower.*", "re:.*mm_projector.*"]


def vision_from_checkpoint(folder: Path, dtype: torch.dtype = torch.float32) -> Vision:
    """The tower and the projector of a checkpoint folder."""
    model = Vision(json.loads((folder / "config.json").read_text())["vision_config"]).to(dtype)
    tensors = read_tensors(folder, lambda name: not name.startswith(PREFIX))
    model.load_state_dict({name: value.to(dtype) for name, value in tensors.items()})
    return model.eval()


def add_vision(model: Vision, folder: Path) -> None:
    """Every tensor as BF16 in a last shard of its own."""
    index = json.loads((folder / INDEX).read_text())
    of_text = {name: shard for name, shard in index["weight_map"].items() if name.startswith(PREFIX)}
    for shard in set(index["weight_map"].values()) - set(of_text.values()):
        (folder / shard).unlink()
    shards = sorted(set(of_text.values()))
    names = [f"model-{i + 1:05d}-of-{len(shards) + 1:06d}.safetensors" for i in range(len(shards) + 1)]
    renamed = dict(zip(shards, names, strict=False))
    for old, new in renamed.items():
        (folder / old).rename(folder / new)
    tensors = {name: value.bfloat16().contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, folder / names[-1], metadata={"format": "pt"})
    (folder / names[-1]).chmod(0o644)  # save_file makes it readable by its owner only
    weight_map = {name: renamed[shard] for name, shard in of_text.items()} | dict.fromkeys(tensors, names[-1])
    size = sum(t.numel() * t.element_size() for shard in names for t in load_file(folder / shard).values())
    write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))})

    config = json.loads((folder / "config.json").read_text())
    config["vision_config"] = model.cfg
    ignored = config["text_config"]["quantization_config"]["ignore"]
    ignored += [pattern for pattern in IGNORED if pattern not in ignored]
    write_json(folder / "config.json", config)
    write_json(folder / "preprocessor_config.json", PREPROCESSOR)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("checkpoint", type=Path)
    args = parser.parse_args()
    file = args.run / "polish.pt"
    if not file.exists():
        raise SystemExit(f"there is nothing to export before the stage polish has begun: {file} is not there")
    state = torch.load(file, weights_only=False)
    model = Vision(state["config"])
    prefix = "vision."
    found = {name.removeprefix(prefix): value for name, value in state["model"].items() if name.startswith(prefix)}
    model.load_state_dict(found)
    add_vision(model, args.checkpoint)
    rows = [json.dumps(row) + "\n" for row in pictures.held_out_rows()]
    (args.checkpoint / "heldout_vision.jsonl").write_text("".join(rows))


if __name__ == "__main__":
    main()
