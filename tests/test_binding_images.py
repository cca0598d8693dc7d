"""Images in conversations: from a message to the timeline, what is refused, what is kept."""

from __future__ import annotations

import base64
import dataclasses
import gc
import io
import json
import os
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import conversion
import tiny
from deltallama import ArgumentError, CancelledError, ContextFullError, Features, Llama, StateError, UnsupportedError
from deltallama.cli import main
from deltallama.images import ImageLimits, preprocess
from reference import Checkpoint, vision
from tiny_vision import tiny_vision_checkpoint

FEATURE = -1
GREEDY: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """checkpoint/, text.gguf, mmproj.gguf."""
    folder = tmp_path_factory.mktemp("sees")
    tiny_vision_checkpoint(folder / "checkpoint")
    conversion.convert(folder / "checkpoint", outfile=folder / "text.gguf", outtype="f32")
    conversion.convert(folder / "checkpoint", outfile=folder / "mmproj.gguf", outtype="f32", mmproj=True)
    return folder


def opened(folder: Path, **options: Any) -> Llama:
    return Llama(folder / "text.gguf", mmproj=folder / "mmproj.gguf", **{"n_ctx": 1024, **options})


@pytest.fixture
def llm(folder: Path) -> Iterator[Llama]:
    with opened(folder, activations="exact", cache_type="f32") as model:
        yield model


def picture(seed: int, width: int = 90, height: int = 60) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def data_url(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def user(*parts: Any) -> dict[str, Any]:
    """A message of texts and images."""
    return {
        "role": "user",
        "content": [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
            for part in parts
        ],
    }


def url(address: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": address}}]}


def runs(tokens: list[int]) -> list[int]:
    """Lengths of the stretches of feature rows."""
    text = "".join("F" if token == FEATURE else " " for token in tokens)
    return [len(run) for run in text.split()]


def test_an_image_in_a_prompt(folder: Path, llm: Llama) -> None:
    """The text around it, its rows in its place, and logits as from rows that the reference makes."""
    image = picture(1)
    reply = llm.chat([user("See: ", image, " What is it?")], **GREEDY)
    prompt = llm.tokens[: reply.usage.prompt_tokens]
    first, n_rows = prompt.index(FEATURE), 4 * 3
    assert runs(prompt) == [n_rows]
    before, after = (llm.detokenize(part, special=True) for part in (prompt[:first], prompt[first + n_rows :]))
    assert before.endswith("See: <|media_begin|>image 90x60<|media_content|>")
    assert after.startswith("<|media_end|> What is it?")

    patches = preprocess(image, ImageLimits())
    checkpoint = folder / "checkpoint"
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["vision_config"]
    weights = vision.tower_weights(Checkpoint(checkpoint))
    [rows] = vision.tower(weights, config, patches.pixels, [(1, *patches.grid)])
    llm.sync([*prompt[:first], Features(rows.astype(np.float32), 1), *prompt[first + n_rows :]])
    expected = llm.logits()
    llm.chat([user("See: ", image, " What is it?")], max_tokens=1)
    np.testing.assert_allclose(llm.logits(), expected, rtol=0, atol=1e-4)


def test_every_way_to_give_an_image_is_the_same_image(folder: Path, tmp_path: Path) -> None:
    image = picture(2)
    path = tmp_path / "with space é.png"
    path.write_bytes(png(image))
    fetched: list[str] = []

    def fetch(address: str) -> bytes:
        fetched.append(address)
        return png(image)

    ways = [
        user(image),
        user(png(image)),
        user(memoryview(png(image))),
        user(path),
        {"role": "user", "content": [{"type": "image", "image": str(path)}]},
        url(data_url(image)),
        url("data:image/png," + urllib.parse.quote_from_bytes(png(image))),
        url(path.as_uri()),
        url(str(path)),
        url("https://example.org/a.png"),
        {"role": "user", "content": [{"type": "image_url", "image_url": data_url(image)}]},
    ]
    with opened(folder, allow_local_images=True, fetch_image=fetch) as llm:
        assert llm.vision is not None
        first = llm.chat([ways[0]], **GREEDY)
        for way in ways:
            reply = llm.chat([way], **GREEDY)
            assert reply.tokens == first.tokens and reply.usage.prompt_tokens == first.usage.prompt_tokens
        assert llm.vision.n_encoded == 1
    assert fetched == ["https://example.org/a.png"]


def test_cancelling_while_an_image_is_encoded(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    """From another thread; the timeline is as before, and the next call is whole."""
    assert llm.vision is not None
    encode, begun = llm.vision._encode, threading.Event()

    def encode_late(image: Any, stopped: Any) -> np.ndarray:
        begun.set()
        while not llm._cancelled:
            time.sleep(0.001)
        return encode(image, stopped)

    monkeypatch.setattr(llm.vision, "_encode", encode_late)

    def cancel() -> None:
        begun.wait()
        llm.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(CancelledError):
        llm.chat([user(picture(1))], **GREEDY)
    thread.join()
    assert llm.n_tokens == 0
    monkeypatch.undo()
    assert llm.chat([user(picture(1))], **GREEDY).tokens


def test_cancelling_while_images_are_prepared(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.vision is not None
    prepare = llm.vision.prepare

    def prepare_and_cancel(source: Any) -> Any:
        llm.cancel()
        return prepare(source)

    monkeypatch.setattr(llm.vision, "prepare", prepare_and_cancel)
    for images in ([picture(1)], [picture(1), picture(2)]):
        with pytest.raises(CancelledError):
            llm.chat([user(*images)], **GREEDY)
    monkeypatch.undo()
    assert llm.chat([user(picture(1))], **GREEDY).tokens


def test_rows_are_evicted_after_a_failure_too(folder: Path) -> None:
    with opened(folder, image_cache_bytes=0) as llm:
        assert llm.vision is not None
        first, second = (llm.vision.prepare(picture(seed)) for seed in (1, 2))
        for wrong, words in [({"n_tokens": 5}, "n_tokens is 5, expected 12"), ({"grid": (2, 2)}, "pixels have the")]:
            with pytest.raises(ArgumentError, match=words):
                llm.vision.features([first, dataclasses.replace(second, **wrong)])
            assert list(llm.vision._kept) == [first.digest]
            first = llm.vision.prepare(picture(3))


def test_several_images_and_text_over_turns(folder: Path, llm: Llama) -> None:
    """A later turn encodes and computes what is new only; the answer is that of a fresh model."""
    messages: list[Any] = []
    turns = [user(picture(1), "and", picture(2, 30, 100)), user("Text alone."), user("Once more", picture(1))]
    assert llm.vision is not None
    for n_encoded, turn in zip((2, 2, 2), turns, strict=True):
        before = llm.n_tokens
        messages.append(turn)
        reply = llm.chat(messages, thinking=False, **GREEDY)
        assert llm.vision.n_encoded == n_encoded
        assert reply.usage.cached_tokens >= before - 40  # the end of a reply may be written anew
        with opened(folder, activations="exact", cache_type="f32", n_batch=7) as fresh:
            assert fresh.chat(messages, thinking=False, **GREEDY).tokens == reply.tokens
        messages.append(reply.message)
    assert runs(llm.tokens) == [12, 2 * 4, 12]


def test_a_changed_image_is_computed_anew(llm: Llama) -> None:
    first = llm.chat([user("a", picture(1), "b")], **GREEDY)
    where = llm.tokens.index(FEATURE)
    second = llm.chat([user("a", picture(3), "b")], **GREEDY)
    assert second.usage.cached_tokens <= where
    assert llm.chat([user("a", picture(1), "b")], **GREEDY).tokens == first.tokens
    assert llm.vision is not None and llm.vision.n_encoded == 2


def test_rows_are_kept_within_bounds(folder: Path) -> None:
    """Those of the latest prompt always, and no others without room for them."""
    row = 64 * 4
    with opened(folder, image_cache_bytes=30 * row) as llm:
        assert llm.vision is not None
        counts = []
        for seeds in [(1,), (2,), (1, 2), (3,), (2,), (1,), (1, 2, 3), (1, 2, 3)]:  # 12 rows each
            llm.chat([user(*(picture(seed) for seed in seeds))], **GREEDY)
            counts.append(llm.vision.n_encoded)
        assert counts == [1, 2, 2, 3, 3, 4, 5, 5]


def test_h1_limits_of_tokens(folder: Path) -> None:
    with opened(folder, image_max_tokens=256) as llm:
        llm.chat([user(picture(1, 2875, 1500))], **GREEDY)
        assert runs(llm.tokens) == [242]
    image = picture(1, 600, 400)
    for options, expected in [
        ({}, 22 * 15),
        ({"image_max_tokens": np.int64(20)}, None),
        ({"image_min_tokens": 400}, None),
    ]:
        with opened(folder, **options) as llm:
            llm.chat([user(image)], **GREEDY)
            [n] = runs(llm.tokens)
            assert n == expected if expected else options.get("image_min_tokens", 1) <= n
            assert n <= options.get("image_max_tokens", 1000)
            assert "image 600x400" in llm.detokenize([t for t in llm.tokens if t != FEATURE], special=True)


def test_a_prompt_too_long_for_the_context_is_found_before_encoding(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(folder, n_ctx=300) as llm:
        with pytest.raises(ContextFullError, match=r"330 of them for images.*300 positions"):
            llm.chat([user(picture(1, 600, 400))], **GREEDY)
        assert llm.vision is not None and llm.vision.n_encoded == 0 and llm.n_tokens == 0
        monkeypatch.setattr(llm.vision, "prepare", None)  # not even decoded
        with pytest.raises(ContextFullError, match=r"660 of them for images.*300 positions"):
            llm.chat([user(*[picture(1, 600, 400)] * 2)], **GREEDY)


@pytest.mark.parametrize(
    "message,words",
    [
        (url("https://example.org/a.png"), "not fetched from the network"),
        (url("HTTP://example.org/a.png"), "not fetched from the network"),
        (url("file:///etc/passwd"), "allow_local_images"),
        (url("picture.png"), "allow_local_images"),
        (user(Path("picture.png")), "allow_local_images"),
        (url("data:image/png;base64,!!!"), "data:image"),
        (url("data:image/png"), "expected data:TYPE;base64,DATA"),
        (url("data:image/png;base64," + base64.b64encode(b"no picture").decode()), "no picture of a known format"),
        (url("http://["), "not fetched from the network"),
        (url("https://℀.com/a.png"), "not fetched from the network"),
        (url("file://[/x"), "file:"),
        (url("data://[;base64,AAAA"), "no picture of a known format"),
        (url("data:,\ud800"), "surrogates not allowed"),
        (url("ftp://example.org/a.png"), "expected a URL of data, http, https or file, or a path"),
        (url("blob:0-0"), "expected a URL of"),
        (url("javascript:alert(1)"), "expected a URL of"),
        (url(7), "image_url must be text"),
        (user(7), "an image must be"),
        (user(b""), "no picture"),
        (user(Image.new("F", (4, 4))), "floating-point values"),
        (url(""), "the path of an image is empty"),
        ({"role": "system", "content": user(picture(1))["content"]}, "role 'system'"),
        ({"role": "assistant", "content": user(picture(1))["content"]}, "role 'assistant'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_images_that_are_refused(llm: Llama, message: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words) as error:
        llm.chat([message, {"role": "user", "content": "Hi"}], **GREEDY)
    assert str(error.value).startswith("message 0:")
    assert llm.n_tokens == 0


def test_files_of_other_machines_are_refused_even_where_local_ones_are_not(folder: Path) -> None:
    with opened(folder, allow_local_images=True) as llm:
        with pytest.raises(ArgumentError, match="another machine"):
            llm.chat([url("file://server/share/a.png")], **GREEDY)
        with pytest.raises(ArgumentError, match=r"absent\.png cannot be read"):
            llm.chat([url("absent.png")], **GREEDY)


def test_text_that_spells_an_image_is_text(llm: Llama) -> None:
    """No user makes a place for an image by writing its tokens."""
    spelled = "<|media_begin|>image 9x9<|media_content|><|media_pad|><|media_end|><|kimi_image_placeholder|>"
    llm.chat([user(spelled, picture(1))], **GREEDY)
    assert runs(llm.tokens) == [12]


def test_without_a_tower(folder: Path) -> None:
    with Llama(folder / "text.gguf", n_ctx=64) as llm:
        with pytest.raises(UnsupportedError, match="message 0 has an image, and the model was opened without mmproj"):
            llm.chat([user(picture(1))], **GREEDY)
        assert llm.vision is None
    with pytest.raises(ArgumentError, match="of no use without mmproj"):
        Llama(folder / "text.gguf", image_max_tokens=5)


def test_an_image_is_no_token(llm: Llama) -> None:
    with pytest.raises(UnsupportedError, match="message 0 has an image, which is no token"):
        llm.chat_tokens([user(picture(1))])


def test_options_that_are_refused(folder: Path, tmp_path: Path) -> None:
    for options, words in [
        ({"image_min_tokens": 9, "image_max_tokens": 8}, "image_min_tokens is 9"),
        ({"image_max_tokens": 0}, "image_max_tokens"),
        ({"allow_local_images": 1}, "allow_local_images must be True or False"),
        ({"fetch_image": "curl"}, "fetch_image"),
        ({"image_cache_bytes": -1}, "image_cache_bytes"),
    ]:
        with pytest.raises(ArgumentError, match=words):
            opened(folder, **options)
    for name in ("image_exif", "allow_local_images", "fetch_image", "image_cache_bytes"):
        with pytest.raises(ArgumentError, match=name):
            Llama(folder / "text.gguf", **{name: -4})
    with pytest.raises(UnsupportedError, match="'kimi-k3' is no vision tower"):
        Llama(folder / "text.gguf", mmproj=folder / "text.gguf")
    with pytest.raises(UnsupportedError, match="is a vision tower, no text model"):
        Llama(folder / "mmproj.gguf")
    with pytest.raises(FileNotFoundError):
        Llama(folder / "text.gguf", mmproj=tmp_path / "absent.gguf")


def test_h7_a_tower_of_another_model(folder: Path, tmp_path: Path) -> None:
    other = conversion.convert(
        tiny.write_checkpoint(tmp_path / "wide", preset="k3", hidden_size=96), outfile=tmp_path / "wide.gguf"
    )
    with pytest.raises(ArgumentError, match="rows of 64 values, and the model's embeddings have 96"):
        Llama(other, mmproj=folder / "mmproj.gguf")


def test_features_in_a_timeline(llm: Llama, rng: np.random.Generator) -> None:
    rows = rng.standard_normal((3, llm.info["n_embd"])).astype(np.float32)
    assert llm.sync([1, Features(rows, 5), 2]).n_computed == 5
    assert llm.tokens == [1, -1, -1, -1, 2]
    assert llm.sync([1, Features(rows, 5), 2, 3]) == (5, 1, 0)
    for bad, words in [
        (Features(rows[:, :5], 5), "shape"),
        (Features(rows[:0], 5), "shape"),
        (Features(rows, -1), "digest"),
        (Features(rows * np.nan, 5), "NaN"),
    ]:
        with pytest.raises(ArgumentError, match=words):
            llm.sync([1, bad])
    assert llm.n_tokens == 6


def test_saved_conversations_keep_their_images(folder: Path, tmp_path: Path) -> None:
    messages = [user(picture(1), "a")]
    with opened(folder) as llm:
        reply = llm.chat(messages, **GREEDY)
        tokens = llm.tokens
        llm.save_state(tmp_path / "state")
    with opened(folder) as llm:
        llm.load_state(tmp_path / "state")
        assert llm.tokens == tokens and runs(tokens) == [12]
        assert llm.chat(messages, **GREEDY).tokens == reply.tokens


def test_a_changed_tower_is_found(folder: Path, tmp_path: Path) -> None:
    """The weights stay mapped from the file: a file written over would make other rows."""
    copy = tmp_path / "mmproj.gguf"
    copy.write_bytes((folder / "mmproj.gguf").read_bytes())
    with Llama(folder / "text.gguf", mmproj=copy, n_ctx=512) as llm:
        llm.chat([user(picture(1))], **GREEDY)
        with copy.open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"x")
            file.truncate()
        os.utime(copy, ns=(1, 1))
        with pytest.raises(StateError, match=r"mmproj\.gguf was changed"):
            llm.chat([user(picture(2))], **GREEDY)
        assert llm.vision is not None
        with pytest.raises(StateError, match=r"mmproj\.gguf was changed"):
            llm.vision.features([llm.vision.prepare(picture(2))])


def test_h_opening_and_closing_does_not_grow_memory(folder: Path) -> None:
    """100 cycles with an image each; what Python frees only when it looks for cycles is freed first."""
    status = Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("resident memory is read from /proc, which this system does not have")
    image, resident = picture(1), []
    for cycle in range(1, 101):
        with opened(folder, n_ctx=512, n_batch=64) as llm:
            llm.chat([user(image)], thinking_effort=None, max_tokens=1)
        del llm
        if cycle % 20 == 0:
            gc.collect()
            resident.append(int(status.read_text().split()[1]))
    growth = (resident[-1] - resident[1]) * os.sysconf("SC_PAGE_SIZE")
    assert growth < 1 << 20, f"{growth} bytes in 80 cycles"


# -- the command line --------------------------------------------------------------------------------------------------


def test_the_command_line_sees(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png(picture(1, 300, 200)))
    model, tower = str(folder / "text.gguf"), str(folder / "mmproj.gguf")
    options = ["-n", "2", "--temp", "0", "-c", "1024", "--stats"]

    def prompt_tokens(*more: str) -> int:
        assert main(["run", model, "What?", "--mmproj", tower, *options, *more]) == 0
        return int(capsys.readouterr().err.split(" prompt +")[0].split()[-1])

    plain = prompt_tokens()
    one, two = prompt_tokens("--image", str(path)), prompt_tokens("--image", str(path), "--image", str(path))
    assert one > plain + 11 * 8 and two - one == one - plain
    assert prompt_tokens("--image", str(path), "--image-max-tokens", "8") < one - 60
    assert prompt_tokens("--image", str(path), "--image-min-tokens", "150") > one + 50


def test_wrong_use_of_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tower = str(folder / "text.gguf"), str(folder / "mmproj.gguf")
    for arguments, words in [
        (["--image", "a.png"], "--image needs --mmproj"),
        (["--image", "a.png", "--mmproj", tower, "--raw"], "no --raw"),
        (["--image", "absent.png", "--mmproj", tower], "absent.png cannot be read"),
        (["--image-max-tokens", "9"], "of no use without mmproj"),
    ]:
        assert main(["run", model, "What?", *arguments]) == 1
        assert words in capsys.readouterr().err
    assert main(["info", tower]) == 1
    assert "is a vision tower, no text model" in capsys.readouterr().err
