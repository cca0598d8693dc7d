"""Score Kimi-K3-nano on its 500 held-out pictures: greedy answers of the numpy reference or of converted files.

    score_nano_vision.py reference [--first 20] [--out answers.json]
    score_nano_vision.py engine MODEL.gguf MMPROJ.gguf [--out answers.json]
    score_nano_vision.py compare A.json B.json
    score_nano_vision.py sheet A.json docs/vision-examples.png

Each picture is drawn from its recipe in heldout_vision.jsonl and written as a PNG or JPEG file; what is scored sees the
file. An answer is right when it equals the expected text to the last character. `compare` lists pictures with different
greedy tokens and how close the two best logits of the first file's run were there, if it recorded that (the reference
does). `sheet` shows pictures with their questions and answers.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

for _variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_variable, "2")

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "gguf-py"), str(ROOT / "tests"), str(ROOT / "models" / "train")]

import numpy as np  # noqa: E402
from PIL import Image, ImageDraw, ImageFont  # noqa: E402
from score_nano import compare  # noqa: E402

import bpe  # noqa: E402
import pictures  # noqa: E402
import vision_data  # noqa: E402
from pictures import Scene  # noqa: E402

NANO = ROOT / "models" / "kimi-k3-nano"
MAX_NEW = 24  # the longest right answer with the end of its turn has fewer tokens
BATCH = 25
COLUMNS, PER_KIND, CELL = 6, 4, (170, 212)  # of the sheet; the cell in pixels

Row = dict[str, Any]
Answer = tuple[list[int], list[float]]  # tokens without the last of the turn; how far each was ahead


def held_out() -> list[Row]:
    return [json.loads(line) for line in (NANO / "heldout_vision.jsonl").read_text().splitlines()]


def write_files(rows: list[Row], folder: Path) -> list[Path]:
    """One file per picture."""
    paths = []
    for row in rows:
        scene = Scene.from_json(row["scene"])
        paths.append(folder / f"{row['id']}.{'jpg' if scene.quality else 'png'}")
        paths[-1].write_bytes(pictures.encoded(scene))
    return paths


def from_reference(rows: list[Row], paths: list[Path], enc: Any) -> Iterator[Answer]:
    """By tests/reference, in float64: the rows of a batch's pictures stand behind the vocabulary as further tokens."""
    from reference import Checkpoint, Model, vision

    checkpoint = Checkpoint(NANO)
    weights = vision.tower_weights(checkpoint)
    cfg = json.loads((NANO / "config.json").read_text())["vision_config"]
    model = Model(checkpoint)
    vocabulary = model.embedding
    common, stop = vision_data.before_size(enc), enc.encode_single_token("<|end_of_msg|>")
    for at in range(0, len(rows), BATCH):
        prompts, features, n = [], [vocabulary], len(vocabulary)
        for row, path in zip(rows[at : at + BATCH], paths[at : at + BATCH], strict=True):
            patches = vision_data.patches(Image.open(path))
            sample = vision_data.sample(enc, Scene.from_json(row["scene"]), row["kind"])
            (found,) = vision.tower(weights, cfg, patches, [(1, *vision_data.grid_of(sample.scene))])
            features.append(found)
            ids = sample.ids[: sample.learn.index(True)]
            for i, token in enumerate(ids):
                if token < 0:
                    ids[i], n = n, n + 1
            prompts.append(common + ids)
        model.embedding = np.concatenate(features)
        yield from model.greedy_batch(prompts, MAX_NEW, {stop})


def from_engine(rows: list[Row], paths: list[Path], enc: Any, model: Path, mmproj: Path) -> Iterator[Answer]:
    """By `Llama.chat`, as anybody would ask."""
    from deltallama import Llama

    stop = enc.encode_single_token("<|end_of_msg|>")
    with Llama(model, mmproj=mmproj, n_ctx=512) as llm:
        for row, path in zip(rows, paths, strict=True):
            content = [{"type": "image", "image": path.read_bytes()}, {"type": "text", "text": row["question"]}]
            messages = [{"role": "user", "content": content}]
            tokens = llm.chat(messages, thinking=False, temperature=0.0, max_tokens=MAX_NEW).tokens
            yield tokens[:-1] if tokens and tokens[-1] == stop else tokens, []


def visible(text: str) -> str:
    """An answer without the end of its turn."""
    return text.partition("<|close|>")[0]


def table(rows: list[Row], right: list[bool]) -> str:
    """Markdown: exact answers per kind, of PNG and of JPEG files, and all."""
    lines = ["| kind | pictures | exact | % |", "|---|---|---|---|"]

    def line(name: str, of: list[bool]) -> None:
        if of:
            lines.append(f"| {name} | {len(of)} | {sum(of)} | {100 * sum(of) / len(of):.1f} |")

    pairs = list(zip(rows, right, strict=True))
    for kind in pictures.HELD_OUT:
        line(kind, [r for row, r in pairs if row["kind"] == kind])
    line("PNG files", [r for row, r in pairs if not row["scene"]["quality"]])
    line("JPEG files", [r for row, r in pairs if row["scene"]["quality"]])
    line("**all**", right)
    return "\n".join(lines)


def score(args: argparse.Namespace) -> None:
    enc = bpe.encoding(bpe.load(NANO / "tiktoken.model"))
    rows = held_out()[:: args.every][: args.first]
    right, kept = [], []
    with tempfile.TemporaryDirectory() as folder:
        paths = write_files(rows, Path(folder))
        began = time.monotonic()
        if args.mode == "engine":
            answers = from_engine(rows, paths, enc, args.model, args.mmproj)
        else:
            answers = from_reference(rows, paths, enc)
        for row, (tokens, margins) in zip(rows, answers, strict=True):
            text = enc.decode(tokens)
            right.append(visible(text) == row["answer"])
            kept.append({"id": row["id"], "tokens": tokens, "margins": margins, "text": text, "exact": right[-1]})
            if not right[-1]:
                print(f"{row['id']} {row['kind']}: {visible(text)!r}, right: {row['answer']!r}")
    print(f"\n{table(rows, right)}\n\n{len(rows)} pictures in {time.monotonic() - began:.0f} s")
    if args.out:
        args.out.write_text(json.dumps(kept))


def sheet(args: argparse.Namespace) -> None:
    """The first pictures of every kind, as a picture."""
    answers = {kept["id"]: kept for kept in json.loads(args.answers.read_text())}
    rows = held_out()
    shown = [row for kind in pictures.HELD_OUT for row in [r for r in rows if r["kind"] == kind][:PER_KIND]]
    width, height = CELL
    image = Image.new("RGB", (COLUMNS * width, -(-len(shown) // COLUMNS) * height), (255, 255, 255))
    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default(13)
    for i, row in enumerate(shown):
        x, y = i % COLUMNS * width, i // COLUMNS * height
        picture = Image.open(io.BytesIO(pictures.encoded(Scene.from_json(row["scene"]))))
        left, top = x + (width - picture.width) // 2, y + 6 + (150 - picture.height) // 2
        image.paste(picture, (left, top))
        pen.rectangle((left - 1, top - 1, left + picture.width, top + picture.height), outline=(150, 150, 150))
        kept = answers[row["id"]]
        colour = (20, 110, 40) if kept["exact"] else (190, 30, 30)
        said = visible(kept["text"]) + ("" if kept["exact"] else f"  (right: {row['answer']})")
        pen.text((x + width / 2, y + 170), row["question"], fill=(60, 60, 60), font=font, anchor="mm")
        pen.text((x + width / 2, y + 190), said, fill=colour, font=font, anchor="mm")
    image.quantize(128, dither=Image.Dither.NONE).save(args.picture, optimize=True)
    print(f"{args.picture}: {len(shown)} pictures, {args.picture.stat().st_size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    for name in ("reference", "engine"):
        mode = modes.add_parser(name)
        if name == "engine":
            mode.add_argument("model", type=Path)
            mode.add_argument("mmproj", type=Path)
        mode.add_argument("--first", type=int, help="only so many pictures")
        mode.add_argument("--every", type=int, default=1, help="only every so many-th picture")
        mode.add_argument("--out", type=Path, help="keep all answers in this JSON file")
        mode.set_defaults(run=score)
    mode = modes.add_parser("compare")
    mode.add_argument("first", type=Path)
    mode.add_argument("second", type=Path)
    mode.set_defaults(run=compare)
    mode = modes.add_parser("sheet")
    mode.add_argument("answers", type=Path)
    mode.add_argument("picture", type=Path)
    mode.set_defaults(run=sheet)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
