"""Our speed beside llama.cpp's, on the same GGUF file, with the same threads, in the same run.

    python bench/llama_bench.py PATH/llama-bench MODEL.gguf -t 2

Rounds of both programs alternate; each number is the median over the rounds. Prompts and generation run at each depth,
with llama.cpp's defaults and ours. For generation the table also shows which share of the memory's read bandwidth each
program makes use of: bytes of weights that a token reads, times tokens per second, over the bandwidth that our program
measures in every round (the best counts). `ratio` above 1 means that ours is faster.

The machine must have nothing else to do: the script prints its load, and ends with status 2 when another process uses
more than 5 % of a core, before the first round or during one. `--despite-load` measures all the same and says so.

Build llama.cpp as its users do: Release, for the machine's own instruction set, with OpenMP.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine

Key = tuple[str, int, int]  # test, tokens, depth


class RunError(RuntimeError):
    """A program failed or said something that cannot be read."""


def run_json(command: list[str], what: str) -> Any:
    """What a program prints, read as JSON."""
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise RunError(f"{what} does not start: {error}") from None
    if result.returncode != 0:
        tail = "\n  ".join(result.stderr.strip().splitlines()[-8:])
        raise RunError(f"{what} ended with status {result.returncode}:\n  {tail}")
    try:
        return json.loads(result.stdout)
    except json.JSONDecodeError as error:
        raise RunError(f"{what} did not print JSON: {error}; it begins with {result.stdout[:80]!r}") from None


def llama_rates(options: argparse.Namespace) -> dict[Key, float]:
    """Tokens per second of one run of llama.cpp's program."""
    depths = ",".join(map(str, options.depth))
    command = [
        str(options.llama_bench),
        "-m",
        str(options.model),
        "-p",
        str(options.n_prompt),
        "-n",
        str(options.n_gen),
    ]
    command += ["-d", depths, "-t", str(options.threads), "-r", "1", "-o", "json"]
    rates: dict[Key, float] = {}
    for row in run_json(command, "llama-bench"):
        test, n_tokens = ("prompt", row["n_prompt"]) if row["n_prompt"] else ("generation", row["n_gen"])
        rates[test, n_tokens, row["n_depth"]] = row["avg_ts"]
    return rates


def our_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one run of `deltallama bench`."""
    depths = ",".join(map(str, options.depth))
    command = [sys.executable, "-m", "deltallama", "bench", str(options.model), "-p", str(options.n_prompt)]
    command += ["-n", str(options.n_gen), "-d", depths, "-t", str(options.threads), "-r", "1", "--json"]
    command += ["--activations", options.activations, "--cache-type", options.cache_type]
    rows: list[dict[str, Any]] = run_json(command, "deltallama bench")["rows"]
    return rows


def compare(
    options: argparse.Namespace, check: Callable[[], None], say: Callable[[str], object]
) -> list[dict[str, Any]]:
    """Alternates both programs; rows with medians, ratio and shares of the bandwidth. `check` follows every round."""
    ours, theirs, weights = defaultdict(list), defaultdict(list), {}
    bandwidth = 0.0
    for number in range(options.rounds):
        say(f"round {number + 1} of {options.rounds}")
        for key, rate in llama_rates(options).items():
            theirs[key].append(rate)
        for row in our_rows(options):
            key = (row["test"], row["n_tokens"], row["depth"])
            ours[key].append(row["tokens_per_second"])
            weights[key] = row["bytes_per_token"]
            bandwidth = max(bandwidth, row["read_gigabytes_per_second"] * 1e9)
        check()
    if set(ours) != set(theirs):
        raise RunError(f"the programs measured different things: {sorted(ours)} and {sorted(theirs)}")
    rows = []
    for key in ours:
        our_rate, their_rate = statistics.median(ours[key]), statistics.median(theirs[key])
        row = {"test": key[0], "n_tokens": key[1], "depth": key[2], "n_threads": options.threads}
        row |= {
            "llama_tokens_per_second": their_rate,
            "our_tokens_per_second": our_rate,
            "ratio": our_rate / their_rate,
        }
        if weights[key] is not None:
            row |= {"read_gigabytes_per_second": bandwidth / 1e9, "bytes_per_token": weights[key]}
            row |= {"llama_bandwidth_share": their_rate * weights[key] / bandwidth}
            row |= {"our_bandwidth_share": our_rate * weights[key] / bandwidth}
        rows.append({**row, "our_rounds": ours[key], "llama_rounds": theirs[key]})
    return rows


def to_table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'test':>10}  tokens  depth  llama.cpp t/s  ours t/s  ratio  llama.cpp of bandwidth  ours of bandwidth"]
    for row in rows:
        shares = [
            f"{row[name]:.1%}" if name in row else "-" for name in ("llama_bandwidth_share", "our_bandwidth_share")
        ]
        lines.append(
            f"{row['test']:>10}  {row['n_tokens']:>6}  {row['depth']:>5}  {row['llama_tokens_per_second']:>13.2f}  "
            f"{row['our_tokens_per_second']:>8.2f}  {row['ratio']:>5.2f}  {shares[0]:>22}  {shares[1]:>17}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("llama_bench", metavar="LLAMA_BENCH", type=Path, help="llama.cpp's program of that name")
    p.add_argument("model", metavar="MODEL", type=Path)
    p.add_argument("-p", "--n-prompt", type=int, default=512, help="default: %(default)s")
    p.add_argument("-n", "--n-gen", type=int, default=128, help="default: %(default)s")
    p.add_argument("-d", "--depth", type=lambda text: [int(part) for part in text.split(",")], default=[0, 4096])
    p.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)), help="default: %(default)s")
    p.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    p.add_argument("--activations", default="auto", help="of ours (default: %(default)s)")
    p.add_argument("--cache-type", default="f16", help="of ours; llama.cpp's is f16 (default: %(default)s)")
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
        guard.settle()
        rows = compare(options, guard.check, say)
    except (machine.BusyError, RunError) as error:
        say(f"llama_bench.py: {error}")
        return 2
    for text in guard.busy:
        say(f"not to be trusted: {text}")
    print(json.dumps({"busy": guard.busy, "rows": rows}, indent=2) if options.json else to_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
