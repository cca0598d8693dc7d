"""Saved sessions: they come back as they were, and nothing else comes back."""

from __future__ import annotations

import os
import resource
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engine import Engine
from timelines import Fails, Fresh, counts, prompt


def test_save_and_load(mini: Path, fresh: Fresh, rng: np.random.Generator, tmp_path: Path) -> None:
    tokens, more = prompt(rng, 45), prompt(rng, 20)
    file = tmp_path / "a session"
    with Engine(mini, n_ctx=96, n_sessions=2) as engine:
        session = engine.session()
        session.sync(tokens)
        session.save(file)
        assert [p.name for p in tmp_path.iterdir()] == ["a session"]
        other = engine.session()
        other.sync(more)
        other.load(file)
        assert np.array_equal(other.row(), session.row())
        fresh.check(other, tokens)
        other.eval(more, "LAST")
        fresh.check(other, tokens + more)
        assert other.sync([*tokens, 3]) == counts(45, 1, 0)  # loading leaves a checkpoint
        fresh.check(other, [*tokens, 3])
        other.sync(more)
        session.save(file)  # over an existing file
    with Engine(mini, n_ctx=64, n_threads=1) as engine:  # another length of context: rows lie elsewhere
        session = engine.session()
        session.load(file)
        fresh.check(session, tokens)
        session.eval(more[:5], "ALL")
        session.save(file)
        session.load(file)
        fresh.check(session, tokens + more[:5])
        session.eval([1], "NONE")
        session.save(file)
        session.load(file)  # without logits
        with Fails("STATE", "no logits"):
            session.row()
        session.truncate(0)
        session.save(file)
        session.sync(more)
        session.load(file)
        assert session.tokens == []
        session.sync(more)
        fresh.check(session, more)


@pytest.fixture
def saved(k3_mini: Path, rng: np.random.Generator, tmp_path: Path) -> tuple[Path, list[int]]:
    tokens = prompt(rng, 30)
    file = tmp_path / "saved"
    with Engine(k3_mini, n_ctx=64) as engine:
        session = engine.session()
        session.sync(tokens)
        session.save(file)
    return file, tokens


def test_a_damaged_file_is_refused(
    k3_mini: Path, k3_fresh: Fresh, saved: tuple[Path, list[int]], rng: np.random.Generator
) -> None:
    file, _ = saved
    good = file.read_bytes()
    tokens = prompt(rng, 12)
    with Engine(k3_mini, n_ctx=64) as engine:
        session = engine.session()
        session.sync(tokens)
        before = session.stats()

        def refused(content: bytes, status: str, *words: str) -> None:
            file.write_bytes(content)
            with Fails(status, str(file), *words):
                session.load(file)

        for n in (0, 1, 95, 96, 108, len(good) - 1):
            refused(good[:n], "FORMAT", "expected" if n >= 96 else f"it has {n} bytes")
        refused(good + b"\0", "FORMAT", f"expected {len(good)}, found {len(good) + 1}")
        refused(b"GGUF" + good[4:], "FORMAT", "DELTASES")
        # Anywhere behind the header a wrong bit is found by the checksum alone.
        for at in [96, 96 + 4 * 29, len(good) - 1, *rng.integers(96, len(good), 20)]:
            refused(good[:at] + bytes([good[at] ^ 1 << int(at) % 8]) + good[at + 1 :], "FORMAT", "checksum")
        # And in the header by what it says.
        refused(good[:8] + struct.pack("<I", 1) + good[12:], "UNSUPPORTED", "version", "expected 2, found 1")
        refused(good[:16] + b"\0" * 8 + good[24:], "UNSUPPORTED", "another model", "fingerprint")
        refused(good[:56] + struct.pack("<Q", 31) + good[64:], "FORMAT", "bytes of the file")
        refused(good[:56] + struct.pack("<Q", 2**63) + good[64:], "CONTEXT_FULL")
        for at in (24, 28, 32, 36, 40, 44, 52):
            refused(good[:at] + struct.pack("<I", 12345) + good[at + 4 :], "UNSUPPORTED", "found 12345")
        for at in (64, 72):
            refused(good[:at] + struct.pack("<Q", 2**62) + good[at + 8 :], "FORMAT", f"found {2**62}")
        refused(good[:80] + struct.pack("<I", 12345) + good[84:], "FORMAT", "found 12345")
        refused(good[:84] + struct.pack("<I", 0) + good[88:], "UNSUPPORTED", "state in float32", "computes in float64")
        refused(good[:84] + struct.pack("<I", 9) + good[88:], "UNSUPPORTED", "an unknown type")
        refused(good[:88] + struct.pack("<Q", 31) + good[96:], "FORMAT", "31 runs of features among 30 positions")
        with Fails("IO", "No such file"):
            session.load(file.with_name("absent"))
        with Fails("IO", "not a regular file"):
            session.load(file.parent)

        assert session.stats() == before
        k3_fresh.check(session, tokens)
        session.eval([1], "LAST")
        k3_fresh.check(session, [*tokens, 1])


def test_a_state_of_something_else_is_refused(
    golden: Path, gguf: Callable[..., Path], k3_mini: Path, saved: tuple[Path, list[int]], tmp_path: Path
) -> None:
    file, tokens = saved
    with Engine(golden_path := gguf(golden / "kl-mini"), n_ctx=64) as engine, Fails("UNSUPPORTED", str(file)):
        engine.session().load(file)
    assert golden_path != k3_mini
    with Engine(k3_mini, n_ctx=64, cache_type="f16") as engine, Fails("UNSUPPORTED", "cache", "expected 1, found 0"):
        engine.session().load(file)
    with Engine(k3_mini, n_ctx=29) as engine, Fails("CONTEXT_FULL", "30 tokens", "29"):
        engine.session().load(file)
    with Engine(gguf(golden / "k3-mini", "bf16"), n_ctx=64) as engine, Fails("UNSUPPORTED", "another model"):
        engine.session().load(file)


def test_a_save_that_fails_leaves_nothing(k3_mini: Path, saved: tuple[Path, list[int]], tmp_path: Path) -> None:
    file, _ = saved
    good = file.read_bytes()
    with Engine(k3_mini, n_ctx=64) as engine:
        session = engine.session()
        session.sync([1, 2, 3])
        with Fails("IO", "No such file or directory"):
            session.save(tmp_path / "absent" / "file")
        os.mkfifo(tmp_path / "pipe")
        with Fails("ARG", "not a regular file"):
            session.save(tmp_path / "pipe")
        assert (tmp_path / "pipe").is_fifo()
        (tmp_path / "pipe").unlink()
        (tmp_path / "folder").mkdir()
        with Fails("IO", "Is a directory"):
            session.save(tmp_path / "folder")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # a full disk; Python ignores the signal
        try:
            with Fails("IO", "File too large"):
                session.save(file)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert file.read_bytes() == good
        assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "saved"]
