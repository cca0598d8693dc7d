"""The smallest program, in C: what it prints, how it fails, and that memory is what was planned."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import native
from engine import Engine
from timelines import prompt


def run_program() -> Path:
    program = native.library_path().with_name("deltallama-run")
    if not program.is_file():
        pytest.skip(f"no {program.name} beside the library under test")
    return program


def test_the_program_in_c(k3_mini: Path, rng: np.random.Generator, tmp_path: Path) -> None:
    program = run_program()
    tokens = prompt(rng, 20)
    with Engine(k3_mini, n_ctx=64, activations="fine", cache_type="f16") as engine:
        expected = engine.session().greedy(tokens, 12)
        stops = [t for t in range(engine.n_vocab) if engine.lib.delta_model_is_stop(engine.model, t)]
    stop = next((i for i, t in enumerate(expected) if t in stops), len(expected))

    def run(*args: Any, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, *map(str, args)], input=stdin, capture_output=True, text=True, check=False)

    given = run(k3_mini, "-n", 12, "--ctx", 64, *tokens)
    assert (given.returncode, given.stderr) == (0, "")
    assert [int(line) for line in given.stdout.split()] == expected[:stop]
    piped = run(k3_mini, "-n", 12, "-t", 1, stdin=" ".join(map(str, tokens)))
    assert piped.stdout == given.stdout
    for args, words in [
        ([k3_mini, "-n", "x", 1], ["x", "not a whole number"]),
        ([k3_mini, "-n"], ["-n", "needs a number"]),
        ([k3_mini, "--what", 1], ["--what", "unknown option"]),
        ([k3_mini, 1, 99999], ["prompt", "ARG", "token 99999"]),
        ([k3_mini, 1, -5], ["-5", "unknown option"]),
        ([k3_mini], ["prompt", "at least one token"]),
        ([tmp_path / "absent.gguf", 1], ["absent.gguf", "IO"]),
        ([], ["usage"]),
    ]:
        failed = run(*args)
        assert failed.returncode == 1 and failed.stdout == ""
        for word in words:
            assert word in failed.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_planned_memory_is_what_the_process_takes(
    tiny_checkpoint: Callable[..., Path], gguf: Callable[..., Path]
) -> None:
    """Anonymous resident memory grows by what was planned, within 5 % or 4 MiB, on a plan of more than 500 MB."""
    path = gguf(tiny_checkpoint("k3-93-layers"))
    command = [run_program(), path, "-n", "4", "--ctx", str(1 << 18), "--memory", "1", "2", "3"]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(line.split() for line in out.splitlines() if "_bytes " in line)
    planned, measured = int(found["planned_private_bytes"]), int(found["measured_growth_bytes"])
    assert planned > 500e6
    assert abs(measured - planned) <= max(0.05 * planned, 4 << 20)
