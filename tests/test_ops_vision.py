"""The ops of a vision tower on every device, alone, against the float64 reference (see test_ops.py for the bounds)."""

from __future__ import annotations

import numpy as np
import pytest

import native
from op_runner import Weight, nmse, run
from reference import vision
from test_ops import DEVICES, WIDE, bound, normal

pytestmark = pytest.mark.skipif(not native.has_test_api(), reason="the library was built without its test interface")

GRIDS = [(1, 2, 2), (1, 6, 10), (2, 4, 6), (4, 2, 8)]  # frames, rows, columns


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def stored_order(d: int) -> np.ndarray:
    """Where each channel of a head as the file keeps it comes from: pairs that turn by the column first."""
    source = np.arange(d).reshape(d // 4, 2, 2)
    return np.concatenate([source[:, 0].ravel(), source[:, 1].ravel()])


def test_pixels(device: str, rng: np.random.Generator) -> None:
    pixels = normal(rng, 6, 27)
    found = run("pixels", [], device=device, out_cols=27, n_rows=6, image=(1, 2, 3), pixels=pixels)
    assert np.array_equal(found, pixels)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("table", [(1, 1), (5, 7), (6, 10), (64, 3)], ids=str)
def test_grid_position(
    device: str, rng: np.random.Generator, grid: tuple[int, int, int], table: tuple[int, int]
) -> None:
    """Larger, smaller and the same; several frames have a time too."""
    n, width = int(np.prod(grid)), 18
    x, places = normal(rng, n, width), Weight.encode(normal(rng, table[0] * table[1], width))
    found = run("grid_position", [x], [places], list(table), device=device, out_cols=width, image=grid)
    expected = x + vision.positions(places.values.reshape(*table, width), grid).reshape(n, width)
    assert nmse(found, expected) < bound(device)


@pytest.mark.parametrize("grid", [*GRIDS, (1, 2, 200)])
@pytest.mark.parametrize("heads,d", [(1, 4), (3, 16), (2, 72)])
def test_grid_rope(device: str, rng: np.random.Generator, grid: tuple[int, int, int], heads: int, d: int) -> None:
    """The reference turns neighbours by column and row in turn; the file keeps the pairs of the columns first."""
    n = int(np.prod(grid))
    qkv, order = normal(rng, n, 3, heads, d), stored_order(d)
    found = run(
        "grid_rope", [qkv[..., order].reshape(n, -1)], params=[heads, d, 10000.0], device=device,
        out_cols=3 * heads * d, image=grid,
    ).reshape(n, 3, heads, d)  # fmt: skip
    for part in range(2):
        assert nmse(found[:, part], vision.rope_2d(qkv[:, part].astype(np.float64), grid)[..., order]) < bound(device)
    assert np.array_equal(found[:, 2], qkv[:, 2][..., order])


@pytest.mark.parametrize("grid", [(1, 1, 1), (1, 6, 10), (1, 8, 8), (2, 4, 12), (1, 14, 16)])
@pytest.mark.parametrize("heads,d,scale", [(1, 4, 1.0), (3, 16, 1.0), (2, 72, 3.0), (5, 128, 1.0)])
def test_image_attention(
    device: str, rng: np.random.Generator, grid: tuple[int, int, int], heads: int, d: int, scale: float
) -> None:
    """One patch, less and more than a block of keys and a tile of queries; large scores make one patch win."""
    n = int(np.prod(grid))
    qkv = normal(rng, n, 3, heads, d, scale=scale)
    found = run(
        "image_attention", [qkv.reshape(n, -1)], params=[heads, d, 10000.0], device=device, out_cols=heads * d,
        image=grid,
    )  # fmt: skip
    q, k, v = (qkv[:, part].astype(np.float64) for part in range(3))
    # A score's rounding is a share of its size, and the exponential makes it a share of the weight.
    largest = float(np.abs(np.einsum("nhd,mhd->hnm", q, k)).max()) * d**-0.5
    rounding = 0.0 if device in WIDE else (3e-7 * largest) ** 2
    assert nmse(found, vision.attention(q, k, v).reshape(n, -1)) < bound(device) + rounding


@pytest.mark.parametrize("n_threads", [1, 3])
def test_image_attention_is_the_same_in_any_company(rng: np.random.Generator, n_threads: int) -> None:
    """Bit for bit, whatever the number of threads: a head does not depend on how many heads there are."""
    n, d = 300, 20
    qkv = normal(rng, n, 3, 4, d)
    options = {"device": "cpu-float", "image": (1, 20, 15), "n_threads": n_threads}
    whole = run("image_attention", [qkv.reshape(n, -1)], params=[4, d, 1.0], out_cols=4 * d, **options)
    for head in range(4):
        alone = run("image_attention", [qkv[:, :, head].reshape(n, -1)], params=[1, d, 1.0], out_cols=d, **options)
        assert np.array_equal(alone, whole[:, head * d : (head + 1) * d])


def test_nan_of_one_patch_reaches_every_patch(device: str, rng: np.random.Generator) -> None:
    """What a picture does not determine is not to look like a result."""
    qkv = normal(rng, 100, 3 * 8)
    qkv[70, 8] = np.nan  # a key
    found = run("image_attention", [qkv], params=[1, 8, 1.0], device=device, out_cols=8, image=(1, 10, 10))
    assert np.isnan(found).all()


@pytest.mark.parametrize("kind,formula", [(0, vision.gelu_erf), (1, vision.gelu_tanh)], ids=["erf", "tanh"])
def test_gelu(device: str, rng: np.random.Generator, kind: int, formula: object) -> None:
    x = np.concatenate([normal(rng, 3, 50, scale=3), [[-1e30, -50, -9, -3, -1e-20, 0, 1e-20, 3, 9, 1e30] * 5]])
    x = x.astype(np.float32)
    found = run("gelu", [x], params=[kind], device=device, out_cols=50, image=(1, 2, 2))
    with np.errstate(over="ignore"):
        expected = formula(x.astype(np.float64))  # type: ignore[operator]
    assert nmse(found[:3], expected[:3]) < bound(device)
    # Near zero from below the two formulas lose their digits at their own pace; half an ulp of 1 is what is promised.
    np.testing.assert_allclose(found[3], expected[3], rtol=1e-6, atol=6e-8)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("side", [1, 2])
def test_merge_squares(device: str, rng: np.random.Generator, grid: tuple[int, int, int], side: int) -> None:
    n = int(np.prod(grid))
    x = normal(rng, n, 9)
    found = run("merge_squares", [x], params=[side], device=device, out_cols=side * side * 9, image=grid)
    assert nmse(found, vision.merge(x.astype(np.float64), grid, (side, side))) < bound(device)


def test_embed_of_features(device: str, rng: np.random.Generator) -> None:
    """Tokens and rows that stand in their place, in any order."""
    table, rows = Weight.encode(normal(rng, 7, 24)), normal(rng, 4, 24)
    tokens = np.array([6, -1, -3, 0], np.int32)
    found = run("embed", [], [table], device=device, out_cols=24, n_rows=4, tokens=tokens, features=rows)
    assert np.array_equal(found, np.stack([table.values[6], rows[0], rows[2], table.values[0]]).astype(np.float32))


@pytest.mark.parametrize(
    "op,cols,params,message",
    [
        ("grid_rope", 24, [2, 6, 1e4], "four must divide"),
        ("grid_rope", 24, [2, 8, 1e4], "24 columns for 2 heads of 8"),
        ("image_attention", 25, [2, 4, 1e4], "25 columns for 2 heads of 4"),
    ],
)
def test_shapes_are_checked(op: str, cols: int, params: list[float], message: str) -> None:
    with pytest.raises(native.NativeError, match=message):
        run(op, [np.zeros((4, cols))], params=params, device="cpu", out_cols=cols, image=(1, 2, 2))
