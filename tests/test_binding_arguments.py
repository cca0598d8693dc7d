"""What the Python binding does with arguments that are not what they should be: an ArgumentError that names them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deltallama
from deltallama import ArgumentError, DeltaError, Llama
from deltallama.checks import brief

PROMPT = [5, 66, 97, 104, 300]
HUGE = 10**5000  # more digits than Python converts to text


def deep(n: int = 100_000) -> list[Any]:
    """A list in a list in a list."""
    value: list[Any] = []
    for _ in range(n):
        value = [value]
    return value


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


WRONG_WHOLE: list[Any] = [
    1.9,
    1.0,
    math.nan,
    True,
    "1",
    None,
    [1],
    Decimal(1),
    np.float32(1),
    np.bool_(True),
    HUGE,
    -HUGE,
]


@pytest.mark.parametrize("value", WRONG_WHOLE, ids=brief)
def test_what_is_no_integer_is_never_made_one(llm: Llama, value: Any) -> None:
    calls: list[tuple[str, Callable[[], object]]] = [
        ("token", lambda: llm.generate([5, value], max_tokens=1)),
        ("token", lambda: llm.eval([value])),
        ("token", lambda: llm.sync([value])),
        ("token", lambda: llm.detokenize([value])),
        ("token", lambda: llm.tokenizer.name(value)),
        ("logit_bias", lambda: llm.generate(PROMPT, max_tokens=1, logit_bias={value: 5} if value != [1] else [1])),
        ("n must", lambda: llm.top(value)),
        ("length", lambda: llm.truncate(value)),
        ("top_k", lambda: llm.generate(PROMPT, max_tokens=1, top_k=value)),
        ("penalty_last_n", lambda: llm.generate(PROMPT, max_tokens=1, penalty_last_n=value)),
    ]
    if value is not None:
        calls.append(("seed", lambda: llm.generate(PROMPT, max_tokens=1, seed=value)))
    if value is not None and value is not HUGE:
        calls.append(("max_tokens", lambda: llm.generate(PROMPT, max_tokens=value)))
    llm.eval(PROMPT)
    calls.append(("row", lambda: llm.logits(value)))
    calls.append(("row", lambda: llm.top(1, row=value)))
    for name, attempt in calls:
        with pytest.raises(ArgumentError, match=name):
            attempt()
    assert llm.tokens == PROMPT or llm.tokens == []  # nothing was computed


@pytest.mark.parametrize("value", [True, "1", None, [1], HUGE, 1j, np.bool_(False), b"1"], ids=brief)
@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty"])
def test_what_is_no_number_is_never_made_one(llm: Llama, name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=name):
        llm.generate(PROMPT, max_tokens=1, **{name: value})
    with pytest.raises(ArgumentError, match="logit_bias"):
        llm.generate(PROMPT, max_tokens=1, logit_bias={5: value})


def test_numbers_of_other_libraries_are_numbers(llm: Llama) -> None:
    expected = llm.generate(PROMPT, max_tokens=3, seed=4, temperature=0.5, top_k=5)
    options: dict[str, Any] = {"max_tokens": np.int32(3), "seed": np.uint64(4), "temperature": np.float64(0.5)}
    options["top_k"] = np.int8(5)
    for prompt in (np.array(PROMPT), np.array(PROMPT, dtype=np.uint16), tuple(PROMPT), [np.int64(t) for t in PROMPT]):
        found = llm.generate(prompt, **options)
        assert found.tokens == expected.tokens and type(found.seed) is int


@pytest.mark.parametrize(
    "prompt",
    [None, 5, 5.0, bytearray(b"ab"), memoryview(b"ab"), {5: 1}, {5}, [[5]], np.ones(3), np.ones((2, 2), int), object()],
    ids=brief,
)
def test_what_is_no_list_of_ids_is_refused(llm: Llama, prompt: Any) -> None:
    for attempt in (lambda: llm.generate(prompt, max_tokens=1), lambda: llm.eval(prompt), lambda: llm.sync(prompt)):
        with pytest.raises(ArgumentError, match="token"):
            attempt()
    for text in (b"ab", "ab"):
        with pytest.raises(ArgumentError, match="token"):
            llm.eval(text)  # type: ignore[arg-type]


@pytest.mark.parametrize("stop", [5, b"x", [b"x"], [5], {"x": 1}, True, ["x", ""], [None]], ids=brief)
def test_what_is_no_stop_string_is_refused_at_once(llm: Llama, stop: Any) -> None:
    for attempt in (llm.generate, llm.chat):
        prompt: Any = PROMPT if attempt == llm.generate else [{"role": "user", "content": "Hi"}]
        with pytest.raises(ArgumentError, match="stop"):
            attempt(prompt, stop=stop, stream=True)  # before the first piece is asked for
    assert llm.generate(PROMPT, max_tokens=2, stop=None).tokens


@pytest.mark.parametrize(
    "options",
    [{"device": None}, {"device": 5}, {"device": "\ud800"}, {"device": "cpu\0"}, {"device": "x" * 10**6}]
    + [{name: value} for name in ("activations", "cache_type") for value in (None, ["f16"], 0, "\ud800")]
    + [
        {name: value}
        for name in ("n_ctx", "n_threads", "n_batch", "n_outputs")
        for value in (None, 1.0, True, HUGE, -1)
    ]
    + [{"checkpoint_bytes": value} for value in (1.5, True, 2**64)]
    + [{"checkpoint_every": value} for value in (1.5, True, 2**32)]
    + [{"seed": value} for value in (1.5, True, -1, 2**64, "1")]
    + [{"progress": 5}],
    ids=brief,
)
def test_opening_options(k3_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(DeltaError, match=next(iter(options))):
        Llama(k3_path, **options)


def test_opening_options_by_name(k3_path: Path) -> None:
    for attempt in (Llama, deltallama.plan):
        with pytest.raises(TypeError, match="nonsense"):
            attempt(k3_path, nonsense=1)


@pytest.mark.parametrize(
    "path", [None, 5, 1.5, "", "a\0b", b"a\0b", "\ud800", ["x"], Unprintable()], ids=lambda p: type(p).__name__
)
def test_paths(llm: Llama, path: Any) -> None:
    for attempt in (Llama, deltallama.plan, llm.save_state, llm.load_state):
        with pytest.raises(ArgumentError, match="path"):
            attempt(path)


def test_a_path_of_any_bytes_works(k3_path: Path, tmp_path: Path) -> None:
    path = str(tmp_path / "m\udcff \n.gguf")  # one byte 0xff, which no UTF-8 has
    try:
        Path(path).symlink_to(k3_path)
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    with Llama(path, n_ctx=32) as model:
        model.eval([5])
        model.save_state(path + ".state")
        model.load_state((path + ".state").encode("utf-8", "surrogateescape"))  # type: ignore[arg-type]
        assert model.tokens == [5]
    with pytest.raises(deltallama.FormatError):
        deltallama.plan(path + ".state")


def test_progress_must_be_a_function(llm: Llama) -> None:
    for attempt in (llm.sync, llm.generate):
        with pytest.raises(ArgumentError, match="progress"):
            attempt(PROMPT, progress=5)


def test_tokens_that_do_not_exist_end_nothing(llm: Llama) -> None:
    assert not any(llm.is_stop(token) for token in (-1, 512, 2**40, -(2**40), HUGE))
    with pytest.raises(ArgumentError):
        llm.is_stop(1.5)  # type: ignore[arg-type]


def test_messages_are_short_whatever_the_value(llm: Llama) -> None:
    for value in ("x" * 10**6, list(range(10**6)), deep(), HUGE, Unprintable(), {"a": "b" * 10**6}):
        assert len(brief(value)) < 400
        with pytest.raises(ArgumentError) as error:
            llm.chat([{"role": "user", "content": "Hi"}], thinking=value)  # type: ignore[call-overload]
        assert len(str(error.value)) < 500
    for tools in (["x" * 10**6], deep()):
        with pytest.raises(ArgumentError) as error:
            llm.chat([{"role": "user", "content": "Hi"}], tools=tools, max_tokens=1)
        assert len(str(error.value)) < 500


def test_very_long_text(llm: Llama) -> None:
    """A million characters, one run and many words, are tokenized, counted and refused, not computed."""
    for text in ("a" * 10**6, "ab " * 350_000, "你" * 400_000):
        assert llm.detokenize(llm.tokenize(text)) == text
        with pytest.raises(deltallama.ContextFullError):
            llm.generate(text, max_tokens=1)
    assert llm.generate(PROMPT, max_tokens=2, stop=["x" * 10**6]).tokens
    with contextlib.closing(llm.generate("\ud800\udfff", max_tokens=2, stream=True)) as stream:  # lone halves
        assert stream is not None
