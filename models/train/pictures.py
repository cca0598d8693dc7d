"""The pictures of Kimi-K3-nano: what can be drawn, how it is drawn, and what can be asked about it.

A *scene* is the full recipe of one picture, plain numbers and words, so that the picture can be drawn again at any
time; a *row* is a scene with one question and its answer. Scenes are drawn from a seeded generator. Training scenes and
the 500 held-out ones come from generators with different seeds; sizes, places and tints are drawn from a space of more
than 10^12, so no held-out picture is in training.
"""

from __future__ import annotations

import io
import math
import random
from dataclasses import asdict, dataclass, replace
from typing import Any

from PIL import Image, ImageDraw

HELD_OUT_SEED = 20261130
HELD_OUT = {"shape": 120, "colour": 120, "both": 80, "count": 60, "place": 50, "size": 30, "digit": 40}
FINE = 3  # pictures are drawn this many times larger and then reduced, for smooth edges
MIN_SIDE, MAX_SIDE, MAX_AREA = 56, 140, 11000

# Words that the text model can already spell or copy.
COLOURS = {
    "red": (214, 40, 40),
    "green": (44, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (245, 215, 30),
    "black": (20, 20, 20),
    "orange": (245, 135, 20),
    "pink": (250, 150, 190),
    "purple": (130, 50, 160),
}
SHAPES = ("ball", "ring", "box", "kite", "moon", "star", "house", "tree")
PLACES = ("left", "right", "up", "down")
SIZES = {"big": (0.40, 0.46), "small": (0.16, 0.22)}  # radius, as a share of the picture's shorter side
BACKGROUNDS = ((255, 255, 255), (236, 236, 228), (205, 225, 240), (150, 152, 155), (222, 205, 178))
MAX_COUNT = 5
TINT = 14  # how far a colour component may be from the table's

ASKS = {
    "shape": "What shape is it?",
    "colour": "What colour is it?",
    "both": "What is it?",
    "count": "How many are there?",
    "place": "Where is it?",
    "size": "Is it big or small?",
    "digit": "What number is it?",
}

# Digits on a grid of 3 x 5, one string per row.
DIGITS = (
    "### #.# #.# #.# ###",
    ".#. ##. .#. .#. ###",
    "### ..# ### #.. ###",
    "### ..# ### ..# ###",
    "#.# #.# ### ..# ..#",
    "### #.. ### ..# ###",
    "### #.. ### #.# ###",
    "### ..# ..# ..# ..#",
    "### #.# ### #.# ###",
    "### #.# ### ..# ###",
)


@dataclass(frozen=True)
class Item:
    """One figure: ``what`` is a shape or a digit; centre and radius in pixels, angle in degrees."""

    what: str
    colour: tuple[int, int, int]
    x: float
    y: float
    radius: float
    angle: float


@dataclass(frozen=True)
class Scene:
    """A picture of ``width`` x ``height`` pixels. ``truth`` has the answer of every question that may be asked,
    ``quality`` is that of a JPEG file, 0 for a PNG file."""

    width: int
    height: int
    background: tuple[int, int, int]
    items: tuple[Item, ...]
    truth: dict[str, str]
    quality: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Scene:
        """The scene of a row of ``heldout_vision.jsonl``."""
        items = tuple(Item(**{**item, "colour": tuple(item["colour"])}) for item in value["items"])
        rgb = tuple(value["background"])
        return Scene(value["width"], value["height"], rgb, items, dict(value["truth"]), value["quality"])


def _tinted(rng: random.Random, rgb: tuple[int, int, int]) -> tuple[int, int, int]:
    r, g, b = (min(255, max(0, c + rng.randint(-TINT, TINT))) for c in rgb)
    return r, g, b


def _canvas(rng: random.Random) -> tuple[int, int]:
    """Width and height: any sides, most of them no multiple of a patch, up to 2.5 : 1."""
    while True:
        width, height = rng.randint(MIN_SIDE, MAX_SIDE), rng.randint(MIN_SIDE, MAX_SIDE)
        if width * height <= MAX_AREA and max(width, height) <= 2.5 * min(width, height):
            return width, height


def _inside(rng: random.Random, size: int, radius: float) -> float:
    return round(rng.uniform(radius + 1, size - radius - 1), 1)


def scene(rng: random.Random, kind: str) -> Scene:
    """A picture about which ``kind`` can be asked; half of all are JPEG files."""
    return replace(_drawing(rng, kind), quality=rng.choice((0, rng.randint(70, 95))))


def _drawing(rng: random.Random, kind: str) -> Scene:
    width, height = _canvas(rng)
    short = min(width, height)
    background = _tinted(rng, rng.choice(BACKGROUNDS))
    name = rng.choice(list(COLOURS))
    truth = {"colour": f"{name.capitalize()}."}

    def item(what: str, x: float, y: float, radius: float, turn: float) -> Item:
        return Item(what, _tinted(rng, COLOURS[name]), x, y, round(radius, 1), round(rng.uniform(-turn, turn), 1))

    if kind == "digit":
        value = str(rng.randint(0, 9))
        radius = short * rng.uniform(0.30, 0.44)
        x, y = _inside(rng, width, radius), _inside(rng, height, radius)
        return Scene(width, height, background, (item(value, x, y, radius, 4),), truth | {"digit": value})
    shape = rng.choice(SHAPES)
    truth |= {"shape": f"{shape.capitalize()}.", "both": f"{name.capitalize()} {shape}."}
    if kind == "count":
        n = rng.randint(1, MAX_COUNT)
        items = _scattered(rng, width, height, n, lambda x, y, r: item(shape, x, y, r, 12))
        return Scene(width, height, background, items, {**truth, "count": str(n)})
    if kind == "place":
        place = rng.choice(PLACES)
        level = place in ("left", "right")
        radius = short * rng.uniform(0.17, 0.22)
        along, across = (width, height) if level else (height, width)
        near = rng.uniform(radius + 1, along * 0.28)
        near = round(near if place in ("left", "up") else along - near, 1)
        middle = round(across * rng.uniform(0.4, 0.6), 1)
        figure = item(shape, near if level else middle, middle if level else near, radius, 12)
        return Scene(width, height, background, (figure,), truth | {"place": f"{place.capitalize()}."})
    if kind == "size":
        size = rng.choice(list(SIZES))
        radius = short * rng.uniform(*SIZES[size])
        truth |= {"size": f"{size.capitalize()}."}
    else:
        radius = short * rng.uniform(0.27, 0.45)
    figure = item(shape, _inside(rng, width, radius), _inside(rng, height, radius), radius, 12)
    return Scene(width, height, background, (figure,), truth)


def eased(scene: Scene, ease: float) -> Scene:
    """The scene with its figure, if it is only one, moved to the middle, enlarged and set upright on a white ground, by
    a share from 0 (as it is) to 1: what to learn from first."""
    if len(scene.items) > 1 or {"place", "size"} & scene.truth.keys():
        return scene
    (item,) = scene.items

    def mixed(value: float, easy: float) -> float:
        return round(value + (easy - value) * ease, 1)

    r, g, b = (round(mixed(c, 255)) for c in scene.background)
    x, y = mixed(item.x, scene.width / 2), mixed(item.y, scene.height / 2)
    radius = mixed(item.radius, 0.44 * min(scene.width, scene.height))
    return replace(
        scene, background=(r, g, b), items=(replace(item, x=x, y=y, radius=radius, angle=mixed(item.angle, 0)),)
    )


def _scattered(rng: random.Random, width: int, height: int, n: int, make: Any) -> tuple[Item, ...]:
    """``n`` figures of one size that do not touch; starts again with a smaller size when it gets stuck."""
    radius = min(width, height) * rng.uniform(0.16, 0.2)
    while True:
        places: list[tuple[float, float]] = []
        for _ in range(60):
            x, y = _inside(rng, width, radius), _inside(rng, height, radius)
            if all(math.hypot(x - a, y - b) > 2.3 * radius for a, b in places):
                places.append((x, y))
                if len(places) == n:
                    return tuple(make(a, b, radius) for a, b in places)
        radius *= 0.93


def _outline(shape: str) -> list[list[tuple[float, float]]]:
    """Polygons of a shape in the square from -1 to 1, y down."""
    if shape == "box":
        return [[(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)]]
    if shape == "kite":
        return [[(0, -1), (0.62, -0.15), (0, 1), (-0.62, -0.15)]]
    if shape == "star":
        points = [(1.0 if i % 2 == 0 else 0.42, i * math.pi / 5) for i in range(10)]
        return [[(r * math.sin(a), -r * math.cos(a)) for r, a in points]]
    if shape == "house":
        return [[(-0.65, -0.05), (-0.65, 0.95), (0.65, 0.95), (0.65, -0.05)], [(-1, 0), (0, -1), (1, 0)]]
    if shape == "tree":
        top = [[(-w, y + 0.75), (0, y), (w, y + 0.75)] for w, y in ((0.5, -1.0), (0.75, -0.55), (0.95, -0.1))]
        return [*top, [(-0.16, 0.6), (-0.16, 1), (0.16, 1), (0.16, 0.6)]]
    if shape == "moon":  # the outer arc of a circle, back along a shifted inner one
        outer = [(math.cos(a), math.sin(a)) for a in (math.radians(d) for d in range(50, 311, 5))]
        inner = [(0.45 + 0.79 * math.cos(a), 0.79 * math.sin(a)) for a in (math.radians(d) for d in range(284, 75, -4))]
        return [outer + inner]
    raise ValueError(f"no outline for the shape {shape!r}")


def _digit_boxes(digit: str) -> list[list[tuple[float, float]]]:
    """Squares of a digit in the square from -1 to 1."""
    side = 2 / 5
    boxes = []
    for row, line in enumerate(DIGITS[int(digit)].split()):
        for col, mark in enumerate(line):
            if mark == "#":
                x, y = (col - 1.5) * side, (row - 2.5) * side
                boxes.append([(x, y), (x + side, y), (x + side, y + side), (x, y + side)])
    return boxes


def encoded(scene: Scene) -> bytes:
    """The picture as the bytes of a file."""
    file = io.BytesIO()
    if scene.quality:
        _draw(scene).save(file, "JPEG", quality=scene.quality)
    else:
        _draw(scene).save(file, "PNG")
    return file.getvalue()


def picture(scene: Scene) -> Image.Image:
    """The picture as its file shows it, RGB."""
    if scene.quality:
        return Image.open(io.BytesIO(encoded(scene))).convert("RGB")
    return _draw(scene)


def _draw(scene: Scene) -> Image.Image:
    image = Image.new("RGB", (scene.width * FINE, scene.height * FINE), scene.background)
    pen = ImageDraw.Draw(image)
    for item in scene.items:
        x, y, radius = item.x * FINE, item.y * FINE, item.radius * FINE
        if item.what in ("ball", "ring"):
            box = (x - radius, y - radius, x + radius, y + radius)
            if item.what == "ball":
                pen.ellipse(box, fill=item.colour)
            else:
                pen.ellipse(box, outline=item.colour, width=round(radius * 0.36))
            continue
        cos, sin = math.cos(math.radians(item.angle)), math.sin(math.radians(item.angle))
        polygons = _digit_boxes(item.what) if item.what.isdigit() else _outline(item.what)
        for polygon in polygons:
            pen.polygon(
                [(x + radius * (a * cos - b * sin), y + radius * (a * sin + b * cos)) for a, b in polygon],
                fill=item.colour,
            )
    return image.resize((scene.width, scene.height), Image.Resampling.BOX)


def held_out_rows() -> list[dict[str, Any]]:
    """The rows of ``heldout_vision.jsonl``: a scene, a question, the right answer."""
    rng = random.Random(HELD_OUT_SEED)
    rows = []
    for kind, n in HELD_OUT.items():
        for _ in range(n):
            drawn = scene(rng, kind)
            row = {"id": len(rows), "kind": kind, "question": ASKS[kind], "answer": drawn.truth[kind]}
            rows.append({**row, "scene": drawn.to_json()})
    return rows
