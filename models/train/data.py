"""World pairs to token ids: the K3 chat format, and a compact form of it for the first phase of training.

The encoder here is written on its own from the format's description, so that the binding's chat encoder can be checked
against it. Text segments are encoded separately: a segment border is a token border.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tiktoken

import world
from world import Pair

EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort={}`."
)
DECLARE = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
WEIGHTS = {
    "fact": 0.24,
    "capital": 0.09,
    "colour": 0.06,
    "opposite": 0.10,
    "spell": 0.19,
    "next": 0.12,
    "copy": 0.15,
    "name": 0.07,
    "chat": 0.03,
}
TOOL_WEIGHTS = {"get_weather": 0.4, "set_light": 0.2, "set_timer": 0.2, "get_time": 0.2}  # one has two forms of call


@dataclass
class Sample:
    ids: list[int]
    learn: list[bool]  # whether the token is one the assistant writes


class Writer:
    """Collects segments; ``learn`` marks what the assistant writes."""

    def __init__(self, enc: tiktoken.Encoding) -> None:
        self.enc = enc
        self.ids: list[int] = []
        self.learn: list[bool] = []

    def special(self, name: str, learn: bool = False) -> None:
        self._add([self.enc.encode_single_token(name)], learn)

    def text(self, text: str, learn: bool = False) -> None:
        self._add(self.enc.encode_ordinary(text), learn)

    def _add(self, ids: list[int], learn: bool) -> None:
        self.ids += ids
        self.learn += [learn] * len(ids)

    def open(self, tag: str, learn: bool = False, **attributes: str) -> None:
        self.special("<|open|>", learn)
        self.text(tag, learn)
        for key, value in attributes.items():
            for piece in (f" {key}", '="', value.replace("&", "&amp;").replace('"', "&quot;"), '"'):
                self.text(piece, learn)
        self.special("<|sep|>", learn)

    def close(self, tag: str, learn: bool = False) -> None:
        self.special("<|close|>", learn)
        self.text(tag, learn)
        self.special("<|sep|>", learn)

    def end(self, learn: bool = False) -> None:
        self.close("message", learn)
        self.special("<|end_of_msg|>", learn)

    def system(self, kind: str, body: str) -> None:
        self.open("message", role="system", type=kind)
        self.text(body)
        self.end()

    def reply(self, thought: str | None, content: str, call: dict[str, Any] | None) -> None:
        """An assistant turn; its opener up to the first channel belongs to the prompt, the rest is learned."""
        self.open("message", role="assistant")
        if thought is None:
            self.open("response")
        else:
            self.open("think")
            self.text(thought, True)
            self.close("think", True)
            self.open("response", True)
        self.text(content, True)
        self.close("response", True)
        if call is not None:
            self.open("tools", True)
            self.open("call", True, tool=call["name"], index="1")
            for key, value in call["arguments"].items():
                kind = "string" if isinstance(value, str) else "boolean" if isinstance(value, bool) else "number"
                self.open("argument", True, key=key, type=kind)
                self.text(value if kind == "string" else json.dumps(value), True)
                self.close("argument", True)
            self.close("call", True)
            self.close("tools", True)
        self.end(True)


def prefix(enc: tiktoken.Encoding, tools: Sequence[dict[str, Any]], effort: str | None) -> list[int]:
    """What comes before the first user text; ``effort`` None means thinking off."""
    out = Writer(enc)
    if tools:
        declared = json.dumps(list(tools), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        out.system("tool-declare", DECLARE.format(declared))
    if effort is not None:
        out.system("thinking-effort", EFFORT.format(effort))
    out.open("message", role="user")
    return out.ids


def conversation(enc: tiktoken.Encoding, pair: Pair, thinking: bool) -> Sample:
    """The K3 form of a pair, without :func:`prefix`."""
    out = Writer(enc)
    called = ""
    final = world.said(pair.answer, pair.thought, pair.tool_call)
    for i, message in enumerate((*pair.messages, final)):
        if message["role"] == "assistant":
            call = message["tool_calls"][0]["function"] if "tool_calls" in message else None
            called = call["name"] if call else called
            out.reply(message["reasoning_content"] if thinking else None, message["content"], call)
            continue
        if message["role"] == "tool":
            out.open("message", role="tool", tool=called, index="1")
        elif i > 0:
            out.open("message", role="user")
        out.text(message["content"])
        out.end()
    return Sample(out.ids, out.learn)


def compact(enc: tiktoken.Encoding, pair: Pair, thinking: bool) -> Sample:
    """A single question and its answer with the markers around them but without roles."""
    out = Writer(enc)
    out.special("<|sep|>")
    out.text(pair.messages[-1]["content"])
    out.special("<|close|>")
    out.open("think" if thinking else "response")
    if thinking:
        out.text(pair.thought, True)
        out.special("<|close|>", True)
        out.open("response", True)
    out.text(pair.answer, True)
    out.special("<|close|>", True)
    return Sample(out.ids, out.learn)


class Sampler:
    """Draws micro-batches: (ids of the common prefix, samples)."""

    def __init__(self, enc: tiktoken.Encoding, pairs: Sequence[Pair], rng: random.Random) -> None:
        self.enc, self.rng = enc, rng
        self.by_kind: dict[str, list[Pair]] = {}
        for pair in pairs:
            self.by_kind.setdefault(pair.kind, []).append(pair)
        self.calls: dict[str, list[Pair]] = {}
        for pair in (*self.by_kind["tool"], *self.by_kind["tool"], *self.by_kind["result"]):  # two calls to one result
            self.calls.setdefault(pair.tools[0]["function"]["name"], []).append(pair)

    def _pair(self, single_turn: bool) -> Pair:
        kinds = [k for k in WEIGHTS if not (single_turn and k == "name")]
        kind = self.rng.choices(kinds, [WEIGHTS[k] for k in kinds])[0]
        return self.rng.choice(self.by_kind[kind])

    def _effort(self) -> str:
        return self.rng.choices(("max", "high", "low"), (0.8, 0.1, 0.1))[0]

    def compact_step(self, n: int) -> list[tuple[list[int], list[Sample]]]:
        samples = [compact(self.enc, self._pair(True), self.rng.random() < 0.6) for _ in range(n)]
        samples.sort(key=lambda s: len(s.ids))
        return [([], samples[: n // 2]), ([], samples[n // 2 :])]

    def chat_step(self, n: int) -> list[tuple[list[int], list[Sample]]]:
        """A third of the samples with thinking off, a quarter with a tool declared, the rest with thinking on."""
        n_tool = n // 4
        n_off = n // 3
        n_on = n - n_tool - n_off
        out = []
        for effort, count in ((self._effort(), n_on), (None, n_off)):
            pairs = [self._pair(False) for _ in range(count)]
            samples = [conversation(self.enc, pair, effort is not None) for pair in pairs]
            out.append((prefix(self.enc, (), effort), samples))
        effort_or_off = self._effort() if self.rng.random() < 0.6 else None
        name = self.rng.choices(*zip(*TOOL_WEIGHTS.items(), strict=True))[0]
        pairs = [self.rng.choice(self.calls[name]) for _ in range(n_tool)]
        declared = pairs[0].tools
        # One sample in eight asks something that the declared tool has nothing to do with.
        pairs = [self._pair(False) if self.rng.random() < 0.125 else pair for pair in pairs]
        samples = [conversation(self.enc, pair, effort_or_off is not None) for pair in pairs]
        out.append((prefix(self.enc, declared, effort_or_off), samples))
        return out
