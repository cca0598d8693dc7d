"""Hugging Face files of a trained model, and the way back into torch: ``export.py RUN_DIR OUT_DIR``.

Writes config.json, shards with an index, the tokenizer, generation_config.json and heldout.jsonl.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import bpe
import world
from config import N_BASE, hf_config
from model import Kimi
from mxfp4 import dequantize, pack, quantize, unpack

PREFIX = "language_model."
FLOAT32 = re.compile(r"(conv1d\.weight|A_log|dt_bias|o_norm\.weight|e_score_correction_bias)$")
LAYERS_PER_SHARD = 3
EXPERT = re.compile(r"(.*\.experts)\.(w[123])$")


def _hf_name(name: str) -> str:
    """Checkpoint name of a torch parameter."""
    if name == "lm_head":
        return PREFIX + "lm_head.weight"
    if name == "embed_tokens":
        return PREFIX + "model.embed_tokens.weight"
    name = re.sub(r"_res\.(norm|proj)$", r"_res_\1.weight", name)
    return PREFIX + "model." + name


def to_checkpoint(model: Kimi) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, in its stored type: packed experts, BF16, and F32 where the release has it."""
    out: dict[str, Tensor] = {}
    lin = model.cfg["linear_attn_config"]
    for name, value in model.state_dict().items():
        hf = _hf_name(name)
        match = EXPERT.match(hf)
        if match:
            code, scale = quantize(value)
            for e in range(value.shape[0]):
                base = f"{match[1]}.{e}.{match[2]}."
                out[base + "weight_packed"] = pack(code[e]).contiguous()
                out[base + "weight_scale"] = scale[e].contiguous()
        elif hf.endswith("A_log"):
            out[hf] = torch.nn.functional.pad(value, (0, max(0, lin["head_dim"] - lin["num_heads"]))).float()
        else:
            out[hf] = value.float() if FLOAT32.search(hf) else value.bfloat16()
    return {k: v.clone().contiguous() for k, v in out.items()}


def read_tensors(folder: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors of a checkpoint folder whose names are wanted."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors: dict[str, Tensor] = {}
    for shard in sorted({shard for name, shard in index.items() if wanted(name)}):
        tensors.update({name: value for name, value in load_file(folder / shard).items() if wanted(name)})
    return tensors


def from_checkpoint(folder: Path, dtype: torch.dtype = torch.float32) -> Kimi:
    """The torch text model of a checkpoint folder, experts decoded."""
    cfg = json.loads((folder / "config.json").read_text())["text_config"]
    tensors = read_tensors(folder, lambda name: name.startswith(PREFIX))
    model = Kimi(cfg).to(dtype)
    state = {}
    for name, value in model.state_dict().items():
        hf = _hf_name(name)
        match = EXPERT.match(hf)
        if match:
            found = torch.stack(
                [
                    dequantize(
                        unpack(tensors.pop(f"{match[1]}.{e}.{match[2]}.weight_packed")),
                        tensors.pop(f"{match[1]}.{e}.{match[2]}.weight_scale"),
                    )
                    for e in range(value.shape[0])
                ]
            )
        else:
            found = tensors.pop(hf)
            if hf.endswith("A_log"):
                found = found[: value.shape[0]]
        if found.shape != value.shape:
            raise ValueError(f"{hf}: expected shape {tuple(value.shape)}, found {tuple(found.shape)}")
        state[name] = found.to(dtype)
    if tensors:
        raise ValueError(f"tensors the model does not use: {sorted(tensors)[:4]}")
    model.load_state_dict(state)
    model.eval()
    return model


def _shards(tensors: dict[str, Tensor], n_layer: int) -> list[dict[str, Tensor]]:
    """Consecutive layers together and, as in the release, everything outside the layers in the last shard."""
    n = (n_layer + LAYERS_PER_SHARD - 1) // LAYERS_PER_SHARD
    shards: list[dict[str, Tensor]] = [{} for _ in range(n + 1)]
    for name, tensor in tensors.items():
        match = re.search(r"\.layers\.(\d+)\.", name)
        shards[int(match[1]) // LAYERS_PER_SHARD if match else n][name] = tensor
    return shards


def _tokenizer_config() -> dict[str, object]:
    added = {}
    for offset, name in bpe.SPECIAL.items():
        added[str(N_BASE + offset)] = {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            # The release keeps the structure markers when special tokens are skipped in decoding.
            "special": name not in ("<|open|>", "<|close|>", "<|sep|>"),
        }
    return {
        "added_tokens_decoder": added,
        "additional_special_tokens": [bpe.SPECIAL[i] for i in (2, 3, 4, 5, 9)],
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "model_max_length": hf_config()["text_config"]["max_position_embeddings"],
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_checkpoint(model: Kimi, vocabulary: Path, folder: Path) -> None:
    """All files of the model except the held-out prompts; files of an earlier export are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    shards = _shards(to_checkpoint(model), model.cfg["num_hidden_layers"])
    weight_map = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):06d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # save_file makes it readable by its owner only
        weight_map.update(dict.fromkeys(shard, name))
    size = sum(t.numel() * t.element_size() for shard in shards for t in shard.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)
    config = hf_config()
    write_json(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(folder / "generation_config.json", ids)
    write_json(folder / "tokenizer_config.json", _tokenizer_config())
    shutil.copyfile(vocabulary, folder / "tiktoken.model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    model = Kimi(hf_config()["text_config"])
    model.load_state_dict(torch.load(args.run / "state.pt", weights_only=False)["model"])
    write_checkpoint(model, args.run / "tiktoken.model", args.out)
    rows = [json.dumps(row, ensure_ascii=False) + "\n" for row in world.held_out_rows()]
    (args.out / "heldout.jsonl").write_text("".join(rows))


if __name__ == "__main__":
    main()
