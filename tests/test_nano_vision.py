"""The shipped trained model looks at pictures, from real files through conversion and engine. No torch."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conversion
import reference as ref
from deltallama import Llama
from reference import vision

ROOT = Path(__file__).resolve().parent.parent
NANO = ROOT / "models" / "kimi-k3-nano"
Ask = Callable[[dict[str, Any]], str]


@pytest.fixture(scope="module")
def pictures() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "models" / "train"))
    import pictures

    yield pictures
    sys.path.remove(str(ROOT / "models" / "train"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("nano")
    text = conversion.convert(NANO, outfile=folder / "nano.gguf", outtype="f32")
    return text, conversion.convert(NANO, outfile=folder / "mmproj-nano.gguf", outtype="f32", mmproj=True)


@pytest.fixture
def llm(files: tuple[Path, Path]) -> Iterator[Llama]:
    with Llama(files[0], mmproj=files[1], n_ctx=512, activations="exact", cache_type="f32") as model:
        yield model


def held_out() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (NANO / "heldout_vision.jsonl").read_text("utf-8").splitlines()]


def shown(pictures: Any, row: dict[str, Any], question: str | None = None) -> dict[str, Any]:
    """A message with the picture of a row as the bytes of a PNG or JPEG file, and a question."""
    file = pictures.encoded(pictures.Scene.from_json(row["scene"]))
    kind = "jpeg" if row["scene"]["quality"] else "png"
    url = f"data:image/{kind};base64,{base64.b64encode(file).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    return {"role": "user", "content": [image, {"type": "text", "text": question or row["question"]}]}


def test_answers_are_those_of_the_reference(pictures: Any, llm: Llama, rng: np.random.Generator) -> None:
    """Six held-out pictures; `bench/score_nano_vision.py` compares all 500."""
    import bpe
    import vision_data

    checkpoint = ref.Checkpoint(NANO)
    weights = vision.tower_weights(checkpoint)
    config = json.loads((NANO / "config.json").read_text("utf-8"))["vision_config"]
    model = ref.Model(checkpoint)
    vocabulary = model.embedding
    enc = bpe.encoding(bpe.load(NANO / "tiktoken.model"))
    stop = enc.encode_single_token("<|end_of_msg|>")
    rows = held_out()
    for row in [rows[i] for i in rng.choice(len(rows), 6, replace=False)]:
        sample = vision_data.sample(enc, pictures.Scene.from_json(row["scene"]), row["kind"])
        patches = vision_data.patches(pictures.picture(sample.scene))
        (features,) = vision.tower(weights, config, patches, [(1, *vision_data.grid_of(sample.scene))])
        # The picture's rows stand behind the vocabulary as further tokens.
        model.embedding = np.concatenate([vocabulary, features])
        ids = np.array(vision_data.before_size(enc) + sample.ids[: sample.learn.index(True)])
        ids[ids < 0] = len(vocabulary) + np.arange((ids < 0).sum())
        expected = model.greedy(ids.tolist(), 24, {stop})
        tokens = llm.chat([shown(pictures, row)], thinking=False, temperature=0, max_tokens=24).tokens
        assert tokens == [*expected, stop], row


def test_it_sees(pictures: Any, llm: Llama) -> None:
    """Every sixth held-out picture that shape or colour is asked of. The table in docs/vision.md has all."""
    rows = [row for row in held_out() if row["kind"] in ("shape", "colour")][::6]
    replies = [llm.chat([shown(pictures, row)], thinking=False, temperature=0, max_tokens=24).content for row in rows]
    assert sum(reply == row["answer"] for reply, row in zip(replies, rows, strict=True)) >= 0.95 * len(rows)
