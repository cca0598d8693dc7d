"""Pictures to patches: sizes and pixels against other people's results and the definition, limits, and odd files."""

from __future__ import annotations

import fcntl
import io
import json
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from deltallama import images as module
from deltallama.errors import ArgumentError
from deltallama.images import ImageLimits, Size, image_size, load_image, preprocess, target_size
from reference import images as definition

PUBLISHED = ImageLimits()


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def picture(rng: np.random.Generator, mode: str, width: int, height: int) -> Image.Image:
    """Noise, which no rounding spares."""
    n_channels = len(Image.new(mode, (1, 1)).getbands())
    values = rng.integers(0, 256, (height, width, n_channels), np.uint8)
    return Image.fromarray(values[..., 0] if n_channels == 1 else values, mode)


def as_bytes(pixels: np.ndarray) -> np.ndarray:
    """Normalised values back to uint8."""
    values = (pixels / 2 + 0.5) * 255
    assert np.abs(values - np.rint(values)).max() < 1e-4
    return np.rint(values).astype(np.uint8)


def png(width: int, height: int, rows: bytes = b"", depth: int = 8, transparent: bytes = b"", colour: int = 0) -> bytes:
    """A PNG, of grey values unless told, whose header may claim anything. A row begins with a zero byte."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    marked = chunk(b"tRNS", transparent) if transparent else b""
    return b"\x89PNG\r\n\x1a\n" + header + marked + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("original", "resized", "grid", "tokens"),
    [
        ((1, 1), (1, 1), (2, 2), 1),
        ((30, 16), (30, 16), (2, 4), 2),
        ((100, 100), (100, 100), (8, 8), 16),
        ((224, 224), (224, 224), (16, 16), 64),
        ((611, 437), (611, 437), (32, 44), 352),
        ((640, 480), (640, 480), (36, 46), 414),
        ((1920, 1080), (1920, 1080), (78, 138), 2691),
        ((4000, 3000), (4000, 3000), (216, 286), 15444),
        ((7168, 7168), (3584, 3584), (256, 256), 16384),
        ((8000, 8000), (3586, 3586), (258, 258), 16641),
        ((10000, 100), (7168, 71), (6, 512), 768),
        ((1, 10000), (1, 7168), (512, 2), 256),
    ],
)
def test_published_sizes(
    original: tuple[int, int], resized: tuple[int, int], grid: tuple[int, int], tokens: int
) -> None:
    assert target_size(*original, PUBLISHED) == Size(*resized, *grid, tokens)


def test_sizes_of_the_definition(rng: np.random.Generator) -> None:
    for _ in range(2000):
        width, height = (int(2 ** rng.uniform(0, 16)) for _ in range(2))
        patch_limit, side_limit = int(2 ** rng.uniform(0, 17)), int(rng.integers(1, 600))
        found = target_size(width, height, ImageLimits(patch_limit, side_limit))
        assert (found.width, found.height) == definition.target_size(width, height, patch_limit, side_limit)
        assert found.grid_w * 14 - found.width in range(28) and found.grid_h * 14 - found.height in range(28)
        assert found.grid_w % 2 == found.grid_h % 2 == 0 and found.tokens * 4 == found.grid_w * found.grid_h


def tokens_at(width: int, height: int, scales: np.ndarray) -> np.ndarray:
    w, h = (np.maximum(1, (side * scales).astype(int)) for side in (width, height))
    return -(-w // 28) * -(-h // 28)


@pytest.mark.parametrize(
    ("original", "options", "size"),
    [
        # (a minimum and) a maximum: the rows of the table in docs/vision.md
        ((2875, 1500), {}, Size(2875, 1500, 108, 206, 5562)),
        ((2875, 1500), {"max_tokens": 256}, Size(592, 308, 22, 44, 242)),
        ((2875, 1500), {"max_tokens": 1024}, Size(1232, 643, 46, 88, 1012)),
        ((640, 480), {"max_tokens": 64}, Size(252, 189, 14, 18, 63)),
        ((640, 480), {"max_tokens": 1}, Size(28, 21, 2, 2, 1)),
        ((100, 100), {"max_tokens": 64}, Size(100, 100, 8, 8, 16)),
        ((1, 10000), {"max_tokens": 16}, Size(1, 448, 32, 2, 16)),
        ((30, 16), {"min_tokens": 2}, Size(30, 16, 2, 4, 2)),
        ((30, 16), {"min_tokens": 4}, Size(54, 29, 4, 4, 4)),
        ((100, 100), {"min_tokens": 64}, Size(197, 197, 16, 16, 64)),
        ((64, 64), {"min_tokens": 10, "max_tokens": 12}, Size(84, 84, 6, 6, 9)),
        ((1, 1), {"min_tokens": 1024}, Size(869, 869, 64, 64, 1024)),
        ((10, 1000), {"min_tokens": 1024}, Size(71, 7168, 512, 6, 768)),
        ((8000, 8000), {"min_tokens": 20000}, Size(3586, 3586, 258, 258, 16641)),
    ],
)
def test_asked_for_tokens(original: tuple[int, int], options: dict[str, int], size: Size) -> None:
    assert target_size(*original, ImageLimits(**options)) == size


def test_asked_for_tokens_are_the_best_there_are(rng: np.random.Generator) -> None:
    """Against every size on the way: the largest scale with at most the maximum, the smallest with at least the
    minimum, and nothing changed where neither is needed."""
    for _ in range(300):
        width, height = (int(2 ** rng.uniform(0, 10)) for _ in range(2))
        plain = target_size(width, height, PUBLISHED)
        scales = np.concatenate([(np.arange(1, 7169) + 1e-7) / side for side in (width, height)])
        tokens = tokens_at(width, height, scales)
        most = int(rng.integers(1, 2 * plain.tokens + 1))
        found = target_size(width, height, ImageLimits(max_tokens=most))
        if plain.tokens <= most:
            assert found == plain
        else:
            best = scales[tokens <= most].max()
            assert (found.width, found.height) == (max(1, int(width * best)), max(1, int(height * best)))
            assert found.tokens <= most
        least = int(rng.integers(0, 3 * plain.tokens + 10))
        found = target_size(width, height, ImageLimits(min_tokens=least))
        if plain.tokens >= least:
            assert found == plain
        elif found.tokens >= least:
            best = scales[(scales >= 1) & (tokens >= least)].min()
            assert (found.width, found.height) == (int(width * best), int(height * best))
        else:
            assert max(found.width, found.height) == 7168  # the side's limit came first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "image_max_tokens is 0, expected a whole number of at least 1"),
        ({"min_tokens": -1}, "image_min_tokens is -1, expected a whole number of at least 0"),
        ({"min_tokens": 9, "max_tokens": 8}, "image_min_tokens is 9, expected at most image_max_tokens, 8"),
        ({"max_tokens": 2.0}, "image_max_tokens is 2.0, expected a whole number"),
        ({"patch_limit": True}, "patch_limit is True, expected a whole number"),
    ],
)
def test_wrong_limits(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ImageLimits(**options)


# ---- pixels ----------------------------------------------------------------------------------------------------------


def golden_cases() -> list[dict[str, Any]]:
    folder = Path(__file__).parent / "golden" / "images"
    return json.loads((folder / "cases.json").read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: case["file"])
def test_golden_pictures(golden: Path, case: dict[str, Any]) -> None:
    """Those that are not resampled byte for byte, the others within a level: other versions of the imaging library may
    round between the two directions of a resampling in another order."""
    limits = ImageLimits(case["in_patch_limit"], case["patch_limit_on_one_side"])
    found = preprocess(golden / "images" / case["file"], limits)
    assert [1, *found.grid] == case["grid_thw"] and found.n_tokens == case["tokens"]
    assert found.original_size == (case["width"], case["height"])
    with np.load(golden / "images" / "patches_u8.npz") as arrays:
        wanted = arrays[case["file"].removesuffix(".png")]
    size = target_size(case["width"], case["height"], limits)
    tolerance = 0 if (size.width, size.height) == (case["width"], case["height"]) else 1
    assert np.abs(as_bytes(found.pixels).astype(int) - wanted).max() <= tolerance
    if tolerance == 0:
        np.testing.assert_allclose(found.pixels, definition.normalise(wanted), rtol=0, atol=1e-7)


@pytest.mark.parametrize(("width", "height"), [(90, 41), (41, 90), (300, 17), (64, 64), (29, 500)])
@pytest.mark.parametrize("limit", [4, 20, 60])
def test_resampling_is_the_definition(rng: np.random.Generator, width: int, height: int, limit: int) -> None:
    """RGB byte for byte in one of the two orders, and, where nothing is clipped in between, within the rounding of
    two directions of the exact sums."""
    image = Image.fromarray(rng.integers(70, 186, (height, width, 3), np.uint8))
    limits = ImageLimits(limit)
    size = target_size(width, height, limits)
    found = as_bytes(preprocess(image, limits).pixels)
    values = np.asarray(image)
    orders = [
        definition.patches(definition.resize_fixed(values, size.width, size.height, vertical_first=order))
        for order in (False, True)
    ]
    assert any(np.array_equal(found, order) for order in orders)
    exact = definition.patches(np.clip(definition.resize_exact(values, size.width, size.height), 0, 255))
    assert np.abs(found - exact).max() < 1.5


def test_transparency_is_the_definition(rng: np.random.Generator) -> None:
    """Every alpha over white and grey squares, in a size that no square divides."""
    image = picture(rng, "RGBA", 301, 275)
    found = as_bytes(preprocess(image, PUBLISHED).pixels)
    np.testing.assert_array_equal(found, definition.patches(definition.over_chessboard(np.asarray(image))))


def test_normalisation_of_the_model(rng: np.random.Generator) -> None:
    image = picture(rng, "RGB", 28, 28)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    found = preprocess(image, PUBLISHED, mean=mean, std=std).pixels
    for colour in range(3):
        wanted = definition.normalise(definition.patches(np.asarray(image))[:, colour], mean[colour], std[colour])
        np.testing.assert_allclose(found[:, colour], wanted, rtol=0, atol=1e-6)


def test_result(rng: np.random.Generator) -> None:
    found = preprocess(picture(rng, "RGB", 61, 43), PUBLISHED)
    assert found.pixels.dtype == np.float32 and found.pixels.shape == (24, 3, 14, 14)
    assert found.pixels.flags.c_contiguous
    assert (found.grid, found.n_tokens, found.original_size) == ((4, 6), 6, (61, 43))


def test_digest(rng: np.random.Generator) -> None:
    """Equal for equal input of the tower, however the picture was stored; another for anything else."""
    image = picture(rng, "RGB", 56, 28)
    digest = preprocess(image, PUBLISHED).digest
    assert 0 <= digest < 2**64
    assert digest == preprocess(encoded(image), PUBLISHED).digest == preprocess(encoded(image, "BMP"), PUBLISHED).digest
    changed = image.copy()
    changed.putpixel((55, 27), tuple(value ^ 1 for value in image.getpixel((55, 27))))
    turned = Image.fromarray(np.asarray(image).reshape(56, 28, 3))  # the same bytes
    others = [
        preprocess(changed, PUBLISHED).digest,
        preprocess(turned, PUBLISHED).digest,
        preprocess(image, PUBLISHED, mean=(0.5, 0.5, 0.4)).digest,
        preprocess(image, ImageLimits(max_tokens=1)).digest,
    ]
    assert len({digest, *others}) == 5


# ---- kinds of files --------------------------------------------------------------------------------------------------


def one_colour(image: Image.Image | bytes, **options: Any) -> list[int]:
    """The colour of a picture of 28 x 28 pixels, which is the same everywhere."""
    found = as_bytes(preprocess(image, PUBLISHED, **options).pixels)
    assert found.shape == (4, 3, 14, 14)
    colours = {tuple(pixel) for pixel in found.transpose(0, 2, 3, 1).reshape(-1, 3).tolist()}
    assert len(colours) == 1
    return list(colours.pop())


def uniform(mode: str, colour: Any, **info: Any) -> Image.Image:
    image = Image.new(mode, (28, 28), colour)
    image.info.update(info)
    return image


DEEP = np.full((28, 28), 33025, np.uint16)  # 128.502 times 257


@pytest.mark.parametrize(
    ("image", "colour"),
    [
        pytest.param(uniform("1", 1), [255, 255, 255], id="black and white"),
        pytest.param(uniform("L", 77), [77, 77, 77], id="grey"),
        pytest.param(uniform("RGB", (9, 8, 7)).quantize(), [9, 8, 7], id="palette"),
        pytest.param(uniform("LA", (77, 255)), [77, 77, 77], id="grey with alpha"),
        pytest.param(uniform("RGBA", (9, 8, 7, 255)), [9, 8, 7], id="opaque alpha"),
        pytest.param(uniform("CMYK", (0, 255, 255, 0)), [255, 0, 0], id="CMYK"),
        pytest.param(uniform("YCbCr", (76, 85, 255)), [254, 0, 0], id="YCbCr"),
        pytest.param(Image.fromarray(DEEP), [129, 129, 129], id="16 bits, rounded up from 128.5"),
        pytest.param(Image.fromarray(DEEP.astype(np.int32)), [129, 129, 129], id="32 bits that hold 16"),
        pytest.param(Image.fromarray(np.full((28, 28), 65535, np.uint16)), [255, 255, 255], id="16 bits, white"),
    ],
)
def test_colours(image: Image.Image, colour: list[int]) -> None:
    assert one_colour(image) == colour


@pytest.mark.parametrize(
    ("format", "tolerance"), [("PNG", 0), ("BMP", 0), ("TIFF", 0), ("GIF", 0), ("PPM", 0), ("JPEG", 6)]
)
def test_formats(tmp_path: Path, format: str, tolerance: int) -> None:
    """Written and read: from a path, from bytes and opened."""
    path = tmp_path / "picture"
    colour = np.array([200, 100, 52])
    path.write_bytes(
        encoded(Image.new("RGB", (28, 28), tuple(colour)), format, **({"quality": 95} if tolerance else {}))
    )
    with Image.open(path) as opened:
        for source in (path, str(path), path.read_bytes(), bytearray(path.read_bytes()), opened):
            found = as_bytes(preprocess(source, PUBLISHED).pixels).astype(int).transpose(1, 0, 2, 3).reshape(3, -1)
            assert np.abs(found - colour[:, None]).max() <= tolerance


def test_16_bit_png_of_grey() -> None:
    image = Image.fromarray(np.linspace(0, 65535, 28 * 28).reshape(28, 28).astype(np.uint16))
    found = as_bytes(preprocess(encoded(image), PUBLISHED).pixels)
    wanted = np.rint(np.asarray(image) / 257).astype(np.uint8)
    np.testing.assert_array_equal(found, definition.patches(np.repeat(wanted[..., None], 3, axis=2)))


@pytest.mark.parametrize("mode", ["L", "RGB", "P", "16 bits"])
def test_one_colour_declared_transparent(mode: str) -> None:
    """The chunk of PNG that makes pixels of one value transparent: the chessboard shows there."""
    values = np.zeros((28, 28, 3) if mode == "RGB" else (28, 28), np.uint8)
    values[:14] = 7
    if mode == "16 bits":
        rows = [b"\0" + row.astype(">u2").tobytes() for row in values]
        data = png(28, 28, b"".join(rows), depth=16, transparent=b"\0\7")
    else:
        image = Image.fromarray(values)
        if mode == "P":
            image.putpalette([0, 0, 0] * 256)
        data = encoded(image, transparency=(7, 7, 7) if mode == "RGB" else 7)
    found = as_bytes(preprocess(data, PUBLISHED).pixels)
    board = definition.chessboard(28, 28)
    board[14:] = 0
    np.testing.assert_array_equal(found, definition.patches(np.repeat(board[..., None].astype(np.uint8), 3, axis=2)))


def test_exif_rotation_is_an_option(rng: np.random.Generator) -> None:
    """Orientation 6: the upper left corner of what is stored is the upper right one of what was seen."""
    image = picture(rng, "RGB", 56, 28)
    note = Image.Exif()
    note[0x0112] = 6
    data = encoded(image, exif=note)
    as_stored, as_seen = preprocess(data, PUBLISHED), preprocess(data, PUBLISHED, exif=True)
    assert as_stored.original_size == (56, 28) and as_stored.digest == preprocess(image, PUBLISHED).digest
    assert as_seen.original_size == (28, 56)
    turned = Image.fromarray(np.ascontiguousarray(np.rot90(np.asarray(image), -1)))
    assert as_seen.digest == preprocess(turned, PUBLISHED).digest
    assert preprocess(image, PUBLISHED, exif=True).digest == as_stored.digest  # nothing is noted there


@pytest.mark.parametrize("format", ["GIF", "PNG", "TIFF"])
def test_animations_give_their_first_picture(format: str) -> None:
    first, second = Image.new("RGB", (28, 28), (255, 0, 0)), Image.new("RGB", (28, 28), (0, 0, 255))
    data = encoded(first, format, save_all=True, append_images=[second])
    assert one_colour(data) == [255, 0, 0]
    with Image.open(io.BytesIO(data)) as opened:
        opened.seek(1)
        assert one_colour(opened) == [0, 0, 255]  # the current one of an opened file


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the picture of 0 bytes is no picture of a known format (PNG, JPEG, WEBP, GIF, BMP, TIFF, PPM)"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "is no picture of a known format"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no picture of a known format"),
        (png(8193, 8192), "has 8193 x 8192 pixels, expected at most 67108864 in all and 65536 on a side"),
        (png(65537, 1), "has 65537 x 1 pixels, expected at most 67108864 in all and 65536 on a side"),
        (png(1 << 20, 1 << 20), "has more than 67108864 pixels"),
    ],
)
def test_refused_data(data: bytes, message: str) -> None:
    for read in (load_image, lambda data: preprocess(data, PUBLISHED)):
        with pytest.raises(ArgumentError) as caught:
            read(data)
        assert message in str(caught.value)


def test_a_palette_picture_without_palette() -> None:
    data = png(1, 1, b"\0\0", colour=3)
    with pytest.raises(ArgumentError, match=f"the picture of {len(data)} bytes has colours of a palette, and no"):
        preprocess(data, PUBLISHED)


def test_tiles_far_larger_than_the_picture() -> None:
    """They would be decoded whole."""
    values = {256: 10, 257: 10, 258: 8, 259: 8, 262: 1, 277: 1, 322: 40000, 323: 40000, 324: 8, 325: 9}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in values.items())
    data = b"II*\0" + struct.pack("<IH", 8, len(values)) + entries + bytes(4)
    for read in (load_image, image_size):
        with pytest.raises(ArgumentError, match="has tiles of 40000 x 40000 pixels, expected at most 67108864"):
            read(data)


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
def test_pictures_without_pixels(size: tuple[int, int]) -> None:
    with pytest.raises(ArgumentError, match=f"the picture has {size[0]} x {size[1]} pixels, expected at least 1 x 1"):
        preprocess(Image.new("RGB", size), PUBLISHED)
    with pytest.raises(ArgumentError):
        load_image(png(*size))
    with pytest.raises(ArgumentError, match="expected at least 1 x 1"):
        target_size(*size, PUBLISHED)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the decoders, about such files
@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "PPM", "WEBP"])
def test_damaged_files(rng: np.random.Generator, format: str) -> None:
    """Cut anywhere, or with bytes changed anywhere: a picture or the one exception."""
    data = encoded(picture(rng, "RGB", 40, 30), format)
    cut = [data[: int(n)] for n in rng.integers(0, len(data), 40)]
    changed = []
    for _ in range(150):
        copy = bytearray(data)
        for at in rng.integers(0, len(data), 3):
            copy[at] = rng.integers(256)
        changed.append(bytes(copy))
    refused = 0
    for damaged in (*cut, *changed):
        try:
            preprocess(damaged, ImageLimits(max_tokens=16))
        except ArgumentError as error:
            refused += 1
            assert str(error).startswith(f"the picture of {len(damaged)} bytes ")
    assert refused > 10


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=f"{tmp_path}/none.png cannot be read: No such file"):
        load_image(tmp_path / "none.png")
    with pytest.raises(ArgumentError, match=f"{tmp_path} is not a file"):
        load_image(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArgumentError, match="pipe is not a file"):
        load_image(tmp_path / "pipe")
    with pytest.raises(ArgumentError, match="null byte"):
        load_image("a\0b")


def test_files_that_wait_or_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the kernel's: a regular file of size 0 whose bytes come some day, or without end."""
    path = tmp_path / "x.png"
    path.write_bytes(b"")
    pipe = os.pipe()
    monkeypatch.setattr(os, "open", lambda path, flags: fcntl.fcntl(pipe[0], fcntl.F_DUPFD_CLOEXEC, 0))
    os.set_blocking(pipe[0], False)
    with pytest.raises(ArgumentError, match="x.png cannot be read: it has no bytes yet"):
        load_image(path)
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 10)
    os.write(pipe[1], bytes(20))
    with pytest.raises(ArgumentError, match="x.png has 11 bytes, expected at most 10"):
        load_image(path)
    for end in pipe:
        os.close(end)


def test_files_that_are_too_long(tmp_path: Path) -> None:
    path = tmp_path / "long.png"
    with path.open("wb") as file:
        file.truncate(module.MAX_FILE_BYTES + 1)
    with pytest.raises(ArgumentError, match="long.png has 268435457 bytes, expected at most 268435456"):
        load_image(path)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (Image.new("F", (4, 4)), "the picture holds floating-point values, whose black and white are unknown"),
        (Image.new("I", (4, 4), 70000), "the picture has grey values from 70000 to 70000, expected 0 to 65535"),
        (Image.new("I", (4, 4), -1), "the picture has grey values from -1 to -1, expected 0 to 65535"),
        (Image.new("La", (4, 4)), "the picture has colours of mode La: "),
        (uniform("P", 0, transparency="abc"), "the picture has colours of mode P: "),
        (uniform("P", 0, transparency=(1, 2)), "the picture has colours of mode P: "),
        (uniform("RGB", (0, 0, 0), transparency="abc"), "the picture has colours of mode RGB: "),
    ],
)
def test_colours_without_meaning(image: Image.Image, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        preprocess(image, PUBLISHED)
    assert str(caught.value).startswith(message)


def test_a_closed_picture(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(encoded(Image.new("RGB", (4, 4))))
    opened = Image.open(tmp_path / "x.png")
    opened.close()
    with pytest.raises(ArgumentError, match="x.png cannot be decoded: "):
        preprocess(opened, PUBLISHED)


PEAK = """
import resource, sys
from PIL import Image
from deltallama.images import ImageLimits, preprocess
with Image.open(sys.argv[1]) as image:
    preprocess(image, ImageLimits())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.fixture(scope="module")
def peak_memory() -> Callable[[bytes, Path], int]:
    """`peak_memory(data, folder)`: the most memory in bytes that a process had that prepared this picture."""

    def measure(data: bytes, folder: Path) -> int:
        (folder / "picture").write_bytes(data)
        command = [sys.executable, "-c", PEAK, str(folder / "picture")]
        return int(subprocess.run(command, check=True, capture_output=True, timeout=600).stdout)

    return measure


@pytest.mark.parametrize("mode", ["RGBA", "P", "L"])
def test_memory(tmp_path: Path, peak_memory: Callable[[bytes, Path], int], mode: str) -> None:
    """At most 16 bytes for a pixel of the picture and 20 for one of the result, which makes the bound of the docs."""
    little = peak_memory(encoded(Image.new(mode, (1, 1))), tmp_path)
    side = 4096
    image = Image.new(mode, (side, side))
    if mode == "P":
        image.info["transparency"] = 0  # the dearest way: through a palette to transparent colours
    size = target_size(side, side, PUBLISHED)
    peak = peak_memory(encoded(image), tmp_path)
    assert peak - little <= 16 * side * side + 20 * size.grid_h * size.grid_w * 196
    largest = 16 * module.MAX_PIXELS + 20 * 196 * 4 * 16641
    assert largest + module.MAX_FILE_BYTES <= 1.5 * 2**30


def test_long_sides_stay_small(tmp_path: Path, peak_memory: Callable[[bytes, Path], int]) -> None:
    """The weights of a resampling grow with the side; the longest one takes little."""
    little = peak_memory(encoded(Image.new("L", (1, 1))), tmp_path)
    assert peak_memory(encoded(Image.new("L", (module.MAX_SIDE, 1))), tmp_path) - little < 32e6
