"""The Python binding: what it adds to the C interface, and that it can be held wrongly without harm."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deltallama
from deltallama import (
    ArgumentError,
    CancelledError,
    Completion,
    ContextFullError,
    Delta,
    FileError,
    FormatError,
    Llama,
    StateError,
)
from deltallama._ffi import ffi
from deltallama.streaming import TextStream

PROMPT = [5, 66, 97, 104, 300]


@pytest.fixture(scope="module")
def k3_path(tiny_checkpoint: Callable[..., Path], gguf: Callable[..., Path]) -> Path:
    return gguf(tiny_checkpoint("k3"))


@pytest.fixture(scope="module")
def opened(k3_path: Path) -> Iterator[Llama]:
    with Llama(k3_path, n_ctx=1024) as model:
        yield model


@pytest.fixture
def llm(opened: Llama) -> Llama:
    opened.reset()
    return opened


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


# -- stopping ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow(k3_path: Path) -> Iterator[Llama]:
    """One row per step, so that a prompt has as many places to stop at as it has tokens."""
    with Llama(k3_path, n_ctx=4096, n_batch=1) as model:
        yield model


LONG = [7] * 4000


def test_progress_can_stop_a_prompt(slow: Llama) -> None:
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> bool:
        seen.append((done, total))
        return len(seen) == 3

    with pytest.raises(CancelledError):
        slow.generate(LONG, progress=progress)
    assert len(seen) == 3 and seen[-1][1] == len(LONG)
    assert slow.n_tokens < 10
    assert slow.generate(PROMPT, max_tokens=3, temperature=0).tokens == greedy(slow, PROMPT, 3)


def test_cancel_from_another_thread(slow: Llama) -> None:
    started = threading.Event()
    canceller = threading.Thread(target=lambda: (started.wait(), slow.cancel()))
    canceller.start()

    def progress(done: int, total: int) -> None:
        started.set()
        if done > 1:
            canceller.join()  # keeps the test from depending on how fast either side is

    with pytest.raises(CancelledError):
        slow.sync(LONG, progress=progress)
    slow.cancel()  # nothing runs: no effect
    assert slow.generate(PROMPT, max_tokens=3).tokens
    stream = slow.generate(PROMPT, stream=True, logit_bias=dict.fromkeys(range(448, 512), -1e4))
    next(stream)
    slow.cancel()
    with pytest.raises(CancelledError):
        list(stream)


def test_progress_functions_cannot_reenter(slow: Llama) -> None:
    for use in (lambda: slow.n_tokens, slow.close, slow.reset, lambda: slow.generate([1])):
        with pytest.raises(StateError, match="progress|stream"):
            slow.sync(LONG, progress=lambda done, total, use=use: use())
    assert not slow.closed and slow.generate(PROMPT, max_tokens=3).tokens


def test_cancel_and_close_race_without_harm(k3_path: Path) -> None:
    for _ in range(5):
        model = Llama(k3_path, n_ctx=4096, n_batch=1)
        outcome: list[BaseException] = []

        def work(model: Llama = model, outcome: list[BaseException] = outcome) -> None:
            try:
                while True:
                    model.sync(LONG)
            except (CancelledError, StateError) as error:
                outcome.append(error)

        def cancel(model: Llama = model) -> None:
            with contextlib.suppress(StateError):
                while True:
                    model.cancel()

        threads = [threading.Thread(target=work), threading.Thread(target=cancel), threading.Thread(target=model.close)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(outcome) == 1 and model.closed


def test_what_progress_raises_arrives(slow: Llama) -> None:
    def progress(done: int, total: int) -> None:
        raise RuntimeError("from the callback")

    with pytest.raises(RuntimeError, match="from the callback"):
        slow.sync(LONG, progress=progress)
    assert slow.generate(PROMPT, max_tokens=3).tokens


def test_ctrl_c_interrupts_a_prompt(slow: Llama) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    slow.reset()
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(KeyboardInterrupt):
            while True:
                slow.sync(LONG)
                slow.reset()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert slow.generate(PROMPT, max_tokens=3).tokens


# -- threads -----------------------------------------------------------------------------------------------------------


def test_i1_threads_on_one_object_are_serialised(llm: Llama) -> None:
    prompts = [[index + 1, 66, 97] for index in range(8)]
    serial = [llm.generate(prompt, max_tokens=6, seed=3).tokens for prompt in prompts]
    found: dict[tuple[int, int], list[int]] = {}

    def work(index: int) -> None:
        for repeat in range(4):
            stream = llm.generate(prompts[index], max_tokens=6, seed=3, stream=True)
            for _ in stream:
                pass
            found[index, repeat] = stream.result.tokens

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {(index, repeat): serial[index] for index in range(8) for repeat in range(4)}


def test_an_open_stream_has_the_model_to_itself(llm: Llama) -> None:
    expected = llm.generate(PROMPT, max_tokens=30, seed=1)
    stream = llm.generate(PROMPT, max_tokens=30, seed=1, stream=True)
    pieces = [next(stream)]
    for attempt in (lambda: llm.generate([1], max_tokens=1), llm.reset, lambda: llm.eval([1])):
        with pytest.raises(StateError, match="stream"):
            attempt()
    other: list[Completion] = []
    thread = threading.Thread(target=lambda: other.append(llm.generate([1], max_tokens=1)))
    thread.start()
    pieces += list(stream)
    thread.join()
    assert "".join(pieces) == expected and len(other) == 1


def test_a_closed_or_forgotten_stream_gives_the_model_back(llm: Llama) -> None:
    with llm.generate(PROMPT, max_tokens=30, stream=True) as stream:
        next(stream)
    assert list(stream) == []
    llm.generate([1], max_tokens=1)
    for _ in llm.generate(PROMPT, max_tokens=30, stream=True):
        break
    gc.collect()
    llm.generate([1], max_tokens=1)


# -- life and death ----------------------------------------------------------------------------------------------------


def test_i9_use_after_close_is_an_exception(k3_path: Path) -> None:
    with Llama(k3_path, n_ctx=64) as model:
        stream = model.generate(PROMPT, stream=True, logit_bias=dict.fromkeys(range(448, 512), -1e4))
        next(stream)
    assert model.closed and "closed" in repr(model)
    model.close()
    with pytest.raises(StateError, match="closed"):
        next(stream)
    uses: list[Callable[[], object]] = [
        lambda: model.generate(PROMPT), lambda: model.chat(USER), lambda: model.sync(PROMPT), lambda: model.eval([1]),
        model.logits, model.top, model.sample, model.reset, model.cancel, lambda: model.tokens, lambda: model.n_tokens,
        lambda: model.save_state("x"), lambda: model.load_state("x"), lambda: model.stats, lambda: model.is_stop(1),
        model.__enter__,
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(StateError, match="closed"):
            use()
    assert model.tokenize("Hi") and model.info["n_ctx"] == 64  # what needs no native memory still works


def test_i9_a_forked_child_is_refused(llm: Llama) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                llm.generate(PROMPT, max_tokens=1)
            except StateError as error:
                llm.close()
                code = 0 if "fork" in str(error) and not llm.closed else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert llm.generate(PROMPT, max_tokens=1).tokens


def test_a_model_cannot_be_copied(llm: Llama) -> None:
    for attempt in (lambda: pickle.dumps(llm), lambda: copy.copy(llm), lambda: copy.deepcopy(llm)):
        with pytest.raises(TypeError, match="pickled or copied"):
            attempt()
    result = llm.generate(PROMPT, max_tokens=3, seed=1)
    assert pickle.loads(pickle.dumps(result)).tokens == result.tokens  # results can


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize(
    "code",
    [
        "llm = Llama(sys.argv[1], n_ctx=32); llm.generate([1], max_tokens=2)",
        "llm = Llama(sys.argv[1], n_ctx=32); s = llm.generate([1], stream=True); next(s)",
        "llm = Llama(sys.argv[1], n_ctx=32); llm.me = llm; del llm",
        "llm = Llama.__new__(Llama); del llm",
        "try: Llama(sys.argv[1], n_ctx=-1)\nexcept ValueError: pass",
        "try: Llama(sys.argv[1], nonsense=1)\nexcept TypeError: pass",
    ],
)
def test_i2_the_interpreter_ends_in_silence(k3_path: Path, code: str) -> None:
    result = run_python(f"import sys; from deltallama import Llama\n{code}", k3_path)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_i4_memory_stays_flat_over_decodes(llm: Llama) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if not Path("/proc/self/statm").exists():
        pytest.skip("resident memory is read from /proc, which this system does not have")

    def decode(n: int) -> None:
        for _ in range(n):
            llm.reset()
            llm.generate(PROMPT, max_tokens=100, temperature=0)

    decode(3)
    before = resident()
    decode(15)
    assert resident() - before < 1 << 20


# -- opening -----------------------------------------------------------------------------------------------------------


def test_files_that_cannot_be_opened(tmp_path: Path, k3_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Llama(tmp_path / "nothing.gguf")
    with pytest.raises(OSError):
        Llama(tmp_path)
    (tmp_path / "text.gguf").write_text("This is not a model file, whatever its name says.")
    with pytest.raises(FormatError, match="text.gguf"):
        Llama(tmp_path / "text.gguf")
    whole = k3_path.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) - 100])
    with pytest.raises(FormatError, match="cut.gguf"):
        Llama(tmp_path / "cut.gguf")


def test_wrong_opening_options_are_refused(k3_path: Path) -> None:
    for wrong in (
        {"n_ctx": -1},
        {"n_threads": 10**6},
        {"activations": "rough"},
        {"cache_type": "q8_0"},
        {"device": "abacus"},
    ):
        with pytest.raises(deltallama.DeltaError):
            Llama(k3_path, **wrong)  # type: ignore[arg-type]


def test_opening_reports_progress_and_can_be_stopped(k3_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    Llama(k3_path, n_ctx=32, progress=lambda done, total: seen.append((done, total))).close()
    assert seen and seen[-1][0] == seen[-1][1]
    with pytest.raises(CancelledError):
        Llama(k3_path, n_ctx=32, progress=lambda done, total: True)


def test_what_a_model_tells_about_itself(llm: Llama, k3_path: Path) -> None:
    assert llm.metadata["general.architecture"] == "kimi-k3" == llm.architecture
    assert "tokenizer.ggml.tokens" not in llm.metadata
    assert llm.info["n_vocab"] == llm.n_vocab == 512 and llm.n_ctx == 1024
    info, memory = deltallama.plan(k3_path, n_ctx=1024)
    assert (info, memory) == (llm.info, llm.memory)
    assert memory["total_private"] == sum(v for k, v in memory.items() if k not in ("weights_mapped", "total_private"))
    assert {"cpu", "ref"} <= {device["kind"] for device in deltallama.devices()}
    assert "compiler" in deltallama.build_info()
    assert deltallama.__version__ == "0.1.0"


def test_log_lines_go_to_logging(k3_path: Path) -> None:
    # In a process of its own: the log callback belongs to the library, which other tests share.
    code = (
        "import logging, sys; logging.basicConfig(level=logging.DEBUG, format='%(levelname)s %(name)s %(message)s')\n"
    )
    result = run_python(code + "from deltallama import Llama; Llama(sys.argv[1], n_ctx=32).close()", k3_path)
    assert result.returncode == 0 and result.stdout == ""
    assert result.stderr.startswith("INFO deltallama ") and "kimi-k3" in result.stderr


def test_struct_sizes_are_those_of_the_compiler(tmp_path: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to compare with")
    include = Path(__file__).resolve().parent.parent / "csrc" / "include"
    structs = re.findall(r"^typedef struct (\w+) \{$", (include / "deltallama.h").read_text(), flags=re.MULTILINE)
    assert len(structs) >= 9
    lines = []
    for name in structs:
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        lines += [
            f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));' for field, _ in ffi.typeof(name).fields
        ]
    (tmp_path / "sizes.c").write_text(
        '#include <stdio.h>\n#include <stddef.h>\n#include "deltallama.h"\nint main(void) {'
        + "".join(lines)
        + "return 0;}"
    )
    command = [*compiler.split(), f"-I{include}", str(tmp_path / "sizes.c"), "-o", str(tmp_path / "sizes")]
    subprocess.run(command, check=True, env={k: v for k, v in os.environ.items() if k != "LD_PRELOAD"})
    output = subprocess.run([tmp_path / "sizes"], check=True, capture_output=True, text=True).stdout
    compiled = {name: int(size) for name, size in (line.split() for line in output.splitlines())}
    assert compiled == {name: ffi.sizeof(name) for name in structs} | {
        f"{name}.{field}": info.offset for name in structs for field, info in ffi.typeof(name).fields
    }


def test_defaults_are_those_of_the_header() -> None:
    defaults = {name: round(value, 6) for name, value in deltallama.default_options().items()}
    assert json.dumps(defaults) == json.dumps(
        {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.0}
        | {"presence_penalty": 0.0, "frequency_penalty": 0.0, "penalty_last_n": 64}
    )
