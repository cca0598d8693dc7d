"""Preparing pictures, as the published preprocessing does it: uint8 arrays to patches, one formula after another.

Written from the description of each step and readable before fast. Resampling is given twice: exactly, and with the
rounding of the imaging library behind it (Pillow), down to its 22-bit weights.
"""

from __future__ import annotations

import math

import numpy as np

WEIGHT_BITS = 22


def target_size(width: int, height: int, patch_limit: int, side_limit: int, patch: int = 14) -> tuple[int, int]:
    """Width and height before padding."""
    scales = [1.0, math.sqrt(patch_limit / (max(1, width // patch) * max(1, height // patch)))]
    scales += [side_limit * patch / width, side_limit * patch / height]
    scale, side = min(scales), side_limit * patch
    return min(max(1, int(width * scale)), side), min(max(1, int(height * scale)), side)


def cubic(x: float) -> float:
    """The kernel of cubic convolution with a = -1/2 (Keys 1981)."""
    x, a = abs(x), -0.5
    if x < 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * a if x < 2 else 0.0


def weights(size: int, length: int) -> np.ndarray:
    """[length, size], rows of sum 1: pixel i of the result as a mean of those around its centre. When shrinking the
    kernel is as much wider, so that every pixel counts."""
    scale = size / length
    stretch = max(1.0, scale)
    out = np.zeros((length, size))
    for i in range(length):
        centre = (i + 0.5) * scale
        low, high = max(0, int(centre - 2 * stretch + 0.5)), min(size, int(centre + 2 * stretch + 0.5))
        row = [cubic((j - centre + 0.5) / stretch) for j in range(low, high)]
        out[i, low:high] = np.array(row) / sum(row)
    return out


def resize_exact(image: np.ndarray, width: int, height: int) -> np.ndarray:
    """float64 [height, width, channels] of uint8 [H, W, channels], not rounded, not clipped."""
    h, w, _ = image.shape
    return np.einsum("yr,xc,rcd->yxd", weights(h, height), weights(w, width), image.astype(float), optimize=True)


def resize_fixed(image: np.ndarray, width: int, height: int, *, vertical_first: bool = False) -> np.ndarray:
    """uint8: weights of 22 bits, a rounding and clipping after each direction. Which of them is first is the library's
    choice, and may differ between its versions."""
    for axis in (0, 1) if vertical_first else (1, 0):
        size, length = image.shape[axis], (height, width)[axis]
        if size == length:
            continue
        fixed = weights(size, length) * (1 << WEIGHT_BITS)
        fixed = np.trunc(fixed + np.copysign(0.5, fixed)).astype(np.int64)
        sums = np.tensordot(fixed, np.moveaxis(image, axis, 0).astype(np.int64), 1) + (1 << (WEIGHT_BITS - 1))
        image = np.moveaxis(np.clip(sums >> WEIGHT_BITS, 0, 255).astype(np.uint8), 0, axis)
    return image


def chessboard(height: int, width: int) -> np.ndarray:
    """[height, width]: squares of 8 pixels, 255 and 180, the upper left one 255."""
    y, x = np.mgrid[:height, :width] // 8
    return np.where((x + y) % 2 == 0, 255.0, 180.0)


def over_chessboard(rgba: np.ndarray) -> np.ndarray:
    """uint8 [h, w, 4] to uint8 [h, w, 3]."""
    alpha = rgba[..., 3:].astype(np.float32) / np.float32(255)
    board = chessboard(*rgba.shape[:2])[..., None].astype(np.float32)
    return np.trunc(alpha * rgba[..., :3] + (1 - alpha) * board).astype(np.uint8)


def patches(rgb: np.ndarray, patch: int = 14, merge: int = 2) -> np.ndarray:
    """uint8 [h, w, 3] to uint8 [patches, 3, patch, patch], black added at the right and at the bottom."""
    cell = patch * merge
    h, w, _ = rgb.shape
    padded = np.pad(rgb, ((0, -h % cell), (0, -w % cell), (0, 0)))
    rows, columns = padded.shape[0] // patch, padded.shape[1] // patch
    cut = [
        padded[patch * y : patch * (y + 1), patch * x : patch * (x + 1)].transpose(2, 0, 1)
        for y in range(rows)
        for x in range(columns)
    ]
    return np.stack(cut)


def normalise(values: np.ndarray, mean: float = 0.5, std: float = 0.5) -> np.ndarray:
    """uint8 to float64."""
    return (values / 255 - mean) / std
