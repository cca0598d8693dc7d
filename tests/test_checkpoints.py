"""Checkpoints: where they are kept, who gives one up, and that no sequence of operations ever sees a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import native
from engine import Engine
from gguf_ext.reader import GGUFReader
from timelines import TAIL, Fails, Fresh, counts, prompt


def test_checkpoints_at_an_interval(k3_mini: Path, k3_fresh: Fresh, rng: np.random.Generator) -> None:
    tokens = prompt(rng, 100)
    with Engine(k3_mini, n_ctx=128, n_batch=64, checkpoint_every=20, checkpoint_bytes=1 << 24) as engine:
        session = engine.session()
        session.sync(tokens)
        for length in (81, 79, 60, 59, 41, 21, 19):
            result = session.sync(tokens[:length])
            start = result["n_reused"]
            assert start >= length - 1 - (length - 1) % 20
            assert result == counts(start, length - start, length - start)
            k3_fresh.check(session, tokens[:length])
        session.sync(tokens[:1])
        session.eval(tokens[1:40], "NONE")  # also where no prompt ends
        for token in tokens[40:70]:
            session.eval([token], "NONE")
        assert session.stats()["n_checkpoints"] == 3
        session.truncate(61)
        assert session.stats()["n_replayed"] > 0
        k3_fresh.check(session, tokens[:61])


@pytest.mark.parametrize("n_places", [0, 1, 2, 3])
def test_a_small_budget_is_kept(k3_mini: Path, k3_fresh: Fresh, rng: np.random.Generator, n_places: int) -> None:
    tokens = prompt(rng, 110)
    with Engine(k3_mini, n_ctx=128) as probe:
        size = int(probe.info.checkpoint_size)
    with Engine(k3_mini, n_ctx=128, checkpoint_every=32, checkpoint_bytes=n_places * size + size - 1) as engine:
        assert engine.info.n_checkpoints == n_places
        session = engine.session()
        for length in (30, 60, 110, 110):
            result = session.sync(tokens[:length])
            assert session.stats()["n_checkpoints"] <= n_places
            assert session.stats()["checkpoint_bytes"] == session.stats()["n_checkpoints"] * size
            k3_fresh.check(session, tokens[:length])
        if n_places > 0:  # the same prompt again starts near its end, however small the budget
            assert result["n_computed"] <= 32
        else:
            assert result == counts(0, 110, 110)
            with Fails("STATE", "checkpoint_bytes", str(size)):
                session.checkpoint()


def test_sessions_share_the_budget(k3_mini: Path, k3_fresh: Fresh, rng: np.random.Generator) -> None:
    """A session that keeps many checkpoints gives up its own before it takes the only one of another."""
    few, many = prompt(rng, 40), prompt(rng, 120)
    with Engine(k3_mini, n_ctx=128) as probe:
        size = int(probe.info.checkpoint_size)
    with Engine(k3_mini, n_ctx=128, n_sessions=2, checkpoint_every=8, checkpoint_bytes=4 * size) as engine:
        a, b = engine.session(), engine.session()
        a.sync(few)
        b.sync(many)
        assert engine.stats()["n_checkpoints"] == 4
        assert a.stats()["n_checkpoints"] == b.stats()["n_checkpoints"] == 2
        assert a.sync(few)["n_computed"] <= TAIL
        k3_fresh.check(a, few)
        a.free()
        assert engine.stats()["n_checkpoints"] == 2


def test_a_fork_keeps_its_newest_checkpoint(k3_mini: Path, k3_fresh: Fresh, rng: np.random.Generator) -> None:
    """A session that goes on and needs room gives up what its fork does not need most."""
    tokens, more = prompt(rng, 40), prompt(rng, 60)
    with Engine(k3_mini, n_ctx=128) as probe:
        size = int(probe.info.checkpoint_size)
    with Engine(k3_mini, n_ctx=128, n_sessions=2, checkpoint_every=16, checkpoint_bytes=2 * size) as engine:
        session = engine.session()
        session.sync(tokens)  # keeps 16 and 24
        fork = session.fork()
        assert fork.stats()["n_checkpoints"] == session.stats()["n_checkpoints"] == 2
        assert engine.stats()["n_checkpoints"] == 2  # shared, not copied
        session.sync(tokens + more)
        session.free()
        assert fork.sync([*tokens, 9]) == counts(40, 1, 0)
        assert fork.sync([*tokens, 10]) == counts(24, 17, 16)
        k3_fresh.check(fork, [*tokens, 10])


def test_generation_by_sync_keeps_few_checkpoints(k3_mini: Path, k3_fresh: Fresh, rng: np.random.Generator) -> None:
    """A loop that calls sync for every token does not copy the state for every token."""
    text = prompt(rng, 20)
    with Engine(k3_mini, n_ctx=128, checkpoint_bytes=1 << 22) as engine:
        session = engine.session()
        session.sync(text)
        for token in prompt(rng, 40):
            text.append(token)
            assert session.sync(text) == counts(len(text) - 1, 1, 0)
        assert session.stats()["n_checkpoints"] <= 6
        k3_fresh.check(session, text)


@pytest.mark.parametrize("activations,value_bytes", [("exact", 8), ("fine", 4)])
def test_e13_memory_is_sized_by_the_kind_of_layer(
    tiny_checkpoint: Callable[..., Path], gguf: Callable[..., Path], activations: str, value_bytes: int
) -> None:
    """69 KDA and 24 MLA layers: recurrent state for the first, latent rows for the second only."""
    ffi, lib = native.load()
    path = gguf(tiny_checkpoint("k3-93-layers"))
    with (
        Engine(
            path, n_ctx=256, n_sessions=3, cache_type="f16", activations=activations, checkpoint_bytes=0
        ) as engine,
        GGUFReader(path) as file,
    ):
        assert (engine.info.n_layer_kda, engine.info.n_layer_mla) == (69, 24)
        key = "kimi-k3."
        heads, taps = file.fields[key + "attention.head_count"], file.fields[key + "ssm.conv_kernel"]
        width = file.fields[key + "kda.head_dim"]
        latent = file.fields[key + "attention.kv_lora_rank"] + file.fields[key + "rope.dimension_count"]
        inner = heads * width
        recurrent = 69 * value_bytes * (3 * (taps - 1) * inner + inner * width)
        memory = ffi.new("delta_memory *")
        memory.size = ffi.sizeof("delta_memory")
        native.check(lib.delta_model_memory(engine.model, memory))
        assert engine.info.checkpoint_size == recurrent
        assert memory.state == 3 * (recurrent + 24 * 256 * latent * 2)


class Walk:
    """Random operations on sessions of one model; after each the timeline and its logits are those of a fresh run."""

    def __init__(self, engine: Engine, fresh: Fresh, rng: np.random.Generator, file: Path) -> None:
        self.engine, self.fresh, self.rng, self.file = engine, fresh, rng, file
        self.sessions = [(engine.session(), list[int]())]
        self.saved: list[int] | None = None
        self.base = prompt(rng, 64)

    def text(self) -> list[int]:
        """A new timeline that shares a random part with an old one."""
        old = self.sessions[self.rng.integers(len(self.sessions))][1] if self.rng.random() < 0.8 else self.base
        new = old[: self.rng.integers(len(old) + 1)] + prompt(self.rng, int(self.rng.integers(1, 12)), 3)
        return new[:64]

    def step(self) -> None:
        index = int(self.rng.integers(len(self.sessions)))
        session, text = self.sessions[index]
        more = prompt(self.rng, min(int(self.rng.integers(1, 12)), 64 - len(text)), 3)
        match self.rng.choice(
            ["sync", "sync", "eval", "decode", "truncate", "checkpoint", "fork", "free", "save", "load", "batch"]
        ):
            case "sync":
                text = self.text()
                session.sync(text)
            case "eval" if more:
                session.eval(more, "LAST")
                text = text + more
            case "decode":
                for token in more:
                    session.eval([token], "NONE")
                text = text + more
            case "truncate":
                text = text[: self.rng.integers(len(text) + 1)]
                session.truncate(len(text))
            case "checkpoint" if self.engine.info.n_checkpoints > 0:
                session.checkpoint()
            case "fork" if len(self.sessions) < 3:
                self.sessions.append((session.fork(), list(text)))
            case "free" if len(self.sessions) > 1:
                session.free()
                del self.sessions[index]
                return
            case "save":
                session.save(self.file)
                self.saved = list(text)
            case "load" if self.saved is not None:
                session.load(self.file)
                text = list(self.saved)
            case "batch" if all(len(t) < 64 for _, t in self.sessions):
                self.engine.eval_batch([(s, [int(self.rng.integers(3))] * 1) for s, _ in self.sessions])
                self.sessions = [(s, s.tokens) for s, _ in self.sessions]
                text = self.sessions[index][1]
        self.sessions[index] = (session, text)
        for other, expected in self.sessions:
            assert other.tokens == expected
            if self.engine.lib.delta_session_logits_count(other.handle) > 0:
                self.fresh.check(other, expected)


@pytest.mark.parametrize("n_places", [0, 1, 2, 3, 5, 24])
def test_any_sequence_of_operations(
    mini: Path, fresh: Fresh, rng: np.random.Generator, tmp_path: Path, n_places: int
) -> None:
    with Engine(mini, n_ctx=64) as probe:
        size = int(probe.info.checkpoint_size)
    with Engine(
        mini, n_ctx=64, n_batch=10, n_sessions=3, checkpoint_every=7, checkpoint_bytes=n_places * size, poison=1
    ) as engine:
        walk = Walk(engine, fresh, rng, tmp_path / "state")
        for _ in range(60):
            walk.step()
            assert engine.stats()["n_checkpoints"] <= n_places
