"""Multi-head Latent Attention without rotary embedding.

Shapes: T new tokens, N tokens in all (N >= T), H heads, R = kv_lora_rank, dn / dr / dv = nope / "rope" / value head
dims. The dr part of the keys is shared by all heads and, in these models, not rotated.
"""

from __future__ import annotations

import numpy as np

from .checkpoint import Checkpoint
from .norm import rms_norm, sigmoid

# The two LoRA norms are built without the config's epsilon in the published code, so their class default applies.
LORA_NORM_EPS = 1e-6


def causal_softmax(scores: np.ndarray) -> np.ndarray:
    """Softmax over the last axis of scores [H, T, N]; query t stands at position N - T + t and sees no later key."""
    _, t, n = scores.shape
    scores = np.where(np.tri(t, n, n - t, dtype=bool), scores, -np.inf)
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def expand_latent(latent: np.ndarray, w_kvb: np.ndarray, dn: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys [N, H, dn + dr] and values [N, H, dv] of latent rows [N, R + dr]; w_kvb [H, dn + dv, R], keys first."""
    rank = w_kvb.shape[2]
    c, p = latent[:, :rank], latent[:, rank:]
    kv = np.einsum("nr,hor->nho", c, w_kvb, optimize=True)
    shared = np.broadcast_to(p[:, None, :], (len(p), len(w_kvb), p.shape[1]))
    return np.concatenate([kv[..., :dn], shared], axis=-1), kv[..., dn:]


def attention_expanded(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The definition: q [T, H, dn + dr], k [N, H, dn + dr], v [N, H, dv] -> [T, H, dv]. The scale is (dn + dr)^-0.5."""
    scores = np.matmul(q.transpose(1, 0, 2), k.transpose(1, 2, 0)) * q.shape[-1] ** -0.5
    return np.matmul(causal_softmax(scores), v.transpose(1, 0, 2)).transpose(1, 0, 2)


def attention_absorbed(q: np.ndarray, latent: np.ndarray, w_kvb: np.ndarray, dn: int) -> np.ndarray:
    """The same result without expanding: q [T, H, dn + dr], latent rows [N, R + dr], w_kvb [H, dn + dv, R].

    The key half of w_kvb is applied to the query, the value half to the attended latent.
    """
    rank = w_kvb.shape[2]
    w_k, w_v = w_kvb[:, :dn], w_kvb[:, dn:]
    heads_first = q.transpose(1, 0, 2)
    query = np.concatenate([heads_first[..., :dn] @ w_k, heads_first[..., dn:]], axis=-1)  # [H, T, R + dr]
    scores = query @ latent.T * q.shape[-1] ** -0.5
    attended = causal_softmax(scores) @ latent[:, :rank]  # [H, T, R]
    return np.matmul(attended, w_v.transpose(0, 2, 1)).transpose(1, 0, 2)


class Rows:
    """Rows that are appended to, kept in a buffer that doubles: appending one row does not copy the others."""

    def __init__(self) -> None:
        self._buffer: np.ndarray | None = None
        self._count = 0

    def append(self, rows: np.ndarray) -> np.ndarray:
        """Append and return a view of all rows so far."""
        need = self._count + len(rows)
        if self._buffer is None or need > len(self._buffer):
            buffer = np.empty((max(2 * need, 64), *rows.shape[1:]), rows.dtype)
            if self._buffer is not None:
                buffer[: self._count] = self._buffer[: self._count]
            self._buffer = buffer
        self._buffer[self._count : need] = rows
        self._count = need
        return self._buffer[:need]

    def copy(self) -> Rows:
        other = Rows()
        if self._buffer is not None:
            other.append(self._buffer[: self._count])
        return other


class MlaState:
    """What an MLA layer carries: latent rows [N, R + dr] (absorbed form) or keys and values (expanded form)."""

    def __init__(self) -> None:
        self.latent, self.keys, self.values = Rows(), Rows(), Rows()

    def copy(self) -> MlaState:
        other = MlaState()
        other.latent, other.keys, other.values = self.latent.copy(), self.keys.copy(), self.values.copy()
        return other


class MlaLayer:
    """Attention sub-block of an MLA layer; ``form`` is "expanded" or "absorbed"."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, form: str) -> None:
        config = checkpoint.config
        self.heads: int = config["num_attention_heads"]
        self.dn: int = config["qk_nope_head_dim"]
        self.rank: int = config["kv_lora_rank"]
        self.form = form
        if config.get("q_lora_rank"):
            self.w_qa: np.ndarray | None = checkpoint.matrix(f"{prefix}q_a_proj")  # [Q, D]
            self.q_norm = checkpoint.tensor(f"{prefix}q_a_layernorm.weight")
            self.w_q = checkpoint.matrix(f"{prefix}q_b_proj")  # [H (dn + dr), Q]
        else:
            self.w_qa = None
            self.w_q = checkpoint.matrix(f"{prefix}q_proj")  # [H (dn + dr), D]
        self.w_kva = checkpoint.matrix(f"{prefix}kv_a_proj_with_mqa")  # [R + dr, D]
        self.kv_norm = checkpoint.tensor(f"{prefix}kv_a_layernorm.weight")
        self.w_kvb = checkpoint.matrix(f"{prefix}kv_b_proj").reshape(self.heads, -1, self.rank)  # [H, dn + dv, R]
        self.w_gate = checkpoint.matrix(f"{prefix}g_proj") if config.get("mla_use_output_gate") else None
        self.w_o = checkpoint.matrix(f"{prefix}o_proj")  # [D, H dv]

    def new_state(self) -> MlaState:
        return MlaState()

    def forward(self, h: np.ndarray, sequences: list[tuple[slice, MlaState]]) -> np.ndarray:
        """h [T, D], the normed layer input -> [T, D]; the state of each sequence is advanced by its rows of h."""
        x = h if self.w_qa is None else rms_norm(h @ self.w_qa.T, self.q_norm, LORA_NORM_EPS)
        q = (x @ self.w_q.T).reshape(len(h), self.heads, -1)
        kv = h @ self.w_kva.T
        latent = np.concatenate([rms_norm(kv[:, : self.rank], self.kv_norm, LORA_NORM_EPS), kv[:, self.rank :]], axis=1)
        outputs = []
        for rows, state in sequences:
            if self.form == "absorbed":
                outputs.append(attention_absorbed(q[rows], state.latent.append(latent[rows]), self.w_kvb, self.dn))
            else:
                k, v = expand_latent(latent[rows], self.w_kvb, self.dn)
                outputs.append(attention_expanded(q[rows], state.keys.append(k), state.values.append(v)))
        o = np.concatenate(outputs).reshape(len(h), -1)
        if self.w_gate is not None:
            o = o * sigmoid(h @ self.w_gate.T)
        return o @ self.w_o.T
