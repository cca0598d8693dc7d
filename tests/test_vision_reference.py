"""The reference of the vision tower against the published code's results, and its parts against their definitions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference import Checkpoint, vision

Mini = tuple[dict[str, np.ndarray], dict[str, Any], dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def vision_mini(golden: Path) -> Mini:
    """Weights, vision_config and golden arrays."""
    folder = golden / "vision-mini"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    with np.load(folder / "golden.npz") as arrays:
        return vision.tower_weights(Checkpoint(folder)), config["vision_config"], dict(arrays)


def test_golden_features(vision_mini: Mini) -> None:
    """One frame, two frames, and the native grid, in one call and each alone."""
    weights, config, arrays = vision_mini
    grids = arrays["grid_thws"].tolist()
    assert grids == [[1, 6, 4], [2, 4, 10], [1, 8, 8]]
    features = vision.tower(weights, config, arrays["pixel_values"], grids)
    at = 0
    for number, (grid, found) in enumerate(zip(grids, features, strict=True)):
        np.testing.assert_allclose(found, arrays[f"features_{number}"], rtol=0, atol=1e-5)
        count = int(np.prod(grid))
        (alone,) = vision.tower(weights, config, arrays["pixel_values"][at : at + count], [grid])
        np.testing.assert_array_equal(alone, found)
        at += count


@pytest.mark.parametrize("size", [1, 2, 7, 8])
@pytest.mark.parametrize("length", [1, 2, 5, 8, 13, 64])
def test_interpolation(size: int, length: int) -> None:
    """Against the definition one sample at a time."""
    samples = np.random.default_rng(size * 100 + length).standard_normal(size)
    wanted = []
    for i in range(length):
        at = max(0.0, (i + 0.5) * size / length - 0.5)
        low = int(at)
        wanted.append((1 - (at - low)) * samples[low] + (at - low) * samples[min(low + 1, size - 1)])
    np.testing.assert_allclose(vision.linear_weights(size, length) @ samples, wanted, rtol=0, atol=1e-14)


def test_native_grid_is_the_table(rng: np.random.Generator) -> None:
    table = rng.standard_normal((5, 6, 4))
    np.testing.assert_array_equal(vision.positions(table, (1, 5, 6))[0], table)


def test_time_of_frames() -> None:
    """Sines first; the first of several frames has (0 ... 0, 1 ... 1), a single frame nothing."""
    np.testing.assert_array_equal(vision.time_sinusoid(1, 6), np.zeros((1, 6)))
    time = vision.time_sinusoid(3, 4)
    np.testing.assert_allclose(time[0], [0, 0, 1, 1], rtol=0, atol=0)
    np.testing.assert_allclose(time[2], [np.sin(2), np.sin(0.02), np.cos(2), np.cos(0.02)], rtol=0, atol=1e-15)


def test_rope_turns_columns_first(rng: np.random.Generator) -> None:
    """One step right turns elements 0 and 1 of each four, one step down elements 2 and 3, by theta of that four."""
    d, grid = 12, (1, 2, 3)
    theta = [10000 ** (-i / 3) for i in range(3)]
    x = rng.standard_normal((1, 2, d))
    turned = vision.rope_2d(np.repeat(x, 6, axis=0), grid)
    for n, (row, column) in enumerate((r, c) for r in range(2) for c in range(3)):
        for i in range(3):
            for half, place in ((0, column), (1, row)):
                a, b = x[0, :, 4 * i + 2 * half], x[0, :, 4 * i + 2 * half + 1]
                sin, cos = np.sin(place * theta[i]), np.cos(place * theta[i])
                found = turned[n, :, 4 * i + 2 * half : 4 * i + 2 * half + 2]
                np.testing.assert_allclose(found, np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1), atol=1e-14)


def test_merge_order() -> None:
    """Squares in reading order, within each the upper left, upper right, lower left, lower right patch."""
    x = np.arange(16.0)[:, None]  # 4 x 4 patches of one channel
    np.testing.assert_array_equal(vision.merge(x, (1, 4, 4), (2, 2))[:2], [[0, 1, 4, 5], [2, 3, 6, 7]])
    two = np.concatenate([x, x + 2])
    np.testing.assert_array_equal(vision.merge(two, (2, 4, 4), (2, 2))[0], [1, 2, 5, 6])


def test_gelu_values() -> None:
    """1 Phi(1) with Phi(1) = 0.841344746068543, and the tanh form beside it, which differs in the fourth digit."""
    assert vision.gelu_erf(np.array([1.0]))[0] == pytest.approx(0.841344746068543, rel=1e-14)
    assert vision.gelu_tanh(np.array([1.0]))[0] == pytest.approx(0.841191990608, rel=1e-11)


@pytest.mark.parametrize(
    ("grids", "n_patches", "message"),
    [
        ([[5, 2, 2]], 20, "5 frames, at most 4"),
        ([[1, 3, 2]], 6, "3 x 2 patches is not made of whole squares of 2 x 2"),
        ([[1, 2, 2], [1, 2, 2]], 4, "4 patches, but the grids have 8"),
    ],
)
def test_refused_items(vision_mini: Mini, grids: list[list[int]], n_patches: int, message: str) -> None:
    weights, config, _ = vision_mini
    with pytest.raises(ValueError, match=message):
        vision.tower(weights, config, np.zeros((n_patches, 3, 14, 14)), grids)
