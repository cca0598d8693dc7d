"""Choosing a token: the sampler against its definition in numpy, token by token and as a distribution."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import native
from engine import Engine, Session
from timelines import Fails, prompt

MASK64 = (1 << 64) - 1
GREEDY = {"temperature": 0.0}
PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # the softmax itself


def mix(z: int) -> int:
    """The finalizer of SplitMix64."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def uniform(seed: int, counter: int) -> float:
    step = 0x9E3779B97F4A7C15
    return (mix((mix((seed + step) & MASK64) + counter * step) & MASK64) >> 11) / 2**53


def weights(
    logits: np.ndarray,
    timeline: Sequence[int],
    *,
    temperature: float = 0.8,
    top_k: int = 40,
    top_p: float = 0.95,
    min_p: float = 0.05,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    penalty_last_n: int = 64,
    logit_bias: dict[int, float] | None = None,
    allow: Sequence[int] | None = None,
) -> np.ndarray:
    """[n_vocab] probabilities, written from the comment in sampler.h; all of the vocabulary is sorted."""
    x = logits.astype(np.float32)
    if allow is not None:
        x[np.setdiff1d(np.arange(len(x)), np.asarray(allow))] = -np.inf
    for token, bias in (logit_bias or {}).items():
        x[token] += np.float32(bias)
    recent = (
        list(timeline) if penalty_last_n < 0 else list(timeline)[len(timeline) - min(penalty_last_n, len(timeline)) :]
    )
    for token, n in Counter(recent).items():
        penalty = np.float32(repetition_penalty)
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
        x[token] -= np.float32(presence_penalty) + np.float32(n) * np.float32(frequency_penalty)
    order = np.lexsort((np.arange(len(x)), -x))  # best first, ties by id
    p = np.zeros(len(x))
    if temperature == 0:
        p[order[0]] = 1
        return p
    kept = [t for t in order if x[t] > -np.inf]
    if top_k > 0:
        kept = kept[:top_k]
    w = np.exp((x.astype(np.float64) - np.float64(x[order[0]])) / np.float64(np.float32(temperature)))
    if top_p < 1:
        reached = np.cumsum(w[kept]) >= np.float64(np.float32(top_p)) * np.sum(w[kept])
        kept = kept[: int(np.argmax(reached)) + 1] if reached.any() else kept
    kept = [t for t in kept if w[t] >= np.float64(np.float32(min_p))]
    p[kept] = w[kept]
    return p / p.sum()


def definition(logits: np.ndarray, timeline: Sequence[int], *, seed: int = 0, **params: Any) -> tuple[int, float]:
    """The token, and how far the draw was from choosing another."""
    sums = np.cumsum(weights(logits, timeline, **params))
    u = uniform(seed, len(timeline))
    token = int(np.argmax(sums > u))
    return token, min(abs(s - u) for s in (sums[token], sums[token - 1] if token > 0 else 0.0))


@pytest.fixture(scope="module")
def engine(golden: Path, gguf: Callable[..., Path]) -> Iterator[Engine]:
    with Engine(gguf(golden / "kl-mini"), n_ctx=256, n_sessions=2) as opened:
        yield opened


@pytest.fixture
def session(engine: Engine, rng: np.random.Generator) -> Iterator[Session]:
    opened = engine.session()
    # Few different tokens, so that penalties meet repetitions.
    opened.sync(prompt(rng, int(rng.integers(20, 100)), 60))
    yield opened
    opened.free()


def random_params(rng: np.random.Generator, n_vocab: int, recent: Sequence[int]) -> dict[str, Any]:
    def maybe(value: Any, off: Any) -> Any:
        return value if rng.random() < 0.5 else off

    tokens = [int(t) for t in rng.choice(n_vocab, 8, replace=False)]
    return {
        "temperature": maybe(float(np.float32(rng.uniform(0.1, 3))), 1.0),
        "top_k": int(maybe(rng.integers(1, 80), 0)),
        "top_p": maybe(float(np.float32(rng.uniform(0.05, 1))), 1.0),
        "min_p": maybe(float(np.float32(rng.uniform(0, 0.5))), 0.0),
        "repetition_penalty": maybe(float(np.float32(rng.uniform(0.5, 2))), 1.0),
        "presence_penalty": maybe(float(np.float32(rng.uniform(-2, 2))), 0.0),
        "frequency_penalty": maybe(float(np.float32(rng.uniform(-1, 1))), 0.0),
        "penalty_last_n": int(rng.choice([-1, 0, 1, 10, 1000])),
        "logit_bias": maybe({t: float(rng.uniform(-5, 5)) for t in tokens[:4]} | {tokens[4]: -math.inf}, None),
        "allow": maybe(sorted({*map(int, rng.choice(n_vocab, 100, replace=False)), tokens[0]}), None),
    }


def test_every_token_is_the_one_of_the_definition(session: Session, rng: np.random.Generator) -> None:
    logits, timeline = session.row(), session.tokens
    close = 0
    for _ in range(300):
        params = random_params(rng, len(logits), timeline)
        seed = int(rng.integers(0, 2**64, dtype=np.uint64))
        token, margin = definition(logits, timeline, seed=seed, **params)
        if margin < 1e-12:  # the sums of two programs may differ there
            close += 1
            continue
        assert session.sample(seed=seed, **params) == token, params
    assert close <= 1


def test_the_defaults(session: Session) -> None:
    logits, timeline = session.row(), session.tokens
    for seed in range(50):
        assert session.sample(seed=seed) == definition(logits, timeline, seed=seed)[0]


@pytest.mark.parametrize(
    "params",
    [
        PLAIN,
        {"temperature": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 1.5, "top_k": 12, "top_p": 1.0, "min_p": 0.0},
        {"temperature": 1.5, "top_k": 0, "top_p": 0.6, "min_p": 0.0},
        {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.2},
        {"temperature": 1.5, "top_k": 50, "top_p": 0.8, "min_p": 0.1},
    ],
    ids=["plain", "hot", "top-k", "top-p", "min-p", "all"],
)
def test_distribution(engine: Engine, params: dict[str, Any]) -> None:
    """Over 4000 fixed seeds the frequencies fit the probabilities (chi-squared), and nothing else is ever drawn."""
    session = engine.session()
    session.sync([5, 9, 300, 41])
    n = 4000
    p = weights(session.row(), session.tokens, **params)
    drawn = np.bincount([session.sample(seed=seed, **params) for seed in range(n)], minlength=len(p))
    session.free()
    assert not drawn[p == 0].any()
    often = p * n >= 5
    expected = np.append(p[often] * n, p[~often].sum() * n)
    found = np.append(drawn[often], drawn[~often].sum())
    expected, found = expected[expected > 0], found[expected > 0]
    chi2 = float(np.sum((found - expected) ** 2 / expected))
    freedom = len(expected) - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom) + 4, f"{chi2:.0f} at {freedom} degrees of freedom"


def test_draws_along_a_timeline_are_independent(engine: Engine) -> None:
    """One seed over many lengths is as good as many seeds: the mean and the spread of uniform numbers, no echo."""
    u = np.array([uniform(7, n) for n in range(4000)])
    assert abs(u.mean() - 0.5) < 0.02 and abs(u.std() - math.sqrt(1 / 12)) < 0.01
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.06
    session = engine.session()
    for n in (3, 5, 1):  # and the engine's numbers are these
        session.eval([1] * n, "LAST")
        p = weights(session.row(), session.tokens, **PLAIN)
        assert session.sample(seed=7, **PLAIN) == int(np.argmax(np.cumsum(p) > u[session.length]))
    session.free()


def test_same_seed_and_text_give_the_same_token(engine: Engine, rng: np.random.Generator) -> None:
    a, b = engine.session(), engine.session()
    tokens = prompt(rng, 30)
    a.sync(tokens)
    b.sync(tokens[:12])
    for seed in (1, 2, 2**64 - 1):  # earlier calls and another way to the same text change nothing
        b.sample(seed=seed)
    b.sync(tokens)
    hot = {"temperature": 3.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    drawn = [a.sample(seed=seed, **hot) for seed in range(40)]
    assert [b.sample(seed=seed, **hot) for seed in range(40)] == drawn
    assert len(set(drawn)) > 20
    before = a.length
    assert a.sample(seed=3, **hot) == drawn[3] and a.length == before  # sampling appends nothing
    a.free()
    b.free()


def test_greedy_ties_go_to_the_lower_id(session: Session) -> None:
    row = session.row()
    top = float(row.max())
    best = int(row.argmax())
    for token in (0, 200, 511):
        bias = {token: float(np.float32(top + 8) - row[token]), 300: float(np.float32(top + 8) - row[300])}
        x = row.copy()
        for t, value in bias.items():
            x[t] += np.float32(value)
        assert session.sample(logit_bias=bias, **GREEDY) == int(np.argmax(x))
    assert session.sample(**GREEDY) == best
    equal = {t: -math.inf for t in range(512) if t not in (17, 90)}
    equal[17], equal[90] = float(-row[17]), float(-row[90])  # x[t] = row[t] - row[t] = 0 for both
    assert session.sample(logit_bias=equal, **GREEDY) == 17
    assert session.sample(logit_bias=equal, temperature=1.0, top_k=1, seed=5) == 17


def test_mask_and_bias_bind(session: Session, rng: np.random.Generator) -> None:
    for seed in range(30):
        allowed = sorted(int(t) for t in rng.choice(512, 3, replace=False))
        assert session.sample(seed=seed, temperature=5.0, allow=allowed) in allowed
    assert session.sample(allow=[511], seed=1) == 511
    assert session.sample(allow=[40, 41], logit_bias={40: -math.inf}, seed=1) == 41
    assert session.sample(logit_bias={44: 1e6}, seed=1) == 44
    # A mask wins over a bias.
    assert session.sample(allow=[40], logit_bias={44: 1e6}, seed=1) == 40


@pytest.mark.parametrize(
    "params,words",
    [
        ({"temperature": math.nan}, ["temperature", "nan"]),
        ({"temperature": -0.5}, ["temperature", "-0.5"]),
        ({"temperature": math.inf}, ["temperature", "inf"]),
        ({"top_k": -1}, ["top_k", "-1"]),
        ({"top_p": 0.0}, ["top_p", "0"]),
        ({"top_p": -0.25}, ["top_p", "-0.25"]),
        ({"top_p": 1.5}, ["top_p", "1.5"]),
        ({"top_p": math.nan}, ["top_p", "nan"]),
        ({"min_p": -0.5}, ["min_p", "-0.5"]),
        ({"min_p": 1.25}, ["min_p", "1.25"]),
        ({"min_p": math.nan}, ["min_p", "nan"]),
        ({"repetition_penalty": 0.0}, ["repetition_penalty", "0"]),
        ({"repetition_penalty": -2.0}, ["repetition_penalty", "-2"]),
        ({"repetition_penalty": math.inf}, ["repetition_penalty", "inf"]),
        ({"presence_penalty": math.nan}, ["presence_penalty", "nan"]),
        ({"frequency_penalty": -math.inf}, ["frequency_penalty", "inf"]),
        ({"penalty_last_n": -2}, ["penalty_last_n", "-2"]),
        ({"logit_bias": {512: 1.0}}, ["logit_bias", "512", "0..511"]),
        ({"logit_bias": {-1: 1.0}}, ["logit_bias", "-1"]),
        ({"logit_bias": {3: math.nan}}, ["logit_bias", "token 3", "nan"]),
        ({"logit_bias": {3: math.inf}}, ["logit_bias", "token 3", "inf"]),
        ({"logit_bias": dict.fromkeys(range(512), -math.inf)}, ["logit_bias", "512"]),
        ({"allow": []}, ["token_mask", "none"]),
        ({"allow": [8], "logit_bias": {8: -math.inf}}, ["token_mask", "logit_bias"]),
        ({"logit_bias": {3: 3e38}, "repetition_penalty": 1e-3, "penalty_last_n": -1}, ["token 3", "infinity"]),
    ],
    ids=str,
)
def test_parameter_errors_name_parameter_and_value(engine: Engine, params: dict[str, Any], words: list[str]) -> None:
    session = engine.session()
    try:
        session.sync([3, 4, 5])
        for temperature in ({}, GREEDY):  # greedy is no way around a wrong parameter
            with Fails("ARG", *words):
                session.sample(**{**temperature, **params})
    finally:
        session.free()


def test_bias_list_errors(session: Session) -> None:
    ffi, lib = session.ffi, session.lib
    params, token = ffi.new("delta_sampling_params *"), ffi.new("int32_t *", -7)
    lib.delta_sampling_params_init(params)

    def sample() -> None:
        native.check(lib.delta_session_sample(session.handle, params, token))

    twice = ffi.new("delta_token_bias[]", [(5, 1.0), (9, 1.0), (5, 2.0)])
    params.logit_bias, params.n_logit_bias = twice, 3
    with Fails("ARG", "token 5", "more than once"):
        sample()
    params.logit_bias = ffi.NULL
    with Fails("ARG", "logit_bias is null", "3"):
        sample()
    params.n_logit_bias = 0
    params.size -= 4
    with Fails("ABI", "delta_sampling_params", str(params.size), str(params.size + 4)):
        sample()
    assert token[0] == -7


def test_top(engine: Engine, session: Session) -> None:
    rows = session.eval([7, 8, 9])
    for index, row in [*enumerate(rows), (-1, rows[-1])]:
        best = session.top(512, index)
        order = np.lexsort((np.arange(512), -row))
        wide = row.astype(np.float64)
        logprobs = wide - wide.max() - math.log(np.exp(wide - wide.max()).sum())
        assert [t for t, _, _ in best] == order.tolist()
        assert [x for _, x, _ in best] == row[order].tolist()
        np.testing.assert_allclose([p for _, _, p in best], logprobs[order], rtol=1e-6, atol=1e-6)
        assert session.top(5, index) == best[:5]
    for n in (0, 513):
        out = session.ffi.new("delta_top_token[]", 513)
        with Fails("ARG", f"n is {n}", "1..512"):
            native.check(session.lib.delta_session_top(session.handle, -1, out, n))


def test_the_real_vocabulary(tiny_checkpoint: Callable[..., Path], gguf: Callable[..., Path]) -> None:
    """163,840 logits, all ways to cut them."""
    with Engine(gguf(tiny_checkpoint("k3-full-vocab")), n_ctx=8) as engine:
        session = engine.session()
        session.sync([100, 163_000, 5])
        logits, timeline = session.row(), session.tokens
        for params in ({}, PLAIN, {**PLAIN, "top_p": 0.9}, {**PLAIN, "min_p": 0.01}, {**PLAIN, "top_k": 5000}):
            sums = np.cumsum(weights(logits, timeline, **params))
            for seed in range(8):
                u = uniform(seed, 3)
                assert np.abs(sums - u).min() > 1e-12
                assert session.sample(seed=seed, **params) == int(np.argmax(sums > u))
