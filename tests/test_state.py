"""Timelines: eval, batches, sync, truncate, fork and cancel, always compared with a fresh run of the same tokens."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

import native
from engine import Engine, Session
from gguf_ext.reader import GGUFReader
from timelines import SPLIT, TAIL, Fails, Fresh, counts, nmse, prompt, status_of

# -- eval ------------------------------------------------------------------------------------------------------------


def test_every_split_of_a_prompt(engine: Engine, rng: np.random.Generator) -> None:
    tokens = prompt(rng, 23)
    whole = engine.logits(tokens)
    for cut in range(1, len(tokens)):
        found = engine.logits(tokens, [cut])
        assert max(map(nmse, found, whole)) < SPLIT, f"cut at {cut}"
    assert max(map(nmse, engine.logits(tokens, [1] * len(tokens)), whole)) < SPLIT


@pytest.mark.parametrize("n_batch", [1, 3, 16])
def test_d6_steps_smaller_than_the_prompt(mini: Path, fresh: Fresh, rng: np.random.Generator, n_batch: int) -> None:
    tokens = prompt(rng, 50)
    with Engine(mini, n_ctx=64, n_batch=n_batch, checkpoint_bytes=0) as engine:
        session = engine.session()
        session.eval(tokens, "LAST")
        fresh.check(session, tokens)
        assert session.stats()["n_steps"] == -(-50 // n_batch)
        session.eval(tokens[:10])  # all rows: at most n_outputs = n_batch per step
        assert engine.lib.delta_session_logits_count(session.handle) == 10
        fresh.check(session, tokens + tokens[:10])


def test_rows_that_keep_logits(engine: Engine, rng: np.random.Generator) -> None:
    tokens = prompt(rng, 40)  # more than n_outputs
    session = engine.session()
    rows = session.eval(tokens)
    assert rows.shape == (40, engine.n_vocab)
    assert np.array_equal(session.row(-1), rows[39])
    with Fails("ARG", "row 40", "0..39"):
        session.row(40)
    with Fails("ARG", "row -2"):
        session.row(-2)
    assert session.eval(tokens[:3], "LAST").shape[0] == 1
    assert session.eval(tokens[:3], "NONE").shape[0] == 0
    for call in (session.row, session.sample, lambda: session.top(1)):
        with Fails("STATE", "no logits"):
            call()


def test_bad_tokens_change_nothing(engine: Engine, fresh: Fresh, rng: np.random.Generator) -> None:
    tokens = prompt(rng, 5)
    session = engine.session()
    session.sync(tokens)
    before = session.stats()
    with Fails("ARG", "token 512", "index 1", "0..511"):
        session.eval([1, 512])
    with Fails("ARG", "token -1", "index 0"):
        session.sync([-1])
    with Fails("ARG", "at least one token"):
        session.eval([])
    with Fails("ARG", "at least one token"):
        session.sync([])
    with Fails("ARG", "logits is 3"):
        native.check(engine.lib.delta_session_eval(session.handle, [1], 1, engine.ffi.cast("delta_logits_mode", 3)))
    assert session.stats() == before
    fresh.check(session, tokens)


def test_e8_a_full_context_is_an_error_and_never_shifts(mini: Path, rng: np.random.Generator) -> None:
    tokens = prompt(rng, 33)
    with Fresh(mini, 32) as fresh, Engine(mini, n_ctx=32, n_sessions=2) as engine:
        session, other = engine.session(), engine.session()
        session.sync(tokens[:30])
        with Fails("CONTEXT_FULL", "30", "3 more", "32"):
            session.eval(tokens[30:33])
        fresh.check(session, tokens[:30])
        session.eval(tokens[30:32], "LAST")
        fresh.check(session, tokens[:32])
        with Fails("CONTEXT_FULL"):
            session.eval(tokens[32:33])
        with Fails("CONTEXT_FULL", "33", "32"):
            session.sync(tokens)
        with Fails("CONTEXT_FULL"):  # nothing of the batch is computed
            engine.eval_batch([(other, [1]), (session, [2])])
        assert other.length == 0
        fresh.check(session, tokens[:32])
        session.sync(tokens[:31])
        fresh.check(session, tokens[:31])


# -- several sessions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_batch", [2, 4, 7, 512])
def test_d7_e10_sessions_together_and_alone(mini: Path, rng: np.random.Generator, n_batch: int) -> None:
    """Prompts of 1, 5 and 9 tokens start together, all rows ask for logits, then greedy decoding in company."""
    prompts = [prompt(rng, n) for n in (1, 5, 9)]
    with Engine(mini, n_ctx=32, n_batch=n_batch, n_sessions=4) as engine:
        alone = []
        for tokens in prompts:
            session = engine.session()
            rows = [session.eval(tokens)]
            text = list(tokens)
            for _ in range(6):
                text.append(int(np.argmax(session.row())))
                rows.append(session.eval(text[-1:]))
            alone.append((text, np.concatenate(rows)))
            session.free()

        sessions = [engine.session() for _ in prompts]
        texts = [list(tokens) for tokens in prompts]
        together: list[list[np.ndarray]] = [[] for _ in prompts]
        items = list(zip(sessions, prompts, strict=True))
        for _ in range(7):
            engine.eval_batch(items)
            items = []
            for session, text, kept in zip(sessions, texts, together, strict=True):
                kept.append(session.kept())
                text.append(int(np.argmax(session.row())))
                items.append((session, text[-1:]))
        for (text, rows), found, kept in zip(alone, texts, together, strict=True):
            assert found[:-1] == text
            assert max(map(nmse, np.concatenate(kept), rows)) < SPLIT


def test_batch_of_mixed_requests(engine: Engine, fresh: Fresh, rng: np.random.Generator) -> None:
    """Logits of none, last and all rows in one call, with fewer output rows per step than asked for."""
    ffi, lib = engine.ffi, engine.lib
    texts = [prompt(rng, n) for n in (40, 1, 30)]
    sessions = [engine.session() for _ in texts]
    keep = [ffi.new("int32_t[]", text) for text in texts]
    items = ffi.new("delta_batch_item[]", len(texts))
    for item, session, data, text, mode in zip(items, sessions, keep, texts, (2, 1, 0), strict=True):
        item.session, item.tokens, item.n_tokens, item.logits = session.handle, data, len(text), mode
    native.check(lib.delta_eval_batch(engine.model, items, len(texts)))
    assert [lib.delta_session_logits_count(s.handle) for s in sessions] == [40, 1, 0]
    assert max(map(nmse, sessions[0].kept(), engine.logits(texts[0]))) < SPLIT
    fresh.check(sessions[0], texts[0])
    fresh.check(sessions[1], texts[1])
    sessions[2].eval([7], "LAST")
    fresh.check(sessions[2], [*texts[2], 7])


def test_batch_refusals(engine: Engine, k3_mini: Path) -> None:
    a, b = engine.session(), engine.session()
    with Fails("ARG", "item 2", "twice"):
        engine.eval_batch([(a, [1]), (b, [2]), (a, [3])])
    with Fails("ARG", "at least one item"):
        engine.eval_batch([])
    with Fails("ARG", "item 1", "at least one token"):
        engine.eval_batch([(a, [1]), (b, [])])
    with Fails("ARG", "item 1", "token 999", "index 1"):
        engine.eval_batch([(a, [1]), (b, [2, 999])])
    with Engine(k3_mini, n_ctx=16) as other, Fails("ARG", "item 1", "another model"):
        engine.eval_batch([(a, [1]), (other.session(), [1])])
    assert a.length == b.length == 0


def test_slots_are_used_again(engine: Engine, fresh: Fresh, rng: np.random.Generator) -> None:
    sessions = [engine.session() for _ in range(4)]
    with Fails("STATE", "4 session slots"):
        engine.session()
    sessions[2].sync(prompt(rng, 40))
    sessions[2].free()
    tokens = prompt(rng, 20)
    again = engine.session()  # in the slot that held another timeline
    assert again.stats()["n_checkpoints"] == 0
    again.sync(tokens)
    fresh.check(again, tokens)


# -- sync ------------------------------------------------------------------------------------------------------------


def test_sync_counts(engine: Engine, fresh: Fresh, rng: np.random.Generator) -> None:
    tokens = prompt(rng, 100)
    session = engine.session()
    assert session.sync(tokens[:60]) == counts(0, 60, 0)
    assert session.sync(tokens[:70]) == counts(60, 10, 0)  # an extension continues the live state
    fresh.check(session, tokens[:70])
    assert session.sync(tokens[:70]) == counts(60, 10, 10)  # the same again: back to the end of the first prompt
    fresh.check(session, tokens[:70])
    assert session.sync(tokens[:50]) == counts(60 - TAIL, 6, 6)
    fresh.check(session, tokens[:50])
    assert session.sync(tokens[:1]) == counts(0, 1, 1)
    fresh.check(session, tokens[:1])
    assert session.sync(tokens[1:30]) == counts(0, 29, 0)  # nothing in common
    fresh.check(session, tokens[1:30])
    stats = session.stats()
    assert stats["n_computed"] == 60 + 10 + 10 + 6 + 1 + 29
    assert stats["n_reused"] == 60 + 60 + 44
    assert stats["n_replayed"] == 10 + 6 + 1
    totals = engine.stats()
    assert {k: totals[k] for k in ("n_computed", "n_reused", "n_replayed", "n_steps")} == {
        k: stats[k] for k in ("n_computed", "n_reused", "n_replayed", "n_steps")
    }


def test_e1_an_edited_question_is_not_answered_stale(engine: Engine, fresh: Fresh, rng: np.random.Generator) -> None:
    """A(B)C, then A(B')C with the same length and the same last tokens."""
    a, b, edited, c = (prompt(rng, n) for n in (40, 12, 12, 20))
    session = engine.session()
    session.sync(a + b)
    session.sync(a + b + c)
    fresh.check(session, a + b + c)
    result = session.sync(a + edited + c)
    assert result["n_reused"] <= len(a) and result["n_reused"] + result["n_computed"] == 72
    fresh.check(session, a + edited + c)
    session.sync(a + b + c)
    fresh.check(session, a + b + c)


def test_e2_repeated_prompts_and_shared_prefixes(engine: Engine, fresh: Fresh, rng: np.random.Generator) -> None:
    shared, tail, other = prompt(rng, 50), prompt(rng, 9), prompt(rng, 9)
    session = engine.session()
    for tokens in (shared + tail, shared + tail, shared + other, shared, shared + tail, shared[:49]):
        session.sync(tokens)
        fresh.check(session, tokens)


def test_e3_ten_turns_with_an_edit_in_the_middle(mini: Path, rng: np.random.Generator) -> None:
    """Every turn costs its new tokens only; an edit no more than the way back to the end of the reply before it."""
    with Fresh(mini, 768) as fresh, Engine(mini, n_ctx=768, checkpoint_bytes=1 << 22) as engine:
        session = engine.session()
        text: list[int] = []
        ends = []
        for _ in range(10):
            question = prompt(rng, 50)
            assert session.sync(text + question) == counts(len(text), 50, 0)
            text += question
            for token in prompt(rng, 10):  # the reply
                session.eval([token], "LAST")
                text.append(token)
            ends.append(len(text))
        fresh.check(session, text)
        edit = ends[4] + 25  # inside turn 6
        edited = text[:edit] + [(text[edit] + 1) % 512] + text[edit + 1 :]
        result = session.sync(edited)
        assert result == counts(ends[4], len(text) - ends[4], 25)
        fresh.check(session, edited)


# -- truncate, checkpoint, fork --------------------------------------------------------------------------------------


def test_truncate_to_every_length(mini: Path, fresh: Fresh, rng: np.random.Generator) -> None:
    tokens = prompt(rng, 24)
    with Engine(mini, n_ctx=64, checkpoint_every=5) as engine:
        session = engine.session()
        for length in range(len(tokens) + 1):
            session.sync(tokens)
            session.truncate(length)
            assert session.tokens == tokens[:length]
            if engine.lib.delta_session_logits_count(session.handle) > 0:
                fresh.check(session, tokens[:length])
            session.eval([5], "LAST")
            fresh.check(session, [*tokens[:length], 5])
        session.truncate(3)
        with Fails("ARG", "3 tokens", "to 4"):
            session.truncate(4)
        session.truncate(0)
        assert session.tokens == []
        session.eval(tokens, "LAST")
        fresh.check(session, tokens)


def test_checkpoint_before_a_draft(engine: Engine, fresh: Fresh, rng: np.random.Generator) -> None:
    tokens, draft = prompt(rng, 20), prompt(rng, 6)
    session = engine.session()
    session.eval(tokens, "NONE")
    session.checkpoint()
    session.eval(draft, "LAST")
    before = session.stats()
    session.truncate(20)  # the draft is refused: nothing is computed
    assert session.stats()["n_computed"] == before["n_computed"]
    assert engine.lib.delta_session_logits_count(session.handle) == 0
    session.eval(draft, "NONE")
    session.truncate(23)  # half of it is accepted
    assert session.stats()["n_replayed"] == before["n_replayed"] + 3
    fresh.check(session, tokens + draft[:3])
    engine.session().checkpoint()  # the empty timeline needs none


def test_fork(engine: Engine, fresh: Fresh, rng: np.random.Generator) -> None:
    tokens, left, right = prompt(rng, 40), prompt(rng, 15), prompt(rng, 15)
    session = engine.session()
    session.sync(tokens)
    twin = session.fork()
    fresh.check(twin, tokens)  # the logits come along
    session.eval(left, "LAST")
    twin.eval(right, "LAST")
    fresh.check(session, tokens + left)
    fresh.check(twin, tokens + right)
    assert twin.sync(tokens + left) == counts(40, 15, 0)  # a fork has the same past: the checkpoint at its end
    fresh.check(twin, tokens + left)
    session.free()
    assert twin.sync(tokens[:30] + right)["n_reused"] == 40 - TAIL
    fresh.check(twin, tokens[:30] + right)
    empty = engine.session().fork()
    empty.sync(left)
    fresh.check(empty, left)
    engine.session()
    with Fails("STATE", "slots"):
        twin.fork()


# -- cancelling and failing ------------------------------------------------------------------------------------------


def sync_with_progress(session: Session, tokens: Sequence[int], fn: Callable[[int, int], int]) -> int:
    """The status of a sync that reports to `fn`."""
    ffi, lib = session.ffi, session.lib
    callback = ffi.callback("delta_progress_fn", lambda done, total, user: fn(done, total))
    return int(lib.delta_session_sync(session.handle, list(tokens), len(tokens), callback, ffi.NULL, ffi.NULL))


@pytest.mark.parametrize("way", ["progress", "cancel"])
def test_e6_cancel_in_the_middle_of_a_prompt(mini: Path, fresh: Fresh, rng: np.random.Generator, way: str) -> None:
    tokens, other = prompt(rng, 60), prompt(rng, 20)
    with Engine(mini, n_ctx=128, n_batch=8) as engine:
        session = engine.session()
        session.sync(tokens[:10])
        calls: list[tuple[int, int]] = []

        def progress(done: int, total: int) -> int:
            calls.append((done, total))
            if done < 20:
                return 0
            if way == "progress":
                return 1
            thread = threading.Thread(target=engine.cancel)
            thread.start()
            thread.join()
            return 0

        assert sync_with_progress(session, tokens, progress) == status_of("CANCELLED")
        assert calls == [(8, 50), (16, 50), (24, 50)]
        assert session.tokens == tokens[:34]
        with Fails("STATE", "no logits"):
            session.row()
        session.eval(tokens[34:36], "LAST")  # the wish to stop does not stick
        fresh.check(session, tokens[:36])
        assert session.sync(tokens)["n_reused"] == 36
        fresh.check(session, tokens)
        assert sync_with_progress(session, other, lambda done, total: done == total) == 0  # too late to stop
        fresh.check(session, other)


def test_cancel_without_a_computation_does_nothing(engine: Engine, fresh: Fresh, rng: np.random.Generator) -> None:
    tokens = prompt(rng, 20)
    session = engine.session()
    engine.cancel()
    session.sync(tokens)
    engine.cancel()
    session.eval([1], "LAST")
    fresh.check(session, [*tokens, 1])


@pytest.fixture
def spoilt_path(k3_mini: Path, tmp_path: Path) -> Path:
    """A model whose embedding of token 7 is NaN: converter and loader do not look at every weight."""
    path = tmp_path / "spoilt.gguf"
    shutil.copyfile(k3_mini, path)
    with GGUFReader(path) as file:
        embedding = file.tensors["token_embd.weight"]
    row_bytes = 4 * embedding.ne[0]
    with path.open("r+b") as out:
        out.seek(embedding.offset + 7 * row_bytes)
        out.write(np.full(embedding.ne[0], np.nan, np.float32).tobytes())
    return path


def test_a_failed_step_is_left_behind_by_the_next_sync(spoilt_path: Path, rng: np.random.Generator) -> None:
    tokens = [t if t != 7 else 8 for t in prompt(rng, 60)]
    with Fresh(spoilt_path) as fresh, Engine(spoilt_path, n_ctx=128, n_sessions=3, n_batch=32) as engine:
        session, other, third = engine.session(), engine.session(), engine.session()
        session.sync(tokens[:40])
        other.sync(tokens[:30])
        third.sync(tokens[:20])
        with Fails("NUMERIC", "position 41", "nan"):
            session.eval([tokens[40], 7], "ALL")
        assert session.tokens == tokens[:40]
        for call in (
            lambda: session.eval([1]),
            session.fork,
            session.checkpoint,
            lambda: session.save(spoilt_path.with_suffix(".state")),
        ):
            with Fails("STATE", "failed", "sync or truncate"):
                call()
        with Fails("STATE", "no logits"):
            session.row()
        assert session.stats()["n_checkpoints"] == 0  # NaN may be older than the row that showed it
        assert session.sync(tokens) == counts(0, 60, 40)
        fresh.check(session, tokens)
        with Fails("NUMERIC"):
            session.sync([*tokens, 7])
        session.truncate(50)
        session.eval([3], "LAST")
        fresh.check(session, [*tokens[:50], 3])

        with Fails("NUMERIC"):  # in company: nobody in that step is trusted
            engine.eval_batch([(other, [7]), (session, [3])])
        third.eval([4], "LAST")
        fresh.check(third, [*tokens[:20], 4])
        for lost, length in ((other, 30), (session, 51)):
            assert lost.length == length
            lost.sync(tokens[:25])
            fresh.check(lost, tokens[:25])
        empty = session
        empty.truncate(0)
        with Fails("NUMERIC", "position 0"):
            empty.eval([7], "LAST")
        empty.eval(tokens, "LAST")  # a timeline of nothing has nothing to lose
        fresh.check(empty, tokens)
