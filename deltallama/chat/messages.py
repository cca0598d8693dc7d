"""What chat formats share: reading messages in the OpenAI form, segments, the base of reply parsers."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from ..checks import brief
from ..errors import ArgumentError, UnsupportedError

Message = Mapping[str, Any]
Segment = tuple[str, bool]
"""Text, and whether it spells control tokens."""
Channel = Literal["reasoning", "content"]


ROLES = ("user", "system", "assistant", "tool")
_TEXTS = ("name", "tool", "reasoning_content", "reasoning")
_IDS = ("id", "tool_call_id")


def check_messages(messages: object) -> Sequence[Message]:
    """The messages, if they have the right form.

    Raises:
        ArgumentError: not a list of mappings with a role, or a field of a wrong type; names the message.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes | bytearray):
        raise ArgumentError(f"messages must be a list, got {brief(messages)}")
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ArgumentError(f"message {number}: expected a dict with a role, got {brief(message)}")
        for _ in content_parts(message.get("content"), number):
            pass
        for field in _TEXTS:
            if not isinstance(message.get(field), str | None):
                raise ArgumentError(f"message {number}: {field} must be text, got {brief(message[field])}")
        _check_ids(number, message)
        calls = message.get("tool_calls")
        if not isinstance(calls, Sequence | None) or isinstance(calls, str | bytes):
            raise ArgumentError(f"message {number}: tool_calls must be a list, got {brief(calls)}")
        for call in calls or ():
            call_function(call)
            _check_ids(number, call)
        check_tools(message.get("tools"), f"message {number}: tools")
    return messages


def _check_ids(number: int, fields: Mapping[str, Any]) -> None:
    for field in _IDS:
        if not isinstance(fields.get(field), str | int | None):
            raise ArgumentError(f"message {number}: {field} must be text, got {brief(fields[field])}")


def check_tools(tools: object, what: str = "tools") -> None:
    """Raises ArgumentError unless `tools` is a list of descriptions, or None."""
    if tools is None:
        return
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes | bytearray):
        raise ArgumentError(f"{what} must be a list of descriptions, got {brief(tools)}")
    for number, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise ArgumentError(f"{what}: description {number} must be a dict, got {brief(tool)}")


def check_complete(messages: Sequence[Message]) -> None:
    """Refuse what a chat format would leave out of the prompt or guess, where an answer would be to something else.

    Raises:
        ArgumentError: no message, a role that the formats drop, the result of a call that was not made; names the
            message.
    """
    if not check_messages(messages):
        raise ArgumentError("messages is empty: there is nothing to answer")
    calls: Sequence[Mapping[str, Any]] = ()  # of the latest assistant message
    for number, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES:
            raise ArgumentError(f"message {number}: role {brief(role)}, expected one of {', '.join(ROLES)}")
        if role == "assistant":
            calls = message.get("tool_calls") or ()
        elif role == "tool":
            _check_result(number, message, calls)


def refuse_images(messages: Sequence[Message], why: str) -> None:
    """Raises UnsupportedError if one of these checked messages has an image."""
    for number, message in enumerate(messages):
        if any(is_image(part) for part in content_parts(message.get("content"), number)):
            raise UnsupportedError(f"message {number} has an image, {why}")


def _check_result(number: int, result: Message, calls: Sequence[Mapping[str, Any]]) -> None:
    """A format attributes a result with an unknown id to the call at its position: right only where calls lack ids."""
    wanted = result.get("tool_call_id") or result.get("id")
    known = [call.get("id") for call in calls]
    if wanted and wanted not in known and None not in known and not (result.get("tool") or result.get("name")):
        made = ", ".join(map(brief, known)) or "none"
        raise ArgumentError(
            f"message {number}: a tool result for call {brief(wanted)}, but the calls of the turn before it are: {made}"
        )


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
    if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray):
        raise ArgumentError(
            f"message {number}: content must be text, null or a list of parts, got {type(content).__name__}"
        )
    for part in content:
        if not isinstance(part, Mapping):
            raise ArgumentError(f"message {number}: a content part must be a dict, got {brief(part)}")
        if not is_image(part) and not isinstance(part.get("text"), str):
            raise ArgumentError(f"message {number}: content part of type {brief(part.get('type'))} has no text")
        yield part


def is_image(part: Mapping[str, Any]) -> bool:
    return part.get("type") in ("image", "image_url")


def compact_json(value: object) -> str:
    """JSON as declarations and schemas are written: keys sorted by code point, no spaces, non-ASCII kept."""
    return _json(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def spaced_json(value: object) -> str:
    """JSON as arguments are written: keys in given order, `, ` and `: `, non-ASCII kept."""
    return _json(value)


def _json(value: object, **options: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, **options)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"cannot be written as JSON: {brief(value)}: {error}") from None
    except RecursionError:
        raise ArgumentError(f"nested too deeply for JSON: {brief(value)}") from None


def read_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON.
        ArgumentError (a ValueError too): it is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ArgumentError(f"JSON text nested too deeply: {brief(text)}") from None


def call_function(call: object) -> tuple[str, Any]:
    """Name and arguments of a tool call, `{"function": {...}}` or flat.

    Raises:
        ArgumentError: it has no name.
    """
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ArgumentError(f"a tool call needs a function name, got {brief(call)}")
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
