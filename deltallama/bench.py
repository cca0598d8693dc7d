"""How fast a model runs here, beside how fast this machine reads its weights, and where the time goes."""

from __future__ import annotations

import csv
import io
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._ffi import call, ffi, lib, new_struct, struct_values
from .errors import ArgumentError
from .handles import plan
from .model import Llama

__all__ = ["Workload", "measure", "op_costs", "profile", "profiled", "read_bandwidth", "to_csv", "to_table"]

Row = dict[str, Any]
Say = Callable[[str], object]
"""Called with what is being measured."""


@dataclass(frozen=True)
class Workload:
    """What is computed.

    Attributes:
        n_prompt: random tokens computed together; 0: no prompts.
        n_gen: random tokens computed one after the other, as generation does without its sampling; 0: none.
        depths: tokens that are in the timeline before.
        threads: numbers of threads; 0: physical cores.
        repeats: how often each is timed.
    """

    n_prompt: int = 512
    n_gen: int = 128
    depths: Sequence[int] = (0,)
    threads: Sequence[int] = (0,)
    repeats: int = 3

    def tests(self) -> Iterator[tuple[str, int]]:
        """("prompt" or "generation", tokens) of what there is to compute."""
        if self.n_prompt:
            yield "prompt", self.n_prompt
        if self.n_gen:
            yield "generation", self.n_gen

    def positions(self, n_ctx_train: int) -> int:
        """Positions that the longest timeline needs.

        Raises:
            ArgumentError: a number is out of range, or the model was made for fewer positions.
        """
        if min(self.n_prompt, self.n_gen) < 0 or self.n_prompt + self.n_gen == 0 or self.repeats < 1:
            raise ArgumentError(
                f"nothing to measure: {self.n_prompt} prompt tokens, {self.n_gen} generated, {self.repeats} repeats"
            )
        if not self.depths or not self.threads or min(*self.depths, *self.threads, 0) < 0:
            raise ArgumentError(f"nothing to measure: depths {[*self.depths]}, threads {[*self.threads]}")
        n = max(self.depths) + max(self.n_prompt, self.n_gen)
        if n > n_ctx_train:
            raise ArgumentError(
                f"depth {max(self.depths)} and {self.n_prompt} prompt tokens or {self.n_gen} generated need {n} "
                f"positions, the model was made for {n_ctx_train}"
            )
        return n


# -- measuring -------------------------------------------------------------------------------------------------------


def measure(model_path: str | os.PathLike[str], work: Workload, say: Say = str, **options: Any) -> list[Row]:
    """Times a workload; one row for each number of threads, depth and kind of test.

    `options` are those of `Llama` but for n_ctx and n_threads. A row has the median, the fastest and the slowest of the
    repeats in tokens per second. Generation also has `bytes_per_token`, the bytes of weights that a token reads (routed
    experts count k of E, the embedding table not at all), the `gigabytes_per_second` that this makes, and the share of
    `read_gigabytes_per_second`, which the same threads reach when they do nothing but read the mapped weights.

    Raises:
        ArgumentError: a number is out of range.
        DeltaError: as `Llama`.
    """
    rows = []
    for llm, about in _models(model_path, work, options, say):
        for depth, again in _depths(llm, work, say):
            for test, n_tokens in work.tests():
                say(f"{llm.info['n_threads']} threads, depth {depth}, {test} of {n_tokens}")
                seconds = []
                for repeat in range(work.repeats):
                    again()
                    seconds.append(_run(llm, test, n_tokens, seed=repeat))
                rates = [n_tokens / each for each in seconds]
                row = {
                    **about,
                    "test": test,
                    "n_tokens": n_tokens,
                    "depth": depth,
                    "tokens_per_second": statistics.median(rates),
                    "fastest": max(rates),
                    "slowest": min(rates),
                    "repeats": work.repeats,
                    "bytes_per_token": None,
                    "gigabytes_per_second": None,
                    "bandwidth_share": None,
                }
                if test == "generation":
                    row["bytes_per_token"] = llm.info["weight_bytes_active"]
                    row["gigabytes_per_second"] = row["bytes_per_token"] * row["tokens_per_second"] / 1e9
                    row["bandwidth_share"] = row["gigabytes_per_second"] / row["read_gigabytes_per_second"]
                rows.append(row)
    return rows


def profile(model_path: str | os.PathLike[str], work: Workload, say: Say = str, **options: Any) -> list[Row]:
    """Where the time of a workload goes: a row for each part of the model and kind of op.

    `milliseconds`, `weight_megabytes` and `state_megabytes` (10^6 bytes read from weights, and moved from and to the
    states of sequences) are per prompt, or per generated token; `share` is that of all ops. Rows whose `op` is "all"
    are sums over a part, and the first row of a test, whose `part` is "all" too, over everything.

    Raises:
        ArgumentError, DeltaError: as `measure`.
    """
    rows = []
    for llm, about in _models(model_path, work, options, say):
        for depth, again in _depths(llm, work, say):
            for test, n_tokens in work.tests():
                say(f"{llm.info['n_threads']} threads, depth {depth}, profile of {test} of {n_tokens}")
                again()
                with profiled(llm):
                    _run(llm, test, n_tokens, seed=0)
                runs = n_tokens if test == "generation" else 1
                context = {**about, "test": test, "n_tokens": n_tokens, "depth": depth}
                rows += [{**context, **row} for row in _summary(op_costs(llm), runs)]
    return rows


def read_bandwidth(llm: Llama, n_threads: int = 0) -> float:
    """Bytes per second at which `n_threads` threads (0: those of the model) read its mapped weights, at most 4 GiB."""
    result = ffi.new("double *")
    with llm._handles.use():
        n_threads = n_threads or llm.info["n_threads"]
        call(lib.delta_model_read_bandwidth(llm._handles.model, n_threads, result))
    return float(result[0])


@contextmanager
def profiled(llm: Llama) -> Iterator[None]:
    """Takes a profile of what the model computes inside; see `op_costs`."""

    def switch(on: bool) -> None:
        with llm._handles.use():
            call(lib.delta_model_profile(llm._handles.model, on))

    switch(True)
    try:
        yield
    finally:
        switch(False)


def op_costs(llm: Llama) -> list[Row]:
    """The last profile: for every op of the graph, in order, the fields of `delta_op_profile`."""
    rows = []
    with llm._handles.use():
        for index in range(lib.delta_model_op_count(llm._handles.model)):
            struct = new_struct("delta_op_profile")
            call(lib.delta_model_profile_get(llm._handles.model, index, struct))
            rows.append(struct_values(struct))
    return rows


def _models(
    model_path: str | os.PathLike[str], work: Workload, options: dict[str, Any], say: Say
) -> Iterator[tuple[Llama, Row]]:
    """The model opened with each number of threads, its pages brought in, and what its rows have in common."""
    info, _ = plan(model_path, **options)
    n_ctx = work.positions(info["n_ctx_train"])
    for n_threads in work.threads:
        with Llama(model_path, n_ctx=n_ctx, n_threads=n_threads, **options) as llm:
            say(f"{llm.info['n_threads']} threads: reading the weights")
            yield (
                llm,
                {
                    "model": os.path.basename(os.fsdecode(model_path)),
                    "architecture": llm.architecture,
                    "n_threads": llm.info["n_threads"],
                    "n_batch": llm.info["n_batch"],
                    "activations": options.get("activations", "auto"),
                    "cache_type": options.get("cache_type", "f16"),
                    "read_gigabytes_per_second": read_bandwidth(llm) / 1e9,
                },
            )


def _depths(llm: Llama, work: Workload, say: Say) -> Iterator[tuple[int, Callable[[], None]]]:
    """Each depth with a function that goes (back) to it. Kernels and threads have run once before the first."""
    _run(llm, "prompt", max(1, min(work.n_prompt, 32)), seed=0)
    for depth in work.depths:
        llm.reset()
        if depth:
            say(f"{llm.info['n_threads']} threads, depth {depth}: filling the timeline")
            llm.eval(_tokens(llm, depth, seed=depth), logits="none")
            with llm._handles.use():
                call(lib.delta_session_checkpoint(llm._handles.session))

        def again(depth: int = depth) -> None:
            if depth:
                llm.truncate(depth)
            else:
                llm.reset()

        yield depth, again


def _run(llm: Llama, test: str, n_tokens: int, seed: int) -> float:
    """Seconds that it takes to compute random tokens, together or one after the other."""
    tokens = _tokens(llm, n_tokens, seed)
    start = time.perf_counter()
    if test == "prompt":
        llm.eval(tokens)
    else:
        for token in tokens:
            llm.eval([token])
    return time.perf_counter() - start


def _tokens(llm: Llama, n: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(llm.n_vocab, size=n)]


def _summary(ops: list[Row], runs: int) -> Iterator[Row]:
    """Costs per run: of all ops, of each part of the model, and in it of each kind of op; the longest first."""
    everything = ("all", "all")
    sums: dict[tuple[str, str], list[int]] = {}
    for op in ops:
        if op["n_runs"] > 0:
            for group in (everything, (op["part"], "all"), (op["part"], op["kind"])):
                for i, name in enumerate(("ns", "weight_bytes", "state_bytes")):
                    sums.setdefault(group, [0, 0, 0])[i] += op[name]
    total = max(sums[everything][0], 1)

    def order(group: tuple[str, str]) -> tuple[bool, int, str, bool, int]:
        part, kind = group
        return group != everything, -sums[part, "all"][0], part, kind != "all", -sums[group][0]

    for part, kind in sorted(sums, key=order):
        ns, weights, state = sums[part, kind]
        yield {
            "part": part,
            "op": kind,
            "milliseconds": ns / runs / 1e6,
            "share": ns / total,
            "weight_megabytes": weights / runs / 1e6,
            "state_megabytes": state / runs / 1e6,
            "gigabytes_per_second": (weights + state) / max(ns, 1),
        }


# -- showing ---------------------------------------------------------------------------------------------------------

# Column -> heading and format; columns of a row without a heading are in JSON and CSV only.
_COLUMNS = {
    "test": ("test", "{}"),
    "n_tokens": ("tokens", "{}"),
    "depth": ("depth", "{}"),
    "n_threads": ("threads", "{}"),
    "part": ("part", "{}"),
    "op": ("op", "{}"),
    "tokens_per_second": ("tokens/s", "{:.2f}"),
    "slowest": ("slowest", "{:.2f}"),
    "fastest": ("fastest", "{:.2f}"),
    "bytes_per_token": ("MB/token", "{:.1f}"),
    "milliseconds": ("ms", "{:.3f}"),
    "share": ("share", "{:.1%}"),
    "weight_megabytes": ("weights MB", "{:.2f}"),
    "state_megabytes": ("state MB", "{:.2f}"),
    "gigabytes_per_second": ("GB/s", "{:.2f}"),
    "bandwidth_share": ("of bandwidth", "{:.1%}"),
}


def to_table(rows: Sequence[Row]) -> str:
    """Aligned columns, with what all rows have in common above them."""
    columns = [name for name in _COLUMNS if name in rows[0]]
    cells = [[_COLUMNS[name][0] for name in columns]]
    cells += [[_cell(name, row[name]) for name in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    read = {row["n_threads"]: row["read_gigabytes_per_second"] for row in rows}
    first = rows[0]
    head = (
        f"{first['model']}: {first['architecture']}, batch {first['n_batch']}, activations {first['activations']}, "
        f"cache {first['cache_type']}"
    )
    speeds = ", ".join(f"{speed:.2f} GB/s with {n} thread{'s' * (n > 1)}" for n, speed in read.items())
    return "\n".join([head, f"memory read alone: {speeds}", "", *lines])


def to_csv(rows: Sequence[Row]) -> str:
    """One line of names, then one for each row; what a row does not have is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip("\n")


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    return _COLUMNS[name][1].format(value / 1e6 if name == "bytes_per_token" else value)
