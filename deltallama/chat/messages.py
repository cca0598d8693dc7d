"""What chat formats share: reading messages in the OpenAI form, segments, the base of reply parsers."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from ..errors import ArgumentError, UnsupportedError

Message = Mapping[str, Any]
Segment = tuple[str, bool]
"""Text, and whether it spells control tokens."""
Channel = Literal["reasoning", "content"]


def check_messages(messages: object) -> Sequence[Message]:
    """The messages, if they have the right form.

    Raises:
        ArgumentError: not a list of mappings with a role, or content of a wrong type; names the message.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise ArgumentError(f"messages must be a list, got {type(messages).__name__}")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ArgumentError(f"message {number}: expected a dict with a role, got {message!r}")
        for _ in content_parts(message.get("content"), number):
            pass
    return messages


ROLES = ("user", "system", "assistant", "tool")


def check_complete(messages: Sequence[Message]) -> None:
    """Refuse what a chat format would leave out of the prompt, where an answer would then be to something else.

    Raises:
        ArgumentError: a role that the formats drop; names the message.
        UnsupportedError: an image.
    """
    for number, message in enumerate(check_messages(messages)):
        if message["role"] not in ROLES:
            raise ArgumentError(f"message {number}: role {message['role']!r}, expected one of {', '.join(ROLES)}")
        if any(is_image(part) for part in content_parts(message.get("content"), number)):
            raise UnsupportedError(f"message {number} has an image; images are not supported yet")


def content_parts(content: object, number: int = 0) -> Iterator[Mapping[str, Any]]:
    """The parts of a message's content: text as a text part, null as none.

    Raises:
        ArgumentError: neither text, null nor a list of parts.
    """
    if content is None:
        return
    if isinstance(content, str):
        yield {"type": "text", "text": content}
        return
    if not isinstance(content, Sequence):
        raise ArgumentError(
            f"message {number}: content must be text, null or a list of parts, got {type(content).__name__}"
        )
    for part in content:
        if not isinstance(part, Mapping):
            raise ArgumentError(f"message {number}: a content part must be a dict, got {part!r}")
        if not is_image(part) and not isinstance(part.get("text"), str):
            raise ArgumentError(f"message {number}: content part of type {part.get('type')!r} has no text")
        yield part


def is_image(part: Mapping[str, Any]) -> bool:
    return part.get("type") in ("image", "image_url")


def compact_json(value: object) -> str:
    """JSON as declarations and schemas are written: keys sorted by code point, no spaces, non-ASCII kept."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def spaced_json(value: object) -> str:
    """JSON as arguments are written: keys in given order, `, ` and `: `, non-ASCII kept."""
    return json.dumps(value, ensure_ascii=False)


def call_function(call: object) -> tuple[str, Any]:
    """Name and arguments of a tool call, `{"function": {...}}` or flat.

    Raises:
        ArgumentError: it has no name.
    """
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ArgumentError(f"a tool call needs a function name, got {call!r}")
    return function["name"], function.get("arguments")


class Vocabulary(Protocol):
    """What a reply parser needs of a tokenizer."""

    special_tokens: dict[str, int]

    def piece(self, token: int, special: bool = False) -> bytes: ...


class ReplyParserBase(ABC):
    """Splits the tokens of a reply into reasoning and content, one token at a time.

    Attributes:
        tool_calls: finished calls as `(name, arguments as JSON text)`.
    """

    def __init__(self, tokenizer: Vocabulary, markers: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        self._markers: dict[int, str] = {}
        for name in markers:
            if name not in tokenizer.special_tokens:
                raise UnsupportedError(
                    f"the chat format needs the control token {name}, which the file's vocabulary lacks"
                )
            self._markers[tokenizer.special_tokens[name]] = name
        self.tool_calls: list[tuple[str, str]] = []

    @abstractmethod
    def push(self, token: int) -> list[tuple[Channel, bytes]]:
        """What `token` adds to the channels."""

    @property
    def reasoning_was_content(self) -> bool:
        """Whether what came as reasoning turned out to be the answer (it was then sent again as content)."""
        return False
