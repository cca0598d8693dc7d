"""Split output: the limits, names and keys of other programs, files moved away meanwhile, several machines at one
set."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import conversion
import tiny
from crash import run_in_child
from gguf_ext import GGUFError, GGUFReader, Plan, PlannedTensor
from gguf_ext import split as split_module
from gguf_ext.constants import GGMLQuantizationType as T
from gguf_ext.constants import GGUFValueType as V
from gguf_ext.split import Limits, OutputSet, parse_size, split
from test_resume import contents

SIZES = (3, 40, 8, 8, 300, 1, 16, 64, 7)  # float32 values of each tensor


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("7", 7), ("20K", 20_000), ("500M", 500_000_000), ("48G", 48_000_000_000)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5G", "1T", "1k", "1 G", "1GB", "０"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(GGUFError, match="expected a number of bytes, or of K, M or G"):
        parse_size(text)


# ---- as other programs split -----------------------------------------------------------------------------------------


def values_of(number: int) -> np.ndarray:
    return np.full(SIZES[number], number, np.float32)


def example_plan(sizes: tuple[int, ...] = SIZES) -> Plan:
    def producer(number: int) -> Callable[[int, int], np.ndarray]:
        return lambda first, count: values_of(number)

    plan = Plan()
    plan.add_field("general.architecture", "test", V.STRING)
    plan.add_field("test.k", 5, V.UINT32)
    for number, size in enumerate(sizes):
        plan.add_tensor(PlannedTensor(f"t{number}", (size,), T.F32, producer(number)))
    return plan


def write(path: Path, limits: Limits, plan: Plan | None = None, **options: Any) -> list[Path]:
    outputs = OutputSet(plan if plan is not None else example_plan(), path, {"source": "1"}, limits)
    assert outputs.write(outputs.outputs, **options)
    return [output.path for output in outputs.outputs]


LIMITS = [
    Limits(max_tensors=1),
    Limits(max_tensors=4),
    Limits(max_tensors=8),
    Limits(max_tensors=9),
    Limits(max_bytes=1),
    Limits(max_bytes=100),
    Limits(max_bytes=192),
    Limits(max_bytes=1600),
    Limits(max_bytes=1 << 20),
    Limits(max_bytes=300, max_tensors=2),
    Limits(max_tensors=3, first_without_tensors=True),
    Limits(max_bytes=250, first_without_tensors=True),
    Limits(first_without_tensors=True),
]


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_files_are_those_of_the_common_writer(tmp_path: Path, limits: Limits) -> None:
    """Names, keys with types, tensors per file, as the PyPI package `gguf` splits the same tensors."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "ours").mkdir()
    writer = gguf.GGUFWriter(
        tmp_path / "theirs" / "m.gguf",
        "test",
        split_max_tensors=limits.max_tensors,
        split_max_size=limits.max_bytes,
        small_first_shard=limits.first_without_tensors,
    )
    writer.add_uint32("test.k", 5)
    for number in range(len(SIZES)):
        writer.add_tensor(f"t{number}", values_of(number))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write(tmp_path / "ours" / "m.gguf", limits)
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_a_split_reads_as_the_whole(tmp_path: Path, limits: Limits) -> None:
    first, *_ = write(tmp_path / "m.gguf", limits)
    with GGUFReader(first) as reader:
        assert list(reader.tensors) == [f"t{number}" for number in range(len(SIZES))]
        for number in range(len(SIZES)):
            np.testing.assert_array_equal(reader.dequantize(f"t{number}"), values_of(number))


def test_one_file_is_no_split(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert write(tmp_path / "m.gguf", Limits(max_bytes=10**9)) == [tmp_path / "m.gguf"]
    assert "m.gguf is within the limits of the split and is written as one file" in caplog.text


def test_more_files_than_can_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_module, "MAX_FILES", 8)
    with pytest.raises(GGUFError, match="9 files, 8 are the most"):
        split(example_plan(), Limits(max_tensors=1))


# ---- files moved away, files left behind -----------------------------------------------------------------------------

THREE = Limits(max_tensors=3)
NAMES = [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def stopping_plan(number: int) -> Plan:
    """Stops when it comes to tensor `number`."""

    def stop(first: int, count: int) -> bytes:
        raise KeyboardInterrupt

    plan, whole = Plan(), example_plan()
    plan.fields, plan._fields_bytes = whole.fields, whole._fields_bytes
    for tensor in whole.tensors.values():
        is_last = tensor.name == f"t{number}"
        plan.add_tensor(PlannedTensor(tensor.name, tensor.ne, tensor.type, stop if is_last else tensor.produce))
    return plan


def expected(tmp_path: Path) -> dict[str, bytes]:
    (tmp_path / "whole").mkdir()
    write(tmp_path / "whole" / "m.gguf", THREE)
    return contents(tmp_path / "whole")


def test_finished_files_may_be_moved_away(tmp_path: Path, folder: Path) -> None:
    """Also before the set is complete: their journals say that they need not be written again."""
    with pytest.raises(KeyboardInterrupt):
        write(folder / "m.gguf", THREE, stopping_plan(7))
    journals = [f"{name}.journal" for name in NAMES]
    assert sorted(contents(folder)) == sorted([NAMES[0], NAMES[1], *journals, f"{NAMES[2]}.partial"])
    (tmp_path / "away").mkdir()
    for name in NAMES[:2]:
        shutil.move(folder / name, tmp_path / "away" / name)
    write(folder / "m.gguf", THREE)
    assert list(contents(folder)) == [NAMES[2]]
    assert {**contents(tmp_path / "away"), **contents(folder)} == expected(tmp_path)


def test_a_finished_file_that_was_changed_is_refused(folder: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(folder / "m.gguf", THREE, stopping_plan(7))
    with (folder / NAMES[0]).open("ab") as file:
        file.write(b"more")
    with pytest.raises(GGUFError, match=rf"{NAMES[0]} has \d+ bytes, expected \d+.*--restart --force"):
        write(folder / "m.gguf", THREE)
    write(folder / "m.gguf", THREE, restart=True, force=True)
    GGUFReader(folder / NAMES[0]).close()


def test_a_file_of_somebody_else_is_kept(folder: Path) -> None:
    (folder / NAMES[1]).write_text("precious")
    with pytest.raises(GGUFError, match=rf"{NAMES[1]} already exists; it is replaced only with --force"):
        write(folder / "m.gguf", THREE)
    assert contents(folder) == {NAMES[1]: b"precious"}  # refused before the first file was written
    write(folder / "m.gguf", THREE, force=True)
    GGUFReader(folder / NAMES[0]).close()


def test_force_replaces_others_files_and_continues_ours(tmp_path: Path, folder: Path) -> None:
    (folder / NAMES[1]).write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write(folder / "m.gguf", THREE, stopping_plan(7), force=True)
    first = (folder / NAMES[0]).stat().st_mtime_ns
    write(folder / "m.gguf", THREE, force=True)
    assert (folder / NAMES[0]).stat().st_mtime_ns == first
    assert contents(folder) == expected(tmp_path)


def test_a_set_larger_than_the_disk_is_begun_with_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its files may be moved away in time; where the next one does not fit, that is said before it is begun."""
    usage = split_module.shutil.disk_usage(folder)
    monkeypatch.setattr(split_module.shutil, "disk_usage", lambda _: usage._replace(free=600))
    with pytest.raises(GGUFError, match=rf"{NAMES[1]}: \d+ bytes are needed, but only 600 are free"):
        write(folder / "m.gguf", THREE)
    assert re.search(r"\d+ bytes are needed, but only 600 are free: move finished files away in time", caplog.text)
    assert sorted(contents(folder)) == [NAMES[0], f"{NAMES[0]}.journal"]


# ---- several machines ------------------------------------------------------------------------------------------------


def write_only(folder: Path, *numbers: int, plan: Plan | None = None) -> bool:
    outputs = OutputSet(plan if plan is not None else example_plan(), folder / "m.gguf", {"source": "1"}, THREE)
    return outputs.write(outputs.select(numbers))


@pytest.mark.parametrize(
    ("order", "missing"), [((1, 2, 3), ("2-3", "3")), ((3, 1, 2), ("1-2", "2")), ((2, 3, 1), ("1, 3", "1"))]
)
def test_one_file_after_another_completes_the_set(
    tmp_path: Path, folder: Path, order: tuple[int, ...], missing: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gguf_ext")
    assert [write_only(folder, number) for number in order] == [False, False, True]
    said = [message for message in caplog.messages if "missing" in message]
    assert said == [f"{n} of 3 files are finished; missing: {left}" for n, left in enumerate(missing, start=1)]
    assert contents(folder) == expected(tmp_path)


def test_machines_at_the_same_time(tmp_path: Path, folder: Path) -> None:
    """Three processes, each with a file of its own, in every race their ends may have."""
    whole = expected(tmp_path)
    for _ in range(10):
        # Each child starts the next before it writes, so all three are at work at once.
        def third() -> None:
            write_only(folder, 3)

        def second() -> None:
            beside(third, lambda: write_only(folder, 2))

        beside(second, lambda: write_only(folder, 1))
        assert contents(folder) == whole
        for path in folder.iterdir():
            path.unlink()


def beside(other: Callable[[], None], work: Callable[[], object]) -> None:

    child = os.fork()
    if child == 0:
        os._exit(run_in_child(other))
    work()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_file_that_another_process_writes_is_refused(folder: Path) -> None:
    seen = []

    def meanwhile(first: int, count: int) -> np.ndarray:
        with pytest.raises(GGUFError, match=rf"{NAMES[1]}\.partial: another process is writing this file"):
            write_only(folder, 2)
        assert not write_only(folder, 3)
        seen.append(first)
        return values_of(4)

    plan, whole = Plan(), example_plan()
    plan.fields, plan._fields_bytes = whole.fields, whole._fields_bytes
    for tensor in whole.tensors.values():
        produce = meanwhile if tensor.name == "t4" else tensor.produce
        plan.add_tensor(PlannedTensor(tensor.name, tensor.ne, tensor.type, produce))
    assert not write_only(folder, 2, plan=plan)
    assert seen == [0]
    assert write_only(folder, 1)
    GGUFReader(folder / NAMES[0]).close()


def test_a_machine_with_another_source_is_refused(folder: Path) -> None:
    assert not write_only(folder, 2)
    plan = example_plan()
    plan.add_field("test.other", 1, V.UINT8)  # of which files 2 and 3 show nothing
    with pytest.raises(GGUFError, match=rf"{NAMES[1]} was begun from something else: plan was"):
        write_only(folder, 3, plan=plan)
    assert NAMES[2] not in contents(folder)


@pytest.mark.parametrize("number", [0, 4])
def test_files_that_do_not_exist(folder: Path, number: int) -> None:
    with pytest.raises(GGUFError, match=f"there is no file {number}: the split has 3, counted from 1"):
        write_only(folder, number)
    with pytest.raises(GGUFError, match="no file is asked for"):
        write_only(folder)


# ---- whole conversions -----------------------------------------------------------------------------------------------


def test_converted_splits_hold_the_same_model(tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_checkpoint("k3")
    whole = conversion.convert(model, tmp_path / "whole.gguf")
    first = conversion.convert(model, tmp_path / "s.gguf", limits=Limits(max_bytes=100_000))
    n_files = len(list(tmp_path.glob("s-*.gguf")))
    assert n_files > 3 and first == tmp_path / f"s-00001-of-{n_files:05d}.gguf"
    with GGUFReader(whole) as a, GGUFReader(first) as b:
        assert list(a.tensors) == list(b.tensors)
        for name in a.tensors:
            assert bytes(a.data(name)) == bytes(b.data(name))
        split_keys = ["split.no", "split.count", "split.tensors.count"]
        assert list(b.fields) == [*a.fields, *split_keys]
        assert [b.fields[key] for key in split_keys] == [0, n_files, len(a.tensors)]


def test_cli_splits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.write_checkpoint(tmp_path / "model", "kimi-linear")
    (tmp_path / "out").mkdir()
    arguments = [str(model), "--outfile", str(tmp_path / "out" / "m.gguf"), "--split-max-size", "200K"]
    assert conversion.cli_main([*arguments, "--dry-run"]) == 0
    planned = capsys.readouterr().out.splitlines()
    assert len(planned) > 2 and list((tmp_path / "out").iterdir()) == []
    assert conversion.cli_main([*arguments, "--only-split", "2,1"]) == 0
    assert f"2 of {len(planned)} files are finished; missing: 3" in capsys.readouterr().err
    assert conversion.cli_main(arguments) == 0
    assert f"the set of {len(planned)} files is complete" in capsys.readouterr().err
    assert sorted(map(str, (tmp_path / "out").iterdir())) == planned
    assert conversion.cli_main([*arguments, "--only-split", "99"]) == 1
    assert f"there is no file 99: the split has {len(planned)}" in capsys.readouterr().err
    assert conversion.cli_main([str(model), "--outfile", str(tmp_path / "v.gguf"), "--no-tensor-first-split"]) == 0
    first, second = sorted(tmp_path.glob("v-*.gguf"))
    with GGUFReader(first) as reader:
        assert {info.path for info in reader.tensors.values()} == {second}
