"""Muon: momentum whose update is made orthogonal by Newton-Schulz iterations (K. Jordan 2024; the scaling that lets one
learning rate serve all shapes as in arXiv 2502.16982). Stacked experts are orthogonalised one matrix at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import parallel

# Quintic coefficients: the largest slope at zero for which singular values still end up near one.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalised(update: Tensor) -> Tensor:
    """Nearly U V^T of ``update = U S V^T``, per matrix of the last two axes."""
    wide = update.shape[-2] <= update.shape[-1]
    x = update if wide else update.transpose(-1, -2)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.transpose(-1, -2)


class Muon(torch.optim.Optimizer):
    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """The costly part is divided among the processes of :mod:`parallel`."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            updates = []
            for i, p in enumerate(params):
                moment: Tensor = self.state[p].setdefault("momentum", torch.zeros_like(p))
                moment.lerp_(p.grad, 1 - group["momentum"])
                own = i % parallel.n_rank() == parallel.rank()
                updates.append(orthogonalised(p.grad.lerp(moment, group["momentum"])) if own else torch.zeros_like(p))
            parallel.add_up(updates)
            for p, update in zip(params, updates, strict=True):
                # 0.2 * sqrt(longer side) gives the update the root mean square of a usual AdamW update.
                scale = 0.2 * max(p.shape[-2:]) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)
