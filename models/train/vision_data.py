"""Questions about pictures as token ids with room for the picture's rows, and pictures as patches. No torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tiktoken
from PIL import Image

import pictures
from data import Writer
from pictures import Scene

Grid = tuple[int, int]  # rows and columns of patches
PATCH, MERGE = 14, 2
WEIGHTS = {"shape": 0.22, "colour": 0.08, "both": 0.22, "count": 0.20, "place": 0.09, "size": 0.05, "digit": 0.14}


@dataclass
class Sample:
    """``ids`` has -1 where a row of the picture stands."""

    scene: Scene
    kind: str
    ids: list[int]
    learn: list[bool]  # whether the token is one the assistant writes


def grid_of(scene: Scene) -> Grid:
    """Rows and columns of patches, after padding to whole merged rows."""
    unit = PATCH * MERGE
    return -(-scene.height // unit) * MERGE, -(-scene.width // unit) * MERGE


def patches(image: Image.Image) -> np.ndarray:
    """float32 ``[P, 3, side, side]``: padded with black at the right and at the bottom, then normalised to -1 … 1."""
    unit = PATCH * MERGE
    pixels = np.asarray(image.convert("RGB"))
    height, width = pixels.shape[:2]
    pixels = np.pad(pixels, ((0, -height % unit), (0, -width % unit), (0, 0)))
    values = (pixels.astype(np.float32) / 255 - 0.5) * 2
    h, w = pixels.shape[0] // PATCH, pixels.shape[1] // PATCH
    return values.reshape(h, PATCH, w, PATCH, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, PATCH, PATCH)


def before_size(enc: tiktoken.Encoding) -> list[int]:
    """What the prompts of all pictures begin with, thinking off: up to the picture's width."""
    out = Writer(enc)
    out.open("message", role="user")
    out.special("<|media_begin|>")
    out.text("image ")
    return out.ids


def sample(enc: tiktoken.Encoding, scene: Scene, kind: str) -> Sample:
    """The rest of the prompt, the answer and the end of the turn: the K3 form, a picture and then the question."""
    before = Writer(enc)
    before.text(f"image {scene.width}x{scene.height}")
    ids = before.ids[len(enc.encode_ordinary("image ")) :]
    h, w = grid_of(scene)
    room = h * w // MERGE**2
    out = Writer(enc)
    out.special("<|media_end|>")
    out.text(pictures.ASKS[kind])
    out.end()
    out.reply(None, scene.truth[kind], None)
    ids += [enc.encode_single_token("<|media_content|>"), *([-1] * room)]
    return Sample(scene, kind, ids + out.ids, [False] * len(ids) + out.learn)


def drawn(enc: tiktoken.Encoding, rng: random.Random, n: int, ease: float = 0.0) -> list[Sample]:
    """``n`` questions about as many new pictures. Any question with an answer is asked: the colour of a digit too."""
    out = []
    for kind in rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=n):
        scene = pictures.eased(pictures.scene(rng, kind), ease)
        asked = kind if rng.random() < 0.8 else rng.choice(list(scene.truth))
        out.append(sample(enc, scene, asked))
    return out


def pixels_of(samples: Sequence[Sample]) -> tuple[np.ndarray, list[Grid]]:
    """Patches of all pictures laid end to end, and their grids."""
    return np.concatenate([patches(pictures.picture(s.scene)) for s in samples]), [grid_of(s.scene) for s in samples]


# What each quarter of a picture's rows is first taught to say: its colour, its shape, how many or how big, and where or
# which digit. Training with the text model then moves the rows wherever its answers become right.
CODES = (
    tuple(pictures.COLOURS),
    (*pictures.SHAPES, "number"),
    (*(str(n + 1) for n in range(pictures.MAX_COUNT)), *pictures.SIZES),
    ("anywhere", *pictures.PLACES, *(f"digit {n}" for n in range(10))),
)


def codes(scene: Scene) -> list[int]:
    """One code per quarter, as indices into ``CODES``."""
    truth = scene.truth
    many = truth.get("size", str(len(scene.items)))
    if "digit" in truth:
        words = ("number", many, f"digit {truth['digit']}")
    else:
        words = (truth["shape"], many, truth.get("place", "anywhere"))
    found = (truth["colour"], *words)
    return [names.index(word.lower().rstrip(".")) for names, word in zip(CODES, found, strict=True)]


def quarters(grid: Grid) -> np.ndarray:
    """The quarter of every merged row of a picture: 0 1 / 2 3."""
    h, w = grid[0] // MERGE, grid[1] // MERGE
    return (2 * (np.arange(h) >= (h + 1) // 2)[:, None] + (np.arange(w) >= (w + 1) // 2)).flatten()
