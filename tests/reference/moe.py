"""Feed-forward blocks: SwiGLU and SiTU, the router, and mixture of experts in the full or in a latent width.

Shapes: T tokens, D hidden, E experts, k chosen experts, X expert width, Z width the experts work in (D, or the latent
width of K3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .checkpoint import Checkpoint
from .norm import rms_norm, sigmoid

Activation = Callable[[np.ndarray, np.ndarray], np.ndarray]


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """silu(gate) * up (Kimi-Linear)."""
    return gate * sigmoid(gate) * up


def situ(gate: np.ndarray, up: np.ndarray, beta: float = 4.0, linear_beta: float | None = 25.0) -> np.ndarray:
    """[beta tanh(gate / beta) sigmoid(gate)] * [linear_beta tanh(up / linear_beta)] (Kimi-K3).

    Without ``linear_beta`` the second factor is ``up`` itself.
    """
    bounded = beta * np.tanh(gate / beta) * sigmoid(gate)
    return bounded * (linear_beta * np.tanh(up / linear_beta) if linear_beta else up)


def glu(config: dict[str, Any]) -> Activation:
    """The activation that ``hidden_act`` names. Raises ValueError for one these models do not have."""
    name = config["hidden_act"]
    if name == "silu":
        return swiglu
    if name == "situ":
        beta, linear_beta = config["activation_situ_beta"], config["activation_situ_linear_beta"]
        return lambda gate, up: situ(gate, up, beta or 1.0, linear_beta)
    raise ValueError(f"hidden_act {name!r} is neither silu nor situ")


def route(
    scores: np.ndarray, bias: np.ndarray, k: int, scale: float, renormalize: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Chosen experts and their weights, both [T, k], best first.

    scores [T, E] are sigmoids of the router logits; bias [E] takes part in the selection only. Ties go to the lower
    expert id.
    """
    chosen = np.argsort(-(scores + bias), axis=-1, kind="stable")[:, :k]
    weights = np.take_along_axis(scores, chosen, axis=-1)
    if renormalize and k > 1:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return chosen, weights * scale


def router_gap(scores: np.ndarray, bias: np.ndarray, k: int) -> np.ndarray:
    """[T]: how far the last chosen expert is ahead of the first one left out; infinite when all are chosen.

    A rounding error larger than this may change which experts run.
    """
    if k >= scores.shape[-1]:
        return np.full(len(scores), np.inf)
    best = -np.sort(-(scores + bias), axis=-1)
    return best[:, k - 1] - best[:, k]


def experts(
    z: np.ndarray,
    chosen: np.ndarray,
    weights: np.ndarray,
    w1: np.ndarray,
    w3: np.ndarray,
    w2: np.ndarray,
    activation: Activation,
) -> np.ndarray:
    """sum over chosen e of weight_e * activation(z w1_e, z w3_e) w2_e.

    z [T, Z]; chosen, weights [T, k]; w1 (gate), w3 (up) [E, X, Z]; w2 (down) [E, Z, X] -> [T, Z].
    """
    out = np.zeros_like(z)
    for e in np.unique(chosen):
        token, slot = np.nonzero(chosen == e)
        x = z[token]
        y = activation(x @ w1[e].T, x @ w3[e].T) @ w2[e].T
        out[token] += weights[token, slot, None] * y
    return out


class DenseFfn:
    """Feed-forward of a dense layer, and the shared experts of an MoE layer."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        self.activation = glu(checkpoint.config)
        self.w_gate = checkpoint.matrix(f"{prefix}gate_proj")
        self.w_up = checkpoint.matrix(f"{prefix}up_proj")
        self.w_down = checkpoint.matrix(f"{prefix}down_proj")

    def forward(self, h: np.ndarray) -> np.ndarray:
        return self.activation(h @ self.w_gate.T, h @ self.w_up.T) @ self.w_down.T


class MoeFfn:
    """Routed experts (in a latent width for K3) plus shared experts; the router reads the full width."""

    def __init__(self, checkpoint: Checkpoint, prefix: str) -> None:
        config = checkpoint.config
        if config["moe_router_activation_func"] != "sigmoid" or config.get("num_expert_group", 1) > 1:
            raise ValueError("the reference has sigmoid routers without expert groups only")
        self.k: int = config["num_experts_per_token"]
        self.scale: float = config["routed_scaling_factor"]
        self.renormalize: bool = config["moe_renormalize"]
        self.eps: float = config["rms_norm_eps"]
        self.activation = glu(config)
        self.w_router = checkpoint.matrix(f"{prefix}gate")  # [E, D]
        self.bias = checkpoint.tensor(f"{prefix}gate.e_score_correction_bias")  # [E]
        self.w1, self.w2, self.w3 = (
            np.stack([checkpoint.matrix(f"{prefix}experts.{e}.{name}") for e in range(config["num_experts"])])
            for name in ("w1", "w2", "w3")
        )
        self.w_latent_down: np.ndarray | None = None
        self.latent_norm: np.ndarray | None = None
        if config.get("routed_expert_hidden_size"):
            self.w_latent_down = checkpoint.matrix(f"{prefix}routed_expert_down_proj")  # [Z, D]
            self.w_latent_up = checkpoint.matrix(f"{prefix}routed_expert_up_proj")  # [D, Z]
            if config.get("latent_moe_use_norm"):
                self.latent_norm = checkpoint.tensor(f"{prefix}routed_expert_norm.weight")
        self.shared = DenseFfn(checkpoint, f"{prefix}shared_experts.") if config["num_shared_experts"] else None

    def forward(self, h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """h [T, D] -> output [T, D] and router gap [T]."""
        scores = sigmoid(h @ self.w_router.T)
        chosen, weights = route(scores, self.bias, self.k, self.scale, self.renormalize)
        z = h if self.w_latent_down is None else h @ self.w_latent_down.T
        y = experts(z, chosen, weights, self.w1, self.w3, self.w2, self.activation)
        if self.w_latent_down is not None:
            if self.latent_norm is not None:
                y = rms_norm(y, self.latent_norm, self.eps)
            y = y @ self.w_latent_up.T
        if self.shared is not None:
            y = y + self.shared.forward(h)
        return y, router_gap(scores, self.bias, self.k)
