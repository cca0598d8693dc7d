"""Scripts of bench/ that compare with other programs: what they run, what they compute of it, when they refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "bench"))

import convert_bench  # noqa: E402
import llama_bench  # noqa: E402
import machine  # noqa: E402

# -- the machine -------------------------------------------------------------------------------------------------------


def add_process(proc: Path, pid: int, parent: int, name: str, ticks: int, start: int = 7) -> None:
    """/proc/PID/stat: fields 3 to 22 behind the name; 14 and 15 are processor time, 22 the start."""
    fields = ["S", str(parent), *["0"] * 9, str(ticks // 2), str(ticks - ticks // 2), *["0"] * 6, str(start)]
    (proc / str(pid)).mkdir(parents=True, exist_ok=True)
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) {' '.join(fields)} 0 0\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A machine where this process has a child, and another one sleeps."""
    folder = tmp_path / "proc"
    add_process(folder, 1, 0, "init", 50)
    add_process(folder, 2, 0, "kthreadd", 0)
    add_process(folder, 40, 2, "kworker/0:1", 0)
    add_process(folder, os.getpid(), 1, "python", 10)
    add_process(folder, 900001, os.getpid(), "child", 0)
    add_process(folder, 900002, 900001, "grandchild", 0)
    add_process(folder, 900003, 1, "odd) (name", 100)
    (folder / "self").mkdir()
    return folder


@pytest.fixture
def watch(proc: Path) -> machine.Watch:
    """A watch on `proc` that always finds ten seconds to have gone by."""
    times = iter(range(0, 10_000, 10))
    return machine.Watch(lambda: machine.processes(proc), lambda: float(next(times)))


TICK = os.sysconf("SC_CLK_TCK")


def test_processes_of_this_machine() -> None:
    found = machine.processes()
    assert found[os.getpid()].parent == os.getppid()
    assert found[os.getpid()].seconds <= sum(os.times()[:2]) + 1
    assert machine.describe().count(",") >= 3


def test_another_process_is_seen(proc: Path, watch: machine.Watch) -> None:
    add_process(proc, 900003, 1, "odd) (name", 100 + 2 * TICK)
    share, process = watch.busiest() or (0, None)
    assert process is not None and process.name == "odd) (name" and share == pytest.approx(0.2)


@pytest.mark.parametrize("pid,parent", [(900001, "us"), (900002, 900001), (40, 2), (os.getpid(), 1)])
def test_descendants_and_the_kernel_do_not_count(proc: Path, watch: machine.Watch, pid: int, parent: int | str) -> None:
    add_process(proc, pid, os.getpid() if parent == "us" else int(parent), "busy", 10 + 9 * TICK)
    watch.check()


@pytest.mark.parametrize("ticks,quiet", [(TICK * 4 // 10, True), (TICK * 6 // 10, False)])
def test_a_twentieth_of_a_core_is_allowed(proc: Path, watch: machine.Watch, ticks: int, quiet: bool) -> None:
    add_process(proc, 900003, 1, "other", 100 + ticks)
    if quiet:
        watch.check()
    else:
        with pytest.raises(machine.BusyError, match=r"900003 \(other\) used 6% of a core"):
            watch.check()


def test_a_new_process_of_an_old_number_counts_from_nothing(proc: Path, watch: machine.Watch) -> None:
    add_process(proc, 900003, 1, "new", 100, start=8)
    share, process = watch.busiest() or (0, None)
    assert process is not None and share == pytest.approx(100 / TICK / 10)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Nothing else runs, or what ``quiet(share)`` says."""
    other = machine.Process(900003, 1, "compiler", 7, 0.0)
    found = [0.0]
    monkeypatch.setattr(machine.Watch, "busiest", lambda self: (found[0], other))
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: None)
    yield lambda share: found.__setitem__(0, share)


# -- llama_bench.py ----------------------------------------------------------------------------------------------------

# As llama-bench prints; "rates" is consumed run by run.
FAKE_LLAMA = """#!{python}
import json, pathlib, sys
here = pathlib.Path(__file__).parent
with (here / "calls").open("a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
n = (here / "calls").read_text().count("\\n")
rate = {rates}[n - 1]
rows = []
for depth in (0, 16):
    rows.append(dict(n_prompt=8, n_gen=0, n_depth=depth, avg_ts=10 * rate))
    rows.append(dict(n_prompt=0, n_gen=2, n_depth=depth, avg_ts=rate))
{ending}
print(json.dumps(rows))
"""


def fake_llama(folder: Path, rates: list[float], ending: str = "") -> Path:
    path = folder / "llama-bench"
    path.write_text(FAKE_LLAMA.format(python=sys.executable, rates=rates, ending=ending))
    path.chmod(0o755)
    return path


def llama_arguments(program: Path, model: Path, *more: str) -> list[str]:
    return [str(program), str(model), "-p", "8", "-n", "2", "-d", "0,16", "-t", "1", *more]


def test_llama_bench_alternates_and_takes_medians(
    k3_path: Path, tmp_path: Path, quiet: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    program = fake_llama(tmp_path, [3.0, 100.0, 5.0])
    assert llama_bench.main(llama_arguments(program, k3_path, "--rounds", "3", "--json")) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["busy"] == [] and "load" in err and "round 3 of 3" in err
    assert [(row["test"], row["depth"]) for row in found["rows"]] == [
        (test, depth) for depth in (0, 16) for test in ("prompt", "generation")
    ]
    for row in found["rows"]:
        theirs = 5.0 if row["test"] == "generation" else 50.0
        assert row["llama_tokens_per_second"] == theirs and len(row["our_rounds"]) == 3
        assert row["our_tokens_per_second"] == sorted(row["our_rounds"])[1]
        assert row["ratio"] == pytest.approx(row["our_tokens_per_second"] / theirs)
        assert ("our_bandwidth_share" in row) == (row["test"] == "generation")
        if row["test"] == "generation":
            per_share = row["read_gigabytes_per_second"] * 1e9 / row["bytes_per_token"]
            assert row["llama_bandwidth_share"] * per_share == pytest.approx(5.0)
            assert row["our_bandwidth_share"] * per_share == pytest.approx(row["our_tokens_per_second"])
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == [f"-m {k3_path} -p 8 -n 2 -d 0,16 -t 1 -r 1 -o json"] * 3


def test_llama_bench_prints_a_table(
    k3_path: Path, tmp_path: Path, quiet: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert llama_bench.main(llama_arguments(fake_llama(tmp_path, [4.0]), k3_path, "--rounds", "1")) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert "ratio" in heading and len(lines) == 4
    assert [line.split()[:4] for line in lines[:2]] == [["prompt", "8", "0", "40.00"], ["generation", "2", "0", "4.00"]]
    assert lines[0].endswith("-") and lines[1].endswith("%")


def test_llama_bench_refuses_a_busy_machine(
    k3_path: Path, tmp_path: Path, quiet: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    quiet(0.3)
    arguments = llama_arguments(fake_llama(tmp_path, [1.0]), k3_path, "--rounds", "1")
    assert llama_bench.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and "(compiler) used 30% of a core" in err and not (tmp_path / "calls").exists()
    assert llama_bench.main([*arguments, "--despite-load", "--json"]) == 0
    out, err = capsys.readouterr()
    assert len(json.loads(out)["busy"]) == 2 and "not to be trusted" in err


@pytest.mark.parametrize(
    "ending,words",
    [
        ("sys.exit('no such architecture')", "llama-bench ended with status 1:\n  no such architecture"),
        ("print('main:')", "llama-bench did not print JSON"),
        ("rows.pop()", "measured different things"),
    ],
)
def test_llama_bench_says_what_failed(
    k3_path: Path,
    tmp_path: Path,
    quiet: Callable[[float], None],
    capsys: pytest.CaptureFixture[str],
    ending: str,
    words: str,
) -> None:
    program = fake_llama(tmp_path, [1.0], ending)
    assert llama_bench.main(llama_arguments(program, k3_path, "--rounds", "1")) == 2
    assert words in capsys.readouterr().err
    assert llama_bench.main(llama_arguments(tmp_path / "nothing", k3_path)) == 2
    assert "llama-bench does not start" in capsys.readouterr().err


# -- convert_bench.py --------------------------------------------------------------------------------------------------

# As upstream's script is laid out: it imports from beside it, and from transformers.
FAKE_UPSTREAM = """
import pathlib, sys
from conversion.base import TextModel
from transformers import AutoTokenizer
arguments = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(pathlib.Path(arguments[0]), trust_remote_code=True)
assert TextModel().get_vocab_base_pre(tokenizer) == "kimi-k2"
ranks, special = tokenizer.model._mergeable_ranks, tokenizer.special_tokens
assert [*ranks.values(), *special.values()] == list(range(512)) and ranks[b"a"] == 97
assert special["[EOS]"] == tokenizer.eos_id and special["[BOS]"] == len(ranks)
out = pathlib.Path(arguments[arguments.index("--outfile") + 1])
out.write_bytes(b"GGUF")
pathlib.Path(__file__).with_name("calls").open("a").write(" ".join(arguments) + "\\n")
{ending}
"""


def fake_upstream(folder: Path, ending: str = "") -> Path:
    root = folder / "upstream"
    (root / "conversion").mkdir(parents=True)
    (root / "conversion" / "__init__.py").touch()
    (root / "conversion" / "base.py").write_text("class TextModel:\n    pass\n")
    (root / "transformers.py").write_text("class AutoTokenizer:\n    pass\n")
    path = root / "convert_hf_to_gguf.py"
    path.write_text(FAKE_UPSTREAM.format(ending=ending))
    return path


def test_convert_bench_compares_three_jobs(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    quiet: Callable[[float], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint, work = tiny_checkpoint("k3"), tmp_path / "work"
    arguments = [str(checkpoint), str(work), "--upstream", str(fake_upstream(tmp_path)), "--rounds", "2"]
    assert convert_bench.main([*arguments, "--json"]) == 0
    rows: dict[str, Any] = {row["job"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert [*rows] == ["floor", "ours", "upstream"]
    for row in rows.values():
        assert len(row["rounds"]) == 2 and row["seconds"] == pytest.approx(sum(row["rounds"]) / 2)
        assert row["to_floor"] == pytest.approx(row["seconds"] / rows["floor"]["seconds"])
        assert row["to_ours"] == pytest.approx(row["seconds"] / rows["ours"]["seconds"])
    assert all(row["peak_mebibytes"] > 0 for row in rows.values())
    assert list(work.iterdir()) == []
    calls = (tmp_path / "upstream" / "calls").read_text().splitlines()
    assert calls == [f"{checkpoint} --outfile {work / 'upstream.gguf'} --outtype q8_0"] * 2
    assert convert_bench.main([*arguments, "--vocab-only"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table] == ["job", "ours", "upstream"] and " - " in table[1]


def test_the_floor_is_a_copy_of_the_shards(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("k3")
    shards = sorted(checkpoint.glob("*.safetensors"))
    job = convert_bench.Job("floor", ["cat", *map(str, shards)], tmp_path / "copy", floor=True)
    code, _ = convert_bench._spawn(job.command, job.output, tmp_path / "log")
    assert code == 0 and job.output.read_bytes() == b"".join(path.read_bytes() for path in shards)


def test_peak_memory_is_that_of_the_job(tmp_path: Path) -> None:
    """Measured from a process as small as the script is."""
    folder = Path(convert_bench.__file__).parent
    code = (
        "import convert_bench, pathlib, sys\n"
        "for command in (['true'], [sys.executable, '-c', 'len(bytearray(b\"1\") * (100 << 20))']):\n"
        "    print(convert_bench._spawn(command, pathlib.Path('out'), pathlib.Path('log'))[1])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    printed = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, env=environment)
    small, large = map(int, printed.split())
    assert 0 < small < 60 << 20 and 100 << 20 < large < 200 << 20


def test_convert_bench_says_what_failed(
    tiny_checkpoint: Callable[..., Path],
    tmp_path: Path,
    quiet: Callable[[float], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    checkpoint = str(tiny_checkpoint("k3"))
    upstream = fake_upstream(tmp_path, "sys.exit('out of memory')")
    arguments = [checkpoint, str(tmp_path / "work"), "--upstream", str(upstream), "--rounds", "1"]
    assert convert_bench.main(arguments) == 2
    assert "upstream ended with status 1" in (err := capsys.readouterr().err) and "out of memory" in err
    assert convert_bench.main([*arguments, "--python", str(tmp_path / "none")]) == 2
    assert "does not start" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert convert_bench.main([str(tmp_path / "empty"), str(tmp_path / "work")]) == 2
    assert "has no safetensors shards" in capsys.readouterr().err
    quiet(0.5)
    assert convert_bench.main(arguments) == 2
    assert "used 50% of a core" in capsys.readouterr().err


# -- long contexts -----------------------------------------------------------------------------------------------------


def test_a_long_context_stays_within_the_planned_memory(tmp_path: Path) -> None:
    script = Path(machine.__file__).with_name("long_context.py")
    command = [sys.executable, str(script), str(tmp_path), "-n", "2560", "--cache-type", "q8_0", "-t", "1"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    lines = run.stdout.splitlines()
    assert lines[1].startswith("long-kl-bench-q8_0.gguf: context 2,560, 1 threads, cache q8_0")
    depths = [int(line.split()[0].replace(",", "")) for line in lines[5:7]]
    assert depths == [1024, 2560 - 512 - 16] and lines[7].split()[0] == "ratio"
