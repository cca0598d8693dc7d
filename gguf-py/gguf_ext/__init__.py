"""GGUF files: a bounds-checked reader, a planning and streaming writer, and what they share.

Builds on the PyPI package `gguf` and is named apart from it, so it never hides it.
"""

from .errors import GGUFError
from .plan import Plan, PlannedTensor
from .reader import GGUFReader, TensorInfo
from .writer import write_file

__all__ = ["GGUFError", "GGUFReader", "Plan", "PlannedTensor", "TensorInfo", "write_file"]
