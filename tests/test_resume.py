"""Interrupted conversions: killed at any moment, out of disk, changed meanwhile, damaged, and continued to the same
bytes."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

import conversion
import tiny
from conversion.checkpoint import Source
from crash import delays, run_in_child
from gguf_ext import GGUFError, GGUFReader, Plan, PlannedTensor
from gguf_ext import writer as writer_module
from gguf_ext.constants import GGMLQuantizationType as T
from gguf_ext.constants import GGUFValueType as V
from gguf_ext.journal import Journal
from gguf_ext.split import Limits, OutputSet

FACTS = {"source": "1"}


def example_plan(broken: Callable[[int], None] = lambda row: None) -> Plan:
    """Three tensors of 7 + 1 + 5 pieces, with padding after each; `broken` is called with the row of the last one."""

    def bytes_of(seed: int, row_bytes: int) -> Callable[[int, int], bytes]:
        def produce(first: int, count: int) -> bytes:
            if seed == 3:
                broken(first)
            return b"".join(np.random.default_rng([seed, first + n]).bytes(row_bytes) for n in range(count))

        return produce

    plan = Plan()
    plan.add_field("general.architecture", "test", V.STRING)
    plan.add_tensor(PlannedTensor("a", (9, 14), T.F32, bytes_of(1, 36), 2))
    plan.add_tensor(PlannedTensor("b", (5,), T.F16, bytes_of(2, 10)))
    plan.add_tensor(PlannedTensor("c", (32, 5), T.Q8_0, bytes_of(3, 34), 1))
    return plan


def write(path: Path, plan: Plan | None = None, facts: dict[str, str] = FACTS, **options: Any) -> None:
    limits = Limits(max_tensors=int(path.stem == "split"))
    plan = plan if plan is not None else example_plan()
    if path.stem == "keys":
        plan = plan.part([], with_fields=True)
    outputs = OutputSet(plan, path, facts, limits)
    outputs.write(outputs.outputs, threads=2, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(autouse=True)
def _records_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_SYNC_BYTES", 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def whole(tmp_path: Path, name: str) -> dict[str, bytes]:
    """The files of an uninterrupted run."""
    (tmp_path / "whole").mkdir()
    write(tmp_path / "whole" / name)
    return contents(tmp_path / "whole")


def interrupt_at(row: int) -> Callable[[int], None]:
    def broken(first: int) -> None:
        if first == row:
            raise KeyboardInterrupt

    return broken


def interrupted(path: Path, row: int = 3) -> None:
    """Leave an unfinished file: all of a and b and `row` pieces of c."""
    with pytest.raises(KeyboardInterrupt):
        write(path, example_plan(interrupt_at(row)))


# ---- killed ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "step"), [("one.gguf", 1), ("split.gguf", 3), ("keys.gguf", 1)])
def test_a2_killed_at_every_operation_and_continued(tmp_path: Path, folder: Path, name: str, step: int) -> None:
    expected = whole(tmp_path, name)
    operation = 0
    while True:
        operation += step
        status = run_in_child(lambda: write(folder / name), kill_at=operation)
        there = contents(folder)
        for file, content in there.items():
            if file.endswith(".gguf"):
                assert content == expected[file], f"{file} after operation {operation}"
        if status == 0:
            break
        assert status == -signal.SIGKILL
        if set(expected) - set(there) or any(file not in expected for file in there):
            assert run_in_child(lambda: write(folder / name)) == 0, f"operation {operation}"
        assert contents(folder) == expected, f"operation {operation}"
        for path in folder.iterdir():
            path.unlink()
    assert operation > (9 if name == "keys.gguf" else 25)  # how many syncs there are depends on how fast they are
    assert contents(folder) == expected


@pytest.mark.parametrize("name", ["one.gguf", "split.gguf"])
def test_a2_killed_again_and_again(tmp_path: Path, folder: Path, name: str) -> None:
    """Every run gets six operations further at most."""
    expected = whole(tmp_path, name)
    for operation in range(3, 60):
        if run_in_child(lambda: write(folder / name), kill_at=operation) == 0:
            break
    assert contents(folder) == expected


def test_a2_conversions_killed_at_random_moments(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_checkpoint("k3")
    expected = conversion.convert(model, tmp_path / "whole.gguf", "q8_0").read_bytes()

    def convert() -> None:
        conversion.convert(model, folder / "x.gguf", "q8_0")

    killed = 0
    for delay in delays(0.4, 12, seed=1):
        if run_in_child(convert, kill_after=delay) == -signal.SIGKILL:
            killed += 1
            if (folder / "x.gguf").exists() and not (folder / "x.gguf.journal").exists():
                break  # killed after its end
    if not (folder / "x.gguf").exists() or (folder / "x.gguf.journal").exists():
        convert()
    assert killed > 0
    assert contents(folder) == {"x.gguf": expected}


def test_only_what_reached_the_disk_counts(tmp_path: Path, folder: Path) -> None:
    """A machine that loses power loses what was written since the last sync; the journal promises nothing of it."""
    expected = whole(tmp_path, "one.gguf")
    path, partial = folder / "one.gguf", folder / "one.gguf.partial"
    for operation in range(6, 26, 2):
        assert run_in_child(lambda: write(path), kill_at=operation) == -signal.SIGKILL
        plan = example_plan()
        n_pieces = Journal(folder / "one.gguf.journal").n_pieces
        pieces = list(plan.pieces(len(plan.header())))
        with partial.open("r+b") as file:
            for piece in pieces[n_pieces:]:
                file.seek(piece.offset)
                file.write(b"\xee" * piece.n_bytes)
        write(path)
        assert contents(folder) == expected
        path.unlink()


# ---- interrupted, out of disk ----------------------------------------------------------------------------------------


def test_interrupted_run_is_continued_where_it_was(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = whole(tmp_path, "one.gguf")
    path = folder / "one.gguf"
    interrupted(path)
    assert list(contents(folder)) == ["one.gguf.journal", "one.gguf.partial"]
    assert "11 of 13 pieces are kept in one.gguf.partial; run the same again to continue" in caplog.text
    assert (folder / "one.gguf.partial").read_bytes()[:4] == bytes(4)  # no header yet: nobody takes it for a model
    made: list[int] = []
    seen: list[int] = []
    write(path, example_plan(made.append), progress=lambda name, done, total: seen.append(done))
    assert sorted(made) == [3, 4]
    assert seen == sorted(seen) and seen[-1] == len(expected["one.gguf"])
    assert contents(folder) == expected


def test_a_run_interrupted_before_its_first_piece_leaves_nothing(folder: Path) -> None:
    def produce(first: int, count: int) -> bytes:
        raise KeyboardInterrupt

    plan = Plan()
    plan.add_tensor(PlannedTensor("a", (9,), T.F32, produce))
    with pytest.raises(KeyboardInterrupt):
        write(folder / "one.gguf", plan)
    assert contents(folder) == {}


def test_values_that_cannot_be_written_leave_nothing(folder: Path) -> None:
    """Trying again cannot help, and half a terabyte should not stay for nothing."""

    def broken(first: int) -> None:
        if first == 3:
            raise GGUFError("tensor c: row 3 is not a number")

    with pytest.raises(GGUFError, match="row 3 is not a number"):
        write(folder / "one.gguf", example_plan(broken))
    assert contents(folder) == {}


def test_a_source_that_cannot_be_read_now_is_read_later(tmp_path: Path, folder: Path) -> None:
    def broken(first: int) -> None:
        if first == 3:
            raise conversion.ConversionError("reading failed")

    with pytest.raises(conversion.ConversionError):
        write(folder / "one.gguf", example_plan(broken))
    write(folder / "one.gguf")
    assert contents(folder) == whole(tmp_path, "one.gguf")


def test_a7_disk_full_midway_is_resumable(tmp_path: Path, folder: Path) -> None:
    """A real limit of the system, reached while the file is written."""
    path = folder / "one.gguf"
    size = OutputSet(example_plan(), path, FACTS).outputs[0].size

    def lower(first: int) -> None:
        if first == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size - 40, size - 40))

    def fill() -> None:
        with pytest.raises(GGUFError, match=rf"one\.gguf: the file size limit is reached: \d+ of {size} bytes"):
            write(path, example_plan(lower))

    assert run_in_child(fill) == 0
    assert list(contents(folder)) == ["one.gguf.journal", "one.gguf.partial"]
    assert Journal(folder / "one.gguf.journal").n_pieces >= 8
    write(path)
    assert contents(folder) == whole(tmp_path, "one.gguf")


@pytest.mark.parametrize("call", ["pwrite", "fdatasync", "fsync", "ftruncate"])
def test_a7_every_operation_may_find_the_disk_full(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The journal's own writes among them. What is left is continued, or nothing is left."""
    expected = whole(tmp_path, "one.gguf")
    real = getattr(os, call)
    for last in range(100):
        calls = 0

        def full(*arguments: Any, last: int = last) -> Any:
            nonlocal calls
            calls += 1
            if calls > last:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments)

        monkeypatch.setattr(os, call, full)
        try:
            write(folder / "one.gguf")
            break
        except GGUFError as error:
            assert "the disk is full" in str(error)
        finally:
            monkeypatch.setattr(os, call, real)
        assert list(contents(folder)) in ([], ["one.gguf.journal", "one.gguf.partial"])
        write(folder / "one.gguf")
        assert contents(folder) == expected
        (folder / "one.gguf").unlink()
    assert last >= 2
    assert contents(folder) == expected


def test_a7_what_is_there_counts_when_space_is_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "one.gguf"
    interrupted(path)
    size = OutputSet(example_plan(), path, FACTS).outputs[0].size
    usage = writer_module.shutil.disk_usage(folder)
    monkeypatch.setattr(writer_module.shutil, "disk_usage", lambda _: usage._replace(free=size // 2))
    write(path)
    GGUFReader(path).close()
    path.unlink()
    with pytest.raises(GGUFError, match=rf"one\.gguf: {size} bytes are needed, but only {size // 2} are free"):
        write(path)
    assert contents(folder) == {}


# ---- damaged or changed meanwhile ------------------------------------------------------------------------------------


def test_a_journal_cut_anywhere_is_continued(tmp_path: Path, folder: Path) -> None:
    expected = whole(tmp_path, "one.gguf")
    interrupted(folder / "one.gguf")
    left = contents(folder)
    journal = left["one.gguf.journal"]
    for length in (*range(0, len(journal), 7), *(n for n, byte in enumerate(journal) if byte == ord("\n"))):
        for name, content in left.items():
            (folder / name).write_bytes(content)
        (folder / "one.gguf.journal").write_bytes(journal[:length])
        write(folder / "one.gguf")
        assert contents(folder) == expected
        (folder / "one.gguf").unlink()


def test_a_journal_damaged_within_is_refused(folder: Path) -> None:
    interrupted(folder / "one.gguf")
    journal = folder / "one.gguf.journal"
    lines = journal.read_bytes().split(b"\n")
    lines[1] = lines[1].replace(b"pieces", b"pieceS")
    journal.write_bytes(b"\n".join(lines))
    with pytest.raises(GGUFError, match=r"one\.gguf\.journal: line 2 is damaged.*--restart"):
        write(folder / "one.gguf")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"pieces": 14, "digest": ""}, r"one\.gguf\.journal: 14 pieces are said to be there, of 13"),
        ({"pieces": 12, "digest": ""}, r"one\.gguf\.partial is damaged in tensor c"),
        ({"pieces": 11, "digest": ""}, r"one\.gguf\.journal: line \d+ is damaged"),
        ({"pieces": "12"}, r"one\.gguf\.journal: line \d+ is damaged"),
        ({"peaces": 12}, r"one\.gguf\.journal: line \d+ is damaged"),
        (["pieces"], r"one\.gguf\.journal: line \d+ is damaged"),
    ],
)
def test_a_record_that_makes_no_sense_is_refused(folder: Path, value: object, message: str) -> None:
    """With a right checksum, and with a record after it, so that it is not taken for a torn line."""
    interrupted(folder / "one.gguf")
    with (folder / "one.gguf.journal").open("ab") as file:
        for record in (value, {"set": "complete"}):
            text = json.dumps(record).encode()
            file.write(b"%08x %s\n" % (crc32(text), text))
    with pytest.raises(GGUFError, match=message):
        OutputSet(example_plan(), folder / "one.gguf", FACTS).outputs[0].write()


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_a_damaged_partial_is_refused_and_restarted(tmp_path: Path, folder: Path) -> None:
    expected = whole(tmp_path, "one.gguf")
    plan = example_plan()
    for number, piece in enumerate(plan.pieces(len(plan.header()))):
        if number >= 11:
            break
        interrupted(folder / "one.gguf")
        flip(folder / "one.gguf.partial", piece.offset + piece.n_bytes - 1)
        before = contents(folder)
        with pytest.raises(GGUFError, match=r"one\.gguf\.partial is damaged in tensor [abc].*--restart"):
            write(folder / "one.gguf")
        assert contents(folder) == before
        write(folder / "one.gguf", restart=True)
        assert contents(folder) == expected
        (folder / "one.gguf").unlink()


@pytest.mark.parametrize("size", [0, 100])
def test_a_partial_of_another_size_is_refused(folder: Path, size: int) -> None:
    interrupted(folder / "one.gguf")
    os.truncate(folder / "one.gguf.partial", size)
    with pytest.raises(GGUFError, match=rf"one\.gguf\.partial is damaged: {size} bytes, expected \d+"):
        write(folder / "one.gguf")


def test_changed_facts_are_named(folder: Path) -> None:
    interrupted(folder / "one.gguf")
    with pytest.raises(GGUFError, match="begun from something else: source was 1, is 2.*--restart"):
        write(folder / "one.gguf", facts={"source": "2"})
    with pytest.raises(GGUFError, match="other is new; source is gone"):
        write(folder / "one.gguf", facts={"other": "1"})
    plan = example_plan()
    plan.add_field("k", 1, V.UINT8)
    with pytest.raises(GGUFError, match="begun from something else: plan was"):
        write(folder / "one.gguf", plan)


@pytest.fixture
def unfinished(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A model whose conversion to out/x.gguf was interrupted."""
    model = tiny.write_checkpoint(tmp_path / "model")
    real = conversion.folds.packed.repack_rows

    def interrupt(weight: Source, *arguments: Any) -> np.ndarray:
        if ".layers.4." in weight.name:
            raise KeyboardInterrupt
        return real(weight, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(conversion.folds.packed, "repack_rows", interrupt)
        with pytest.raises(KeyboardInterrupt):
            conversion.convert(model, folder / "x.gguf")
    assert list(contents(folder)) == ["x.gguf.journal", "x.gguf.partial"]
    yield model


def touch(model: Path) -> None:
    shard = min(model.glob("*.safetensors"))
    os.utime(shard, ns=(0, shard.stat().st_mtime_ns + 1))


def rewrite(model: Path) -> None:
    """Other values in the same place at the same time."""
    shard = sorted(model.glob("*.safetensors"))[-1]
    before = shard.stat()
    flip(shard, 9)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))


def edit_config(model: Path) -> None:
    text = (model / "config.json").read_text()
    (model / "config.json").write_text(text.replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-06'))


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (touch, {}, r"shard model-00001-of-\d+\.safetensors was"),
        (edit_config, {}, r"config\.json was"),
        (lambda model: (model / "README.md").write_text("---\nlicense: mit\n---\n"), {}, r"README\.md is new"),
        (lambda model: (model / "generation_config.json").unlink(missing_ok=True), {"outtype": "f32"}, "outtype was"),
        (lambda model: None, {"outtype": "q8_0"}, "outtype was auto, is q8_0"),
        (lambda model: None, {"model_name": "other"}, r"general\.name was Model, is other\. Use"),
    ],
)
def test_a_changed_source_or_option_is_named(
    unfinished: Path, folder: Path, change: Callable[[Path], object], options: dict[str, Any], message: str
) -> None:
    change(unfinished)
    before = contents(folder)
    with pytest.raises(GGUFError, match=rf"x\.gguf was begun from something else: .*{message}.*--restart"):
        conversion.convert(unfinished, folder / "x.gguf", **options)
    assert contents(folder) == before
    conversion.convert(unfinished, folder / "x.gguf", restart=True, **options)
    GGUFReader(folder / "x.gguf").close()
    assert list(contents(folder)) == ["x.gguf"]


def test_an_unchanged_conversion_continues(unfinished: Path, tmp_path: Path, folder: Path) -> None:
    conversion.convert(unfinished, folder / "x.gguf", threads=1)
    assert contents(folder) == {"x.gguf": conversion.convert(unfinished, tmp_path / "whole.gguf").read_bytes()}


def test_a_source_written_to_meanwhile_gives_no_file(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.write_checkpoint(tmp_path / "model")
    real = conversion.folds.packed.repack_rows

    def repack(*arguments: Any) -> np.ndarray:
        touch(model)
        return real(*arguments)

    monkeypatch.setattr(conversion.folds.packed, "repack_rows", repack)
    with pytest.raises(conversion.ConversionError, match="was changed while it was converted"):
        conversion.convert(model, folder / "x.gguf")
    assert not (folder / "x.gguf").exists()


def test_cli_says_what_is_kept_and_continues(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny.write_checkpoint(tmp_path / "model", "kimi-linear")
    arguments = [str(model), "--outfile", str(folder / "x.gguf"), "--outtype", "f32", "--threads", "2"]
    real, calls = conversion.folds.quantize_rows, 0

    def interrupt(rows: np.ndarray, type_: T, name: str, first_row: int = 0) -> np.ndarray:
        nonlocal calls
        calls += 1
        if calls == 60:
            raise KeyboardInterrupt
        return real(rows, type_, name, first_row)

    with monkeypatch.context() as patch:
        patch.setattr(conversion.folds, "quantize_rows", interrupt)
        assert conversion.cli_main(arguments) == 130
    error = capsys.readouterr().err
    assert re.search(r"warning: .*x\.gguf: \d+ of \d+ pieces are kept in x\.gguf\.partial; run the same again", error)
    assert error.endswith("interrupted\n") and "Traceback" not in error
    assert conversion.cli_main(arguments) == 0
    assert re.search(r"x\.gguf: continued, \d+ of \d+ bytes are there", capsys.readouterr().err)
    assert list(contents(folder)) == ["x.gguf"]


# ---- two processes ---------------------------------------------------------------------------------------------------


def test_a_second_writer_is_refused_and_disturbs_nothing(tmp_path: Path, folder: Path) -> None:
    path = folder / "one.gguf"

    def second(first: int) -> None:
        for options in ({}, {"force": True}, {"restart": True}):
            with pytest.raises(GGUFError, match="another process is writing this file"):
                write(path, **options)

    write(path, example_plan(second))
    assert contents(folder) == whole(tmp_path, "one.gguf")


def test_links_under_the_journals_name_are_not_followed(tmp_path: Path, folder: Path) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"precious")
    (folder / "one.gguf.journal").symlink_to(target)
    with pytest.raises(GGUFError):
        write(folder / "one.gguf")
    assert target.read_bytes() == b"precious"
