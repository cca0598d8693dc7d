"""How well a model predicts a text, and how far its predictions are from another model's: perplexity and KL divergence.

The text is cut into chunks of `n_ctx` tokens, each computed from an empty state; tokens after the last whole chunk are
left out. Predictions are scored in the second half of a chunk only, where at least half of it is context, or, with
`all_positions`, everywhere. Probabilities come from the raw logits, by a softmax in float64, natural logarithms
throughout. Standard errors take positions as independent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, sqrt
from typing import Any

import numpy as np

from gguf_ext import GGUFError, GGUFReader

from .errors import ArgumentError, FormatError
from .model import Llama

_LOGITS = 32 << 20  # numbers that the engine keeps of one evaluation,
_BLOCK = 2 << 20  # and of them in float64 at a time
_MOST_ROWS = 512
_VOCABULARY = ("model", "pre", "tokens", "token_type", "merges")

OnChunk = Callable[[int, int, float], None]
"""Called after each chunk with how many are done, how many there are, and the mean so far: of the negative
log-likelihood, or of the KL divergence."""


@dataclass(frozen=True)
class Estimate:
    """A mean over scored positions and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: np.ndarray) -> Estimate:
        n = values.size
        return cls(float(values.mean()), float(values.std(ddof=1) / sqrt(n)) if n > 1 else float("nan"))


@dataclass(frozen=True)
class Perplexity:
    """Result of `perplexity`.

    Attributes:
        n_chunks, n_scored: chunks of the text and predictions in them that count.
        nll: negative log-likelihood per token.
        perplexity: its exponential; the error to first order.
    """

    n_chunks: int
    n_scored: int
    nll: Estimate
    perplexity: Estimate


@dataclass(frozen=True)
class Divergence:
    """Result of `divergence`. KL is sum over tokens of p_ref (ln p_ref - ln p), per position.

    Attributes:
        n_chunks, n_scored: as in `Perplexity`.
        kl: mean; its quantiles and maximum are `median`, `p90`, `p99`, `maximum`.
        same_top: share of positions at which both find the same token the likeliest.
        rms_dp: root mean square of p(next token) - p_ref(next token), the next token being the text's.
        nll, nll_reference: negative log-likelihoods of the text.
    """

    n_chunks: int
    n_scored: int
    kl: Estimate
    median: float
    p90: float
    p99: float
    maximum: float
    same_top: Estimate
    rms_dp: float
    nll: Estimate
    nll_reference: Estimate


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Natural logarithms of the probabilities, float64 of the same shape, over the last axis."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def chunks_of(tokens: Sequence[int], n_ctx: int) -> list[Sequence[int]]:
    """Whole chunks of `n_ctx` tokens.

    Raises:
        ArgumentError: there is none, or `n_ctx` is below 2.
    """
    if n_ctx < 2:
        raise ArgumentError(f"chunks of {n_ctx} tokens, expected at least 2")
    n = len(tokens) // n_ctx
    if n == 0:
        raise ArgumentError(f"the text has {len(tokens)} tokens, less than one chunk of {n_ctx}")
    return [tokens[i * n_ctx : (i + 1) * n_ctx] for i in range(n)]


def open_for_scoring(path: str | os.PathLike[str], n_ctx: int, n_vocab: int, **options: Any) -> Llama:
    """A model that gives the logits of all rows of a step, of as many as memory should hold."""
    rows = min(_MOST_ROWS, n_ctx)
    n_outputs = max(1, min(_LOGITS // n_vocab, rows))
    return Llama(path, n_ctx=n_ctx, n_batch=rows, n_outputs=n_outputs, checkpoint_bytes=0, **options)


def perplexity(
    model: Llama, tokens: Sequence[int], n_ctx: int, *, all_positions: bool = False, on_chunk: OnChunk | None = None
) -> Perplexity:
    """Perplexity of a text: exp of the mean negative log-likelihood of its tokens given those before in their chunk.

    Raises:
        ArgumentError: the text is shorter than a chunk.
    """
    chunks = chunks_of(tokens, n_ctx)
    nll: list[np.ndarray] = []
    for number, chunk in enumerate(chunks, start=1):
        for next_tokens, logits in _scored(model, chunk, all_positions):
            nll.append(-_of_tokens(log_softmax(logits), next_tokens))
        if on_chunk is not None:
            on_chunk(number, len(chunks), float(np.concatenate(nll).mean()))
    values = np.concatenate(nll)
    mean = Estimate.of(values)
    return Perplexity(len(chunks), values.size, mean, Estimate(exp(mean.mean), exp(mean.mean) * mean.error))


def divergence(
    model: Llama,
    reference: Llama,
    tokens: Sequence[int],
    n_ctx: int,
    *,
    all_positions: bool = False,
    on_chunk: OnChunk | None = None,
) -> Divergence:
    """How far the predictions of `model` are from those of `reference` on a text.

    Raises:
        ArgumentError: the text is shorter than a chunk.
    """
    chunks = chunks_of(tokens, n_ctx)
    parts: dict[str, list[np.ndarray]] = {name: [] for name in ("kl", "same", "dp", "nll", "nll_reference")}
    for number, chunk in enumerate(chunks, start=1):
        both = zip(_scored(model, chunk, all_positions), _scored(reference, chunk, all_positions), strict=True)
        for (next_tokens, logits), (_, reference_logits) in both:
            log_q, log_p = log_softmax(logits), log_softmax(reference_logits)
            of_q, of_p = _of_tokens(log_q, next_tokens), _of_tokens(log_p, next_tokens)
            parts["kl"].append((np.exp(log_p) * (log_p - log_q)).sum(axis=1))
            parts["same"].append(log_p.argmax(axis=1) == log_q.argmax(axis=1))
            parts["dp"].append(np.exp(of_q) - np.exp(of_p))
            parts["nll"].append(-of_q)
            parts["nll_reference"].append(-of_p)
        if on_chunk is not None:
            on_chunk(number, len(chunks), float(np.concatenate(parts["kl"]).mean()))
    found = {name: np.concatenate(values).astype(np.float64) for name, values in parts.items()}
    median, p90, p99 = (float(q) for q in np.quantile(found["kl"], (0.5, 0.9, 0.99)))
    return Divergence(
        n_chunks=len(chunks),
        n_scored=found["kl"].size,
        kl=Estimate.of(found["kl"]),
        median=median,
        p90=p90,
        p99=p99,
        maximum=float(found["kl"].max()),
        same_top=Estimate.of(found["same"]),
        rms_dp=sqrt(float((found["dp"] ** 2).mean())),
        nll=Estimate.of(found["nll"]),
        nll_reference=Estimate.of(found["nll_reference"]),
    )


def check_same_vocabulary(model: str | os.PathLike[str], reference: str | os.PathLike[str]) -> int:
    """Raise unless two files have the same tokens, so that their predictions can be compared; their number.

    Raises:
        ArgumentError: names what differs.
        FormatError: a file is no GGUF file, or without a vocabulary.
    """
    fields = [_vocabulary(path) for path in (model, reference)]
    for key in _VOCABULARY:
        found, expected = (f.get(key) for f in fields)
        if np.array_equal(np.asarray(found), np.asarray(expected)):
            continue
        name = f"tokenizer.ggml.{key}"
        if not isinstance(found, list | np.ndarray) or not isinstance(expected, list | np.ndarray):
            raise ArgumentError(f"{name} is {found!r} in {model}, {expected!r} in {reference}")
        if len(found) != len(expected):
            raise ArgumentError(f"{name} has {len(found)} entries in {model}, {len(expected)} in {reference}")
        at = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
        raise ArgumentError(f"{name}[{at}] is {found[at]!r} in {model}, {expected[at]!r} in {reference}")
    return len(fields[0]["tokens"])


def vocabulary_size(path: str | os.PathLike[str]) -> int:
    """The number of tokens of a file.

    Raises:
        FormatError: it is no GGUF file, or without a vocabulary.
    """
    return len(_vocabulary(path)["tokens"])


def _vocabulary(path: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        with GGUFReader(os.fspath(path)) as reader:
            fields = reader.fields
    except GGUFError as error:
        raise FormatError(str(error)) from None
    found = {key: fields[f"tokenizer.ggml.{key}"] for key in _VOCABULARY if f"tokenizer.ggml.{key}" in fields}
    if not isinstance(found.get("tokens"), list):
        raise FormatError(f"{os.fspath(path)}: key tokenizer.ggml.tokens is missing")
    return found


def _scored(model: Llama, chunk: Sequence[int], all_positions: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The scored positions of a chunk a few at a time: the tokens that follow, and the logits `[n, n_vocab]` there."""
    first = 0 if all_positions else len(chunk) // 2
    rows, block = model.info["n_outputs"], max(1, _BLOCK // model.n_vocab)
    model.reset()
    if first:
        model.eval(chunk[:first], logits="none")
    for begin in range(first, len(chunk) - 1, rows):
        end = min(begin + rows, len(chunk) - 1)
        model.eval(chunk[begin:end], logits="all")
        for at in range(begin, end, block):
            stop = min(at + block, end)
            yield np.array(chunk[at + 1 : stop + 1]), np.stack([model.logits(n - begin) for n in range(at, stop)])


def _of_tokens(log_p: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return np.take_along_axis(log_p, tokens[:, None], axis=1)[:, 0]
