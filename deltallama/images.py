"""Pictures to patches: the way from a file to what the vision tower takes, as the published preprocessing goes it.

    image = load_image("cat.jpg")
    patches = preprocess(image, ImageLimits(max_tokens=1024))
    patches.pixels.shape      # (patches, 3, 14, 14)

A picture is made smaller until it keeps the limits, laid over a chessboard where it is transparent, padded with black
at the right and at the bottom to whole squares of merged patches, normalised and cut into patches. docs/vision.md has
the tables.
"""

from __future__ import annotations

import io
import math
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, TiffImagePlugin, UnidentifiedImageError

from .errors import ArgumentError

# What is decoded at all. With these a picture never takes more than 1.5 GiB on its way (docs/vision.md).
MAX_PIXELS = 1 << 26
MAX_SIDE = 1 << 16  # resizing keeps 32 bytes per column or row
MAX_FILE_BYTES = 1 << 28
# Others are rare, and some of their decoders start programs.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")

_SQUARE, _WHITE, _GREY = 8, 255, 180  # of the chessboard: its side in pixels, and its colours
_HALF = (0.5, 0.5, 0.5)
_DEEP = ("I", "I;16", "I;16L", "I;16B", "I;16N")  # modes of grey values beyond 8 bits

ImageSource = Image.Image | str | os.PathLike[str] | bytes | bytearray | memoryview


@dataclass(frozen=True)
class ImageLimits:
    """How large a picture may become, and how it is cut.

    Attributes:
        patch_limit: patches of a picture before padding, about (the published formula rounds); side_limit: of a side.
        min_tokens: a picture of fewer tokens is enlarged to have as many, as far as the other limits allow; None or 0
            leaves it as it is, which is what the published preprocessing does.
        max_tokens: a picture never has more; None: no other limit than those above.
        patch: side of a patch in pixels; merge: side of the square of patches that becomes one token.

    Raises:
        ArgumentError: a number is out of range, or the minimum is above the maximum.
    """

    patch_limit: int = 65536
    side_limit: int = 512
    min_tokens: int | None = None
    max_tokens: int | None = None
    patch: int = 14
    merge: int = 2

    def __post_init__(self) -> None:
        for name in ("patch_limit", "side_limit", "patch", "merge"):
            _check_count(name, getattr(self, name), 1)
        if self.min_tokens is not None:
            _check_count("image_min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _check_count("image_max_tokens", self.max_tokens, 1)
            if self.min_tokens is not None and self.min_tokens > self.max_tokens:
                raise ArgumentError(
                    f"image_min_tokens is {self.min_tokens}, expected at most image_max_tokens, {self.max_tokens}"
                )

    @property
    def cell(self) -> int:
        """Side in pixels of the square that becomes one token."""
        return self.patch * self.merge


@dataclass(frozen=True)
class Size:
    """What a picture becomes: `width` and `height` in pixels before padding, the grid in patches after it, and the
    number of tokens."""

    width: int
    height: int
    grid_h: int
    grid_w: int
    tokens: int


@dataclass(frozen=True, eq=False)
class Preprocessed:
    """Patches of one picture, ready for the tower.

    Attributes:
        pixels: float32 `[grid_h * grid_w, 3, patch, patch]`, normalised, row by row of the grid.
        grid: (grid_h, grid_w).
        n_tokens: rows that the tower makes of it.
        original_size: (width, height) before anything was done, as the prompt tells the model.
        digest: 64 bits of pixels, grid and normalisation: equal for equal input of the tower.
    """

    pixels: np.ndarray
    grid: tuple[int, int]
    n_tokens: int
    original_size: tuple[int, int]
    digest: int


# ---- sizes -----------------------------------------------------------------------------------------------------------


def target_size(width: int, height: int, limits: ImageLimits) -> Size:
    """The size of a picture of `width` times `height` pixels under the limits.

    Raises:
        ArgumentError: a side is below 1.
    """
    if min(width, height) < 1:
        raise ArgumentError(f"a picture of {width} x {height} pixels, expected at least 1 x 1")
    scale = _published_scale(width, height, limits)
    size = _scaled(width, height, scale, limits)
    most = limits.max_tokens
    if scale == 1 and limits.min_tokens is not None and size.tokens < limits.min_tokens:
        allowed = max(size.tokens, limits.patch_limit // limits.merge**2)
        most = allowed if most is None else min(most, allowed)
        size = _scaled(width, height, _smallest_scale(width, height, limits.min_tokens, limits), limits)
    if most is not None and size.tokens > most:
        size = _largest_size(width, height, most, limits)
    return size


def _published_scale(width: int, height: int, limits: ImageLimits) -> float:
    """The scale of the published preprocessing, by the same floating-point operations."""
    patches = max(1, width // limits.patch) * max(1, height // limits.patch)
    side = limits.side_limit * limits.patch
    return min(1.0, math.sqrt(limits.patch_limit / patches), side / width, side / height)


def _scaled(width: int, height: int, scale: float | Fraction, limits: ImageLimits) -> Size:
    side = limits.side_limit * limits.patch
    return _padded(min(max(1, int(width * scale)), side), min(max(1, int(height * scale)), side), limits)


def _padded(width: int, height: int, limits: ImageLimits) -> Size:
    columns, rows = -(-width // limits.cell), -(-height // limits.cell)
    return Size(width, height, rows * limits.merge, columns * limits.merge, columns * rows)


def _columns(tokens: int, limits: ImageLimits) -> range:
    """The numbers of columns that so many tokens may stand in."""
    return range(1, min(tokens, -(-limits.side_limit // limits.merge)) + 1)


def _smallest_scale(width: int, height: int, tokens: int, limits: ImageLimits) -> Fraction:
    """The smallest scale with at least so many tokens, at most that of the longest side allowed. More than n cells
    begin where a side has n cell + 1 pixels."""
    cell, scales = limits.cell, []
    for columns in _columns(tokens, limits):
        rows = -(-tokens // columns)
        scales.append(max(Fraction((columns - 1) * cell + 1, width), Fraction((rows - 1) * cell + 1, height)))
    return min(*scales, Fraction(limits.side_limit * limits.patch, max(width, height)))


def _largest_size(width: int, height: int, tokens: int, limits: ImageLimits) -> Size:
    """The size of the largest scale with at most so many tokens.

    Scales with at most `columns` times `rows` cells are those below the one at which either side has one pixel too
    many; the sizes meant are those just below it.
    """
    cell = limits.cell
    below = Fraction(0)
    for columns in _columns(tokens, limits):
        rows = tokens // columns
        below = max(below, min(Fraction(columns * cell + 1, width), Fraction(rows * cell + 1, height)))
    return _padded(max(1, math.ceil(width * below) - 1), max(1, math.ceil(height * below) - 1), limits)


# ---- reading ---------------------------------------------------------------------------------------------------------


def load_image(source: ImageSource) -> Image.Image:
    """Decode a picture: a path, the bytes of a file, or one that Pillow has opened, which is decoded if it is not yet.

    Of an animation or a file of several pictures the first is taken (of an opened one the current).

    Raises:
        ArgumentError: there is no such file, it is no picture of one of the `FORMATS`, damaged, without pixels or
            larger than `MAX_PIXELS`, `MAX_SIDE` or `MAX_FILE_BYTES`.
    """
    return _read(source, lambda image: image.load())


def image_size(source: ImageSource) -> tuple[int, int]:
    """(width, height) of a picture as its header has them: nothing is decoded.

    Raises:
        ArgumentError: as `load_image`, as far as the header tells.
    """
    return _read(source, lambda image: None).size


def _read(source: ImageSource, use: Callable[[Image.Image], object]) -> Image.Image:
    """The picture, opened, within the limits, and used."""
    name = _name(source)
    try:
        image = source if isinstance(source, Image.Image) else Image.open(_opened(source, name), formats=FORMATS)
        _check_size(image, name)
        use(image)
    except ArgumentError:
        raise
    except UnidentifiedImageError:
        raise ArgumentError(f"{name} is no picture of a known format ({', '.join(FORMATS)})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ArgumentError(f"{name} has more than {MAX_PIXELS} pixels") from None
    except MemoryError:
        raise
    except Exception as error:  # on damaged data decoders raise nearly anything
        raise ArgumentError(f"{name} cannot be decoded: {error}") from None
    return image


def _name(source: ImageSource) -> str:
    """What messages call a picture."""
    if isinstance(source, Image.Image):
        return str(getattr(source, "filename", "") or "the picture")
    if isinstance(source, bytes | bytearray | memoryview):
        return f"the picture of {len(source)} bytes"
    return os.fspath(source)


def _opened(source: str | os.PathLike[str] | bytes | bytearray | memoryview, name: str) -> io.BytesIO:
    """The bytes of a file: held whole, so that no file stays open with a picture."""
    if isinstance(source, bytes | bytearray | memoryview):
        size = len(source)
        if size <= MAX_FILE_BYTES:
            return io.BytesIO(source)
    else:
        try:
            status = Path(source).stat()
            if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
                raise ArgumentError(f"{name} is not a file")
            size = status.st_size
            if size <= MAX_FILE_BYTES:
                # A file may grow meanwhile, and one of size 0 may be one that the kernel makes up, or waits with.
                with open(source, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
                    data = file.read(MAX_FILE_BYTES + 1)
                if data is None:
                    raise ArgumentError(f"{name} cannot be read: it has no bytes yet")
                size = len(data)
                if size <= MAX_FILE_BYTES:
                    return io.BytesIO(data)
        except OSError as error:
            raise ArgumentError(f"{name} cannot be read: {error.strerror}") from None
    raise ArgumentError(f"{name} has {size} bytes, expected at most {MAX_FILE_BYTES}")


def _check_size(image: Image.Image, name: str) -> None:
    width, height = image.size
    if min(width, height) < 1:
        raise ArgumentError(f"{name} has {width} x {height} pixels, expected at least 1 x 1")
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise ArgumentError(
            f"{name} has {width} x {height} pixels, expected at most {MAX_PIXELS} in all and {MAX_SIDE} on a side"
        )
    if isinstance(image, TiffImagePlugin.TiffImageFile):  # a tile is decoded whole, whatever lies within the picture
        tile: list[Any] = [image.tag_v2.get(tag) for tag in (TiffImagePlugin.TILEWIDTH, TiffImagePlugin.TILELENGTH)]
        if all(isinstance(side, int) for side in tile) and tile[0] * tile[1] > MAX_PIXELS:
            raise ArgumentError(f"{name} has tiles of {tile[0]} x {tile[1]} pixels, expected at most {MAX_PIXELS}")


# ---- pixels ----------------------------------------------------------------------------------------------------------


def preprocess(
    image: ImageSource,
    limits: ImageLimits,
    *,
    exif: bool = False,
    mean: Sequence[float] = _HALF,
    std: Sequence[float] = _HALF,
) -> Preprocessed:
    """The patches of a picture.

    `exif` turns it as its camera noted (the published preprocessing does not); its sizes are then those afterwards.
    `mean` and `std` are those of the model's file, red, green and blue, for values from 0 to 1.

    Raises:
        ArgumentError: as `load_image`; or the colours are stored in a way that has no meaning as red, green and blue.
    """
    name = _name(image)
    image = load_image(image)
    if exif:
        try:
            image = ImageOps.exif_transpose(image)
        except Exception as error:  # as above: the note is data of the file
            raise ArgumentError(f"{name}: its EXIF data cannot be read: {error}") from None
    original = image.size
    size = target_size(*original, limits)
    coloured = _coloured(image, name)
    if coloured.size != (size.width, size.height):
        coloured = coloured.resize((size.width, size.height), Image.Resampling.BICUBIC)
    bands = np.zeros((size.grid_h, limits.patch, size.grid_w, limits.patch, 3), np.uint8)  # padding is black
    canvas = bands.reshape(size.grid_h * limits.patch, size.grid_w * limits.patch, 3)
    for top, rows in _opaque_rows(coloured):
        canvas[top : top + len(rows), : size.width] = rows
    values = _normalised(mean, std)
    pixels = np.empty((size.grid_h, size.grid_w, 3, limits.patch, limits.patch), np.float32)
    for band, out in zip(bands, pixels, strict=True):  # [patch, grid_w, patch, 3] -> [grid_w, 3, patch, patch]
        for colour in range(3):
            out[:, colour] = values[colour][band[..., colour].transpose(1, 0, 2)]
    digest = blake2b(repr((size.grid_h, size.grid_w, limits.patch)).encode(), digest_size=8)
    digest.update(values.data)
    digest.update(canvas.data)
    return Preprocessed(
        pixels.reshape(-1, 3, limits.patch, limits.patch),
        (size.grid_h, size.grid_w),
        size.tokens,
        original,
        int.from_bytes(digest.digest(), "little"),
    )


def _coloured(image: Image.Image, name: str) -> Image.Image:
    """The picture in RGB, or in RGBA if any of it may be transparent."""
    if image.mode in _DEEP:
        return _eight_bits(image, name)
    if image.mode == "F":
        raise ArgumentError(f"{name} holds floating-point values, whose black and white are unknown")
    if image.mode in ("P", "PA") and image.palette is None:
        raise ArgumentError(f"{name} has colours of a palette, and no palette")
    wanted = "RGBA" if image.has_transparency_data else "RGB"
    try:
        return image if image.mode == wanted else image.convert(wanted)
    except MemoryError:
        raise
    except Exception as error:  # the palette and what is transparent are data of the file, or of whoever made it
        raise ArgumentError(f"{name} has colours of mode {image.mode}: {error}") from None


def _eight_bits(image: Image.Image, name: str) -> Image.Image:
    """Grey values from 0 to 65535 to 0 to 255, rounded. (Pillow's own conversion cuts off at 255.)"""
    deep = np.asarray(image)
    if deep.min() < 0 or deep.max() > 65535:
        raise ArgumentError(f"{name} has grey values from {deep.min()} to {deep.max()}, expected 0 to 65535")
    grey = Image.fromarray(((np.arange(65536) + 128) // 257).astype(np.uint8)[deep])
    transparent = image.info.get("transparency")
    if not isinstance(transparent, int):
        return grey.convert("RGB")
    coloured = grey.convert("RGBA")
    coloured.putalpha(Image.fromarray(np.where(deep == transparent, 0, 255).astype(np.uint8)))
    return coloured


def _opaque_rows(image: Image.Image) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, uint8 rows) of a picture, some at a time; what is transparent lets a chessboard of white and grey
    squares through, the upper left one white."""
    width, height = image.size
    step = 32 * _SQUARE
    for top in range(0, height, step):
        rows = np.asarray(image.crop((0, top, width, min(top + step, height))))
        if image.mode == "RGBA":
            square = (np.arange(top, top + len(rows))[:, None] // _SQUARE + np.arange(width) // _SQUARE) % 2
            board = np.where(square, np.float32(_GREY), np.float32(_WHITE))[..., None]
            alpha = rows[..., 3:].astype(np.float32) / 255
            rows = (alpha * rows[..., :3] + (1 - alpha) * board).astype(np.uint8)
        yield top, rows


def _normalised(mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """float32 `[3, 256]`: what each value of a colour becomes."""
    values = np.arange(256, dtype=np.float32) / 255
    return (values - np.asarray(mean, np.float32)[:, None]) / np.asarray(std, np.float32)[:, None]


def _check_count(name: str, value: object, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ArgumentError(f"{name} is {value!r}, expected a whole number of at least {minimum}")
