"""Attention residuals of Kimi-K3: each sub-block reads a softmax mix of earlier residual streams.

Attention Residuals, arXiv 2603.15031, the block variant.
"""

from __future__ import annotations

import numpy as np


def mix(entries: np.ndarray, score: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """Mix m + 1 streams of T tokens: entries [m + 1, T, D], score [D] -> mixed [T, D] and weights [m + 1, T].

    An entry's score is its RMS-normalised vector times ``score``; what is mixed are the raw vectors. No scale and no
    temperature; tokens do not see each other.
    """
    normed = entries / np.sqrt(np.mean(entries * entries, axis=-1, keepdims=True) + eps)
    scores = normed @ score
    e = np.exp(scores - scores.max(axis=0))
    weights = e / e.sum(axis=0)
    return np.einsum("mt,mtd->td", weights, entries), weights
