"""The determinism contract over many prompts: however a text reaches the engine, the greedy continuation is the same.

The unsplit run of a prompt is what a user does: the whole prompt in one step, then the best token, again and again. The
same text is then given to the engine in other ways (`WAYS`), and wherever a token was chosen the choice must be the
same. Up to its first difference a greedy run sees exactly the unsplit run's tokens, so giving those and comparing every
choice finds the first difference of the greedy texts, at the price of reading instead of writing.

A first difference is allowed only where the two best logits of the unsplit run are a near-tie. Prompts with a
difference in any of the ways are counted, printed at the end of the test run, and stay below `ALLOWED` of the prompts.
In `exact` mode the logits of every position are bounded as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from deltallama import Llama
from engine import Engine, Session
from test_nano_engine import NANO, held_out
from timelines import SPLIT, prompt

N_PROMPTS = 200
N_GENERATED = 8
N_OTHER = 5  # tokens that a restore takes back
TOGETHER = 8  # prompts that are computed in one step in the way "company"
NEAR_TIE = {"exact": 1e-3, "fine": 0.05, "fast": 0.05}
ALLOWED = 0.005  # of the prompts


@dataclass
class Run:
    """A prompt, its greedy continuation, and the logits [n_prompt + n_greedy - 1, vocab] of every token given."""

    prompt: list[int]
    greedy: list[int]
    rows: np.ndarray

    @property
    def text(self) -> list[int]:
        """The tokens that were given: the last one chosen is not among them."""
        return self.prompt + self.greedy[:-1]

    def choosing(self, rows: np.ndarray) -> np.ndarray:
        """Of rows over `text` those that choose the tokens of `greedy`."""
        return rows[len(self.prompt) - 1 :]

    def gap(self, i: int) -> float:
        """Distance of the two best logits where token `i` of `greedy` was chosen."""
        second, best = np.sort(self.choosing(self.rows)[i])[-2:]
        return float(best - second)


def unsplit(engine: Engine, tokens: list[int]) -> Run:
    session = engine.session()
    rows, greedy = [session.eval(tokens)], []
    while len(greedy) < N_GENERATED:
        if greedy:
            rows.append(session.eval(greedy[-1:]))
        greedy.append(int(np.argmax(rows[-1][-1])))
        if engine.lib.delta_model_is_stop(engine.model, greedy[-1]):
            break
    session.free()
    return Run(tokens, greedy, np.concatenate(rows))


# -- other ways to compute the same texts: each returns the logits of all positions of all texts -----------------------


def token_by_token(engine: Engine, runs: list[Run], rng: np.random.Generator) -> list[np.ndarray]:
    """One token of each text a step, until the texts end."""
    sessions = [engine.session() for _ in runs]
    rows: list[list[np.ndarray]] = [[] for _ in runs]
    for i in range(max(len(run.text) for run in runs)):
        going = [k for k, run in enumerate(runs) if i < len(run.text)]
        engine.eval_batch([(sessions[k], runs[k].text[i : i + 1]) for k in going])
        for k in going:
            rows[k].append(sessions[k].row())
    return [np.stack(r) for r in freed(sessions, rows)]


def random_pieces(engine: Engine, runs: list[Run], rng: np.random.Generator) -> list[np.ndarray]:
    """Up to four cuts anywhere, in the continuation too."""
    out = []
    for run in runs:
        n = len(run.text)
        cuts = np.sort(rng.choice(np.arange(1, n), min(int(rng.integers(1, 5)), n - 1), replace=False))
        out.append(engine.logits(run.text, np.diff(cuts, prepend=0).tolist()))
    return out


def company(engine: Engine, runs: list[Run], rng: np.random.Generator) -> list[np.ndarray]:
    """All texts in common steps: their first parts of any length in one, the rest in another."""
    sessions = [engine.session() for _ in runs]
    cuts = [int(rng.integers(1, len(run.text))) for run in runs]
    rows: list[list[np.ndarray]] = [[] for _ in runs]
    for part in (0, 1):
        pieces = [run.text[cut:] if part else run.text[:cut] for run, cut in zip(runs, cuts, strict=True)]
        engine.eval_batch(list(zip(sessions, pieces, strict=True)))
        for session, kept in zip(sessions, rows, strict=True):
            kept.append(session.kept())
    return [np.concatenate(r) for r in freed(sessions, rows)]


def restored(engine: Engine, runs: list[Run], rng: np.random.Generator) -> list[np.ndarray]:
    """After other tokens, back to a checkpoint inside the prompt, from where a part is computed again."""
    out = []
    for run in runs:
        kept, back = sorted(rng.choice(np.arange(1, len(run.prompt) + 1), 2, replace=False).tolist())
        session = engine.session()
        first = session.eval(run.text[:kept])
        session.checkpoint()
        between = session.eval(run.text[kept:back])
        session.eval(prompt(rng, N_OTHER, engine.n_vocab), "NONE")
        if len(run.text) > back:
            replayed = session.stats()["n_replayed"]
            session.truncate(back)
            assert session.stats()["n_replayed"] - replayed == back - kept
            between = np.concatenate([between, session.eval(run.text[back:])])
        session.free()
        out.append(np.concatenate([first, between]))
    return out


def freed(sessions: list[Session], rows: list[list[np.ndarray]]) -> Iterator[list[np.ndarray]]:
    for session, kept in zip(sessions, rows, strict=True):
        session.free()
        yield kept


WAYS = (token_by_token, random_pieces, company, restored)

# -- the models and their prompts --------------------------------------------------------------------------------------


def random_prompts(_: Path, rng: np.random.Generator) -> list[list[int]]:
    return [prompt(rng, int(n)) for n in rng.integers(2, 40, N_PROMPTS)]


def questions(path: Path, rng: np.random.Generator) -> list[list[int]]:
    """Held-out questions in the chat format, to be answered without thinking: tools and long turns are left out."""
    with Llama(path, n_ctx=512) as llm:
        prompts = [llm.chat_tokens(row["messages"], thinking=False) for row in held_out(rng, 500)]
    return [tokens for tokens in prompts if len(tokens) < 40][:N_PROMPTS]


# -- the comparison ----------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What a comparison found."""

    differing: int = 0  # prompts with another text in any of the ways
    gaps: list[float] = field(default_factory=list)  # of the unsplit run at each first difference
    worst: float = 0.0  # NMSE of the logits of one position

    def __str__(self) -> str:
        gaps = f", gaps up to {max(self.gaps):.2g}" if self.gaps else ""
        return f"{self.differing} prompts with another text{gaps}, largest NMSE of a position {self.worst:.1e}"


def compare(engine: Engine, prompts: list[list[int]], rng: np.random.Generator) -> Tally:
    tally = Tally()
    for start in range(0, len(prompts), TOGETHER):
        runs = [unsplit(engine, tokens) for tokens in prompts[start : start + TOGETHER]]
        found = [way(engine, runs, rng) for way in WAYS]
        for run, ways in zip(runs, zip(*found, strict=True), strict=True):
            gaps = []
            for rows in ways:
                tally.worst = max(tally.worst, float(nmse_rows(rows, run.rows).max()))
                differs = run.choosing(rows).argmax(axis=1) != run.greedy
                if differs.any():
                    gaps.append(run.gap(int(differs.argmax())))
            tally.differing += bool(gaps)
            tally.gaps += gaps
    return tally


def nmse_rows(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """[n]: normalised squared error of each position's logits."""
    expected = expected.astype(np.float64)
    return np.asarray(np.sum((found - expected) ** 2, axis=1) / np.sum(expected**2, axis=1))


@pytest.mark.parametrize("activations", ["exact", "fine", "fast"])
@pytest.mark.parametrize("model", ["nano", "k3", "kl"])
def test_the_greedy_text_is_the_same_in_every_way(
    tiny_checkpoint: Callable[..., Path],
    gguf: Callable[..., Path],
    rng: np.random.Generator,
    summary: Callable[[str], None],
    model: str,
    activations: str,
) -> None:
    path = gguf(NANO if model == "nano" else tiny_checkpoint(model), "q8_0")
    prompts = (questions if model == "nano" else random_prompts)(path, rng)
    assert len(prompts) == N_PROMPTS
    cache = "f32" if activations == "exact" else "f16"
    n_ctx = max(map(len, prompts)) + N_GENERATED + N_OTHER
    step = TOGETHER * n_ctx
    params = {"n_ctx": n_ctx, "n_sessions": TOGETHER, "n_batch": step, "n_outputs": step}
    params["n_threads"] = 0 if model == "nano" else 1  # tiny matrices are too small for more
    with Engine(path, activations=activations, cache_type=cache, **params) as engine:
        tally = compare(engine, prompts, rng)
    summary(f"{model} {activations}: {N_PROMPTS} prompts in {len(WAYS)} other ways, {tally}")
    assert max(tally.gaps, default=0.0) < NEAR_TIE[activations]
    assert tally.differing < ALLOWED * N_PROMPTS
    assert activations != "exact" or tally.worst <= SPLIT
