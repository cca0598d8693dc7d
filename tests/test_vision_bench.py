"""The sums of bench/vision_bench.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "bench"))

import vision_bench  # noqa: E402


def test_operations_of_an_image() -> None:
    """Counted by hand from the table of tensors: two rows by four columns of patches, 3 layers."""
    kernel, block = 3 * 14 * 14 * 1024, 1024 * 4608 + 1536 * 1024 + 2 * 1024 * 4096
    projector = 4096 * 4096 + 4096 * 7168
    found = vision_bench.operations(2, 4, layers=3)
    assert found["products"] == 2 * (8 * (kernel + 3 * block) + 2 * projector)
    assert found["attention"] == 3 * 2 * (2 * 12 * 8 * 8 * 128)  # scores, then values
    assert found["all"] == found["products"] + found["attention"]


def test_pictures_differ() -> None:
    a, b = vision_bench.picture(2, 4, 1), vision_bench.picture(2, 4, 2)
    assert a.pixels.shape == (8, 3, 14, 14) and a.n_tokens == 2 and a.original_size == (56, 28)
    assert a.digest != b.digest and (a.pixels != b.pixels).any()
