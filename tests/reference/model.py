"""Whole models: layers in order, residuals, logits, state between calls, greedy decoding."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoint import Checkpoint
from .kda import KdaLayer, KdaState
from .mix import mix
from .mla import MlaLayer, MlaState
from .moe import DenseFfn, MoeFfn
from .norm import rms_norm

Trace = dict[str, np.ndarray]


class State:
    """A sequence so far: one state per layer and the number of tokens."""

    def __init__(self, layers: list[KdaState | MlaState], length: int = 0) -> None:
        self.layers, self.length = layers, length

    def copy(self) -> State:
        """An independent copy: continuing one does not change the other."""
        return State([layer.copy() for layer in self.layers], self.length)


class Layer:
    """One decoder layer: norms, attention sub-block, feed-forward sub-block, score vectors of its two mixes."""

    def __init__(self, checkpoint: Checkpoint, number: int, kda: str, mla: str, chunk_size: int) -> None:
        config, prefix = checkpoint.config, f"model.layers.{number}."
        self.attn_norm = checkpoint.tensor(f"{prefix}input_layernorm.weight")
        self.ffn_norm = checkpoint.tensor(f"{prefix}post_attention_layernorm.weight")
        # The lists count layers from 1.
        self.attn: KdaLayer | MlaLayer
        if number + 1 in config["linear_attn_config"]["kda_layers"]:
            self.attn = KdaLayer(checkpoint, f"{prefix}self_attn.", kda, chunk_size)
        else:
            self.attn = MlaLayer(checkpoint, f"{prefix}self_attn.", mla)
        self.ffn: DenseFfn | MoeFfn
        first_moe = config["first_k_dense_replace"] if config.get("num_experts") else config["num_hidden_layers"]
        if number >= first_moe and number % config.get("moe_layer_freq", 1) == 0:
            self.ffn = MoeFfn(checkpoint, f"{prefix}block_sparse_moe.")
        else:
            self.ffn = DenseFfn(checkpoint, f"{prefix}mlp.")
        if config.get("attn_res_block_size"):
            self.attn_score = mix_score(checkpoint, f"{prefix}self_attention_res")
            self.ffn_score = mix_score(checkpoint, f"{prefix}mlp_res")


def mix_score(checkpoint: Checkpoint, stem: str) -> np.ndarray:
    """Score vector [D] of a mix: norm weight times projection, of which only the product matters."""
    return checkpoint.tensor(f"{stem}_norm.weight") * checkpoint.tensor(f"{stem}_proj.weight").reshape(-1)


class Model:
    """Kimi-Linear or Kimi-K3, as the config says.

    ``kda``         "recurrent" (the definition) or "chunked", with ``chunk_size`` tokens at a time
    ``mla``         "expanded" (the definition) or "absorbed"
    Raises ValueError for a config these formulas do not cover and KeyError for a missing tensor.
    """

    def __init__(
        self, checkpoint: Checkpoint, *, kda: str = "recurrent", mla: str = "expanded", chunk_size: int = 16
    ) -> None:
        if kda not in ("recurrent", "chunked"):
            raise ValueError(f"kda must be recurrent or chunked, not {kda!r}")
        if mla not in ("expanded", "absorbed"):
            raise ValueError(f"mla must be expanded or absorbed, not {mla!r}")
        config = checkpoint.config
        if not config["mla_use_nope"]:
            raise ValueError("mla_use_nope is false: these models have no rotary embedding")
        self.config: dict[str, Any] = config
        self.eps: float = config["rms_norm_eps"]
        self.block: int = config.get("attn_res_block_size") or 0
        self.embedding = checkpoint.tensor("model.embed_tokens.weight")  # [vocab, D]
        self.layers = [Layer(checkpoint, number, kda, mla, chunk_size) for number in range(config["num_hidden_layers"])]
        if self.block:
            self.output_score = mix_score(checkpoint, "model.output_attn_res")
        self.norm = checkpoint.tensor("model.norm.weight")
        tied = config.get("tie_word_embeddings")
        self.lm_head = self.embedding if tied else checkpoint.matrix("lm_head")  # [vocab, D]

    @classmethod
    def from_checkpoint(
        cls,
        folder: Path | str,
        *,
        dtype: type = np.float64,
        kda: str = "recurrent",
        mla: str = "expanded",
        chunk_size: int = 16,
    ) -> Model:
        """Load a Hugging Face model folder, everything dequantized to ``dtype``."""
        return cls(Checkpoint(folder, dtype), kda=kda, mla=mla, chunk_size=chunk_size)

    def new_state(self) -> State:
        """The state before the first token."""
        return State([layer.attn.new_state() for layer in self.layers])

    def forward(
        self, ids: Sequence[int] | np.ndarray, state: State | None = None, trace: Trace | None = None
    ) -> np.ndarray:
        """Logits [n, vocab] after each of n tokens.

        ``state`` continues a sequence and is advanced; without one the sequence starts here. ``trace`` is filled with

            embed                                 [n, D]
            layer.I.attn_in, layer.I.ffn_in       [n, D] inputs of the sub-blocks, mixed and normed
            layer.I.attn, layer.I.ffn             [n, D] outputs of the sub-blocks
            layer.I.out                           [n, D] the residual stream after the layer
            layer.I.router_gap                    [n] of an MoE layer (see ``moe.router_gap``)
            output                                [n, D] what lm_head is applied to
            router_gaps                           [n] smallest router gap over all layers, infinite without MoE layers
        """
        state = self.new_state() if state is None else state
        return self.forward_batch([ids], [state], trace)[0]

    def forward_batch(
        self, batch: Sequence[Sequence[int] | np.ndarray], states: Sequence[State], trace: Trace | None = None
    ) -> list[np.ndarray]:
        """``forward`` over several sequences at once, each continuing its own state: logits [n_i, vocab] of each.

        Sequences do not influence each other. In ``trace`` their rows follow one another.
        """

        def note(name: str, value: np.ndarray) -> np.ndarray:
            if trace is not None:
                trace[name] = value
            return value

        ends = np.cumsum([len(ids) for ids in batch])
        rows = [slice(end - len(ids), end) for end, ids in zip(ends, batch, strict=True)]
        x = note("embed", self.embedding[np.concatenate([np.asarray(ids, dtype=np.int64) for ids in batch])])
        gaps = np.full(len(x), np.inf)
        bank: list[np.ndarray] = []  # residual streams at the block boundaries, each [n, D]
        for number, layer in enumerate(self.layers):
            name = f"layer.{number}."
            a = self._mixed(bank, x, layer.attn_score) if bank else x
            sequences: list[Any] = [(r, state.layers[number]) for r, state in zip(rows, states, strict=True)]
            h = note(name + "attn_in", rms_norm(a, layer.attn_norm, self.eps))
            y = note(name + "attn", layer.attn.forward(h, sequences))
            if self.block and number % self.block == 0:
                # What is banked is the stream itself, not the mix; the stream restarts from this layer's output.
                bank.append(x)
                x = y
            else:
                x = x + y
            b = self._mixed(bank, x, layer.ffn_score) if bank else x
            h = note(name + "ffn_in", rms_norm(b, layer.ffn_norm, self.eps))
            if isinstance(layer.ffn, MoeFfn):
                y, gap = layer.ffn.forward(h)
                gaps = np.minimum(gaps, note(name + "router_gap", gap))
            else:
                y = layer.ffn.forward(h)
            x = note(name + "out", x + note(name + "ffn", y))
        if bank:
            x = self._mixed(bank, x, self.output_score)
        x = note("output", rms_norm(x, self.norm, self.eps))
        note("router_gaps", gaps)
        for ids, state in zip(batch, states, strict=True):
            state.length += len(ids)
        logits = x @ self.lm_head.T
        return [logits[r] for r in rows]

    def _mixed(self, bank: list[np.ndarray], x: np.ndarray, score: np.ndarray) -> np.ndarray:
        return mix(np.stack([*bank, x]), score, self.eps)[0]

    def greedy(
        self,
        ids: Sequence[int],
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
        margins: list[float] | None = None,
    ) -> list[int]:
        """Continue ``ids`` with the most probable token each time (the lower id on a tie).

        Ends after ``max_new_tokens`` or before a token of ``stop_ids``, which is not part of the result. ``margins``
        receives, for each step including a stop, how far the best logit was ahead of the second. Raises ValueError for
        an empty prompt.
        """
        out, steps = self.greedy_batch([ids], max_new_tokens, stop_ids)[0]
        if margins is not None:
            margins.extend(steps)
        return out

    def greedy_batch(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Collection[int] = ()
    ) -> list[tuple[list[int], list[float]]]:
        """``greedy`` for several prompts side by side: (new tokens, margins) of each.

        Faster than one by one, because every weight is read once per step for all; about 32 at a time is enough.
        """
        if not all(len(ids) for ids in prompts):
            raise ValueError("greedy needs at least one prompt token")
        states = [self.new_state() for _ in prompts]
        step: list[Sequence[int]] = list(prompts)
        results: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
        alive = list(range(len(prompts))) if max_new_tokens > 0 else []
        while alive:
            logits = self.forward_batch([step[i] for i in alive], [states[i] for i in alive])
            for i, last in zip(tuple(alive), (rows[-1] for rows in logits), strict=True):
                out, margins = results[i]
                second, first = np.partition(last, -2)[-2:]
                margins.append(float(first - second))
                best = int(np.argmax(last))
                step[i] = [best]
                if best not in stop_ids:
                    out.append(best)
                if best in stop_ids or len(out) == max_new_tokens:
                    alive.remove(i)
        return results
