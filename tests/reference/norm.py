"""Norms and the scalar functions shared by all layers."""

from __future__ import annotations

import numpy as np


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), without overflow for any x."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def softplus(x: np.ndarray) -> np.ndarray:
    """ln(1 + exp(x)), without overflow for any x."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def l2_norm(x: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """x / sqrt(sum(x^2) + eps) over the last axis; eps is added to the sum of squares, not to the mean."""
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + eps)
