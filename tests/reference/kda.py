"""Kimi Delta Attention: a linear-attention layer whose state forgets per channel and is corrected by the delta rule.

Kimi Linear report, arXiv 2510.26692. Shapes: T tokens, n heads, K = V = head_dim, P = n * head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .checkpoint import Checkpoint
from .norm import l2_norm, rms_norm, sigmoid, softplus


def short_conv(x: np.ndarray, weight: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Causal depthwise convolution followed by SiLU.

    x [T, P]; weight [P, kernel], the last tap multiplies the current token; state [kernel - 1, P] holds the rows of x
    before this call, oldest first (zeros at the start of a sequence). Returns y [T, P] and the next state.
    """
    kernel = weight.shape[1]
    rows = np.concatenate([state, x])
    c = sum(rows[j : j + len(x)] * weight[:, j] for j in range(kernel))
    return c * sigmoid(c), rows[len(rows) - (kernel - 1) :]


def kda_gate(f: np.ndarray, a_log: np.ndarray, dt_bias: np.ndarray, lower_bound: float | None) -> np.ndarray:
    """Log decay g [T, n, K], always below 0, from f [T, n, K], a_log [n] and dt_bias [n, K].

    Without a lower bound (Kimi-Linear) g = -exp(a_log) * softplus(f + dt_bias). With one (Kimi-K3, -5) it is another
    function, not a clamp: g = lower_bound * sigmoid(exp(a_log) * (f + dt_bias)).
    """
    a = np.exp(a_log)[:, None]
    z = f + dt_bias
    if lower_bound is None:
        return -a * softplus(z)
    return lower_bound * sigmoid(a * z)


def kda_recurrent(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The definition: one token after another.

    q, k [T, n, K] L2-normalised, q already scaled by K^-0.5; v [T, n, V]; g [T, n, K] log decay; beta [T, n];
    state [n, K, V]. Returns o [T, n, V] and the next state.
    """
    state = state.copy()
    decay = np.exp(g)
    o = np.empty_like(v)
    for t in range(len(q)):
        state *= decay[t][:, :, None]
        predicted = np.matmul(k[t][:, None, :], state)[:, 0]
        delta = beta[t][:, None] * (v[t] - predicted)
        state += k[t][:, :, None] * delta[:, None, :]
        o[t] = np.matmul(q[t][:, None, :], state)[:, 0]
    return o, state


def kda_chunked(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    beta: np.ndarray,
    state: np.ndarray,
    chunk_size: int = 16,
) -> tuple[np.ndarray, np.ndarray]:
    """The same as ``kda_recurrent``, ``chunk_size`` tokens at a time; the last chunk may be shorter.

    Inside a chunk the corrected values u solve a unit lower triangular system that follows from unrolling the
    recurrence: u_i = beta_i * (v_i - (k_i * e^G_i) S - sum_{j<i} <k_i * e^(G_i - G_j), k_j> u_j), with G the running
    sum of g. Differences of G stay inside one exponent, where they are never positive; factors e^-G would overflow.
    """
    o = np.empty_like(v)
    for start in range(0, len(q), chunk_size):
        rows = slice(start, start + chunk_size)
        # heads first: [n, C, K]
        qc, kc, vc, gc = (x[rows].transpose(1, 0, 2) for x in (q, k, v, g))
        bc = beta[rows].T[:, :, None]  # [n, C, 1]
        total = np.cumsum(gc, axis=1)
        between = np.exp(np.minimum(total[:, :, None, :] - total[:, None, :, :], 0))  # [n, C, C, K], valid for i >= j
        keys = np.einsum("nid,njd,nijd->nij", kc, kc, between)
        reads = np.tril(np.einsum("nid,njd,nijd->nij", qc, kc, between))
        since_start = np.exp(total)
        u = bc * (vc - (kc * since_start) @ state)
        for i in range(1, u.shape[1]):
            u[:, i] -= bc[:, i] * np.matmul(keys[:, i, None, :i], u[:, :i])[:, 0]
        o[rows] = ((qc * since_start) @ state + reads @ u).transpose(1, 0, 2)
        to_end = np.exp(total[:, -1:] - total)
        state = since_start[:, -1, :, None] * state + (kc * to_end).transpose(0, 2, 1) @ u
    return o, state


def gated_norm(o: np.ndarray, weight: np.ndarray, gate: np.ndarray, eps: float) -> np.ndarray:
    """RMS norm per head times the sigmoid of the output gate: o, gate [T, n, V], weight [V]."""
    return rms_norm(o, weight, eps) * sigmoid(gate)


@dataclass
class KdaState:
    """What a KDA layer carries from one call to the next."""

    conv: list[np.ndarray]  # q, k, v: [kernel - 1, P] each, projection rows before the convolution, oldest first
    scan: np.ndarray  # [n, K, V]

    def copy(self) -> KdaState:
        return KdaState([rows.copy() for rows in self.conv], self.scan.copy())


class KdaLayer:
    """Attention sub-block of a KDA layer; ``form`` is "recurrent" or "chunked"."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, form: str, chunk_size: int) -> None:
        config: dict[str, Any] = checkpoint.config
        linear = config["linear_attn_config"]
        self.heads: int = linear["num_heads"]
        self.dim: int = linear["head_dim"]
        self.kernel: int = linear["short_conv_kernel_size"]
        self.lower_bound: float | None = linear.get("gate_lower_bound")
        self.eps: float = config["rms_norm_eps"]
        self.form, self.chunk_size = form, chunk_size
        inner = self.heads * self.dim

        self.w_qkv = [checkpoint.matrix(f"{prefix}{s}_proj") for s in "qkv"]  # [P, D] each
        self.conv = [checkpoint.tensor(f"{prefix}{s}_conv1d.weight").reshape(inner, self.kernel) for s in "qkv"]
        self.w_fa = checkpoint.matrix(f"{prefix}f_a_proj")  # [rank, D]
        self.w_fb = checkpoint.matrix(f"{prefix}f_b_proj")  # [P, rank]
        # K3 stores zeros beyond the head count; Kimi-Linear stores [1, 1, n, 1].
        self.a_log = checkpoint.tensor(f"{prefix}A_log").reshape(-1)[: self.heads]
        self.dt_bias = checkpoint.tensor(f"{prefix}dt_bias").reshape(self.heads, self.dim)
        self.w_beta = checkpoint.matrix(f"{prefix}b_proj")  # [n, D]
        if linear.get("use_full_rank_gate"):
            self.w_gate = [checkpoint.matrix(f"{prefix}g_proj")]  # [P, D]
        else:
            self.w_gate = [checkpoint.matrix(f"{prefix}g_a_proj"), checkpoint.matrix(f"{prefix}g_b_proj")]
        self.o_norm = checkpoint.tensor(f"{prefix}o_norm.weight")  # [V]
        self.w_o = checkpoint.matrix(f"{prefix}o_proj")  # [D, P]

    def new_state(self) -> KdaState:
        inner, dtype = self.heads * self.dim, self.w_o.dtype
        conv = [np.zeros((self.kernel - 1, inner), dtype) for _ in range(3)]
        return KdaState(conv, np.zeros((self.heads, self.dim, self.dim), dtype))

    def forward(self, h: np.ndarray, sequences: list[tuple[slice, KdaState]]) -> np.ndarray:
        """h [T, D], the normed layer input -> [T, D]; the state of each sequence is advanced by its rows of h."""
        shape = (len(h), self.heads, self.dim)
        projections = [h @ w.T for w in self.w_qkv]
        g = kda_gate((h @ self.w_fa.T @ self.w_fb.T).reshape(shape), self.a_log, self.dt_bias, self.lower_bound)
        beta = sigmoid(h @ self.w_beta.T)
        o = np.empty(shape, h.dtype)
        for rows, state in sequences:
            streams = []
            for i, projection in enumerate(projections):
                y, state.conv[i] = short_conv(projection[rows], self.conv[i], state.conv[i])
                streams.append(y.reshape(-1, self.heads, self.dim))
            q, k, v = streams
            q = l2_norm(q) * self.dim**-0.5
            k = l2_norm(k)
            if self.form == "chunked":
                o[rows], state.scan = kda_chunked(q, k, v, g[rows], beta[rows], state.scan, self.chunk_size)
            else:
                o[rows], state.scan = kda_recurrent(q, k, v, g[rows], beta[rows], state.scan)
        gate = h
        for weight in self.w_gate:
            gate = gate @ weight.T
        y = gated_norm(o, self.o_norm, gate.reshape(shape), self.eps)
        return y.reshape(len(h), -1) @ self.w_o.T
