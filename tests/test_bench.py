"""`deltallama bench`: what it measures, the bytes that ops move, the checkpoints it is for. No test expects a speed."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conversion
from deltallama import Llama
from deltallama._ffi import call, ffi, lib, new_struct
from deltallama.bench import Workload, measure, op_costs, profile, profiled, read_bandwidth, to_csv, to_table
from deltallama.cli import main
from deltallama.errors import ArgumentError
from gguf_ext import GGUFReader

sys.path.append(str(Path(__file__).resolve().parent.parent / "bench"))

import make_models  # noqa: E402


def active_bytes(path: Path) -> tuple[int, int]:
    """Bytes of weights that a token reads, from the file alone; and those that the graph has no use for."""
    reader = GGUFReader(path)
    arch = reader.fields["general.architecture"]
    used, count = (int(reader.fields[f"{arch}.{key}"]) for key in ("expert_used_count", "expert_count"))
    total = 0
    for name, info in reader.tensors.items():
        if name != "token_embd.weight":
            total += info.n_bytes * used // count if "_exps." in name else info.n_bytes
    # The first layer has nothing to mix, but the file holds its score vector all the same.
    idle = reader.tensors["blk.0.attn_res_score.weight"].n_bytes if arch == "kimi-k3" else 0
    reader.close()
    return total, idle


def costs_of(llm: Llama, tokens: list[int]) -> list[dict[str, Any]]:
    with profiled(llm):
        llm.eval(tokens)
    return op_costs(llm)


# -- the profile -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activations", ["fast", "exact"])
def test_the_bytes_of_a_token_are_those_of_the_file(mini: Path, activations: str) -> None:
    with Llama(mini, n_ctx=64, activations=activations) as llm:
        llm.eval([1, 2, 3])
        costs = costs_of(llm, [4])
        expected, idle = active_bytes(mini)
        assert llm.info["weight_bytes_active"] == expected
        embedding, *others = costs
        assert (embedding["kind"], embedding["part"]) == ("embed", "embed")
        assert embedding["weight_bytes"] == llm.info["n_embd"] * 4
        assert sum(op["weight_bytes"] for op in others) == expected - idle
        assert all(op["n_runs"] == 1 and op["n_rows"] == 1 for op in costs)


def test_a_product_reads_its_tensor(mini: Path) -> None:
    reader = GGUFReader(mini)
    with Llama(mini, n_ctx=64) as llm:
        linear = [op for op in costs_of(llm, [1, 2, 3]) if op["kind"] == "linear"]
    sizes = {name.removesuffix(".weight"): info.n_bytes for name, info in reader.tensors.items()}
    reader.close()
    assert len(linear) > 20
    assert {op["name"]: op["weight_bytes"] for op in linear} == {op["name"]: sizes[op["name"]] for op in linear}
    assert all(op["name"].startswith(f"blk.{op['layer']}.") for op in linear if op["layer"] >= 0)


def test_experts_are_counted_once_per_step(k3_mini: Path, rng: np.random.Generator) -> None:
    reader = GGUFReader(k3_mini)
    with Llama(k3_mini, n_ctx=512) as llm:
        n_expert, n_used = llm.info["n_expert"], llm.info["n_expert_used"]
        tensors = [f"blk.1.ffn_{part}_exps.weight" for part in ("gate", "up", "down")]
        one = sum(reader.tensors[name].n_bytes for name in tensors) // n_expert

        def n_read(tokens: list[int]) -> float:
            (op,) = (op for op in costs_of(llm, tokens) if op["kind"] == "moe_experts" and op["layer"] == 1)
            return float(op["weight_bytes"] / one)

        assert n_read([5]) == n_used
        llm.reset()
        assert n_used <= n_read([5, 6]) <= 2 * n_used
        assert n_read([int(token) for token in rng.integers(400, size=300)]) == n_expert  # nobody stays idle that long
    reader.close()


def test_the_bytes_of_states(k3_path: Path) -> None:
    """Those of `tiny`: two KDA heads of 32, three earlier rows per convolution, latents of 32 + 16 values."""
    with Llama(k3_path, n_ctx=64, cache_type="f16") as llm:
        llm.eval(list(range(10)))
        moved = {op["kind"]: op["state_bytes"] for op in costs_of(llm, [20, 21, 22])}
    assert moved["kda_scan"] == 2 * 2 * 32 * 32 * 4
    assert moved["short_conv"] == 2 * 3 * 2 * 32 * 4
    assert moved["latent_append"] == 3 * 48 * 2
    assert moved["mla_attention"] == 13 * 48 * 2
    assert {kind for kind, n in moved.items() if n} == {"kda_scan", "short_conv", "latent_append", "mla_attention"}


def test_times_add_up_to_the_steps(llm: Llama) -> None:
    before = llm.stats["compute_ns"]
    with profiled(llm):
        llm.eval(list(range(300)))
        llm.eval(list(range(300)))
    step_ns = llm.stats["compute_ns"] - before
    costs = op_costs(llm)
    assert all(op["ns"] > 0 for op in costs)
    # Between the ops of a step there is nothing but the reading of clocks, and behind them a look at the logits.
    assert step_ns / 2 < sum(op["ns"] for op in costs) <= step_ns
    assert {op["n_rows"] for op in costs if op["part"] not in ("output", "embed")} == {600}
    assert {op["n_rows"] for op in costs if op["kind"] == "linear" and op["part"] == "output"} == {2}


def test_every_op_belongs_to_a_part(mini: Path) -> None:
    with Llama(mini, n_ctx=64) as llm:
        costs = costs_of(llm, [1])
        info = llm.info
    parts = {op["part"] for op in costs}
    assert parts == {"embed", "residual", "kda", "mla", "dense", "router", "experts", "shared", "output"}

    def count(kind: str, part: str) -> int:
        return sum(op["kind"] == kind and op["part"] == part for op in costs)

    assert count("kda_scan", "kda") == info["n_layer_kda"]
    assert count("mla_attention", "mla") == info["n_layer_mla"]
    assert count("moe_experts", "experts") == count("moe_route", "router") == info["n_layer"] - 1
    assert [op["name"] for op in costs if op["kind"] == "linear" and op["part"] == "output"] == ["output"]
    assert all((op["layer"] < 0) == (op["part"] in ("embed", "output")) for op in costs)


def test_a_profile_starts_from_nothing_and_changes_nothing(k3_path: Path) -> None:
    with Llama(k3_path, n_ctx=64) as llm:
        assert all(op["n_runs"] == op["ns"] == op["weight_bytes"] == 0 for op in op_costs(llm))
        llm.eval([1, 2, 3, 4])
        plain = llm.logits()
        llm.reset()
        first = costs_of(llm, [1, 2, 3, 4])
        assert np.array_equal(llm.logits(), plain)
        llm.eval([5])
        assert op_costs(llm) == first  # ended: further steps do not count
        again = costs_of(llm, [6])
        assert {op["n_runs"] for op in again} == {1}


def test_the_profile_ends_with_an_error_too(k3_path: Path) -> None:
    with Llama(k3_path, n_ctx=64) as llm:
        with pytest.raises(ArgumentError), profiled(llm):
            llm.eval([10**6])
        llm.eval([1])
        assert all(op["n_runs"] == 0 for op in op_costs(llm))


def test_nothing_is_measured_while_the_model_computes(llm: Llama) -> None:
    model, speed, statuses = llm._handles.model, ffi.new("double *"), []

    def progress(done: int, total: int) -> None:
        struct = new_struct("delta_op_profile")
        statuses.append(lib.delta_model_profile(model, 1))
        statuses.append(lib.delta_model_profile_get(model, 0, struct))
        statuses.append(lib.delta_model_read_bandwidth(model, 1, speed))

    llm.sync(list(range(100)), progress)
    assert statuses and set(statuses) == {lib.DELTA_BUSY}


def test_an_op_that_is_not_there(llm: Llama) -> None:
    count = lib.delta_model_op_count(llm._handles.model)
    with pytest.raises(ArgumentError, match=f"op {count} is not in 0..{count - 1}"):
        call(lib.delta_model_profile_get(llm._handles.model, count, new_struct("delta_op_profile")))


def test_bandwidth(llm: Llama) -> None:
    assert all(read_bandwidth(llm, n) > 0 for n in (0, 1, 3))
    with pytest.raises(ArgumentError, match="1000000"):
        read_bandwidth(llm, 1000000)


# -- workloads ---------------------------------------------------------------------------------------------------------

WORK = Workload(n_prompt=12, n_gen=3, depths=(0, 20), threads=(1, 2), repeats=2)


def test_measure_covers_the_workload(k3_path: Path) -> None:
    said: list[str] = []
    rows = measure(k3_path, WORK, said.append, activations="fast")
    cases = [(row["n_threads"], row["depth"], row["test"], row["n_tokens"]) for row in rows]
    tests = [("prompt", 12), ("generation", 3)]
    assert cases == [(threads, depth, *test) for threads in (1, 2) for depth in (0, 20) for test in tests]
    with Llama(k3_path) as llm:
        n_bytes = llm.info["weight_bytes_active"]
    for row in rows:
        assert 0 < row["slowest"] <= row["tokens_per_second"] <= row["fastest"] and row["repeats"] == 2
        assert row["activations"] == "fast" and row["read_gigabytes_per_second"] > 0
        if row["test"] == "generation":
            assert row["bytes_per_token"] == n_bytes
            assert row["gigabytes_per_second"] == pytest.approx(n_bytes * row["tokens_per_second"] / 1e9)
            share = row["gigabytes_per_second"] / row["read_gigabytes_per_second"]
            assert row["bandwidth_share"] == pytest.approx(share)
    assert any("2 threads, depth 20" in text for text in said)


def test_measuring_computes_what_it_says(k3_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every repeat starts at its depth: the timelines that are computed have the right lengths."""
    seen: list[tuple[int, int]] = []
    plain = Llama.eval

    def watched(self: Llama, tokens: list[int], logits: str = "last") -> None:
        seen.append((self.n_tokens, len(tokens)))
        plain(self, tokens, logits)

    monkeypatch.setattr(Llama, "eval", watched)
    measure(k3_path, Workload(n_prompt=12, n_gen=3, depths=(0, 20), threads=(1,), repeats=2))
    warm_up, *rest = seen
    at_0 = 2 * [(0, 12)] + 2 * [(0, 1), (1, 1), (2, 1)]
    at_20 = 2 * [(20, 12)] + 2 * [(20, 1), (21, 1), (22, 1)]
    assert warm_up == (0, 12) and rest == [*at_0, (0, 20), *at_20]


def test_profile_rows_add_up(k3_path: Path) -> None:
    rows = profile(k3_path, Workload(n_prompt=12, n_gen=3, threads=(1,)))
    expected, idle = active_bytes(k3_path)
    for test in ("prompt", "generation"):
        whole, *others = [row for row in rows if row["test"] == test]
        assert (whole["part"], whole["op"], whole["share"]) == ("all", "all", 1)
        parts = [row for row in others if row["op"] == "all"]
        kinds = [row for row in others if row["op"] != "all"]
        for name in ("milliseconds", "share", "weight_megabytes", "state_megabytes"):
            assert sum(row[name] for row in parts) == pytest.approx(whole[name])
            assert sum(row[name] for row in kinds) == pytest.approx(whole[name])
        assert [row["share"] for row in parts] == sorted((row["share"] for row in parts), reverse=True)
        if test == "generation":
            embedding = next(row for row in kinds if row["op"] == "embed")
            per_token = whole["weight_megabytes"] - embedding["weight_megabytes"]
            assert per_token == pytest.approx((expected - idle) / 1e6)


@pytest.mark.parametrize(
    "work,words",
    [
        (Workload(n_prompt=0, n_gen=0), "nothing to measure: 0 prompt tokens, 0 generated"),
        (Workload(n_gen=-1), "nothing to measure"),
        (Workload(repeats=0), "0 repeats"),
        (Workload(depths=()), "nothing to measure"),
        (Workload(depths=(-4,)), "depths"),
        (Workload(threads=(-1,)), "threads"),
        (Workload(depths=(10**7,)), "the model was made for 1048576"),
    ],
)
def test_workloads_that_make_no_sense(k3_path: Path, work: Workload, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        measure(k3_path, work)


# -- the command -------------------------------------------------------------------------------------------------------


def test_every_output_has_the_same_rows(k3_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", str(k3_path), "-p", "8", "-n", "2", "-d", "0,16", "-t", "1", "-r", "1"]

    def output(*options: str) -> str:
        assert main([*command, *options]) == 0
        return capsys.readouterr().out

    found = json.loads(output("--json"))
    assert found["build"] and [row["depth"] for row in found["rows"]] == [0, 0, 16, 16]
    lines = list(csv.DictReader(io.StringIO(output("--output", "csv"))))
    assert [*lines[0]] == [*found["rows"][0]]
    assert [line["test"] for line in lines] == ["prompt", "generation"] * 2
    assert lines[0]["bytes_per_token"] == "" and int(lines[1]["bytes_per_token"]) > 0
    table = output()
    assert len(table.splitlines()) == 3 + 1 + 4 and "of bandwidth" in table and "memory read alone" in table
    shown = output("--profile", "--activations", "fast")
    assert "kda_scan" in shown and "mla_attention" in shown and "activations fast" in shown
    assert {row["part"] for row in json.loads(output("--profile", "--json"))["rows"]} >= {"all", "kda", "experts"}


def test_texts_of_rows() -> None:
    row = {
        "model": "m", "architecture": "a", "n_threads": 2, "n_batch": 512, "activations": "fine", "cache_type": "f16",
        "read_gigabytes_per_second": 20.0, "test": "generation", "n_tokens": 4, "depth": 0, "tokens_per_second": 12.344,
        "fastest": 13.0, "slowest": 12.0, "repeats": 3, "bytes_per_token": 438_700_000, "gigabytes_per_second": 5.415,
        "bandwidth_share": 0.27076,
    }  # fmt: skip
    assert to_table([row]).splitlines() == [
        "m: a, batch 512, activations fine, cache f16",
        "memory read alone: 20.00 GB/s with 2 threads",
        "",
        "      test  tokens  depth  threads  tokens/s  slowest  fastest  MB/token  GB/s  of bandwidth",
        "generation       4      0        2     12.34    12.00    13.00     438.7  5.42         27.1%",
    ]
    assert to_csv([{**row, "bandwidth_share": None}]).splitlines()[1].endswith(",438700000,5.415,")


@pytest.mark.parametrize("option", ["-d", "-t"])
def test_lists_that_are_none(k3_path: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", str(k3_path), option, "1,x"])
    assert ended.value.code == 2 and "1,x" in capsys.readouterr().err


# -- the checkpoints of bench/make_models.py ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", make_models.SHAPES)
def test_bench_checkpoints_convert_and_run(name: str, tmp_path: Path) -> None:
    small: dict[str, Any] = {"num_hidden_layers": 4, "num_experts": 12, "hidden_size": 128, "num_attention_heads": 1}
    small |= {"moe_intermediate_size": 64, "intermediate_size": 64, "vocab_size": 2048}
    small |= {"routed_expert_hidden_size": 64} if name == "k3-bench" else {}
    n_bytes = make_models.write(tmp_path / name, name, seed=1, **small)
    assert n_bytes == sum(
        path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")
        for path in (tmp_path / name).glob("*.safetensors")
    )
    file = conversion.convert(tmp_path / name, outfile=tmp_path / "out.gguf", outtype="q8_0")
    with Llama(file, n_ctx=64) as llm:
        assert llm.info["n_expert"] == 12 and llm.info["n_layer_mla"] == (2 if name == "k3-bench" else 1)
        llm.eval(list(range(40)))
        spread = float(llm.logits().std())
        assert math.isfinite(spread) and 0.3 < spread < 30
        routed = next(op for op in costs_of(llm, [1]) if op["kind"] == "moe_experts")
        assert routed["weight_bytes"] > 0


@pytest.mark.parametrize("name,billions", [("kl-bench", 2.1), ("k3-bench", 4.0)])
def test_bench_shapes_have_the_parameters_they_are_known_by(name: str, billions: float) -> None:
    """Nearly all of them are in the routed experts: three matrices each, in every layer but the first."""
    shape = make_models.SHAPES[name][1]
    width = shape.get("routed_expert_hidden_size", shape["hidden_size"])
    experts = (shape["num_hidden_layers"] - 1) * shape["num_experts"] * 3 * width * shape["moe_intermediate_size"]
    assert 0.85 * billions < experts / 1e9 < billions
