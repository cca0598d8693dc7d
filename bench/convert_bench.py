"""How long a conversion takes beside upstream's converter and beside a plain copy of the source.

    python bench/convert_bench.py CHECKPOINT WORK --outtype q8_0 \
        --upstream PATH/convert_hf_to_gguf.py --python VENV/bin/python

Three jobs alternate: the floor (`cat` of all shards into a file, then fsync), our converter, and upstream's where it is
given. The table has the median wall time of each over the rounds, the most memory that it held (resident, with its
threads but without the kernel's cache of files), and the ratio to the floor; for upstream also the ratio to ours.
Outputs are written to WORK, which should be on the disk that is meant, and removed again.

`--vocab-only` converts the vocabulary alone, without a floor. The machine must have nothing else to do: see
`llama_bench.py`. `make_models.py` makes the checkpoints; their vocabularies are generated, so upstream's converter runs
through `upstream_convert.py`, which says what that changes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine

HERE = Path(__file__).resolve().parent
CONVERTER = HERE.parent / "convert_hf_to_gguf.py"


class JobError(RuntimeError):
    """A job failed."""


@dataclass
class Job:
    """`command` writes `output`, or prints what goes there if it is the `floor`."""

    name: str
    command: list[str]
    output: Path
    floor: bool = False
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0


def run(job: Job) -> None:
    """Runs a job once, until its output is on disk, and removes the output.

    Raises:
        JobError: it does not start, ends with another status than 0, or leaves no output.
    """
    log = job.output.with_suffix(".log")
    for path in (job.output, log):
        path.unlink(missing_ok=True)
    start = time.perf_counter()
    code, peak = _spawn(job.command, stdout=job.output if job.floor else log, stderr=log)
    with contextlib.suppress(FileNotFoundError), job.output.open("rb") as file:
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    if code != 0 or not job.output.is_file():
        tail = "\n  ".join(log.read_text(errors="replace").strip().splitlines()[-8:])
        raise JobError(f"{job.name} ended with status {code}, its output is {job.output}:\n  {tail}")
    job.output.unlink()
    log.unlink()
    job.seconds.append(seconds)
    job.peak_bytes = max(job.peak_bytes, peak)


def _spawn(command: Sequence[str], stdout: Path, stderr: Path) -> tuple[int, int]:
    """Exit status of a command and the most bytes that it had resident, at least as many as this process has: Linux
    counts what was there before the command took the place of a copy of it."""
    with stdout.open("wb") as out, stderr.open("ab") as err:
        try:
            process = subprocess.Popen(command, stdout=out, stderr=err)
        except OSError as error:
            raise JobError(f"{command[0]} does not start: {error}") from None
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:  # interrupted: not to be left behind
            process.kill()
            process.wait()
            raise
    process.returncode = os.waitstatus_to_exitcode(status)  # it was waited for
    return process.returncode, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def jobs(options: argparse.Namespace) -> list[Job]:
    shards = sorted(map(str, options.checkpoint.glob("*.safetensors")))
    if not shards:
        raise JobError(f"{options.checkpoint} has no safetensors shards")
    work = options.work
    more = ["--vocab-only"] if options.vocab_only else ["--outtype", options.outtype]

    def converter(start: list[str | Path], output: Path) -> list[str]:
        return [*map(str, start), str(options.checkpoint), "--outfile", str(output), *more]

    found = [Job("ours", converter([sys.executable, CONVERTER], work / "ours.gguf"), work / "ours.gguf")]
    if not options.vocab_only:
        found.insert(0, Job("floor", ["cat", *shards], work / "floor.bin", floor=True))
    if options.upstream is not None:
        start = [options.python, HERE / "upstream_convert.py", options.upstream]
        found.append(Job("upstream", converter(start, work / "upstream.gguf"), work / "upstream.gguf"))
    return found


def measure(work: Sequence[Job], rounds: int, check: Callable[[], None], say: Callable[[str], object]) -> None:
    """Alternates the jobs; `check` follows every round."""
    for number in range(rounds):
        for job in work:
            run(job)
        say(f"round {number + 1} of {rounds}: " + ", ".join(f"{job.name} {job.seconds[-1]:.2f} s" for job in work))
        check()


def rows(work: Sequence[Job]) -> list[dict[str, Any]]:
    medians = {job.name: statistics.median(job.seconds) for job in work}
    return [
        {
            "job": job.name,
            "seconds": medians[job.name],
            "to_floor": medians[job.name] / medians["floor"] if "floor" in medians else None,
            "to_ours": medians[job.name] / medians["ours"],
            "peak_mebibytes": job.peak_bytes / 2**20,
            "rounds": job.seconds,
        }
        for job in work
    ]


def to_table(found: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'job':>8}  seconds  to floor  to ours  peak MiB"]
    for row in found:
        floor = "-" if row["to_floor"] is None else f"{row['to_floor']:.2f}"
        ours, peak = row["to_ours"], row["peak_mebibytes"]
        lines.append(f"{row['job']:>8}  {row['seconds']:>7.2f}  {floor:>8}  {ours:>7.2f}  {peak:>8.0f}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkpoint", metavar="CHECKPOINT", type=Path)
    p.add_argument("work", metavar="WORK", type=Path, help="folder for the outputs")
    p.add_argument("--outtype", default="q8_0", help="default: %(default)s")
    p.add_argument("--vocab-only", action="store_true", help="convert keys and vocabulary only")
    p.add_argument("--upstream", metavar="SCRIPT", type=Path, help="llama.cpp's convert_hf_to_gguf.py")
    p.add_argument(
        "--python", default=sys.executable, help="interpreter that has what upstream's needs, torch above all"
    )
    p.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    p.add_argument("--json", action="store_true", help="print JSON, with every round's numbers")
    p.add_argument("--despite-load", action="store_true", help="measure although something else runs")
    options = p.parse_args(argv)
    if options.rounds < 1:
        p.error("there must be at least one round")

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    say(machine.describe())
    guard = machine.Guard(options.despite_load)
    try:
        work = jobs(options)
        options.work.mkdir(parents=True, exist_ok=True)
        guard.settle()
        measure(work, options.rounds, guard.check, say)
    except (machine.BusyError, JobError) as error:
        say(f"convert_bench.py: {error}")
        return 2
    for text in guard.busy:
        say(f"not to be trusted: {text}")
    found = rows(work)
    print(json.dumps({"busy": guard.busy, "rows": found}, indent=2) if options.json else to_table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
