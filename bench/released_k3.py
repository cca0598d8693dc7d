"""A checkpoint with the names, shapes and types of the released Kimi-K3, whose payloads are holes: 1.56 TB that take
200 MB of disk, for measuring what a converter does before the first payload.

    python bench/released_k3.py FOLDER
    python convert_hf_to_gguf.py FOLDER --dry-run

`--layers` and `--experts` make it smaller with the same structure: one layer per shard, then embeddings, projector and
vision tower. All weights are zero. The vocabulary has the released size and is generated.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import sys
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

import tiny  # noqa: E402
import tiny_vocab  # noqa: E402

LAYERS, EXPERTS, VOCABULARY = 93, 896, 163840
HIDDEN, LATENT, EXPERT, DENSE, HEADS, SHARED = 7168, 3584, 3072, 33792, 96, 6144
Q_LORA, KV_LORA, NOPE, ROPE, V, KDA = 1536, 512, 128, 64, 128, 128
ITEM_BYTES = {"BF16": 2, "F32": 4, "U8": 1}
MAX_TOKEN_BYTES = 16

Tensors = dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype, shape


def config(layers: int = LAYERS, experts: int = EXPERTS) -> dict[str, Any]:
    return tiny.config_for(
        "kimi-k3",
        vision=True,
        num_hidden_layers=layers,
        num_experts=experts,
        num_experts_per_token=min(16, experts),
        num_attention_heads=HEADS,
        hidden_size=HIDDEN,
        routed_expert_hidden_size=LATENT,
        moe_intermediate_size=EXPERT,
        intermediate_size=DENSE,
        num_shared_experts=SHARED // EXPERT,
        q_lora_rank=Q_LORA,
        kv_lora_rank=KV_LORA,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=V,
        attn_res_block_size=12,
        vocab_size=VOCABULARY,
        linear_attn_config={"head_dim": KDA},
    )


def kda() -> Tensors:
    width = HEADS * KDA
    return {
        **{f"{x}_proj.weight": ("BF16", (width, HIDDEN)) for x in "qkvg"},
        **{f"{x}_conv1d.weight": ("F32", (width, 1, 4)) for x in "qkv"},
        "f_a_proj.weight": ("BF16", (KDA, HIDDEN)),
        "f_b_proj.weight": ("BF16", (width, KDA)),
        "b_proj.weight": ("BF16", (HEADS, HIDDEN)),
        "A_log": ("F32", (128,)),
        "dt_bias": ("F32", (width,)),
        "o_norm.weight": ("F32", (KDA,)),
        "o_proj.weight": ("BF16", (HIDDEN, width)),
    }


def mla() -> Tensors:
    return {
        "q_a_proj.weight": ("BF16", (Q_LORA, HIDDEN)),
        "q_a_layernorm.weight": ("BF16", (Q_LORA,)),
        "q_b_proj.weight": ("BF16", (HEADS * (NOPE + ROPE), Q_LORA)),
        "kv_a_proj_with_mqa.weight": ("BF16", (KV_LORA + ROPE, HIDDEN)),
        "kv_a_layernorm.weight": ("BF16", (KV_LORA,)),
        "kv_b_proj.weight": ("BF16", (HEADS * (NOPE + V), KV_LORA)),
        "g_proj.weight": ("BF16", (HEADS * V, HIDDEN)),
        "o_proj.weight": ("BF16", (HIDDEN, HEADS * V)),
    }


def moe(experts: int) -> Tensors:
    tensors: Tensors = {
        "gate.weight": ("BF16", (experts, HIDDEN)),
        "gate.e_score_correction_bias": ("F32", (experts,)),
        "routed_expert_down_proj.weight": ("BF16", (LATENT, HIDDEN)),
        "routed_expert_norm.weight": ("BF16", (LATENT,)),
        "routed_expert_up_proj.weight": ("BF16", (HIDDEN, LATENT)),
        "shared_experts.gate_proj.weight": ("BF16", (SHARED, HIDDEN)),
        "shared_experts.up_proj.weight": ("BF16", (SHARED, HIDDEN)),
        "shared_experts.down_proj.weight": ("BF16", (HIDDEN, SHARED)),
    }
    for expert in range(experts):
        for name, rows, cols in (("w1", EXPERT, LATENT), ("w2", LATENT, EXPERT), ("w3", EXPERT, LATENT)):
            tensors[f"experts.{expert}.{name}.weight_packed"] = ("U8", (rows, cols // 2))
            tensors[f"experts.{expert}.{name}.weight_scale"] = ("U8", (rows, cols // 32))
    return tensors


def layer_tensors(layer: int, is_kda: bool, experts: int) -> Tensors:
    tensors: Tensors = {
        **{f"{x}_layernorm.weight": ("BF16", (HIDDEN,)) for x in ("input", "post_attention")},
        **{f"{x}_res_norm.weight": ("BF16", (HIDDEN,)) for x in ("self_attention", "mlp")},
        **{f"{x}_res_proj.weight": ("BF16", (1, HIDDEN)) for x in ("self_attention", "mlp")},
        **{f"self_attn.{name}": what for name, what in (kda() if is_kda else mla()).items()},
    }
    if layer == 0:
        tensors |= {f"mlp.{x}_proj.weight": ("BF16", (DENSE, HIDDEN)) for x in ("gate", "up")}
        tensors["mlp.down_proj.weight"] = ("BF16", (HIDDEN, DENSE))
    else:
        tensors |= {f"block_sparse_moe.{name}": what for name, what in moe(experts).items()}
    return {f"language_model.model.layers.{layer}.{name}": what for name, what in tensors.items()}


def outer_tensors() -> Iterator[Tensors]:
    """The three shards after the layers'."""
    model = "language_model.model."
    yield {
        model + "embed_tokens.weight": ("BF16", (VOCABULARY, HIDDEN)),
        "language_model.lm_head.weight": ("BF16", (VOCABULARY, HIDDEN)),
        model + "norm.weight": ("BF16", (HIDDEN,)),
        model + "output_attn_res_norm.weight": ("BF16", (HIDDEN,)),
        model + "output_attn_res_proj.weight": ("BF16", (1, HIDDEN)),
    }
    yield {
        "mm_projector.proj.0.weight": ("BF16", (4096, 4096)),
        "mm_projector.proj.2.weight": ("BF16", (7168, 4096)),
        "mm_projector.post_norm.weight": ("BF16", (7168,)),
    }
    vision: Tensors = {
        "patch_embed.proj.weight": ("BF16", (1024, 3, 14, 14)),
        "patch_embed.pos_emb.weight": ("BF16", (64, 64, 1024)),
        "encoder.final_layernorm.weight": ("BF16", (1024,)),
    }
    for block in range(27):
        shapes = {"norm0": (1024,), "norm1": (1024,), "wqkv": (4608, 1024), "wo": (1024, 1536)}
        shapes |= {"mlp.fc0": (4096, 1024), "mlp.fc1": (1024, 4096)}
        vision |= {f"encoder.blocks.{block}.{name}.weight": ("BF16", shape) for name, shape in shapes.items()}
    yield {f"vision_tower.{name}": what for name, what in vision.items()}


def write_shard(path: Path, tensors: Tensors) -> int:
    """Header and a hole as large as the payload; returns the payload's bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in sorted(tensors.items()):
        end = offset + prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    return offset


def tokens(count: int, seed: int = 0) -> list[bytes]:
    """Byte-level tokens by rank: all bytes, then joins of two earlier ones, early ones more often, as byte pair
    encoding learns them: 6 to 7 bytes on average."""
    rng = random.Random(seed)

    def earlier() -> bytes:
        return found[int(len(found) * rng.random() ** 4)]

    found = [bytes((byte,)) for byte in range(256)]
    known = set(found)
    while len(found) < count:
        token = earlier() + earlier()
        if len(token) <= MAX_TOKEN_BYTES and token not in known:
            known.add(token)
            found.append(token)
    return found


def write_vocabulary(folder: Path) -> None:
    n_ranks = VOCABULARY - tiny_vocab.special_count(VOCABULARY)
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens(n_ranks)))
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps(tiny_vocab.tokenizer_config("kimi-k3", VOCABULARY)))


def write(folder: Path, layers: int = LAYERS, experts: int = EXPERTS) -> int:
    """Write the checkpoint; returns how many tensors it has."""
    folder.mkdir(parents=True, exist_ok=True)
    text = config(layers, experts)
    is_kda = set(text["text_config"]["linear_attn_config"]["kda_layers"])
    shards = [layer_tensors(layer, layer + 1 in is_kda, experts) for layer in range(layers)] + list(outer_tensors())
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        total += write_shard(folder / name, shard)
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps(text, indent=2))
    write_vocabulary(folder)
    return len(weight_map)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder", type=Path, help="where to write; the file system must have sparse files")
    p.add_argument("--layers", type=int, default=LAYERS, help=f"default {LAYERS}, as released")
    p.add_argument("--experts", type=int, default=EXPERTS, help=f"default {EXPERTS}, as released")
    arguments = p.parse_args()
    n = write(arguments.folder, arguments.layers, arguments.experts)
    print(f"{arguments.folder}: {n} tensors")


if __name__ == "__main__":
    main()
