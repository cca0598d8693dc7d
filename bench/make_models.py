"""Two random checkpoints of a few GB, with heads of the released sizes, for measuring speed.

    python bench/make_models.py kl-bench FOLDER
    python bench/make_models.py k3-bench FOLDER --gguf auto,q8_0

kl-bench has the structure of Kimi-Linear (2.1 B parameters, 4.3 GB), k3-bench that of Kimi-K3 with packed MXFP4 experts
(4.0 B, 2.7 GB). Names, nesting and types are those of the released checkpoints. The weights are random: the text makes
no sense, but activations keep their scale through depth, logits are finite and the router spreads over all experts.
One shard per layer is made and written at a time. `--gguf` then converts to FOLDER/NAME-TYPE.gguf for each type named.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
for folder in ("", "gguf-py", "tests"):
    sys.path.append(str(ROOT / folder))

import tiny  # noqa: E402
import tiny_files  # noqa: E402
import tiny_vocab  # noqa: E402
from tiny_files import HfTensor  # noqa: E402

HEADS: dict[str, Any] = {
    "linear_attn_config": {"head_dim": 128},
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 32768,
    "num_experts_per_token": 8,
}
# name -> architecture and config keys; MLA layers are those of `tiny.default_layers`: every fourth, and the last ones.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "kl-bench": (
        "kimi-linear",
        {
            **HEADS,
            "num_hidden_layers": 20,
            "hidden_size": 1024,
            "num_attention_heads": 8,
            "num_experts": 64,
            "moe_intermediate_size": 512,
            "num_shared_experts": 1,
            "intermediate_size": 4096,
        },
    ),
    "k3-bench": (
        "kimi-k3",
        {
            **HEADS,
            "num_hidden_layers": 13,
            "hidden_size": 1536,
            "num_attention_heads": 12,
            "q_lora_rank": 512,
            "num_experts": 96,
            "moe_intermediate_size": 1024,
            "routed_expert_hidden_size": 1024,
            "num_shared_experts": 2,
            "intermediate_size": 6144,
            "attn_res_block_size": 4,
        },
    ),
}

Entry = tuple[str, HfTensor]


@lru_cache(maxsize=8)
def normal_bf16(std: float) -> np.ndarray:
    """bfloat16 bits [65536] of the normal distribution's quantiles: a random index is a random weight."""
    inverse = statistics.NormalDist(0, std).inv_cdf
    return tiny_files.bf16_bits(np.array([inverse((i + 0.5) / 65536) for i in range(65536)]))


class Weights(tiny.Weights):
    """Random weights of large matrices, a few nanoseconds each."""

    def matrix(self, name: str, rows: int, cols: int) -> HfTensor:
        """bfloat16 [rows, cols]; the output has the scale of the input."""
        index = np.frombuffer(self.rng(name).bytes(rows * cols * 2), np.uint16)
        return HfTensor("BF16", (rows, cols), normal_bf16(1 / math.sqrt(cols))[index].tobytes())

    def packed(self, name: str, rows: int, cols: int) -> tuple[HfTensor, HfTensor]:
        """MXFP4 codes [rows, cols / 2] and E8M0 scales [rows, cols / 32] of such a matrix, all 16 codes alike often."""
        rng = self.rng(name)
        codes = HfTensor("U8", (rows, cols // 2), rng.bytes(rows * cols // 2))
        middle = 127 + round(-math.log2(2.93 * math.sqrt(cols)))  # 2.93: root mean square of the 16 values
        return codes, HfTensor.from_bytes(rng.integers(middle - 1, middle + 2, (rows, cols // 32)))


def layer_tensors(w: Weights, layer: int, text: dict[str, Any], *, k3: bool) -> Iterator[Entry]:
    p, hidden = f"model.layers.{layer}.", text["hidden_size"]
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{p}{name}.weight", HfTensor.from_float(w.uniform(f"{p}{name}", (hidden,), 0.5, 1.5))
    if k3:
        yield from tiny.mix_tensors(w, f"{p}self_attention_res", hidden)
        yield from tiny.mix_tensors(w, f"{p}mlp_res", hidden)
    if layer + 1 in text["linear_attn_config"]["kda_layers"]:
        yield from tiny.kda_tensors(w, f"{p}self_attn.", text, k3=k3, alog_padded=True, conv_rank=3)
    else:
        yield from tiny.mla_tensors(w, f"{p}self_attn.", text)
    if layer < text["first_k_dense_replace"]:
        yield from tiny.ffn_tensors(w, f"{p}mlp.", hidden, text["intermediate_size"])
    else:
        yield from moe_tensors(w, f"{p}block_sparse_moe.", text, k3=k3)


def moe_tensors(w: Weights, p: str, text: dict[str, Any], *, k3: bool) -> Iterator[Entry]:
    hidden, experts, width = text["hidden_size"], text["num_experts"], text["moe_intermediate_size"]
    inner = text["routed_expert_hidden_size"] if k3 else hidden
    yield f"{p}gate.weight", HfTensor.from_float(w.linear(f"{p}gate", experts, hidden, 1.5))
    bias = w.normal(f"{p}gate.bias", (experts,), 0.01)
    yield f"{p}gate.e_score_correction_bias", HfTensor.from_float(bias, "F32" if k3 else "BF16")
    if k3:
        yield f"{p}routed_expert_down_proj.weight", w.matrix(f"{p}routed_down", inner, hidden)
        yield f"{p}routed_expert_norm.weight", HfTensor.from_float(w.uniform(f"{p}routed_norm", (inner,), 0.5, 1.5))
        yield f"{p}routed_expert_up_proj.weight", w.matrix(f"{p}routed_up", hidden, inner)
    for expert in range(experts):
        for name, rows, cols in (("w1", width, inner), ("w2", inner, width), ("w3", width, inner)):
            q = f"{p}experts.{expert}.{name}"
            if k3:
                codes, scales = w.packed(q, rows, cols)
                yield f"{q}.weight_packed", codes
                yield f"{q}.weight_scale", scales
            else:
                yield f"{q}.weight", w.matrix(q, rows, cols)
    yield from tiny.ffn_tensors(w, f"{p}shared_experts.", hidden, width * text["num_shared_experts"])


def write(folder: Path, name: str, seed: int = 0, **overrides: Any) -> int:
    """Writes the checkpoint `name`, with other config keys where they are given; returns the bytes of its tensors."""
    arch, shape = SHAPES[name]
    k3 = arch == "kimi-k3"
    config = tiny.config_for(arch, **{**shape, **overrides})
    text = config.get("text_config", config)
    w = Weights(seed)
    start = "language_model." if k3 else ""
    n_shards = text["num_hidden_layers"] + 1
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    total = 0
    for number in range(n_shards):
        top = number == n_shards - 1
        entries = tiny.top_tensors(w, text) if top else layer_tensors(w, number, text, k3=k3)
        shard = {start + tensor: data for tensor, data in entries}
        path = folder / f"model-{number + 1:05d}-of-{n_shards:0{6 if k3 else 5}d}.safetensors"
        tiny_files.write_safetensors(path, shard)
        weight_map.update(dict.fromkeys(shard, path.name))
        total += sum(len(tensor.data) for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    tiny_files.write_json(folder / "model.safetensors.index.json", index)
    tiny_files.write_json(folder / "config.json", config)
    tiny_files.write_json(folder / "tokenizer_config.json", tiny_vocab.tokenizer_config(arch, text["vocab_size"]))
    (folder / "tiktoken.model").write_bytes(tiny_vocab.tiktoken_model(text["vocab_size"]))
    return total


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("name", choices=SHAPES)
    p.add_argument("folder", type=Path, help="the checkpoint is written to FOLDER/NAME")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--layers", type=int, help="fewer layers of the same kind")
    p.add_argument("--experts", type=int, help="fewer experts, at least the 8 used per token")
    p.add_argument("--gguf", metavar="TYPE[,...]", default="", help="also convert: output types of the converter")
    options = p.parse_args()
    given = {"num_hidden_layers": options.layers, "num_experts": options.experts}
    overrides = {key: value for key, value in given.items() if value is not None}
    checkpoint = options.folder / options.name
    n_bytes = write(checkpoint, options.name, options.seed, **overrides)
    print(f"{checkpoint}: {n_bytes / 1e9:.2f} GB")
    if options.gguf:
        import conversion

        logging.basicConfig(level=logging.WARNING)
        for outtype in options.gguf.split(","):
            outfile = options.folder / f"{options.name}-{outtype}.gguf"
            written = conversion.convert(checkpoint, outfile=outfile, outtype=outtype, force=True)
            print(f"{written}: {written.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
