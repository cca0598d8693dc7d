"""Conversations to token ids and replies back to messages; one module per model family, chosen by the file's
architecture.

A format turns messages into *segments*, pieces of text marked as control tokens or not, and each segment into ids on
its own: nothing a user writes can become a control token, whatever it spells.
"""

from __future__ import annotations

from types import ModuleType

from ..errors import UnsupportedError
from . import kimi_k3, kimi_linear

FORMATS: dict[str, ModuleType] = {"kimi-k3": kimi_k3, "kimi-linear": kimi_linear}
"""Architecture of the file -> module with `segments(messages, **options)` and `ReplyParser(tokenizer, thinking)`."""


def get_format(architecture: str) -> ModuleType:
    """The chat format of an architecture.

    Raises:
        UnsupportedError: there is none; names those there are.
    """
    if architecture not in FORMATS:
        raise UnsupportedError(f"no chat format for architecture {architecture!r}; there are: {', '.join(FORMATS)}")
    return FORMATS[architecture]
