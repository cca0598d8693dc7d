"""The console command as a user meets it: output, exit status, and no traceback for a mistake."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltallama import Llama, default_options, plan
from deltallama.cli import main

GREEDY = ["--temperature", "0"]


@pytest.fixture
def model(k3_path: Path) -> str:
    return str(k3_path)


def command(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "deltallama", *arguments], capture_output=True, text=True, timeout=300, **options
    )


def test_run_answers_in_the_chat_format(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", model, "Hi", "-n", "12", *GREEDY, "--no-thinking"]) == 0
    out, err = capsys.readouterr()
    with Llama(model) as llm:
        reply = llm.chat([{"role": "user", "content": "Hi"}], max_tokens=12, temperature=0, thinking=False)
    assert out == reply.content + "\n"
    assert ("no tokens left" in err) == (reply.finish_reason == "length")


def test_run_shows_or_hides_the_reasoning(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", model, "Hi", "-n", "12", *GREEDY, "--system", "Be brief.", "--effort", "low"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert main([*arguments, "--hide-reasoning", "--stats"]) == 0
    hidden, err = capsys.readouterr()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    with Llama(model) as llm:
        reply = llm.chat(messages, max_tokens=12, temperature=0, thinking_effort="low")
    assert reply.reasoning and shown.startswith(reply.reasoning) and reply.content in shown
    assert hidden.strip() == reply.content.strip() and "\x1b" not in shown
    assert (
        f"{reply.usage.prompt_tokens} prompt + {reply.usage.completion_tokens} generated" in err and "tokens/s" in err
    )


def test_run_raw_reads_standard_input(model: str) -> None:
    result = command("run", model, "-", "--raw", "-n", "8", *GREEDY, "--stop", "\x01never", input="The model")
    with Llama(model) as llm:
        assert result.stdout == llm.generate("The model", max_tokens=8, temperature=0) + "\n"
    assert result.returncode == 0


def test_a_terminal_gets_no_control_sequences_from_the_model(model: str) -> None:
    arguments = [sys.executable, "-m", "deltallama", "run", model, "Hi", "--raw", "-n", "400", "--seed", "1"]
    arguments += ["--temperature", "3", "--top-k", "0", "--top-p", "1", "--min-p", "0", "--stop", "\x01never"]
    piped = subprocess.run(arguments, capture_output=True, check=True, timeout=300).stdout
    assert any(byte < 0x20 and byte not in b"\t\n\r" for byte in piped)  # a random model says everything
    leader, follower = pty.openpty()
    shown = b""
    with subprocess.Popen(arguments, stdout=follower, stderr=subprocess.DEVNULL) as process:
        os.close(follower)
        with contextlib.suppress(OSError):  # EIO: the other side was closed
            while piece := os.read(leader, 1 << 16):
                shown += piece
    os.close(leader)
    assert process.returncode == 0 and b"\\x" in shown
    assert not any(byte < 0x20 and byte not in b"\t\n\r" for byte in shown)


def test_run_repeats_with_a_seed(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for seed in ("5", "5", "6"):
        assert main(["run", model, "Hi", "--raw", "-n", "20", "--seed", seed]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


def test_info_allocates_nothing_and_tells_the_plan(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", model, "--json", "--n-ctx", "2048"]) == 0
    found = json.loads(capsys.readouterr().out)
    info, memory = plan(model, n_ctx=2048)
    assert (found["info"], found["memory"]) == (info, memory)
    assert found["device"]["kind"] == "cpu" and found["device"]["isa"]
    # A plan far beyond this machine's memory is still told.
    assert main(["info", model, "--n-ctx", "1000000", "--n-batch", "4096"]) == 0
    text = capsys.readouterr().out
    for word in ("kimi-k3", "KDA", "MLA", "active per token", "read per token", "allocated", found["device"]["isa"]):
        assert word in text


def test_convert_is_the_converter(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    result = command("convert", str(tiny_checkpoint("kl")), "--outfile", str(out), "--outtype", "q8_0")
    assert result.returncode == 0, result.stderr
    again = command("convert", str(tiny_checkpoint("kl")), "--outfile", str(out), "--outtype", "q8_0")
    assert again.returncode != 0 and str(out) in again.stderr and "Traceback" not in again.stderr
    assert command("info", str(out)).stdout.startswith("architecture       kimi-linear")


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["run", "nothing.gguf", "Hi"], 1, "nothing.gguf"),
        (["info", __file__], 1, "test_cli.py"),
        (["run", "MODEL", "Hi", "--effort", "medium"], 1, "low, high, max"),
        (["run", "MODEL", "Hi", "--temperature", "-1"], 1, "temperature"),
        (["run", "MODEL", "Hi", "--cache-type", "q4"], 1, "f32, f16, bf16, q8_0"),
        (["run", "MODEL", "--raw", ""], 1, "prompt is empty"),
        (["run", "MODEL", "Hi", "-c", "10"], 1, "n_ctx"),
        (["run", "MODEL", "Hi", "--device", "abacus"], 1, "abacus"),
        (["run"], 2, "usage"),
        ([], 2, "usage"),
        (["fly"], 2, "fly"),
        (["run", "MODEL", "Hi", "--top-k", "many"], 2, "many"),
    ],
)
def test_mistakes_end_in_one_sentence(model: str, arguments: list[str], status: int, message: str) -> None:
    result = command(*(model if argument == "MODEL" else argument for argument in arguments), stdin=subprocess.DEVNULL)
    assert result.returncode == status
    assert message in result.stderr and "Traceback" not in result.stderr
    assert result.stdout == ""
    if status == 1:
        assert result.stderr.startswith("deltallama: error: ") and result.stderr.count("\n") == 1


def test_a_reader_that_leaves_is_no_error_message(model: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "deltallama", "run", model, "Hi", "--raw", "-c", "4096"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    process.wait(timeout=300)
    assert process.stderr.read() == b""
    process.stderr.close()


def test_ctrl_c_ends_quietly(model: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "deltallama", "run", model, "Hi", "--raw", "-c", "100000", "-n", "90000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None and process.stderr is not None
    os.read(process.stdout.fileno(), 1)  # it generates
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert err == b"interrupted\n"


def test_help_names_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["run", "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for name, value in default_options().items():
        assert f"--{name.replace('_', '-')}" in text and f"default: {value:.6g}" in text
