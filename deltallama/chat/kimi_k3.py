"""The chat format of Kimi-K3: messages of tagged elements, `<|open|>tag key="value"<|sep|> … <|close|>tag<|sep|>`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ..checks import brief
from ..errors import ArgumentError, UnsupportedError
from .messages import (
    Channel,
    Message,
    ReplyParserBase,
    Segment,
    Vocabulary,
    call_function,
    check_messages,
    check_tools,
    compact_json,
    content_parts,
    is_image,
    read_json,
    spaced_json,
)

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"
Image = TypeVar("Image")
IMAGE_PAD = "<|media_pad|>"  # one for each image; its rows stand in place of it
_IMAGE = f"<|media_begin|>image {{}}x{{}}<|media_content|>{IMAGE_PAD}<|media_end|>"
_IMAGE_TOKENS = ("<|media_begin|>", "<|media_content|>", IMAGE_PAD, "<|media_end|>")
EFFORTS = ("low", "high", "max")  # the message also advertises "medium", which the model's own encoder refuses
DEFAULT_EFFORT = "max"
TOOL_CHOICES = ("auto", "required", "none")

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_NEW_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
    "```json\n{}\n```"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort={}`."
)
_TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_RESPONSE_FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


def image_prompt(width: int, height: int) -> str:
    """What stands for an image of so many pixels, before it was made to fit."""
    return _IMAGE.format(width, height)


def with_images(tokens: Sequence[int], images: Sequence[Image], vocabulary: Vocabulary) -> list[int | Image]:
    """The tokens of a prompt, with the images in place of those that stand for them.

    Raises:
        ArgumentError: there are not as many places as images.
        UnsupportedError: the vocabulary lacks a control token of images.
    """
    for name in _IMAGE_TOKENS:
        if name not in vocabulary.special_tokens:
            raise UnsupportedError(f"images need the control token {name}, which the file's vocabulary lacks")
    pad = vocabulary.special_tokens[IMAGE_PAD]
    n_places = sum(token == pad for token in tokens)
    if n_places != len(images):
        raise ArgumentError(f"the prompt has {n_places} places for {len(images)} images")
    left = iter(images)
    return [next(left) if token == pad else token for token in tokens]


class _Writer:
    """Collects segments."""

    def __init__(self, image_prompts: Sequence[str]) -> None:
        self.segments: list[Segment] = []
        self._images = list(image_prompts)

    def special(self, text: str) -> None:
        self.segments.append((text, True))

    def text(self, text: str) -> None:
        if text:
            self.segments.append((text, False))

    def open(self, tag: str, attributes: Sequence[tuple[str, str]] = ()) -> None:
        self.special(OPEN)
        self.text(tag)
        for key, value in attributes:
            self.text(f" {key}")
            self.text('="')
            self.text(value.replace("&", "&amp;").replace('"', "&quot;"))
            self.text('"')
        self.special(SEP)

    def close(self, tag: str) -> None:
        self.special(CLOSE)
        self.text(tag)
        self.special(SEP)

    def element(self, tag: str, text: str, attributes: Sequence[tuple[str, str]] = ()) -> None:
        self.open(tag, attributes)
        self.text(text)
        self.close(tag)

    def content(self, content: object) -> None:
        for part in content_parts(content):
            if not is_image(part):
                self.text(part["text"])
            elif self._images:
                self.special(self._images.pop(0))
            else:
                self.text(IMAGE_PLACEHOLDER)

    def message(self, role: str, attributes: Sequence[tuple[str, str]], content: object) -> None:
        self.open("message", [("role", role), *attributes])
        self.content(content)
        self.end_message()

    def end_message(self) -> None:
        self.close("message")
        self.special(END)

    def internal(self, kind: str, body: str) -> None:
        self.message("system", [("type", kind)], body.strip())


def segments(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    thinking_effort: str | None = DEFAULT_EFFORT,
    tool_choice: str | None = None,
    response_format: Mapping[str, Any] | None = None,
    response_schema: Mapping[str, Any] | None = None,
    image_prompts: Sequence[str] = (),
    add_generation_prompt: bool = True,
) -> list[Segment]:
    """The prompt of a conversation as segments `(text, is_special)`.

    Args:
        messages: OpenAI-style messages. Roles other than user, system, assistant and tool are dropped.
        tools: tool descriptions, passed on as given.
        thinking: whether replies have a think element; history without one gets an empty one.
        thinking_effort: "low", "high" or "max"; None leaves the message out. Without effect when not thinking.
        tool_choice: "auto", "required" or "none".
        response_format: `{"type": "json_object"}` or `{"type": "json_schema", "json_schema": {...}}`.
        response_schema: the schema, if not inside `response_format`.
        image_prompts: control text that stands for the images, in order of the image parts.
        add_generation_prompt: end with the opener of the reply.

    Raises:
        ArgumentError: a value that the format does not have; a message, call or result that cannot be written.
    """
    messages = check_messages(messages)
    check_tools(tools)
    if thinking_effort is not None and thinking_effort not in EFFORTS:
        raise ArgumentError(
            f"thinking_effort must be one of {', '.join(EFFORTS)} or None, got {brief(thinking_effort)}"
        )
    if tool_choice is not None and tool_choice not in TOOL_CHOICES:
        raise ArgumentError(f"tool_choice must be one of {', '.join(TOOL_CHOICES)} or None, got {brief(tool_choice)}")
    writer = _Writer(image_prompts)
    if tools:
        writer.internal("tool-declare", _TOOLS.format(compact_json(tools)))
    if thinking and thinking_effort is not None:
        writer.internal("thinking-effort", _EFFORT.format(thinking_effort))
    _write_messages(writer, messages, thinking)
    if tool_choice in _TOOL_CHOICE:
        writer.internal("tool-choice", _TOOL_CHOICE[tool_choice])
    _write_response_format(writer, response_format, response_schema)
    if add_generation_prompt:
        writer.open("message", [("role", "assistant")])
        writer.open("think" if thinking else "response")
    return writer.segments


def _write_messages(writer: _Writer, messages: Sequence[Message], thinking: bool) -> None:
    calls: Sequence[Any] = ()  # of the latest assistant message
    n_results = 0  # tool results since then
    at = 0
    while at < len(messages):
        message = messages[at]
        role = message["role"]
        name = [("name", str(message["name"]))] if message.get("name") else []
        if role == "tool":
            end = next((i for i in range(at, len(messages)) if messages[i]["role"] != "tool"), len(messages))
            for result, tool in _match_results(messages[at:end], calls, n_results):
                n_results += 1
                writer.message("tool", [("tool", tool), ("index", str(n_results))], result.get("content"))
            at = end
            continue
        if role == "system" and message.get("tools"):
            writer.internal("tool-declare", _NEW_TOOLS.format(compact_json(message["tools"])))
        elif role in ("user", "system"):
            writer.message(role, name, message.get("content"))
        elif role == "assistant":
            calls, n_results = message.get("tool_calls") or (), 0
            _write_assistant(writer, message, name, calls, thinking)
        at += 1


def _write_assistant(
    writer: _Writer, message: Message, name: Sequence[tuple[str, str]], calls: Sequence[Any], thinking: bool
) -> None:
    writer.open("message", [("role", "assistant"), *name])
    if thinking:
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        writer.element("think", reasoning if reasoning.strip() else "")
    writer.open("response")
    writer.content(message.get("content"))
    writer.close("response")
    if calls:
        writer.open("tools")
        for index, call in enumerate(calls, start=1):
            tool, arguments = call_function(call)
            writer.open("call", [("tool", tool), ("index", str(index))])
            _write_arguments(writer, tool, arguments)
            writer.close("call")
        writer.close("tools")
    writer.end_message()


def _write_arguments(writer: _Writer, tool: str, arguments: Any) -> None:
    if isinstance(arguments, str):
        if not arguments:
            return
        try:
            parsed = read_json(arguments)
        except ArgumentError:
            raise
        except ValueError:
            writer.element("json", arguments, [("type", "object")])
            return
        arguments = parsed
    if arguments is None:
        return
    if not isinstance(arguments, Mapping):
        raise ArgumentError(f"arguments of a call of {tool!r} must be an object, got {brief(arguments)}")
    for key, value in arguments.items():
        kind, text = _typed(value)
        writer.element("argument", text, [("key", str(key)), ("type", kind)])


def _typed(value: Any) -> tuple[str, str]:
    """Type name and text of a JSON value."""
    if isinstance(value, str):
        return "string", value
    if value is None:
        return "null", "null"
    if isinstance(value, bool):  # before numbers: bool is an int
        return "boolean", spaced_json(value)
    if isinstance(value, int | float):
        return "number", spaced_json(value)
    return ("object" if isinstance(value, Mapping) else "array"), spaced_json(value)


def _match_results(run: Sequence[Message], calls: Sequence[Any], position: int) -> list[tuple[Message, str]]:
    """A run of tool results with their tool names: in the order of the calls if every result names one by id.

    `position` is the number of results since the calls that came before this run.
    """
    order: dict[object, int] = {}
    for index, call in enumerate(calls):
        if isinstance(call, Mapping) and call.get("id") is not None:
            order.setdefault(call["id"], index)
    ids = [result.get("tool_call_id") or result.get("id") for result in run]
    if all(name in order for name in ids):
        indices = [order[name] for name in ids]
        matched = sorted(zip(indices, run, strict=True), key=lambda pair: pair[0])
        return [(result, call_function(calls[index])[0]) for index, result in matched]
    named = []
    for index, result in enumerate(run, start=position):
        tool = result.get("tool") or result.get("name")
        if not tool:
            if index >= len(calls):
                raise ArgumentError(
                    f"tool result {index + 1} names no tool, and the turn before it has {len(calls)} calls"
                )
            tool = call_function(calls[index])[0]
        named.append((result, str(tool)))
    return named


def _write_response_format(
    writer: _Writer, response_format: Mapping[str, Any] | None, schema: Mapping[str, Any] | None
) -> None:
    if not isinstance(response_format, Mapping | None):
        raise ArgumentError(f"response_format must be a dict, got {brief(response_format)}")
    kind = (response_format or {}).get("type", "text")
    if response_format is None or kind == "text":
        return
    if kind not in ("json_object", "json_schema"):
        raise ArgumentError(f"response_format type must be text, json_object or json_schema, got {brief(kind)}")
    body = _RESPONSE_FORMAT.format(kind)
    if kind == "json_schema":
        given = response_format.get("json_schema")
        if schema is None and isinstance(given, Mapping):
            schema = given.get("schema", given.get("json_schema", given))
        if schema is None:
            raise ArgumentError("response_format json_schema needs a schema")
        body += _SCHEMA.format(compact_json(schema))
    writer.internal("response-format", body)


_ATTRIBUTE = re.compile(r'\s(\S+?)="([^"]*)"')


def parse_tag(text: str) -> tuple[str, dict[str, str]]:
    """Name and attributes of the text between an opening marker and `<|sep|>`."""
    name = text.split(maxsplit=1)[0] if text.strip() else ""
    values = {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in _ATTRIBUTE.findall(text)}
    return name, values


class ReplyParser(ReplyParserBase):
    """A state machine over tokens: markers are single tokens, so text that merely mentions a tag is never one.

    The prompt has already opened `think` (thinking) or `response`, so that is where a reply starts; opening it again is
    accepted. Reasoning also ends where a response or tools begin. A closed response that was never opened, with
    reasoning
    never closed, means that the model skipped thinking: what came as reasoning was the answer.
    """

    def __init__(self, tokenizer: Vocabulary, thinking: bool = True) -> None:
        super().__init__(tokenizer, (OPEN, CLOSE, SEP))
        self._channel: Channel | None = "reasoning" if thinking else "content"
        self._marked = not thinking  # a channel was opened or closed: the text before is what it seemed to be
        self._tag: tuple[str, bytearray] | None = None  # marker and text of the tag being read
        self._reasoning = bytearray()
        self._call: dict[str, Any] | None = None
        self._argument: tuple[str, str, bytearray] | None = None  # key, type, text; an empty key is the whole object
        self._skipped = False

    @property
    def reasoning_was_content(self) -> bool:
        return self._skipped

    def push(self, token: int) -> list[tuple[Channel, bytes]]:
        marker = self._markers.get(token)
        if marker in (OPEN, CLOSE):
            self._tag = (marker, bytearray())
            return []
        if marker == SEP:
            if self._tag is None:
                return []
            (kind, text), self._tag = self._tag, None
            name, attributes = parse_tag(text.decode("utf-8", errors="replace"))
            return self._opened(name, attributes) if kind == OPEN else self._closed(name)
        piece = self._tokenizer.piece(token)
        if self._tag is not None:
            self._tag[1].extend(piece)
        elif self._argument is not None:
            self._argument[2].extend(piece)
        elif self._channel is not None and piece:
            if not self._marked:
                self._reasoning += piece
            return [(self._channel, piece)]
        return []

    def _opened(self, name: str, attributes: dict[str, str]) -> list[tuple[Channel, bytes]]:
        if name == "think":
            self._channel = "reasoning"
        elif name == "response":
            self._channel, self._marked = "content", True
        elif name == "tools":
            self._channel, self._marked = None, True
        elif name == "call":
            self._call = {"name": attributes.get("tool", ""), "arguments": {}}
        elif name == "argument":
            self._argument = (attributes.get("key", ""), attributes.get("type", "string"), bytearray())
        elif name == "json":
            self._argument = ("", "object", bytearray())
        return []

    def _closed(self, name: str) -> list[tuple[Channel, bytes]]:
        if name == "think":
            # A response may follow without its opener; then it is still the answer.
            self._channel, self._marked = "content", True
        elif name == "response":
            self._channel = None
            if not self._marked:
                self._marked = self._skipped = True
                return [("content", bytes(self._reasoning))]
        elif name in ("argument", "json") and self._argument is not None:
            (key, kind, value), self._argument = self._argument, None
            self._set_argument(key, kind, value.decode("utf-8", errors="replace"))
        elif name == "call" and self._call is not None:
            arguments = self._call["arguments"]
            self.tool_calls.append(
                (self._call["name"], arguments if isinstance(arguments, str) else spaced_json(arguments))
            )
            self._call = None
        elif name in ("tools", "message"):
            self._channel = None
        return []

    def _set_argument(self, key: str, kind: str, text: str) -> None:
        if self._call is None:
            return
        if not key:
            self._call["arguments"] = text
            return
        value: Any = text
        if kind != "string":
            try:
                value = read_json(text)
                compact_json([value])  # NaN, or nesting too deep to be written again: no JSON after all
            except ValueError:
                value = text  # better the model's text than nothing
        if isinstance(self._call["arguments"], dict):
            self._call["arguments"][key] = value
