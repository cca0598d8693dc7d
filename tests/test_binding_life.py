"""The life of a model in Python: opening, stopping, threads, closing, forks; wrong use ends in an exception."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deltallama
from deltallama import CancelledError, Completion, FormatError, Llama, StateError
from deltallama._ffi import ffi, lib
from deltallama.interrupt import interruptible

PROMPT = [5, 66, 97, 104, 300]
USER = [{"role": "user", "content": "Hi"}]


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
    slow.reset()
    slow.eval(PROMPT)
    best = int(np.argmax(slow.logits()))
    assert slow.generate(PROMPT, max_tokens=1, temperature=0).tokens == [best]


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


class InterruptLater:
    """Sends Ctrl-C once a call of the library, and not a line of Python, is what runs: after its first steps."""

    def __init__(self, model: Llama, times: int = 1) -> None:
        session = model._handles.session
        before = lib.delta_session_length(session)

        def work() -> None:
            while lib.delta_session_length(session) in (before, before + 1):
                time.sleep(0.0005)
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

        self._thread = threading.Thread(target=work)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._thread.join()


@pytest.mark.parametrize("times", [1, 20])
def test_ctrl_c_interrupts_an_evaluation(slow: Llama, times: int) -> None:
    slow.reset()
    slow.eval(PROMPT)
    with pytest.raises(KeyboardInterrupt), InterruptLater(slow, times):
        slow.eval(LONG)
    done = slow.tokens
    assert len(PROMPT) < len(done) < len(PROMPT) + len(LONG) and done == [*PROMPT, *LONG][: len(done)]
    slow.eval([9, 10])  # what is there can be continued, and is what it says it is
    logits = slow.logits()
    slow.reset()
    slow.eval([*done, 9, 10])
    assert np.array_equal(slow.logits(), logits)


def test_ctrl_c_interrupts_shortening(k3_path: Path) -> None:
    """Without checkpoints, going back computes everything before again."""
    with Llama(k3_path, n_ctx=4096, n_batch=1, checkpoint_bytes=0) as model:
        model.eval(LONG)
        with pytest.raises(KeyboardInterrupt), InterruptLater(model):
            model.truncate(3900)
        assert 0 < model.n_tokens < 3900
        model.reset()
        assert model.generate(PROMPT, max_tokens=3).tokens


def test_an_evaluation_in_another_thread_ends_with_cancel(slow: Llama) -> None:
    slow.reset()
    outcome: list[BaseException] = []

    def work() -> None:
        try:
            slow.eval(LONG)
        except CancelledError as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():
        slow.cancel()
    assert len(outcome) == 1 and slow.n_tokens < len(LONG)


def test_a_signal_handler_can_cancel_and_nothing_else(slow: Llama) -> None:
    refused: list[str] = []

    def handler(*_: object) -> None:
        for attempt in (slow.reset, slow.close, lambda: slow.n_tokens, lambda: slow.generate([1])):
            with contextlib.suppress(StateError):
                attempt()
                refused.append("not refused")
        slow.cancel()

    slow.reset()
    previous = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(CancelledError), InterruptLater(slow):
            slow.eval(LONG)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert not refused and not slow.closed and slow.generate(PROMPT, max_tokens=3).tokens


def test_an_interrupt_of_any_instruction_of_waiting_arrives_when_the_work_has_ended() -> None:
    """An exception at each instruction that Python runs between the call and its end, one after the other."""

    class Interrupt(BaseException):
        pass

    def interrupted(n_instructions: int) -> bool:
        """Whether the call was, after so many instructions."""
        cancelled, running = threading.Event(), []

        def work() -> None:
            running.append(True)
            cancelled.wait(0.002)
            running.clear()

        n = 0

        def trace(frame: types.FrameType, event: str, _: object) -> Callable[..., Any]:
            nonlocal n
            frame.f_trace_opcodes = True
            if event == "opcode":
                n += 1
                if n == n_instructions:
                    raise Interrupt
            return trace

        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            interruptible(work, cancelled.set)
            return False
        except Interrupt:
            return True
        finally:
            sys.settrace(previous)
            assert not running

    n_instructions = 1
    while interrupted(n_instructions):
        n_instructions += 1
    assert n_instructions > 30


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one may meet a callback of pytest
def test_an_interrupt_at_any_moment_leaves_a_usable_model(k3_path: Path, tmp_path: Path, seed: int) -> None:
    class Interrupt(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupt

    rng = random.Random(seed)
    previous = signal.signal(signal.SIGALRM, interrupt)
    n_interrupted = 0
    with Llama(k3_path, n_ctx=512, n_batch=8) as model:
        expected = model.generate(PROMPT, max_tokens=5, temperature=0).tokens
        model.save_state(tmp_path / "state")
        calls: list[Callable[[], object]] = [
            lambda: model.eval([7] * 200),
            lambda: model.sync([9] * 300),
            lambda: model.truncate(model.n_tokens // 2),
            lambda: model.generate([5, 6], max_tokens=30),
            lambda: list(model.generate([5], max_tokens=20, stream=True)),
            lambda: model.chat(USER, max_tokens=5),
            lambda: model.save_state(tmp_path / "state"),
            lambda: model.load_state(tmp_path / "state"),
            model.reset,
        ]
        try:
            for _ in range(300):
                try:
                    try:
                        signal.setitimer(signal.ITIMER_REAL, rng.choice([1e-4, 1e-3, 3e-3, 1e-2]))
                        rng.choice(calls)()
                    finally:  # inside the other: the signal may come here too
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except Interrupt:
                    n_interrupted += 1
                except deltallama.ContextFullError:
                    pass
                if rng.random() < 0.1:
                    assert model.generate(PROMPT, max_tokens=5, temperature=0).tokens == expected
        finally:
            signal.signal(signal.SIGALRM, previous)
    assert n_interrupted > 20


def test_errors_of_an_evaluation_arrive(llm: Llama) -> None:
    for tokens, error in (([5, 10**6], deltallama.ArgumentError), ([5] * 2000, deltallama.ContextFullError)):
        with pytest.raises(error, match="tokens?"):
            llm.eval(tokens)
    assert llm.tokens == []


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


def test_threads_may_share_a_stream(llm: Llama) -> None:
    expected = llm.generate(PROMPT, max_tokens=60, seed=1, temperature=2.0)
    with llm.generate(PROMPT, max_tokens=60, seed=1, temperature=2.0, stream=True) as stream:
        pieces: list[list[str]] = [[] for _ in range(4)]
        threads = [threading.Thread(target=found.extend, args=(stream,)) for found in pieces]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert stream.result == expected
        assert sorted(sum(pieces, [])) == sorted(
            llm.generate(PROMPT, max_tokens=60, seed=1, temperature=2.0, stream=True)
        )


def test_a_stream_cannot_be_used_while_it_makes_a_piece(slow: Llama) -> None:
    streams: list[deltallama.Stream[str, Completion]] = []
    for use in (lambda: next(streams[-1]), lambda: streams[-1].close()):
        streams.append(slow.generate(LONG, stream=True, max_tokens=1, progress=lambda done, total, use=use: use()))
        with pytest.raises(StateError, match="making a piece"):
            list(streams[-1])
    assert slow.generate(PROMPT, max_tokens=3).tokens


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


CHANGES = {
    "cut": "os.truncate(path, os.path.getsize(path) // 2)",
    "grown": "open(path, 'ab').write(b'x')",
    "written over": "data = open(path, 'rb').read(); time.sleep(0.02); open(path, 'r+b').write(data)",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_while_it_is_open_is_an_error(k3_path: Path, tmp_path: Path, change: str) -> None:
    """In a process of its own: where the check fails, reading the map of a file cut short ends the process."""
    shutil.copy(k3_path, tmp_path / "m.gguf")
    code = f"""
import os, sys, time
from deltallama import Llama, StateError
path = sys.argv[1]
with Llama(path, n_ctx=64) as llm:
    os.chdir("/")
    llm.generate([5, 66], max_tokens=2)
    {CHANGES[change]}
    for attempt in (lambda: llm.generate([5, 66, 7], max_tokens=2), lambda: llm.eval([5]), lambda: llm.truncate(1)):
        try:
            attempt()
        except StateError as error:
            print(error)
"""
    result = run_python(code, tmp_path / "m.gguf")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert len(lines) == 3 and all("m.gguf was changed after it was opened" in line for line in lines)
    assert ("bytes then" in lines[0]) == (change != "written over")


def test_a_file_that_is_replaced_or_removed_lives_on(k3_path: Path, tmp_path: Path) -> None:
    path, other = tmp_path / "m.gguf", tmp_path / "other"
    shutil.copy(k3_path, path)
    with Llama(path, n_ctx=64) as model:
        expected = model.generate(PROMPT, max_tokens=3, temperature=0)
        other.write_text("not a model")
        os.replace(other, path)
        assert model.generate(PROMPT, max_tokens=3, temperature=0) == expected
        path.unlink()
        assert model.generate(PROMPT, max_tokens=3, temperature=0) == expected


def test_a_saved_state_never_replaces_the_model(k3_path: Path, tmp_path: Path) -> None:
    shutil.copy(k3_path, tmp_path / "m.gguf")
    (tmp_path / "link").symlink_to("m.gguf")
    with Llama(tmp_path / "m.gguf", n_ctx=32) as model:
        model.eval(PROMPT)
        for name in ("m.gguf", "link", "./../" + tmp_path.name + "/m.gguf"):
            with pytest.raises(deltallama.ArgumentError, match="the model itself"):
                model.save_state(os.path.join(tmp_path, name))
    assert (tmp_path / "m.gguf").read_bytes() == k3_path.read_bytes()


def test_wrong_opening_options_are_refused(k3_path: Path) -> None:
    for wrong in (
        {"n_ctx": -1},
        {"n_threads": 10**6},
        {"activations": "rough"},
        {"cache_type": "q4_0"},
        {"cache_type": "q8_0"},  # latents of 48 values
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
