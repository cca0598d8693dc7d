"""The exceptions of this package."""

from __future__ import annotations


class GGUFError(ValueError):
    """A GGUF file, plan or value is wrong; the message names the thing, what was expected and what was found."""


class UnwritableError(GGUFError):
    """A tensor cannot be made as planned. Doing the same again would end the same."""
