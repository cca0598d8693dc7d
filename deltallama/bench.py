"""How fast a model runs here, beside how fast this machine reads memory."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from .errors import ArgumentError
from .model import Llama

_READ_BYTES = 256 << 20  # well beyond the caches
_READ_TRIES = 5


def measure(llm: Llama, n_prompt: int, n_gen: int, repetitions: int) -> dict[str, Any]:
    """Times prompts of `n_prompt` random tokens and `n_gen` tokens after a prompt of one; the best run counts.

    Raises:
        ArgumentError: a count is out of range.
    """
    if n_prompt < 0 or n_gen < 0 or repetitions < 1 or n_prompt + n_gen == 0:
        raise ArgumentError(
            f"nothing to measure: {n_prompt} prompt tokens, {n_gen} generated, {repetitions} repetitions"
        )
    if max(n_prompt, n_gen + 1 if n_gen else 0) > llm.n_ctx:  # before the tokens are drawn
        raise ArgumentError(
            f"{n_prompt} prompt tokens or 1 + {n_gen} generated exceed the {llm.n_ctx} positions (n_ctx)"
        )
    rng = np.random.default_rng(0)
    prompt, generation = [], []
    for _ in range(repetitions):
        if n_prompt:
            tokens = [int(token) for token in rng.integers(llm.n_vocab, size=n_prompt)]
            llm.reset()
            start = time.perf_counter()
            llm.sync(tokens)
            prompt.append(n_prompt / (time.perf_counter() - start))
        if n_gen:
            llm.reset()
            llm.eval([int(rng.integers(llm.n_vocab))])
            start = time.perf_counter()
            for token in rng.integers(llm.n_vocab, size=n_gen):
                llm.eval([int(token)])
                llm.sample(temperature=0)
            generation.append(n_gen / (time.perf_counter() - start))
    bytes_per_token = llm.info["weight_bytes_active"]
    result: dict[str, Any] = {
        name: llm.info[name] for name in ("architecture", "n_threads", "n_batch", "n_ctx", "weight_bytes")
    }
    result["activations"] = ("exact", "fine", "fast")[llm.info["activations"]]
    result["bytes_per_token"] = bytes_per_token
    result["prompt"] = _speed(n_prompt, prompt)
    result["generation"] = _speed(n_gen, generation)
    if generation:
        result["generation"]["gigabytes_per_second"] = bytes_per_token * max(generation) / 1e9
    result["read_gigabytes_per_second"] = read_bandwidth(llm.info["n_threads"]) / 1e9
    return result


def read_bandwidth(n_threads: int) -> float:
    """Bytes per second that `n_threads` threads read from memory together: the best of several sums of an array."""
    data = np.ones(_READ_BYTES // 8, dtype=np.int64)
    parts = np.array_split(data, n_threads)
    best = float("inf")
    for _ in range(_READ_TRIES):
        threads = [threading.Thread(target=part.sum) for part in parts]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        best = min(best, time.perf_counter() - start)
    return data.nbytes / best


def _speed(n_tokens: int, rates: list[float]) -> dict[str, Any] | None:
    return {"n_tokens": n_tokens, "tokens_per_second": max(rates), "slowest": min(rates)} if rates else None
