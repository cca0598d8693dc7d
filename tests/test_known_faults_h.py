"""Section H of the list of known faults: vision. What other programs got wrong, in the smallest input that shows it."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from deltallama.images import ImageLimits, preprocess, target_size
from reference import Checkpoint, vision
from reference import images as definition
from reference.norm import rms_norm

# ---- H1: limits on the tokens of an image are ignored ----------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 16, 256, 1024])
def test_h1_a_maximum_of_tokens_is_kept(most: int) -> None:
    """2875 x 1500 pixels, which are 5562 tokens without one: the patches themselves are counted."""
    limits = ImageLimits(max_tokens=most)
    found = preprocess(Image.new("RGB", (2875, 1500), (1, 2, 3)), limits)
    assert len(found.pixels) // 4 == found.n_tokens == target_size(2875, 1500, limits).tokens <= most
    assert found.n_tokens >= 0.9 * most  # and no picture is made smaller than it has to be


def test_h1_a_minimum_of_tokens_is_kept() -> None:
    found = preprocess(Image.new("RGB", (30, 16)), ImageLimits(min_tokens=64))
    assert len(found.pixels) // 4 == found.n_tokens >= 64


# ---- H5: pictures are resampled in another way than the model was trained with ---------------------------------------


@pytest.mark.parametrize("name", ["rgb_61x43", "rgb_200x90", "rgba_260x40"])
def test_h5_pixels_are_those_of_the_reference(golden: Path, name: str) -> None:
    """After resampling and normalising, at most 1/255 of the range from black to white away. Bilinear sums, or sums
    that skip pixels, are not."""
    cases = json.loads((golden / "images" / "cases.json").read_text(encoding="utf-8"))["cases"]
    case = next(case for case in cases if case["file"] == f"{name}.png")
    limits = ImageLimits(case["in_patch_limit"], case["patch_limit_on_one_side"])
    with np.load(golden / "images" / "patches_u8.npz") as arrays:
        wanted = definition.normalise(arrays[name])
    found = preprocess(golden / "images" / case["file"], limits).pixels
    bound = 2 / 255 + 1e-6  # normalised values reach from -1 to 1
    assert np.abs(found - wanted).max() <= bound
    size = target_size(case["width"], case["height"], limits)
    if (size.width, size.height) == (case["width"], case["height"]):
        return
    with Image.open(golden / "images" / case["file"]) as image:
        for way in (Image.Resampling.BILINEAR, Image.Resampling.NEAREST):
            other = preprocess(image.resize((size.width, size.height), way), limits).pixels
            assert np.abs(other - wanted).max() > 2 * bound


def test_h5_pictures_are_padded_not_stretched() -> None:
    """The right and lower borders are black and the picture keeps its proportions."""
    file = io.BytesIO()
    Image.new("RGB", (30, 16), (255, 255, 255)).save(file, "PNG")
    pixels = preprocess(file.getvalue(), ImageLimits()).pixels
    whole = pixels.reshape(2, 4, 3, 14, 14).transpose(0, 3, 1, 4, 2).reshape(28, 56, 3)
    assert (whole[:16, :30] == 1).all() and (whole[16:] == -1).all() and (whole[:, 30:] == -1).all()


# ---- H6: the tower's mathematics is that of an older model -----------------------------------------------------------


def cubic_weights(size: int, length: int) -> np.ndarray:
    """As `vision.linear_weights`, but bicubic (a = -3/4, no antialiasing), as Kimi-VL has it."""
    a, out = -0.75, np.zeros((length, size))
    for i in range(length):
        at = (i + 0.5) * size / length - 0.5
        low = int(np.floor(at))
        for j in range(low - 1, low + 3):
            x = abs(at - j)
            near = ((a + 2) * x - (a + 3)) * x * x + 1
            far = a * (((x - 5) * x + 8) * x - 4)
            out[i, min(max(j, 0), size - 1)] += near if x <= 1 else far
    return out


def test_h6_positions_of_an_odd_grid() -> None:
    """5 x 3 patches on a table of 8 x 8, one number at a time. Bicubic interpolation is another thing."""
    table = np.random.default_rng(6).standard_normal((8, 8, 4))
    found = vision.positions(table, (1, 5, 3))[0]
    for y in range(5):
        for x in range(3):
            sy, sx = max(0.0, (y + 0.5) * 8 / 5 - 0.5), max(0.0, (x + 0.5) * 8 / 3 - 0.5)
            y0, x0 = int(sy), int(sx)
            y1, x1, fy, fx = min(y0 + 1, 7), min(x0 + 1, 7), sy - y0, sx - x0
            upper = (1 - fx) * table[y0, x0] + fx * table[y0, x1]
            lower = (1 - fx) * table[y1, x0] + fx * table[y1, x1]
            np.testing.assert_allclose(found[y, x], (1 - fy) * upper + fy * lower, rtol=0, atol=1e-14)
    cubic = np.einsum("hr,wc,rcd->hwd", cubic_weights(8, 5), cubic_weights(8, 3), table)
    assert np.abs(cubic - found).max() > 0.1


def norm_first(weights: Mapping[str, np.ndarray], z: np.ndarray, eps: float) -> np.ndarray:
    """The projector of Kimi-K2.5: a norm before the products, none behind."""
    z = rms_norm(z, np.ones(z.shape[-1]), eps)
    z = vision.gelu_erf(z @ weights["mm_projector.proj.0.weight"].T)
    return z @ weights["mm_projector.proj.2.weight"].T


@pytest.mark.parametrize(
    ("name", "wrong"), [("linear_weights", cubic_weights), ("project", norm_first), ("gelu_erf", vision.gelu_tanh)]
)
def test_h6_golden_features_tell_towers_apart(
    golden: Path, monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any
) -> None:
    """With one mechanism of an older model each, the published features are missed by far more than they are met."""
    config = json.loads((golden / "vision-mini" / "config.json").read_text(encoding="utf-8"))["vision_config"]
    weights = vision.tower_weights(Checkpoint(golden / "vision-mini"))
    with np.load(golden / "vision-mini" / "golden.npz") as arrays:
        wanted = [arrays[f"features_{number}"] for number in range(3)]
        pixels, grids = arrays["pixel_values"], arrays["grid_thws"].tolist()

    def error() -> float:
        found = vision.tower(weights, config, pixels, grids)
        return max(float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True))

    right = error()
    monkeypatch.setattr(vision, name, wrong)
    assert right < 1e-5 and error() > 20 * 1e-5
