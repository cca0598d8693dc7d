"""Hugging Face checkpoints of Kimi models to GGUF files.

`convert` does it, `cli_main` is its command line. A model is one module here with a class under `@register`; naming the
module in this file adds it.
"""

from . import kimi_k3, kimi_linear, moonvit
from .base import get_converter, supported_architectures
from .cli import cli_main
from .errors import ConversionError
from .run import convert

__all__ = [
    "ConversionError",
    "cli_main",
    "convert",
    "get_converter",
    "kimi_k3",
    "kimi_linear",
    "moonvit",
    "supported_architectures",
]
