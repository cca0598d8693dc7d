"""Feature rows in a timeline: computed as embeddings are, compared by digest and row, kept by whatever keeps timelines.

The oracle is the model itself: rows that equal the embeddings of tokens must give the logits of those tokens, bit for
bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import native
from engine import Engine, Session
from gguf_edit import Edit
from timelines import Fails, prompt

FEATURE = -1
Piece = Sequence[int] | tuple[np.ndarray, int]


@pytest.fixture(scope="module")
def path(golden: Path, gguf: Callable[..., Path]) -> Path:
    return gguf(golden / "k3-mini")


@pytest.fixture(scope="module")
def table(path: Path) -> np.ndarray:
    """The embeddings [n_vocab, n_embd]."""
    return Edit(path).values("token_embd.weight")


@pytest.fixture(scope="module")
def whole(path: Path) -> Iterator[Callable[[Sequence[int]], np.ndarray]]:
    """``whole(tokens)``: logits after them, in one step of a fresh session."""
    with Engine(path, n_ctx=128, n_batch=128, checkpoint_bytes=0) as engine:

        def compute(tokens: Sequence[int]) -> np.ndarray:
            session = engine.session()
            logits = session.eval(tokens, "LAST")[0]
            session.free()
            return logits

        yield compute


def features(table: np.ndarray, tokens: Sequence[int], digest: int) -> tuple[np.ndarray, int]:
    return table[list(tokens)], digest


def turns(rng: np.random.Generator, table: np.ndarray) -> tuple[list[Piece], list[int]]:
    """Text, two images side by side, text, an image, text; and the tokens whose embeddings all of it is."""
    parts = [prompt(rng, n) for n in (5, 9, 6, 4, 12, 3)]
    images = {1: 10, 2: 11, 4: 12}
    pieces = [features(table, part, images[i]) if i in images else part for i, part in enumerate(parts)]
    return pieces, [token for part in parts for token in part]


def shown(pieces: Sequence[Piece]) -> list[int]:
    out: list[int] = []
    for piece in pieces:
        out += [FEATURE] * len(piece[0]) if isinstance(piece, tuple) else piece
    return out


def grow(session: Session, pieces: Sequence[Piece]) -> None:
    """A checkpoint after each piece."""
    for n in range(1, len(pieces) + 1):
        session.sync_pieces(pieces[:n])
        session.checkpoint()


@pytest.mark.parametrize("activations", ["exact", "fine"])
@pytest.mark.parametrize("n_batch", [1, 4, 7, 64])
def test_batch_borders_inside_an_image(
    path: Path, table: np.ndarray, rng: np.random.Generator, n_batch: int, activations: str
) -> None:
    pieces, tokens = turns(rng, table)
    with Engine(path, n_ctx=64, n_batch=n_batch, n_sessions=2, activations=activations) as engine:
        session, plain = engine.session(), engine.session()
        assert session.sync_pieces(pieces) == {"n_reused": 0, "n_computed": 39, "n_replayed": 0}
        plain.sync(tokens)
        assert np.array_equal(session.row(), plain.row())
        assert session.tokens == shown(pieces)
        assert np.array_equal(session.eval([1, 2]), plain.eval([1, 2]))


def test_images_and_text_alternating_over_turns(
    path: Path, table: np.ndarray, whole: Callable[..., np.ndarray], rng: np.random.Generator
) -> None:
    """Each turn adds to the timeline of the turn before it, and nothing is computed again."""
    pieces, tokens = turns(rng, table)
    with Engine(path, n_ctx=64) as engine:
        session, length = engine.session(), 0
        for n in range(1, len(pieces) + 1):
            result = session.sync_pieces(pieces[:n])
            now = len(shown(pieces[:n]))
            assert result == {"n_reused": length, "n_computed": now - length, "n_replayed": 0}
            assert np.array_equal(session.row(), whole(tokens[:now]))
            length = now
        assert (
            session.sync_pieces(pieces)["n_computed"] <= 17
        )  # the last is computed again, from the nearest checkpoint


def test_a_changed_image_is_a_changed_prefix(
    path: Path, table: np.ndarray, whole: Callable[..., np.ndarray], rng: np.random.Generator
) -> None:
    pieces, tokens = turns(rng, table)
    other = prompt(rng, 6)
    with Engine(path, n_ctx=64, checkpoint_bytes=1 << 24) as engine:
        session = engine.session()
        grow(session, pieces)
        changed = [*pieces[:2], features(table, other, 77), *pieces[3:]]
        assert session.sync_pieces(changed)["n_reused"] == 14  # what is before the second image
        assert np.array_equal(session.row(), whole([*tokens[:14], *other, *tokens[20:]]))

        # As many rows, and the same, with another digest.
        grow(session, changed)
        assert session.sync_pieces([pieces[0], (pieces[1][0], 99), *changed[2:]])["n_reused"] == 5
        assert np.array_equal(session.row(), whole([*tokens[:14], *other, *tokens[20:]]))


def test_rows_of_an_image_have_their_places(
    path: Path, table: np.ndarray, whole: Callable[..., np.ndarray], rng: np.random.Generator
) -> None:
    """Two images of one digest side by side: nine rows of one are not four and five of two. Text is no image."""
    nine = prompt(rng, 9)
    image = features(table, nine, 5)
    for wish, tokens, common in [
        ([[7], features(table, nine[:4], 5), features(table, nine[:5], 5), [8]], [7, *nine[:4], *nine[:5], 8], 1),
        ([[7], nine, [8]], [7, *nine, 8], 1),
        ([[7], image, [9]], [7, *nine, 9], 10),
    ]:
        with Engine(path, n_ctx=64, checkpoint_bytes=1 << 24) as engine:
            session = engine.session()
            grow(session, [[7], image, [8]])
            assert session.sync_pieces(wish)["n_reused"] == common
            assert np.array_equal(session.row(), whole(tokens))


def test_forks_and_checkpoints_keep_images(
    path: Path, table: np.ndarray, whole: Callable[..., np.ndarray], rng: np.random.Generator
) -> None:
    pieces, tokens = turns(rng, table)
    with Engine(path, n_ctx=64, n_sessions=2) as engine:
        session = engine.session()
        session.sync_pieces(pieces[:3])
        session.checkpoint()
        session.sync_pieces(pieces)
        fork = session.fork()
        assert fork.tokens == session.tokens
        other = [*pieces[:3], [3, 4]]
        for each in (session, fork):
            assert each.sync_pieces(other) == {"n_reused": 20, "n_computed": 2, "n_replayed": 0}
            assert np.array_equal(each.row(), whole([*tokens[:20], 3, 4]))
        fork.sync_pieces([*pieces[:2], features(table, tokens[:6], 99), [3]])
        assert session.sync_pieces([*other, [5]])["n_reused"] == 22  # the other's images are its own


def test_saved_timelines_keep_images(
    path: Path, table: np.ndarray, whole: Callable[..., np.ndarray], rng: np.random.Generator, tmp_path: Path
) -> None:
    pieces, tokens = turns(rng, table)
    file = tmp_path / "saved"
    with Engine(path, n_ctx=64) as engine:
        session = engine.session()
        session.sync_pieces(pieces)
        session.save(file)
    with Engine(path, n_ctx=64) as engine:
        session = engine.session()
        session.load(file)
        assert session.tokens == shown(pieces)
        assert session.sync_pieces([*pieces, [3, 4]]) == {"n_reused": 39, "n_computed": 2, "n_replayed": 0}
        assert np.array_equal(session.row(), whole([*tokens, 3, 4]))
        session.load(file)
        assert session.sync_pieces([*pieces[:4], (pieces[4][0], 99), pieces[5]])["n_reused"] == 0
        good = file.read_bytes()
        for at in (96 + 4 * 39, 96 + 4 * 39 + 8, 96 + 4 * 5):  # begin and end of a run, a token
            file.write_bytes(good[:at] + b"\x07" + good[at + 1 :])
            with Fails("FORMAT", "checksum"):
                session.load(file)


def test_shortening(path: Path, table: np.ndarray, whole: Callable[..., np.ndarray], rng: np.random.Generator) -> None:
    """Where rows of an image would have to be computed again, nothing happens: the timeline does not have them."""
    pieces, tokens = turns(rng, table)
    with Engine(path, n_ctx=64, checkpoint_bytes=0) as engine:
        session = engine.session()
        session.sync_pieces(pieces)
        for length in (38, 20, 10):
            with Fails("STATE", f"shorten the timeline to {length}", "features", "sync with pieces"):
                session.truncate(length)
            assert session.tokens == shown(pieces)
        session.truncate(4)
        assert np.array_equal(session.row(), whole(tokens[:4]))
    with Engine(path, n_ctx=64) as engine:
        session = engine.session()
        session.sync_pieces(pieces[:5])
        session.checkpoint()
        session.eval([3, 4, 5])
        session.truncate(38)
        assert session.tokens == [*shown(pieces[:5]), 3, 4]
        assert np.array_equal(session.row(), whole([*tokens[:36], 3, 4]))


def test_penalties_pass_over_images(path: Path, table: np.ndarray, rng: np.random.Generator) -> None:
    with Engine(path, n_ctx=64, n_sessions=2) as engine:
        session, text = engine.session(), prompt(rng, 4)
        session.sync_pieces([text, features(table, prompt(rng, 5), 1)])
        best = session.top(1)[0][0]
        assert session.sample(temperature=0.0, presence_penalty=1000.0, penalty_last_n=5) == best


def test_pieces_that_are_refused(path: Path, table: np.ndarray, rng: np.random.Generator) -> None:
    """They change nothing."""
    good = features(table, prompt(rng, 4), 1)
    bad = (np.where(np.arange(table.shape[1]) == 3, np.nan, good[0]), 2)
    with Engine(path, n_ctx=16) as engine:
        session = engine.session()
        session.sync_pieces([[1, 2], good])

        def refused(pieces: list[Piece], status: str, *words: str) -> None:
            with Fails(status, *words):
                session.sync_pieces(pieces)
            assert session.tokens == [1, 2, *[FEATURE] * 4]

        refused([], "ARG", "at least one piece")
        refused([[1], []], "ARG", "piece 1")
        refused([[1], good, [512]], "ARG", "token 512")
        refused([[1, FEATURE]], "ARG", "token -1")
        refused([[1], bad], "ARG", "piece 1", "NaN")
        refused([good] * 5, "CONTEXT_FULL", "16 tokens and 4 more")
        with Fails("ARG", "token -1"):
            session.eval([FEATURE])
        with Fails("ARG", "token -1"):
            session.sync([1, FEATURE])
        piece = engine.ffi.new("delta_piece *", {"n": 1})
        null = engine.ffi.NULL
        with Fails("ARG", "tokens or features"):
            native.check(engine.lib.delta_session_sync_pieces(session.handle, piece, 1, null, null, null))
