"""The chat format of Kimi-Linear (that of the Kimi-K2 family): `<|im_user|>user<|im_middle|>TEXT<|im_end|>`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import UnsupportedError
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
    spaced_json,
)

SYSTEM, USER, ASSISTANT, MIDDLE, END = "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"
CALLS, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
_MARKERS = {"user": USER, "assistant": ASSISTANT}


def segments(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **unused: object,
) -> list[Segment]:
    """The prompt of a conversation as segments `(text, is_special)`.

    No default system turn is inserted. The model has no reasoning channel: `thinking` and `thinking_effort` change
    nothing, reasoning in the history is dropped.

    Raises:
        ArgumentError: a message or call that cannot be written.
        UnsupportedError: an image, or an option that this format does not have.
    """
    for option, value in unused.items():
        if option not in ("thinking", "thinking_effort") and value:
            raise UnsupportedError(f"the chat format of kimi-linear has no {option}")
    messages = check_messages(messages)
    check_tools(tools)
    result: list[Segment] = []
    if tools:
        result += [(SYSTEM, True), ("tool_declare", False), (MIDDLE, True), (compact_json(tools), False), (END, True)]
    ids: dict[str, str] = {}  # id of a call -> functions.NAME:N
    n_calls = 0
    for number, message in enumerate(messages):
        role = message["role"]
        if role not in ("system", "user", "assistant", "tool"):
            continue
        result += [(_MARKERS.get(role, SYSTEM), True), (str(message.get("name") or role), False), (MIDDLE, True)]
        if role == "tool":
            call = str(message.get("tool_call_id") or message.get("id") or "")
            result.append((f"## Return of {ids.get(call, call)}\n", False))
        for part in content_parts(message.get("content"), number):
            if is_image(part):
                raise UnsupportedError(f"message {number}: kimi-linear reads no images")
            result.append((part["text"], False))
        calls = message.get("tool_calls") or () if role == "assistant" else ()
        if calls:
            result.append((CALLS, True))
            for call in calls:
                name, arguments = call_function(call)
                label = f"functions.{name}:{n_calls}"
                n_calls += 1
                if call.get("id") is not None:
                    ids.setdefault(call["id"], label)
                text = arguments if isinstance(arguments, str) else spaced_json(arguments or {})
                result += [(CALL, True), (label, False), (ARGUMENTS, True), (text, False), (CALL_END, True)]
            result.append((CALLS_END, True))
        result.append((END, True))
    if add_generation_prompt:
        result += [(ASSISTANT, True), ("assistant", False), (MIDDLE, True)]
    return _merge(result)


def _merge(pieces: Sequence[Segment]) -> list[Segment]:
    """Joins ordinary text between control tokens: here, unlike in Kimi-K3, parts of one text are no token borders."""
    merged: list[Segment] = []
    for text, special in pieces:
        if not special and merged and not merged[-1][1]:
            merged[-1] = (merged[-1][0] + text, False)
        elif text:
            merged.append((text, special))
    return merged


class ReplyParser(ReplyParserBase):
    """Content until a section of tool calls; each call is a label `functions.NAME:N` and JSON text."""

    def __init__(self, tokenizer: Vocabulary, thinking: bool = False) -> None:
        # A vocabulary without the tool tokens is one of a model that calls no tools.
        present = [name for name in (CALLS, CALLS_END, CALL, ARGUMENTS, CALL_END) if name in tokenizer.special_tokens]
        super().__init__(tokenizer, present)
        self._in_calls = False
        self._label = bytearray()
        self._text: bytearray | None = None

    def push(self, token: int) -> list[tuple[Channel, bytes]]:
        marker = self._markers.get(token)
        if marker in (CALLS, CALLS_END):
            self._in_calls = marker == CALLS
        elif marker == CALL:
            self._label, self._text = bytearray(), None
        elif marker == ARGUMENTS:
            self._text = bytearray()
        elif marker == CALL_END:
            if self._text is not None:
                name = self._label.decode("utf-8", errors="replace").strip().removeprefix("functions.").rpartition(":")
                self.tool_calls.append((name[0] or name[2], self._text.decode("utf-8", errors="replace")))
            self._text = None
        else:
            piece = self._tokenizer.piece(token)
            if not self._in_calls:
                return [("content", piece)] if piece else []
            (self._label if self._text is None else self._text).extend(piece)
        return []
