"""GGUF files: a bounds-checked reader, a planning and streaming writer, and what they share.

Builds on the PyPI package `gguf` and is named apart from it, so it never hides it.
"""

from .errors import GGUFError
from .reader import GGUFReader, TensorInfo
from .writer import Plan, PlannedTensor

__all__ = ["GGUFError", "GGUFReader", "Plan", "PlannedTensor", "TensorInfo"]
