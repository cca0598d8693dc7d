"""Rows A1, A3 and A4 of the list of known faults: what a conversion reads, keeps on disk and says meanwhile.

A2 and A7 are in `test_resume.py` and `test_gguf_writer.py`; memory (A1, A3, A6) is in `test_convert.py`, on a model
that is large enough.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import conversion
import tiny
from conversion import cli
from conversion.checkpoint import Checkpoint
from conversion.shards import LocalShard
from gguf_ext.split import Limits


class Reads:
    """The ranges that were read of each shard, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranges: dict[str, list[tuple[int, int]]] = {}
        read = LocalShard.read

        def noted(shard: LocalShard, offset: int, n_bytes: int) -> np.ndarray:
            self.ranges.setdefault(shard.name, []).append((offset, offset + n_bytes))
            return read(shard, offset, n_bytes)

        monkeypatch.setattr(LocalShard, "read", noted)


@pytest.mark.parametrize("limits", [Limits(), Limits(max_bytes=200_000)])
def test_a1_disk_holds_the_output_only(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: Limits
) -> None:
    """No temporary copy, whether the output is split or not; nothing but the output and its journal at any time."""
    for name in ("out", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    seen: set[str] = set()

    def look(*_: object) -> None:
        assert list((tmp_path / "temporary").iterdir()) == []
        seen.update(path.suffix for path in (tmp_path / "out").iterdir())

    conversion.convert(tiny_checkpoint("k3"), tmp_path / "out" / "x.gguf", limits=limits, progress=look)
    assert seen <= {".gguf", ".partial", ".journal"}
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".gguf"}
    assert (len(list((tmp_path / "out").iterdir())) > 1) == bool(limits)


@pytest.mark.parametrize("preset", ["k3", "k3-bf16-experts", "kl"])
@pytest.mark.parametrize("threads", [1, 4])
def test_a3_every_byte_is_read_once(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str, threads: int
) -> None:
    folder = tiny_checkpoint(preset)
    with Checkpoint(folder) as checkpoint:
        sources = {(s.shard.name, s.offset): (name, s.n_bytes) for name, s in checkpoint.tensors.items()}
    reads = Reads(monkeypatch)
    conversion.convert(folder, tmp_path / "x.gguf", threads=threads)
    times: Counter[str] = Counter()
    for (shard, offset), (name, n_bytes) in sources.items():
        for begin, end in reads.ranges[shard]:
            times[name] += max(0, min(end, offset + n_bytes) - max(begin, offset))
    wrong = {name: times[name] / n_bytes for name, n_bytes in sources.values() if times[name] != n_bytes}
    # Of kv_b_proj heads are read by row for K and for V, each once.
    assert not wrong, wrong


def test_a4_large_tensors_are_read_forwards(
    tiny_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix in slabs: one pass from the beginning to the end, no seeking back."""
    folder = tiny_checkpoint("k3", shards=1, vocab_size=40_000)
    with Checkpoint(folder) as checkpoint:
        embedding = next(s for name, s in checkpoint.tensors.items() if name.endswith("embed_tokens.weight"))
    reads = Reads(monkeypatch)
    conversion.convert(folder, tmp_path / "x.gguf", threads=1)
    ranges = reads.ranges["model.safetensors"]
    inside = [
        begin for begin, end in ranges if embedding.offset <= begin and end <= embedding.offset + embedding.n_bytes
    ]
    assert len(inside) > 3 and inside == sorted(inside)


def test_a4_progress_has_bytes_rate_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that gives 100 MB/s."""
    for size, width, expected in [
        (4e9, 100, " 25 %  1.00 of 4.00 GB  100 MB/s  30 s left  blk.0.ffn_gate_exps.weight"),
        (10e9, 100, " 10 %  1.00 of 10.00 GB  100 MB/s  1 min 30 s left  blk.0.ffn_gate_exps.weight"),
        (1561e9, 60, "  0 %  1.00 of 1561.00 GB  100 MB/s  4 h 20 min left  blk.0"),  # cut where the terminal ends
    ]:
        now = [0.0]
        monkeypatch.setattr("conversion.cli.time.monotonic", lambda now=now: now[0])
        monkeypatch.setattr("conversion.cli._terminal_width", lambda width=width: width)
        bar = cli._Progress()
        for second in range(1, 11):
            now[0] = float(second)
            bar("blk.0.ffn_gate_exps.weight", second * 100_000_000, int(size))
        lines = capsys.readouterr().err.split("\r")
        assert lines[1] == lines[1].split("GB")[0] + "GB  blk.0.ffn_gate_exps.weight"  # no rate can be known yet
        assert lines[-1].rstrip() == expected


def test_a3_the_source_is_not_mapped(tmp_path: Path) -> None:
    """Mapped pages would count as resident memory."""
    folder = tiny.write_checkpoint(tmp_path / "model")
    with Checkpoint(folder) as checkpoint:
        arrays = [source.raw() for source in checkpoint.tensors.values()]
        assert ".safetensors" not in Path("/proc/self/maps").read_text()
    assert sum(array.nbytes for array in arrays) > 1_000_000
