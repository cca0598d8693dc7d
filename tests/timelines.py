"""Helpers for tests of timelines: prompts, the fresh run that everything is compared with, and expected failures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

import native
from engine import Engine, Session

SPLIT = 1e-9  # NMSE of a row of logits between two ways to compute the same timeline
TAIL = 16  # sync keeps a checkpoint this far before the end of a prompt


def prompt(rng: np.random.Generator, n: int, n_vocab: int = 512) -> list[int]:
    return [int(t) for t in rng.integers(0, n_vocab, n)]


def nmse(found: np.ndarray, expected: np.ndarray) -> float:
    expected = expected.astype(np.float64)
    return float(np.sum((found - expected) ** 2) / np.sum(expected**2))


class Fresh:
    """Logits of the last token of a timeline, from a session of its own that saw the tokens in one go."""

    def __init__(self, path: Path, n_ctx: int = 128) -> None:
        self.engine = Engine(path, n_ctx=n_ctx, n_batch=n_ctx, checkpoint_bytes=0)
        self.rows: dict[tuple[int, ...], np.ndarray] = {}

    def __enter__(self) -> Fresh:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def __call__(self, tokens: Sequence[int]) -> np.ndarray:
        key = tuple(tokens)
        if key not in self.rows:
            session = self.engine.session()
            self.rows[key] = session.eval(key, "LAST")[0]
            session.free()
        return self.rows[key]

    def check(self, session: Session, tokens: Sequence[int]) -> None:
        """`session` is at `tokens` and has the right logits."""
        assert session.tokens == list(tokens)
        assert nmse(session.row(), self(tokens)) < SPLIT


def status_of(name: str) -> int:
    return int(getattr(native.load()[1], f"DELTA_{name}"))


class Fails:
    """``with Fails("STATE", "words", ...):`` the block raises this status and its message contains all the words."""

    def __init__(self, name: str, *words: str) -> None:
        self.name, self.words = name, words

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: object) -> bool:
        assert error is not None, f"nothing failed, expected {self.name}"
        if not isinstance(error, native.NativeError):
            return False
        assert error.name == self.name, str(error)
        for word in self.words:
            assert word in error.message, f"{word!r} is not in {error.message!r}"
        return True


def counts(reused: int, computed: int, replayed: int) -> dict[str, int]:
    return {"n_reused": reused, "n_computed": computed, "n_replayed": replayed}
