"""Data parallelism over the processes that torchrun starts; without torchrun every function is the identity.

Two processes of one thread each beat one process of two threads on a small machine: a model this small consists of
thousands of short operations per step, and threads wait for each other at the end of each of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

Item = TypeVar("Item")


def start() -> None:
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")


def finish() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def n_rank() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def wait() -> None:
    if dist.is_initialized():
        dist.barrier()


def mine(items: Sequence[Item]) -> Sequence[Item]:
    """This process's share."""
    return items[rank() :: n_rank()]


def add_up(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over the processes, in place and in one message."""
    if n_rank() > 1:
        flat = torch.cat([t.flatten() for t in tensors])
        dist.all_reduce(flat)
        for t, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            t.copy_(part.view_as(t))


def gathered(value: Any) -> list[Any]:
    """Every process's value, in rank order."""
    if n_rank() == 1:
        return [value]
    out: list[Any] = [None] * n_rank()
    dist.all_gather_object(out, value)
    return out
