"""GGUF writer and row quantization: refused plans, full disks, killed and competing writers, values that do not fit."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from gguf_ext import GGUFError, GGUFReader, Plan, PlannedTensor, write_file
from gguf_ext import writer as writer_module
from gguf_ext.constants import GGMLQuantizationType as T
from gguf_ext.constants import GGUFValueType as V
from gguf_ext.quants import can_quantize, quantize_rows
from test_gguf import example_plan

# ---- the plan --------------------------------------------------------------------------------------------------------


def never(first: int, count: int) -> bytes:
    raise AssertionError("a producer ran although the plan was refused")


@pytest.mark.parametrize(
    ("name", "ne", "type_", "message"),
    [
        ("", (4,), T.F32, "has 0 bytes"),
        ("n" * 64, (4,), T.F32, "has 64 bytes, expected 1 to 63"),
        ("ü" * 32, (4,), T.F32, "has 64 bytes"),
        ("x", (), T.F32, "impossible dimensions"),
        ("x", (1,) * 5, T.F32, "impossible dimensions"),
        ("x", (4, 0), T.F32, "impossible dimensions"),
        ("x", (48,), T.Q8_0, "rows of 48 values are not whole Q8_0 blocks of 32"),
        ("taken", (4,), T.F32, "taken is added twice"),
    ],
)
def test_plan_refuses_tensor(name: str, ne: tuple[int, ...], type_: T, message: str) -> None:
    plan = Plan()
    plan.add_tensor(PlannedTensor("taken", (4,), T.F32, never))
    with pytest.raises(GGUFError, match=message):
        plan.add_tensor(PlannedTensor(name, ne, type_, never))


@pytest.mark.parametrize(
    ("key", "value", "type_", "element", "message"),
    [
        ("", 1, V.UINT32, None, "empty"),
        ("taken", 1, V.UINT32, None, "added twice"),
        ("k", -1, V.UINT32, None, "key k: the value is not UINT32"),
        ("k", 2**32, V.UINT32, None, "key k"),
        ("k", "1", V.UINT32, None, "key k"),
        ("k", 1e300, V.FLOAT32, None, "key k: the value is not FLOAT32"),
        ("k", 1, V.BOOL, None, "key k"),
        ("k", 1, V.STRING, None, "key k: the value is not STRING"),
        ("k", "\ud800", V.STRING, None, "key k"),
        ("k", ["a", 1], V.ARRAY, V.STRING, "key k: the value is not ARRAY of STRING"),
        ("k", ["a", "\ud800"], V.ARRAY, V.STRING, "key k: the value is not ARRAY of STRING: 'utf-8' codec"),
        ("k", [1, -1], V.ARRAY, V.UINT32, "key k: the value is not ARRAY of UINT32"),
        ("k", [True, 1], V.ARRAY, V.BOOL, "key k: the value is not ARRAY of BOOL: 1 is not true or false"),
        ("k", [1], V.ARRAY, None, "key k"),
        ("k", 5, V.ARRAY, V.UINT32, "key k"),
    ],
)
def test_plan_refuses_key(key: str, value: Any, type_: V, element: V | None, message: str) -> None:
    plan = Plan()
    plan.add_field("taken", 1, V.UINT32)
    with pytest.raises(GGUFError, match=message):
        plan.add_field(key, value, type_, element)


def test_size_and_offsets_are_known_before_writing(tmp_path: Path, rng: np.random.Generator) -> None:
    plan, _ = example_plan(rng)
    size = len(plan.header()) + plan.data_bytes
    offsets = plan.offsets()
    write_file(plan, tmp_path / "x.gguf")
    assert (tmp_path / "x.gguf").stat().st_size == size
    with GGUFReader(tmp_path / "x.gguf") as reader:
        start = reader.tensors["one"].offset
        assert {name: info.offset - start for name, info in reader.tensors.items()} == offsets


def test_b26_strided_views_give_the_bytes_of_their_copies(tmp_path: Path, rng: np.random.Generator) -> None:
    values = rng.standard_normal((6, 10)).astype(np.float32)
    for name, view in {"transposed": values.T, "every_second": values[::2, 1::3], "reversed": values[::-1]}.items():
        plan = Plan()
        plan.add_tensor(PlannedTensor("x", view.shape[::-1], T.F32, lambda first, count, view=view: view))
        path = tmp_path / f"{name}.gguf"
        write_file(plan, path)
        with GGUFReader(path) as reader:
            np.testing.assert_array_equal(reader.dequantize("x"), view.copy())


# ---- writing: nothing half-written under a final name ----------------------------------------------------------------


def one_tensor_plan(produce: Callable[[int, int], Any]) -> Plan:
    """Four rows of 64 bytes, one after another."""
    plan = Plan()
    plan.add_field("general.architecture", "test", V.STRING)
    plan.add_tensor(PlannedTensor("x", (16, 4), T.F32, produce, 1))
    return plan


def zeros(first: int, count: int) -> bytes:
    return bytes(64 * count)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("n_bytes", [0, 63, 65])
def test_wrong_amount_of_bytes_is_an_error(tmp_path: Path, n_bytes: int) -> None:
    plan = one_tensor_plan(lambda first, count: bytes(n_bytes if first == 2 else 64))
    with pytest.raises(GGUFError, match=f"tensor x: rows 2 to 2: 64 bytes planned, {n_bytes} produced"):
        write_file(plan, tmp_path / "x.gguf")
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_failing_producer_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    def produce(first: int, count: int) -> bytes:
        if first:
            raise error
        return bytes(64)

    with pytest.raises(type(error)):
        write_file(one_tensor_plan(produce), tmp_path / "x.gguf")
    assert names(tmp_path) == []


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_bytes_and_first_error_do_not_depend_on_threads(tmp_path: Path, threads: int) -> None:
    def produce(first: int, count: int) -> bytes:
        time.sleep((7 * first % 5) / 1000)  # so that they do not end in order
        if broken and first % 20 == 19:
            raise RuntimeError(f"row {first}")
        return bytes([first]) * 64 * count

    plan = Plan()
    plan.add_tensor(PlannedTensor("x", (16, 100), T.F32, produce, 3))
    broken = False
    write_file(plan, tmp_path / "x.gguf", threads=threads)
    with GGUFReader(tmp_path / "x.gguf") as reader:
        rows = [first for first in range(100) if first % 3 == 0 for _ in range(min(3, 100 - first))]
        assert reader.data("x").tobytes() == b"".join(bytes([first]) * 64 for first in rows)
    broken = True
    with pytest.raises(RuntimeError, match="row 39"):
        write_file(plan, tmp_path / "y.gguf", threads=threads)


def test_existing_output_needs_force(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_text("precious")
    with pytest.raises(GGUFError, match=r"x\.gguf already exists.*--force"):
        write_file(one_tensor_plan(never), path)
    assert path.read_text() == "precious"
    write_file(one_tensor_plan(zeros), path, force=True)
    GGUFReader(path).close()
    assert names(tmp_path) == ["x.gguf"]


def test_a_pipe_or_device_is_never_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.gguf")
    with pytest.raises(GGUFError, match="not a regular file"):
        write_file(one_tensor_plan(never), tmp_path / "x.gguf", force=True)
    assert (tmp_path / "x.gguf").is_fifo()


def test_a_run_killed_while_it_published_is_no_obstacle(tmp_path: Path) -> None:
    """The finished file under both names: the next run takes the partial name away and writes."""
    path = tmp_path / "x.gguf"
    path.write_text("finished")
    (tmp_path / "x.gguf.partial").hardlink_to(path)
    write_file(one_tensor_plan(zeros), path, force=True)
    GGUFReader(path).close()
    assert names(tmp_path) == ["x.gguf"]


def test_failure_with_force_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_text("precious")
    with pytest.raises(GGUFError, match="produced"):
        write_file(one_tensor_plan(lambda first, count: b""), path, force=True)
    assert path.read_text() == "precious"
    assert names(tmp_path) == ["x.gguf"]


def test_output_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"

    def produce(first: int, count: int) -> bytes:
        path.write_text("precious")
        return bytes(64)

    with pytest.raises(GGUFError, match="appeared while it was being written"):
        write_file(one_tensor_plan(produce), path)
    assert path.read_text() == "precious"
    assert names(tmp_path) == ["x.gguf"]


@pytest.mark.parametrize("target_exists", [True, False])
def test_links_are_not_followed(tmp_path: Path, target_exists: bool) -> None:
    target, link = tmp_path / "target", tmp_path / "x.gguf"
    if target_exists:
        target.write_text("precious")
    link.symlink_to(target)
    with pytest.raises(GGUFError, match="already exists"):
        write_file(one_tensor_plan(never), link)
    write_file(one_tensor_plan(zeros), link, force=True)
    assert not link.is_symlink()
    assert target.exists() == target_exists and (not target_exists or target.read_text() == "precious")


def test_link_under_the_partial_name_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "x.gguf.partial").symlink_to(target)
    with pytest.raises(GGUFError, match=r"x\.gguf\.partial: cannot be created"):
        write_file(one_tensor_plan(never), tmp_path / "x.gguf")
    (tmp_path / "x.gguf.partial").unlink()
    (tmp_path / "x.gguf.partial").hardlink_to(target)
    with pytest.raises(GGUFError, match="in the way"):
        write_file(one_tensor_plan(never), tmp_path / "x.gguf")
    assert target.read_text() == "precious"


@pytest.mark.parametrize("path", ["missing/x.gguf", "."])
def test_folder_faults_are_named(tmp_path: Path, path: str) -> None:
    with pytest.raises(GGUFError, match="does not exist|is a folder"):
        write_file(one_tensor_plan(never), tmp_path / path)


def test_two_writers_of_one_file(tmp_path: Path) -> None:
    """The second is refused while the first is at work, and does not disturb it."""
    path = tmp_path / "x.gguf"

    def produce(first: int, count: int) -> bytes:
        with pytest.raises(GGUFError, match="another process is writing this file"):
            write_file(one_tensor_plan(never), path)
        return bytes(64)

    write_file(one_tensor_plan(produce), path)
    GGUFReader(path).close()


def test_a7_disk_too_small_is_known_before_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = writer_module.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(writer_module.shutil, "disk_usage", lambda _: usage._replace(free=300))
    with pytest.raises(GGUFError, match=r"x\.gguf: \d+ bytes are needed, but only 300 are free"):
        write_file(one_tensor_plan(never), tmp_path / "x.gguf")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "quota"),
        (errno.EFBIG, "file size limit"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_a7_disk_full_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, message: str) -> None:
    real, calls = os.pwrite, []

    def pwrite(handle: int, data: memoryview, offset: int) -> int:
        calls.append(len(data))
        if len(calls) > 5:
            raise OSError(number, os.strerror(number))
        return real(handle, data[:50], offset)  # short writes must be continued

    monkeypatch.setattr(writer_module.os, "pwrite", pwrite)
    plan = one_tensor_plan(zeros)
    done = len(plan.header()) + 128
    with pytest.raises(GGUFError, match=rf"x\.gguf: .*{message}.*: {done} of {done + 128} bytes were written"):
        write_file(plan, tmp_path / "x.gguf", threads=1)
    assert names(tmp_path) == []


SUBPROCESS = """
    import resource, sys, time
    from pathlib import Path
    from gguf_ext import GGUFError, Plan, PlannedTensor, write_file
    from gguf_ext.constants import GGMLQuantizationType

    def produce(first, count):
        print(first, flush=True)
        time.sleep(float(sys.argv[2]))
        return bytes([first]) * 1024

    plan = Plan()
    plan.add_tensor(PlannedTensor("x", (256, 64), GGMLQuantizationType.F32, produce, 1))
"""


def script(body: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(SUBPROCESS) + textwrap.dedent(body)]


def test_a7_file_size_limit_of_the_process(tmp_path: Path) -> None:
    body = """
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
        try:
            write_file(plan, Path(sys.argv[1]))
        except GGUFError as error:
            print(error)
    """
    command = [*script(body), str(tmp_path / "x.gguf"), "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "this process may write files of 20000 bytes at most" in done.stdout
    assert names(tmp_path) == []


def test_killed_writer_leaves_only_a_partial_and_the_next_run_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    body = "write_file(plan, Path(sys.argv[1]))"
    with subprocess.Popen([*script(body), str(path), "0.1"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(3):
            assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
    assert names(tmp_path) == ["x.gguf.partial"]
    subprocess.run([*script(body), str(path), "0"], stdout=subprocess.DEVNULL, timeout=60, check=True)
    assert names(tmp_path) == ["x.gguf"]
    with GGUFReader(path) as reader:
        expected = b"".join(bytes([n]) * 1024 for n in range(64))
        assert reader.data("x").tobytes() == expected


def test_lock_is_given_up_when_the_writer_ends(tmp_path: Path) -> None:
    """A leftover of a killed run is taken over; one that is locked is not."""
    partial = tmp_path / "x.gguf.partial"
    partial.write_bytes(b"leftover" * 1000)
    with partial.open("rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(GGUFError, match="another process"):
            write_file(one_tensor_plan(never), tmp_path / "x.gguf")
    write_file(one_tensor_plan(zeros), tmp_path / "x.gguf")
    assert names(tmp_path) == ["x.gguf"]
    GGUFReader(tmp_path / "x.gguf").close()


def test_progress_counts_to_the_end(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    size = write_file(
        one_tensor_plan(zeros), tmp_path / "x.gguf", progress=lambda *event: seen.append(event), threads=3
    )
    assert seen == [("x", size - left, size) for left in (192, 128, 64, 0)]


def test_no_thread_outlives_a_failure(tmp_path: Path) -> None:
    """Whoever still wrote would write into whatever file gets the number of ours."""

    def produce(first: int, count: int) -> bytes:
        time.sleep(0.05 * first)
        return bytes(64)

    def progress(name: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:  # the traceback keeps every frame alive
        write_file(one_tensor_plan(produce), tmp_path / "x.gguf", progress=progress, threads=4)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith(("piece", "sync"))] == []
    assert caught.traceback and names(tmp_path) == []


# ---- row quantization ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_", [T.F32, T.F16, T.BF16, T.Q8_0])
def test_slabs_of_rows_equal_the_whole(rng: np.random.Generator, type_: T) -> None:
    rows = (rng.standard_normal((23, 96)) * rng.choice([1e-3, 1, 1e3], (23, 1))).astype(np.float32)
    whole = quantize_rows(rows, type_, "x")
    slabs = np.concatenate([quantize_rows(rows[n : n + 5], type_, "x", n) for n in range(0, 23, 5)])
    np.testing.assert_array_equal(whole, slabs)
    np.testing.assert_array_equal(whole, gguf.quantize(rows, type_).view(np.uint8))


@pytest.mark.parametrize(
    ("type_", "value"),
    [(T.F16, 65520.0), (T.F16, -1e9), (T.Q8_0, 65520.0 * 127), (T.F32, np.inf), (T.BF16, np.nan), (T.Q8_0, -np.inf)],
)
def test_values_that_do_not_fit_are_named(type_: T, value: float) -> None:
    rows = np.zeros((4, 32), np.float32)
    rows[2, 5] = value
    with pytest.raises(GGUFError, match=r"tensor w: row 102, column 5: .* (does not fit|not a finite number)"):
        quantize_rows(rows, type_, "w", first_row=100)


def test_largest_values_that_fit(rng: np.random.Generator) -> None:
    rows = np.full((1, 32), 65519.0, np.float32)
    assert np.isfinite(quantize_rows(rows, T.F16, "w").view(np.float16)).all()
    rows *= 127
    assert np.isfinite(gguf.dequantize(quantize_rows(rows, T.Q8_0, "w"), T.Q8_0)).all()


def test_types_that_are_not_written() -> None:
    assert not can_quantize(T.IQ2_XS, 256)
    assert not can_quantize(T.Q8_0, 48)
    with pytest.raises(GGUFError, match="tensor w: rows of 48 values cannot be written as Q8_0"):
        quantize_rows(np.zeros((1, 48), np.float32), T.Q8_0, "w")
