"""The Python binding: text, sampling, chat, timeline and saved states (opening and closing: test_binding_life.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltallama import (
    ArgumentError,
    Completion,
    ContextFullError,
    Delta,
    FileError,
    FormatError,
    Llama,
    StateError,
    UnsupportedError,
)
from deltallama.streaming import TextStream

PROMPT = [5, 66, 97, 104, 300]


def greedy(llm: Llama, prompt: list[int], n: int) -> list[int]:
    """The definition: evaluate, take the best, append."""
    llm.reset()
    llm.eval(prompt)
    tokens: list[int] = []
    while True:
        tokens.append(int(np.argmax(llm.logits())))
        if len(tokens) == n or llm.is_stop(tokens[-1]):
            return tokens
        llm.eval(tokens[-1:])


# -- text --------------------------------------------------------------------------------------------------------------


def test_generate_is_greedy_continuation_at_temperature_zero(llm: Llama) -> None:
    expected = greedy(llm, PROMPT, 20)
    result = llm.generate(PROMPT, max_tokens=20, temperature=0)
    assert result.tokens == expected
    assert isinstance(result, str) and isinstance(result, Completion)
    assert result == llm.detokenize([token for token in expected if not llm.is_stop(token)])
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (5, len(expected))
    assert result.usage.total_tokens == 5 + len(expected)


def test_a_text_prompt_is_its_tokens(llm: Llama) -> None:
    text = "The model reads <|open|> 你好"
    ids = llm.tokenize(text)
    assert llm.detokenize(ids) == text
    expected = llm.generate(ids, max_tokens=8, temperature=0)
    assert llm.generate(text, max_tokens=8, temperature=0) == expected
    assert llm.generate(text.encode(), max_tokens=8, temperature=0) == expected


def test_streaming_gives_the_same_text_in_whole_characters(llm: Llama, seed: int) -> None:
    options: dict[str, Any] = {"max_tokens": 60, "seed": seed, "temperature": 1.5, "top_k": 0, "top_p": 1, "min_p": 0}
    whole = llm.generate(PROMPT, **options)
    stream = llm.generate(PROMPT, stream=True, **options)
    with pytest.raises(StateError, match="no result"):
        _ = stream.result
    pieces = list(stream)
    assert "".join(pieces) == whole == stream.result
    assert all(pieces)
    assert stream.result.tokens == whole.tokens and stream.result.seed == seed
    assert list(stream) == [] and stream.result == whole


@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=4), max_size=3), st.data())
@settings(max_examples=300, deadline=None)
def test_text_streams_do_not_depend_on_how_bytes_arrive(text: str, stop: list[str], data: st.DataObject) -> None:
    encoded = text.encode()
    if encoded and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(encoded) - 1))
        encoded = encoded[:at] + b"\xff" + encoded[at:]
    if len(text) > 3 and data.draw(st.booleans()):
        stop = [*stop, text[1:3]]
    decoded = encoded.decode("utf-8", errors="replace")
    # Definition: the stop string that is complete first ends the text where it begins.
    ends = [(decoded.index(s) + len(s), decoded.index(s)) for s in stop if s in decoded]
    expected = decoded[: min(ends)[1]] if ends else decoded
    stream, found, at = TextStream(stop), "", 0
    while at < len(encoded):
        size = data.draw(st.integers(1, 5))
        piece = stream.push(encoded[at : at + size])
        found, at = found + piece, at + size
        assert expected.startswith(found)
    found += stream.finish()
    assert found == expected
    assert (stream.stopped is not None) == bool(ends)


def test_stop_strings_cut_exactly(llm: Llama) -> None:
    whole = llm.generate(PROMPT, max_tokens=40, temperature=0)
    stop = whole[7:10]
    assert len(stop) == 3
    result = llm.generate(PROMPT, max_tokens=40, temperature=0, stop=["\0never", stop])
    assert result == whole[: whole.index(stop)]
    assert result.finish_reason == "stop"
    assert len(result.tokens) < len(whole.tokens)
    assert "".join(llm.generate(PROMPT, max_tokens=40, temperature=0, stop=stop, stream=True)) == result
    with pytest.raises(ArgumentError, match="stop"):
        llm.generate(PROMPT, stop=[""])


@pytest.mark.parametrize("name", ["<|end_of_msg|>", "[EOS]", "[EOT]"])
def test_c5_generation_ends_at_the_tokens_that_end_a_turn(llm: Llama, name: str) -> None:
    end = llm.tokenizer.special_tokens[name]
    assert llm.is_stop(end)
    result = llm.generate(PROMPT, max_tokens=5, logit_bias={end: 1e4})
    assert (result, result.tokens, result.finish_reason) == ("", [end], "stop")


def test_max_tokens_and_a_full_context_end_with_length(k3_path: Path) -> None:
    with Llama(k3_path, n_ctx=16) as small:
        never = dict.fromkeys((t for t in range(small.n_vocab) if small.is_stop(t)), -1e4)
        assert small.generate(PROMPT, max_tokens=3, logit_bias=never).finish_reason == "length"
        result = small.generate(PROMPT, logit_bias=never)
        assert result.finish_reason == "length" and len(result.tokens) == 16 - 5 + 1  # the last need not be computed
        none = small.generate(PROMPT, max_tokens=0)
        assert (none, none.tokens) == ("", [])
        assert len(small.generate([1] * 16, logit_bias=never).tokens) == 1
        with pytest.raises(ContextFullError, match="16"):
            small.generate([1] * 17)
        assert small.generate(PROMPT, max_tokens=3, logit_bias=never).finish_reason == "length"


# -- sampling ----------------------------------------------------------------------------------------------------------


def test_seeds(llm: Llama, k3_path: Path) -> None:
    first = llm.generate(PROMPT, max_tokens=12, seed=7)
    llm.generate([1, 2, 3], max_tokens=3)
    assert llm.generate(PROMPT, max_tokens=12, seed=7).tokens == first.tokens
    fresh = [llm.generate(PROMPT, max_tokens=12) for _ in range(4)]
    assert len({result.seed for result in fresh}) == 4
    again = llm.generate(PROMPT, max_tokens=12, seed=fresh[0].seed)
    assert again.tokens == fresh[0].tokens
    with Llama(k3_path, n_ctx=64, seed=7) as seeded:
        result = seeded.generate(PROMPT, max_tokens=12)
        assert result.seed == 7 and seeded.generate(PROMPT, max_tokens=12).tokens == result.tokens


def test_options_reach_the_sampler(llm: Llama) -> None:
    best = llm.generate(PROMPT, max_tokens=4, temperature=0).tokens
    assert llm.generate(PROMPT, max_tokens=4, top_k=1).tokens == best
    assert llm.generate(PROMPT, max_tokens=4, logit_bias={9: 1e4}, temperature=0).tokens == [9] * 4
    assert llm.generate(PROMPT, max_tokens=1, logit_bias={best[0]: -1e4}, temperature=0).tokens != best[:1]
    many = {"temperature": 0, "max_tokens": 20}
    free = llm.generate([9] * 5, logit_bias={9: 2}, **many).tokens  # type: ignore[call-overload]
    names = ("repetition_penalty", "repeat_penalty", "presence_penalty", "frequency_penalty")
    for penalty in ({name: 1e4} for name in names):
        penalised = llm.generate([9] * 5, logit_bias={9: 2}, penalty_last_n=-1, **many, **penalty).tokens  # type: ignore[call-overload]
        assert len(set(penalised)) >= len(set(free)) and penalised.count(9) <= free.count(9)
    assert len(set(llm.generate(PROMPT, presence_penalty=1e5, penalty_last_n=-1, **many).tokens)) == 20  # type: ignore[call-overload]


def test_wrong_options_are_refused(llm: Llama) -> None:
    with pytest.raises(TypeError, match="'temprature'; did you mean 'temperature'"):
        llm.generate(PROMPT, temprature=1)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="same option"):
        llm.generate(PROMPT, repeat_penalty=1.1, repetition_penalty=1.1)
    for wrong in (
        {"temperature": -1}, {"temperature": float("nan")}, {"top_p": 2}, {"min_p": -0.1}, {"top_k": -1},
        {"top_k": 2**40}, {"top_k": 1.5}, {"seed": -1}, {"logit_bias": {10**6: 1.0}}, {"logit_bias": [3]},
        {"repetition_penalty": 0},
    ):  # fmt: skip
        with pytest.raises(ArgumentError):
            llm.generate(PROMPT, max_tokens=1, **wrong)  # type: ignore[call-overload]
    for prompt in ([], "", [512], [-1], [2**40], ["a"]):
        with pytest.raises(ArgumentError):
            llm.generate(prompt, max_tokens=1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="max_tokens"):
        llm.generate(PROMPT, max_tokens=-1)
    assert llm.generate(PROMPT, max_tokens=2, temperature=0).tokens  # and nothing is broken


# -- chat --------------------------------------------------------------------------------------------------------------


def scripted(llm: Llama, monkeypatch: pytest.MonkeyPatch, reply: str) -> None:
    """Makes the model say `reply`, control tokens spelled out, and nothing but end tokens after it."""
    tokens = iter(llm.tokenizer.encode(reply, special=True))
    end = llm.tokenizer.special_tokens["<|end_of_msg|>"]
    monkeypatch.setattr(llm, "_sample", lambda sampler: next(tokens, end))


USER = [{"role": "user", "content": "Hi"}]
CLOSERS = "<|close|>response<|sep|><|close|>message<|sep|>"
REPLY = "They greet é.<|close|>think<|sep|><|open|>response<|sep|>Hello! 你好." + CLOSERS


def test_what_a_prompt_would_leave_out_is_refused(llm: Llama) -> None:
    """A dropped message or image would have the model answer something else."""
    with pytest.raises(ArgumentError, match="message 1: role 'developer'"):
        llm.chat([{"role": "user", "content": "Hi"}, {"role": "developer", "content": "Be brief."}], max_tokens=1)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    with pytest.raises(UnsupportedError, match="message 0 has an image"):
        llm.chat([{"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]}], max_tokens=1)


def test_chat_splits_reasoning_and_content(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(llm, monkeypatch, REPLY)
    reply = llm.chat(USER)
    assert (reply.reasoning, reply.content, reply.finish_reason) == ("They greet é.", "Hello! 你好.", "stop")
    assert str(reply) == "Hello! 你好."
    assert llm.tokens[: reply.usage.prompt_tokens] == llm.chat_tokens(USER)
    assert reply.message == {"role": "assistant", "content": "Hello! 你好.", "reasoning_content": "They greet é."}
    # The reply, put back into the history, is what the model has said: the cached timeline stays a prefix.
    following = llm.chat_tokens([*USER, reply.message, *USER])
    end = llm.tokenizer.special_tokens["<|end_of_msg|>"]
    assert following[: len(llm.tokens) + 1] == [*llm.tokens, end]


def test_chat_streams_deltas(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(llm, monkeypatch, REPLY)
    stream = llm.chat(USER, stream=True)
    deltas = list(stream)
    assert "".join(delta.reasoning for delta in deltas) == "They greet é."
    assert "".join(delta.content for delta in deltas) == "Hello! 你好." == stream.result.content
    assert all(isinstance(delta, Delta) and bool(delta.reasoning) != bool(delta.content) for delta in deltas)


def test_g2_a_cut_reply_is_reasoning(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(llm, monkeypatch, REPLY)
    reply = llm.chat(USER, max_tokens=5)
    assert reply.reasoning and (reply.content, reply.finish_reason) == ("", "length")


def test_chat_without_thinking_and_with_it_skipped(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(llm, monkeypatch, "Hello!" + CLOSERS)
    assert llm.chat(USER, thinking=False).content == "Hello!"
    scripted(llm, monkeypatch, "Hello!" + CLOSERS)
    reply = llm.chat(USER)
    assert (reply.reasoning, reply.content) == ("", "Hello!")


def test_chat_stop_strings_are_searched_in_the_content(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(llm, monkeypatch, "a stop b<|close|>think<|sep|><|open|>response<|sep|>c stop d" + CLOSERS)
    reply = llm.chat(USER, stop="stop")
    assert (reply.reasoning, reply.content, reply.finish_reason) == ("a stop b", "c ", "stop")


def test_chat_returns_calls(llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    call = (
        '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="n" type="number"<|sep|>2<|close|>argument<|sep|>'
    )
    reply_text = "t<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
    reply_text += call + "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
    scripted(llm, monkeypatch, reply_text)
    reply = llm.chat(USER, tools=[{"type": "function", "function": {"name": "f"}}])
    assert reply.finish_reason == "tool_calls"
    assert reply.tool_calls == [
        {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"n": 2}'}}
    ]
    following = llm.chat_tokens([*USER, reply.message, {"role": "tool", "tool_call_id": "call_1", "content": "4"}])
    assert 'tool="f" index="1"' in llm.detokenize(following, special=True)


# -- tokens and state --------------------------------------------------------------------------------------------------


def test_the_timeline(llm: Llama) -> None:
    assert llm.tokens == [] and llm.n_tokens == 0
    with pytest.raises(StateError):
        llm.logits()
    assert llm.sync(PROMPT).n_computed == 5
    alone = llm.logits()
    assert alone.shape == (512,) and alone.dtype == np.float32
    llm.eval([7, 8], logits="all")
    assert llm.tokens == [*PROMPT, 7, 8] and llm.n_logits == 2
    top = llm.top(3, row=0)
    assert [item.token for item in top] == list(np.argsort(-llm.logits(0), kind="stable")[:3])
    logits = llm.logits(0).astype(np.float64)
    assert abs(top[0].logprob - (logits.max() - np.log(np.exp(logits).sum()))) < 1e-4
    llm.truncate(5)
    assert llm.tokens == PROMPT
    llm.eval([7], logits="none")
    with pytest.raises(StateError):
        llm.logits()
    llm.reset()
    assert llm.sync(PROMPT).n_reused == 0
    assert np.array_equal(llm.logits(), alone)  # a copy: later calls do not change it
    assert llm.sample(temperature=0) == int(alone.argmax())
    for wrong in (lambda: llm.truncate(-1), lambda: llm.top(0), lambda: llm.eval([1], logits="some")):
        with pytest.raises(ArgumentError):
            wrong()


def test_a_prefix_is_not_computed_again(llm: Llama) -> None:
    long = [int(token) for token in np.random.default_rng(0).integers(440, size=60)]
    first = llm.generate(long, max_tokens=8, temperature=0)
    following = llm.generate([*long, *first.tokens, 3, 4], max_tokens=1, temperature=0)
    assert following.usage.cached_tokens >= len(long)


def test_saved_state_continues_the_same(llm: Llama, k3_path: Path, tmp_path: Path) -> None:
    expected = llm.generate(PROMPT, max_tokens=20, temperature=0).tokens
    llm.reset()
    llm.eval(PROMPT)
    llm.save_state(tmp_path / "state")
    with Llama(k3_path, n_ctx=1024) as other:
        other.load_state(tmp_path / "state")
        assert other.tokens == PROMPT
        assert other.generate(PROMPT, max_tokens=20, temperature=0).tokens == expected
    damaged = bytearray((tmp_path / "state").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    llm.eval([9])
    with pytest.raises(FormatError):
        llm.load_state(tmp_path / "damaged")
    with pytest.raises(FileError, match="nothing-here"):
        llm.load_state(tmp_path / "nothing-here")
    with pytest.raises(FileError):
        llm.save_state(tmp_path / "no" / "folder")
    with pytest.raises(ArgumentError, match="zero byte"):
        llm.save_state("a\0b")
    assert llm.tokens == [*PROMPT, 9]
