"""The command line of the conversion: arguments, exit status, messages, progress."""

from __future__ import annotations

import contextlib
import errno
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import conversion
import tiny
from gguf_ext import GGUFReader

SCRIPT = Path(__file__).parent.parent / "convert_hf_to_gguf.py"


def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def test_script_converts_from_any_folder(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    arguments = (tiny_checkpoint("k3"), "--outfile", "out.gguf", "--outtype", "q8_0", "--verbose")
    done = run(*arguments, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "KimiK3ForConditionalGeneration with 8 layers" in done.stderr
    of_experts = r"experts\.0\.w1\.weight_packed … \S+ \(48 tensors\) -> blk\.1\.ffn_gate_exps\.weight, "
    assert re.search(of_experts + r"ne \[32, 64, 8\], MXFP4", done.stderr)
    assert "model.norm.weight -> output_norm.weight, ne [64], F32" in done.stderr
    table = [line.split() for line in done.stderr.splitlines() if re.match(r"(F32|MXFP4|all) +\d", line)]
    assert [row[0] for row in table] == ["F32", "MXFP4", "all"] and table[1][1] == "21"
    assert table[2][2].replace(",", "") == str((tmp_path / "out.gguf").stat().st_size)
    short = (
        r"warning: blk\.3\.attn_q_b\.weight and \d like it: rows of 48 values are not whole Q8_0 blocks; written as F16"
    )
    assert re.search(short, done.stderr)
    assert "written: out.gguf" in done.stderr and "\r" not in done.stderr
    GGUFReader(tmp_path / "out.gguf").close()


def test_cli_dry_run_prints_the_name(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tiny_checkpoint("kl")), "--outfile", str(tmp_path / "{ftype}.gguf"), "--dry-run"]
    assert conversion.cli_main(arguments) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'bf16.gguf'}\n"
    assert list(tmp_path.iterdir()) == []


def test_cli_existing_output_needs_force(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "x.gguf"
    output.write_text("precious")
    arguments = [str(tiny_checkpoint("kl")), "--outfile", str(output)]
    assert conversion.cli_main([*arguments, "--dry-run"]) == 1
    assert conversion.cli_main(arguments) == 1
    assert f"error: {output} already exists; it is replaced only with --force" in capsys.readouterr().err
    assert output.read_text() == "precious"
    assert conversion.cli_main([*arguments, "--force"]) == 0
    GGUFReader(output).close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing"], "missing is not a folder"),
        (["."], r"config\.json cannot be read"),
        (["model", "--outfile", "nowhere/x.gguf"], "the folder nowhere does not exist"),
        (["model", "--outfile", "{x}.gguf"], "braces may only hold one of"),
        (["model", "--outfile", "a{.gguf"], "braces may only hold one of"),
        (["model", "--metadata", "nowhere.json"], r"nowhere\.json cannot be read"),
    ],
)
def test_cli_errors_are_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    tiny.write_checkpoint(tmp_path / "model", "kimi-linear")
    monkeypatch.chdir(tmp_path)
    assert conversion.cli_main(arguments) == 1
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert re.search(message, error[0])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["x", "--outtype", "q4_2"],
        ["x", "--tensor-type", "ffn_down"],
        ["x", "--tensor-type", "=q8_0"],
        ["x", "--tensor-type", "ffn_down=q9"],
        ["x", "--tensor-type", "ffn_(down=q8_0"],
        ["x", "--unknown"],
        ["x", "--split-max-size", "1T"],
        ["x", "--only-split", "0"],
        ["x", "--threads", "-1"],
        ["x", "--forc"],
        ["x", "--dry-run", "--verify"],
        ["x", "--validate", "--verify-only"],
    ],
)
def test_cli_wrong_arguments_are_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        conversion.cli_main(arguments)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_cli_types_in_either_case(tiny_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert conversion.cli_main([str(tiny_checkpoint("kl")), "--outtype", "Q8_0", "--dry-run"]) == 0
    assert capsys.readouterr().out.endswith("-Q8_0.gguf\n")


@pytest.mark.parametrize("file", ["config.json", "tiktoken.model", "tokenizer_config.json", "chat_template.jinja"])
def test_files_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    read = Path.read_bytes

    def denied(path: Path) -> bytes:
        if path.name == file:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", denied)
    with pytest.raises(conversion.ConversionError) as caught:
        conversion.convert(folder, tmp_path / "x.gguf")
    assert str(caught.value) == f"{folder / file} cannot be read: Permission denied"


def test_cli_lists_what_is_supported(capsys: pytest.CaptureFixture[str]) -> None:
    assert conversion.cli_main(["--print-supported-models"]) == 0
    assert capsys.readouterr().out.split() == [
        "KimiK3ForConditionalGeneration",
        "KimiLinearForCausalLM",
        "KimiLinearModel",
    ]


def test_cli_interrupted(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("conversion.folds.packed.repack_rows", interrupted)
    assert conversion.cli_main([str(tiny_checkpoint("k3")), "--outfile", str(tmp_path / "x.gguf")]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_cli_interrupted_twice_does_not_wait(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """A piece that takes for ever, a disk or network that has gone: the first Ctrl-C waits for it."""
    code = """
        import os, signal, sys, time
        import conversion, conversion.folds
        def stuck(*_):
            time.sleep(0.5)  # until all threads have started
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(100)
            print("waited", flush=True)
        conversion.folds.packed.repack_rows = stuck
        sys.exit(conversion.cli_main(sys.argv[1:]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tiny_checkpoint("k3")), "--threads", "1", "--outfile"]
    result = subprocess.run([*command, str(tmp_path / "x.gguf")], capture_output=True, text=True)
    assert result.returncode == -signal.SIGINT
    assert "waited" not in result.stdout and "Traceback" not in result.stderr
    assert not (tmp_path / "x.gguf").exists()


def test_progress_only_on_a_terminal(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """On a terminal a line is redrawn in place and cleared at the end."""
    master, slave = pty.openpty()
    code = """
        import sys, conversion.cli as cli
        cli._REDRAW_SECONDS = 0
        sys.exit(cli.cli_main(sys.argv[1:]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tiny_checkpoint("k3")), "--outfile"]
    with subprocess.Popen([*command, str(tmp_path / "x.gguf")], stderr=slave) as process:
        os.close(slave)
        seen = b""
        with contextlib.suppress(OSError):  # raised when the other end is closed
            while chunk := os.read(master, 65536):
                seen += chunk
    os.close(master)
    assert process.returncode == 0
    assert b"\r" in seen and b"100 %" in seen and b"MB/s" in seen
    assert seen.rstrip().endswith(b"x.gguf")


@pytest.mark.parametrize("part", ["model.safetensors.index.json", "config.json", "tiktoken.model"])
def test_force_never_replaces_a_part_of_the_model(tmp_path: Path, part: str) -> None:
    """Neither by its own name nor through a link from elsewhere."""
    folder = tiny.write_checkpoint(tmp_path / "model")
    before = (folder / part).read_bytes()
    (tmp_path / "link.gguf").hardlink_to(folder / part)
    for target in (folder / part, tmp_path / "link.gguf"):
        with pytest.raises(conversion.ConversionError, match="part of the model"):
            conversion.convert(folder, outfile=target, force=True)
    assert (folder / part).read_bytes() == before


def test_force_never_replaces_what_is_read_from_elsewhere(tmp_path: Path) -> None:
    """Shards in a sub-folder, a file of overrides; a link that leads nowhere is no reason to stop."""
    folder = tiny.write_checkpoint(tmp_path / "model", index=False)
    (folder / "weights").mkdir()
    for shard in folder.glob("*.safetensors"):
        shard.rename(folder / "weights" / shard.name)
    overrides = tmp_path / "overrides.json"
    overrides.write_text('{"general.name": "Kimi"}')
    before = {path: path.read_bytes() for path in (*sorted(folder.glob("weights/*")), overrides)}
    for target, message in zip(before, ["part of the model"] * 3 + ["the file that --metadata names"], strict=True):
        with pytest.raises(conversion.ConversionError, match=message):
            conversion.convert(folder, outfile=target, force=True, metadata=overrides)
    assert {path: path.read_bytes() for path in before} == before
    (folder / "link").symlink_to("nowhere")
    (tmp_path / "x.gguf").write_text("old")
    conversion.convert(folder, outfile=tmp_path / "x.gguf", force=True)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_config_in_another_encoding_is_named(tmp_path: Path, encoding: str) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model")
    config = folder / "config.json"
    config.write_bytes(config.read_text("utf-8").encode(encoding))
    with pytest.raises(conversion.ConversionError, match=r"config\.json is not valid JSON"):
        conversion.convert(folder, outfile=tmp_path / "x.gguf")


def test_a_bottomless_model_card_is_an_error_in_words(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model")
    (folder / "README.md").write_text("---\na: " + "[" * 5000 + "\n---\n")
    with pytest.raises(ValueError, match=r"README\.md: the front matter"):
        conversion.convert(folder, outfile=tmp_path / "x.gguf")


def test_dump_into_a_closed_pipe_is_silent(tmp_path: Path) -> None:
    path = conversion.convert(tiny.write_checkpoint(tmp_path / "model"), outfile=tmp_path / "x.gguf")
    run = subprocess.Popen(
        [sys.executable, "-m", "gguf_ext.dump", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert run.stdout is not None and run.stderr is not None
    run.stdout.close()
    assert (run.stderr.read(), run.wait()) == (b"", 0)
