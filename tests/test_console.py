"""The command lines with standard streams that are closed, full, gone or of a small alphabet; wrong sizes and paths."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deltallama.cli import main

ROOT = Path(__file__).resolve().parent.parent
PYTHON = f"exec {sys.executable}"
RUN = f"{PYTHON} -m deltallama run MODEL Hi --raw -n 4 --temperature 0"
COMMANDS = {
    "run": RUN,
    "chat": f"{PYTHON} -m deltallama run MODEL Hi -n 4 --temperature 0 --stats",
    "info": f"{PYTHON} -m deltallama info MODEL",
    "json": f"{PYTHON} -m deltallama info MODEL --json",
    "bench": f"{PYTHON} -m deltallama bench MODEL -p 4 -n 2 -r 1",
    "help": f"{PYTHON} -m deltallama run --help",
    "version": f"{PYTHON} -m deltallama --version",
    "dump": f"{PYTHON} -m gguf_ext.dump MODEL",
    "plan": f"{PYTHON} -m deltallama convert CHECKPOINT --dry-run",
    "script": f"{PYTHON} {ROOT / 'convert_hf_to_gguf.py'} CHECKPOINT --dry-run",
    "error": f"{PYTHON} -m deltallama info nothing.gguf",
    "usage": f"{PYTHON} -m deltallama fly",
}


@pytest.fixture
def shell(k3_path: Path, tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[int, str, str]]:
    """``shell(line, **variables)`` -> (exit status, output, errors), in an empty folder; not UTF-8: as escapes."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    environment.pop(
        "PYTHONUNBUFFERED", None
    )  # argparse hides that its help cannot be written, where that shows at once

    def run(line: str, **variables: str) -> tuple[int, str, str]:
        line = line.replace("MODEL", str(k3_path)).replace("CHECKPOINT", str(tiny_checkpoint("kl")))
        result = subprocess.run(
            ["/bin/sh", "-c", line],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd=tmp_path,
            env={**environment, **variables},
            timeout=300,
        )
        assert b"Traceback" not in result.stderr and b"Exception ignored" not in result.stderr, result.stderr.decode()
        return result.returncode, *(s.decode("utf-8", "backslashreplace") for s in (result.stdout, result.stderr))

    return run


STATUS = {"error": 1, "usage": 2}  # of the others 0
CLOSED = [(name, closed) for name in COMMANDS for closed in ("<&- >&- 2>&-", ">&-")]


@pytest.mark.parametrize(("name", "closed"), [*CLOSED, ("chat", "<&-"), ("chat", "2>&-"), ("error", "2>&-")])
def test_closed_streams(shell: Callable[..., tuple[int, str, str]], name: str, closed: str) -> None:
    status, out, err = shell(f"{COMMANDS[name]} {closed}")
    assert status == STATUS.get(name, 0)
    assert out == "" or closed in ("<&-", "2>&-")
    assert err == "" or "2>&-" not in closed
    assert err or name != "error" or "2>&-" in closed


def test_a_closed_stream_gives_its_number_to_no_output(
    shell: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """Else what is printed to standard error would be written into the model."""
    line = f"{PYTHON} -m deltallama convert CHECKPOINT --verbose --outfile"
    assert shell(f"{line} right.gguf")[0] == 0
    assert shell(f"{line} closed.gguf <&- >&- 2>&-")[0] == 0
    assert (tmp_path / "closed.gguf").read_bytes() == (tmp_path / "right.gguf").read_bytes()


def test_a_prompt_from_a_closed_input_is_refused(shell: Callable[..., tuple[int, str, str]]) -> None:
    status, out, err = shell(f"{PYTHON} -m deltallama run MODEL - <&-")
    assert (status, out) == (1, "") and "standard input is closed" in err


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("error", "usage")])
def test_output_that_cannot_be_written(shell: Callable[..., tuple[int, str, str]], name: str) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    status, _, err = shell(f"{COMMANDS[name]} >/dev/full")
    assert status == 1 and "No space left" in err
    assert shell(f"{COMMANDS[name]} >/dev/full 2>/dev/full")[0] == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_that_has_gone(shell: Callable[..., tuple[int, str, str]], name: str) -> None:
    """`sleep` holds the command back until nobody reads; its messages, which come elsewhere, are the usual ones."""
    _, out, err = shell(f"(sleep 0.1; {COMMANDS[name]}) | true")
    assert out == "" and "Broken pipe" not in err
    _, out, err = shell(f"(sleep 0.1; {COMMANDS[name]}) 2>&1 | true")
    assert (out, err) == ("", "")


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8:strict", "ascii:surrogateescape"])
def test_text_that_the_output_cannot_encode(
    shell: Callable[..., tuple[int, str, str]], k3_path: Path, tmp_path: Path, encoding: str
) -> None:
    names = ["模型.gguf", os.fsdecode(b"m\xff.gguf")]
    for name in names:
        try:
            (tmp_path / name).symlink_to(k3_path)
        except OSError:
            pytest.skip("this file system takes UTF-8 names only")
    (tmp_path / "bad.gguf").write_bytes(b"nonsense" * 10)
    options = {"PYTHONIOENCODING": encoding}
    for name in names:
        line = f"{PYTHON} -m gguf_ext.dump ./{name}"
        assert shell(line, **options)[0] == 0
        shutil.copy(tmp_path / "bad.gguf", tmp_path / f"bad-{name}")
        for command in (f"{PYTHON} -m deltallama info ./bad-{name}", f"{PYTHON} -m gguf_ext.dump ./bad-{name}"):
            status, _, err = shell(command, **options)
            assert status == 1 and "error" in err.replace("\0", "")
    line = f"{PYTHON} -m deltallama run MODEL 你好 --raw -n 200 --top-k 0 --top-p 1 --temperature 2 --seed 1"
    _, whole, _ = shell(line, PYTHONIOENCODING="utf-8")
    assert not whole.isascii()
    status, out, _ = shell(line, **options)
    assert status == 0 and (out == whole or "\\u" in out)


def test_input_that_is_not_text(shell: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(bytes(range(256)) * 2)
    for encoding in ("ascii", "utf-8:surrogateescape"):
        status, out, _ = shell(f"{PYTHON} -m deltallama run MODEL - -n 4 <bytes", PYTHONIOENCODING=encoding)
        assert status == 0 and out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "MODEL", "-p", "1000000000000"], "1000000000000 prompt tokens"),
        (["bench", "MODEL", "-p", "0", "-n", "1000000000000"], "1000000000000 generated"),
        (["bench", "MODEL", "-p", "-5"], "nothing to measure"),
        (["bench", "MODEL", "-r", "0"], "nothing to measure"),
        (["run", "MODEL", "Hi", "-n", "-1"], "max_tokens must be at least 0, got -1"),
        (["run", "MODEL", "Hi", "-c", "99999999999"], "n_ctx"),
        (["run", "MODEL", "Hi", "-c", "-1"], "n_ctx"),
        (["run", "MODEL", "Hi", "-t", "100000000"], "threads asked for"),
        (["run", "MODEL", "Hi", "--seed", "-1"], "seed"),
        (["run", "MODEL", "Hi", "--seed", str(2**64)], "seed"),
        (["run", "MODEL", "Hi", "--stop", ""], "stop"),
        (["run", "MODEL", "Hi", "--temperature", "nan"], "temperature"),
        (["run", "MODEL", "Hi", "--top-k", str(2**40)], "top_k"),
        (["run", "MODEL", "Hi", "--device", ""], "device"),
        (["run", "MODEL", "ab " * 100_000], "n_ctx"),
        (["run", "MODEL\0", "Hi"], "zero byte"),
        (["run", "", "Hi"], "path is empty"),
        (["info", "."], "."),
        (["info", "MODEL", "--n-batch", "4294967296"], "n_batch"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_odd_sizes_end_in_one_sentence(
    k3_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([argument.replace("MODEL", str(k3_path)) for argument in arguments]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("deltallama: error: ") and err.count("\n") == 1 and message in err


@pytest.mark.parametrize("arguments", [[""], ["CHECKPOINT", "--outfile", ""], ["CHECKPOINT", "--metadata", ""]])
def test_an_empty_path_is_not_the_current_folder(
    tiny_checkpoint: Callable[..., Path],
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["convert", *(argument.replace("CHECKPOINT", str(tiny_checkpoint("kl"))) for argument in arguments)])
    assert end.value.code == 2 and "MODEL" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
