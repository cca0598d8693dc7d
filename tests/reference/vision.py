"""MoonViT-3d, its merger and its projector: patches of pictures to rows that stand in place of token embeddings.

    features = tower(weights, config["vision_config"], patches, grids)

`weights` are arrays by their Hugging Face names, `patches` [sum of t h w, 3, 14, 14] those of all items one after
another, `grids` the (frames t, rows h, columns w) of each item, counted in patches. All in float64.

Shapes below: N patches of an item, C hidden width, H heads of d channels (H d need not equal C).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .checkpoint import Checkpoint
from .norm import rms_norm

# The norms of the tower are built without an epsilon, so the framework's default applies: that of float32 numbers.
TOWER_NORM_EPS = float(np.finfo(np.float32).eps)
ROPE_BASE = 10000.0
TIME_BASE = 10000.0

_erf = np.vectorize(math.erf, otypes=[np.float64])

Weights = Mapping[str, np.ndarray]
Grid = tuple[int, int, int]


def gelu_erf(x: np.ndarray) -> np.ndarray:
    """x Phi(x), Phi the distribution function of the standard normal."""
    return 0.5 * x * (1 + _erf(x / math.sqrt(2)))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """The approximation of `gelu_erf` by a tanh (Hendrycks and Gimpel 2016)."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def linear_weights(size: int, length: int) -> np.ndarray:
    """[length, size]: row i interpolates linearly between the two of `size` samples around the centre of its cell,
    clamped at the borders. Nothing is averaged when shrinking."""
    at = np.maximum(0, (np.arange(length) + 0.5) * size / length - 0.5)
    low = np.floor(at).astype(int)
    high = np.minimum(low + 1, size - 1)
    weights = np.zeros((length, size))
    np.add.at(weights, (np.arange(length), low), 1 - (at - low))
    np.add.at(weights, (np.arange(length), high), at - low)
    return weights


def positions(table: np.ndarray, grid: Grid) -> np.ndarray:
    """[t, h, w, C]: the learned table [rows, columns, C] at the size of the grid, plus the time of several frames."""
    t, h, w = grid
    rows, columns, width = table.shape
    place = np.einsum("hr,wc,rcd->hwd", linear_weights(rows, h), linear_weights(columns, w), table, optimize=True)
    return place[None] + time_sinusoid(t, width)[:, None, None]


def time_sinusoid(frames: int, width: int) -> np.ndarray:
    """[frames, width]: sines, then cosines. A single frame has no time: zeros, which is not what frame 0 of two has."""
    if frames == 1:
        return np.zeros((1, width))
    omega = TIME_BASE ** -(np.arange(width // 2) / (width // 2))
    angle = np.arange(frames)[:, None] * omega
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1)


def rope_2d(x: np.ndarray, grid: Grid, base: float = ROPE_BASE) -> np.ndarray:
    """Rotate x [N, H, d] by the place of each patch: of every four neighbours the first two by the column, the others
    by the row, with one frequency."""
    t, h, w = grid
    n, heads, d = x.shape
    theta = base ** (-4 * np.arange(d // 4) / d)
    row, column = np.divmod(np.tile(np.arange(h * w), t), w)
    turn = np.exp(1j * np.stack([column, row], axis=-1)[:, None, None] * theta[:, None])  # [N, 1, d / 4, 2]
    pairs = x.reshape(n, heads, d // 4, 2, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
    return np.stack([turned.real, turned.imag], axis=-1).reshape(n, heads, d)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """q, k, v [N, H, d] -> [N, H, d]; every patch of the item sees every other. The scale is d^-0.5."""
    scores = np.einsum("nhd,mhd->hnm", q, k, optimize=True) * q.shape[-1] ** -0.5
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hnm,mhd->nhd", e / e.sum(axis=-1, keepdims=True), v, optimize=True)


def block(w: Weights, x: np.ndarray, grid: Grid, heads: int, eps: float) -> np.ndarray:
    """x [N, C] -> [N, C]; `w` has the tensors of one block by their names within it."""
    qkv = rms_norm(x, w["norm0.weight"], eps) @ w["wqkv.weight"].T
    q, k, v = (part.reshape(len(x), heads, -1) for part in np.split(qkv, 3, axis=1))
    o = attention(rope_2d(q, grid), rope_2d(k, grid), v)
    x = x + o.reshape(len(x), -1) @ w["wo.weight"].T
    up = rms_norm(x, w["norm1.weight"], eps) @ w["mlp.fc0.weight"].T
    return x + gelu_tanh(up) @ w["mlp.fc1.weight"].T


def merge(x: np.ndarray, grid: Grid, kernel: tuple[int, int]) -> np.ndarray:
    """x [N, C] -> [h w / (kh kw), kh kw C]: the mean over the frames, then each kh x kw square of patches side by
    side, row by row."""
    (t, h, w), (kh, kw) = grid, kernel
    x = x.reshape(t, h // kh, kh, w // kw, kw, -1).mean(axis=0)
    return x.transpose(0, 2, 1, 3, 4).reshape((h // kh) * (w // kw), -1)


def project(weights: Weights, z: np.ndarray, eps: float) -> np.ndarray:
    """Merged patches [n, kh kw C] -> rows of the text model's width [n, D]."""
    z = gelu_erf(z @ weights["mm_projector.proj.0.weight"].T)
    return rms_norm(z @ weights["mm_projector.proj.2.weight"].T, weights["mm_projector.post_norm.weight"], eps)


def tower(
    weights: Weights,
    config: Mapping[str, Any],
    patches: np.ndarray,
    grids: Sequence[Sequence[int]],
    *,
    norm_eps: float = TOWER_NORM_EPS,
) -> list[np.ndarray]:
    """The features of each item, [h w / (kh kw), D].

    Raises:
        ValueError: an item has more frames than the model knows, sides that are not whole merged squares, or the
            grids do not add up to the number of patches.
    """
    weights = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    kernel = tuple(config["merge_kernel_size"])
    features = []
    for grid, item in _items(np.asarray(patches, np.float64), grids, config["init_pos_emb_time"], kernel):
        kernels = weights["vision_tower.patch_embed.proj.weight"]
        x = item.reshape(len(item), -1) @ kernels.reshape(len(kernels), -1).T
        x = x + positions(weights["vision_tower.patch_embed.pos_emb.weight"], grid).reshape(x.shape)
        for number in range(config["vt_num_hidden_layers"]):
            prefix = f"vision_tower.encoder.blocks.{number}."
            own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
            x = block(own, x, grid, config["vt_num_attention_heads"], norm_eps)
        x = rms_norm(x, weights["vision_tower.encoder.final_layernorm.weight"], norm_eps)
        features.append(project(weights, merge(x, grid, kernel), config["projector_ln_eps"]))
    return features


def tower_weights(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """The tensors of tower and projector of a checkpoint."""
    return {name: checkpoint.tensor(name) for name in checkpoint if name.startswith(("vision_tower.", "mm_projector."))}


def _items(
    patches: np.ndarray, grids: Sequence[Sequence[int]], max_frames: int, kernel: tuple[int, int]
) -> Iterator[tuple[Grid, np.ndarray]]:
    total = sum(math.prod(grid) for grid in grids)
    if total != len(patches):
        raise ValueError(f"{len(patches)} patches, but the grids have {total}")
    at = 0
    for t, h, w in grids:
        if t > max_frames:
            raise ValueError(f"{t} frames, at most {max_frames}")
        if h % kernel[0] or w % kernel[1]:
            raise ValueError(f"a grid of {h} x {w} patches is not made of whole squares of {kernel[0]} x {kernel[1]}")
        yield (t, h, w), patches[at : at + t * h * w]
        at += t * h * w
