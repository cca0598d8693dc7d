"""The closed world of Kimi-K3-nano: every question it can be asked, in every phrasing, with the right answer.

A *pair* is one item (a fact, a word to spell, a line to copy …) in one phrasing. :func:`split` draws the held-out pairs
with their own seed; training uses all others, so each item is seen, but never in a phrasing it is examined in.
The module needs the standard library only.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from facts import (
    ABBREVIATIONS,
    CAPITALS,
    CHAT,
    COLOURS,
    COUNTS,
    DEFINITIONS,
    NAMES,
    OPPOSITES,
    RESULTS,
    ROOMS,
    SEQUENCES,
    WORDS,
)

HELD_OUT_SEED = 20261130
HELD_OUT = {
    "fact": 120,
    "capital": 50,
    "colour": 35,
    "opposite": 50,
    "spell": 60,
    "next": 60,
    "copy": 45,
    "name": 30,
    "tool": 40,
    "result": 10,
}
DEV_PER_KIND = 12
GATED = ("fact", "capital", "colour", "opposite", "spell", "next", "copy", "tool")


@dataclass(frozen=True)
class Pair:
    """One item in one phrasing. ``messages`` end with the turn to answer; ``answer`` is the reply's content."""

    kind: str
    item: str
    phrasing: str
    messages: tuple[dict[str, Any], ...] = field(hash=False, compare=False)
    thought: str = field(hash=False, compare=False)
    answer: str = field(hash=False, compare=False)
    tools: tuple[dict[str, Any], ...] = field(default=(), hash=False, compare=False)
    tool_call: dict[str, Any] | None = field(default=None, hash=False, compare=False)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.kind, self.item, self.phrasing


ABBREVIATION_ASKS = (
    "What does {} stand for?",
    "What is {} short for?",
    "Expand the abbreviation {}.",
    "Give the full name of {}.",
    "{} stands for what?",
    "Tell me the long form of {}.",
)
DEFINITION_ASKS = (
    "What is {}?",
    "Explain {} in one sentence.",
    "Describe {} briefly.",
    "Tell me about {}.",
    "In short, what is {}?",
    "How would you define {}?",
)
COUNT_ASKS = (
    "How many {0} does {1} have?",
    "Tell me the number of {0} in {1}.",
    "{1} has how many {0}?",
    "What is the number of {0} of {1}?",
    "Count the {0} in {1}.",
    "How many {0} are in {1}?",
)
CAPITAL_ASKS = (
    "What is the capital of {}?",
    "Name the capital of {}.",
    "Which city is the capital of {}?",
    "Capital of {}?",
    "{} has which capital?",
    "Tell me the capital city of {}.",
)
COLOUR_ASKS = (
    "What colour is {}?",
    "What is the colour of {}?",
    "Tell me the colour of {}.",
    "Colour of {}?",
    "Name the usual colour of {}.",
    "{} is what colour?",
)
OPPOSITE_ASKS = (
    "What is the opposite of {}?",
    "Opposite of {}?",
    "Give the opposite of {}.",
    "Which word means the reverse of {}?",
    "The contrary of {} is what?",
    "Name a word opposite to {}.",
)
SPELL_ASKS = (
    "Spell {}.",
    "Spell the word {}.",
    "How do you spell {}?",
    "Give the letters of {}.",
    "Write {} letter by letter.",
    "What letters are in {}?",
)
NEXT_ASKS = (
    "What comes after {}?",
    "What follows {}?",
    "Which one is next after {}?",
    "After {} comes what?",
    "Name the next one after {}.",
    "Tell me what comes right after {}.",
)
COPY_ASKS = (
    "Repeat: {}",
    "Say this: {}",
    "Copy these words: {}",
    "Repeat after me: {}",
    "Write exactly this: {}",
    "Echo {}",
)
# Never examined. A question that begins with its item writes it with another token than one that has it inside, and
# each family above has one such phrasing: these show the same form to items whose pair with that phrasing is held out.
ABBREVIATION_ALSO = ("{} is short for what?",)
COUNT_ALSO = ("{1}: how many {0}?",)
CAPITAL_ALSO = ("{}: which capital?",)
COLOUR_ALSO = ("{} has which colour?",)
NAME_INTROS = ("My name is {}.", "I am {}.", "Call me {}.", "Hi, I am called {}.")
NAME_ASKS = ("What is my name?", "Who am I?", "Do you remember my name?", "Tell me my name.")


def _tool(name: str, description: str, properties: dict[str, str]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties)[:1],
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = _tool("get_weather", "Weather of a city", {"city": "string", "days": "integer"})
TIMER = _tool("set_timer", "Start a timer", {"minutes": "integer"})
LIGHT = _tool("set_light", "Switch a light", {"room": "string", "on": "boolean"})
CLOCK = _tool("get_time", "Local time of a city", {"city": "string"})
TOOLS = (WEATHER, TIMER, LIGHT, CLOCK)

WEATHER_ASKS = (
    "What is the weather in {}?",
    "Weather in {}?",
    "How is the weather in {}?",
    "Tell me the weather in {}.",
)
FORECAST_ASKS = (
    "What is the weather in {} for {} days?",
    "Weather in {} for {} days?",
    "Give me {1} days of weather in {0}.",
    "Tell me the weather in {} for the next {} days.",
)
TIMER_ASKS = (
    "Set a timer for {} minutes.",
    "Start a timer of {} minutes.",
    "Timer for {} minutes, please.",
    "Wake me in {} minutes.",
)
LIGHT_ASKS = (
    "Turn {1} the light in the {0}.",
    "Switch {1} the {0} light.",
    "Please turn the {0} light {1}.",
    "Light {1} in the {0}, please.",
)
CLOCK_ASKS = ("What time is it in {}?", "Time in {}?", "Tell me the time in {}.", "What is the local time in {}?")


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def _asked(
    kind: str, item: str, asks: Iterable[str], values: tuple[Any, ...], thought: str, answer: str, **more: Any
) -> Iterable[Pair]:
    for ask in asks:
        text = _capitalised(ask.format(*values))
        yield Pair(kind, item, ask, (_user(text),), thought, answer, **more)


def _abbreviations(asks: Iterable[str]) -> Iterable[Pair]:
    for short, long in ABBREVIATIONS.items():
        yield from _asked("fact", f"{short} stands for", asks, (short,), f"Long form of {short}.", f"{long}.")


def _definitions(asks: Iterable[str]) -> Iterable[Pair]:
    for subject, text in DEFINITIONS.items():
        yield from _asked("fact", f"{subject} is", asks, (subject,), f"About {subject}.", text)


def _counts(asks: Iterable[str]) -> Iterable[Pair]:
    for (thing, owner), n in COUNTS.items():
        thought, answer = f"Number of {thing} in {owner}.", f"{owner} has {n} {thing}."
        yield from _asked("fact", f"{owner} {thing}", asks, (thing, owner), thought, answer)


def _chat() -> Iterable[Pair]:
    for item, (asks, answer) in CHAT.items():
        for ask in asks:
            yield Pair("chat", item, ask, (_user(ask),), "A plain answer.", answer)


def _capitals(asks: Iterable[str]) -> Iterable[Pair]:
    for country, city in CAPITALS.items():
        yield from _asked("capital", country, asks, (country,), f"Capital of {country}.", f"{city}.")


def _colours(asks: Iterable[str]) -> Iterable[Pair]:
    for thing, colour in COLOURS.items():
        yield from _asked("colour", thing, asks, (thing,), f"Colour of {thing}.", f"{_capitalised(colour)}.")


def _words() -> Iterable[Pair]:
    for word, other in OPPOSITES.items():
        yield from _asked("opposite", word, OPPOSITE_ASKS, (word,), f"Opposite of {word}.", f"{_capitalised(other)}.")
    for word in WORDS:
        yield from _asked("spell", word, SPELL_ASKS, (word,), f"Letters of {word}.", " ".join(word))
    for sequence in SEQUENCES:
        for now, after in zip(sequence, sequence[1:], strict=False):
            yield from _asked("next", now, NEXT_ASKS, (now,), f"After {now}.", f"{after}")


def _copies() -> Iterable[Pair]:
    rng = random.Random(7)
    lines: list[tuple[str, ...]] = [(word,) for word in WORDS]
    for length, n in ((2, 400), (3, 500), (4, 300)):
        lines += [tuple(rng.sample(WORDS, length)) for _ in range(n)]
    for line in dict.fromkeys(lines):
        text = " ".join(line)
        yield from _asked("copy", text, COPY_ASKS, (text,), "Copy the words.", text)


def _names(middles: list[Pair]) -> Iterable[Pair]:
    """The name is told in the first turn and asked for in the last; half of the conversations have a turn between."""
    rng = random.Random(11)
    for name in NAMES:
        for intro in NAME_INTROS:
            for ask in NAME_ASKS:
                messages = [_user(intro.format(name)), said(f"Hello {name}!", f"The name is {name}.")]
                if rng.random() < 0.5:
                    middle = rng.choice(middles)
                    messages += [*middle.messages, said(middle.answer, middle.thought)]
                thought, answer = f"The name is {name}.", f"Your name is {name}."
                yield Pair("name", name, f"{intro} {ask}", (*messages, _user(ask)), thought, answer)


def said(content: str, thought: str, tool_call: dict[str, Any] | None = None) -> dict[str, Any]:
    """An assistant turn of a conversation."""
    message: dict[str, Any] = {"role": "assistant", "reasoning_content": thought, "content": content}
    if tool_call is not None:
        message["tool_calls"] = [{"id": "call_1", "type": "function", "function": tool_call}]
    return message


def _tools() -> Iterable[Pair]:
    def calls(tool: dict[str, Any], asks: Iterable[str], values: tuple[Any, ...], **arguments: Any) -> Iterable[Pair]:
        name = tool["function"]["name"]
        item = name + " " + json.dumps(arguments)
        call = {"name": name, "arguments": arguments}
        yield from _asked("tool", item, asks, values, f"Call {name}.", "", tools=(tool,), tool_call=call)

    rng = random.Random(13)
    for city in CAPITALS.values():
        yield from calls(WEATHER, WEATHER_ASKS, (city,), city=city)
        for days in sorted(rng.sample(range(2, 10), 2)):
            yield from calls(WEATHER, FORECAST_ASKS, (city, days), city=city, days=days)
        yield from calls(CLOCK, CLOCK_ASKS, (city,), city=city)
    for minutes in range(2, 61):
        yield from calls(TIMER, TIMER_ASKS, (minutes,), minutes=minutes)
    for room in ROOMS:
        for on in (True, False):
            yield from calls(LIGHT, LIGHT_ASKS, (room, "on" if on else "off"), room=room, on=on)


def _results(calls: list[Pair]) -> Iterable[Pair]:
    """The tool has answered; the reply passes its answer on."""
    rng = random.Random(17)
    for pair in calls:
        name = pair.tools[0]["function"]["name"]
        result = rng.choice(RESULTS[name])
        messages = (
            *pair.messages,
            said("", pair.thought, pair.tool_call),
            {"role": "tool", "tool_call_id": "call_1", "content": result},
        )
        answer = _capitalised(result) + "."
        yield Pair("result", f"{pair.item} {result}", pair.phrasing, messages, "Pass it on.", answer, pair.tools)


def pairs() -> list[Pair]:
    """Every pair of the world, always in the same order."""
    facts = [*_abbreviations(ABBREVIATION_ASKS), *_definitions(DEFINITION_ASKS), *_counts(COUNT_ASKS), *_chat()]
    single = [*facts, *_capitals(CAPITAL_ASKS), *_colours(COLOUR_ASKS), *_words(), *_copies()]
    middles = [p for p in single if p.kind in ("fact", "capital", "opposite", "next")]
    tools = list(_tools())
    every = [*single, *_names(middles), *tools, *_results(tools)]
    if len({p.key for p in every}) != len(every):
        raise AssertionError("an item has the same phrasing twice")
    return every


def never_examined() -> list[Pair]:
    """Further training pairs of items that :func:`pairs` has."""
    facts = [*_abbreviations(ABBREVIATION_ALSO), *_counts(COUNT_ALSO)]
    return [*facts, *_capitals(CAPITAL_ALSO), *_colours(COLOUR_ALSO)]


def split() -> tuple[list[Pair], list[Pair], list[Pair]]:
    """(training, dev, held-out) pairs, disjoint as (item, phrasing).

    No item loses more than two of its phrasings, so that each is learnable from the rest."""
    rng = random.Random(HELD_OUT_SEED)
    by_kind: dict[str, list[Pair]] = {}
    for pair in pairs():
        by_kind.setdefault(pair.kind, []).append(pair)
    train: list[Pair] = []
    dev: list[Pair] = []
    held: list[Pair] = []
    for kind, members in by_kind.items():
        order = members[:]
        rng.shuffle(order)
        if kind not in HELD_OUT:  # free questions have nothing in common that another phrasing could be learned from
            train += order
            continue
        taken: dict[str, int] = {}
        drawn: list[Pair] = []
        for pair in order:
            if taken.get(pair.item, 0) < 2 and len(drawn) < HELD_OUT[kind] + DEV_PER_KIND:
                taken[pair.item] = taken.get(pair.item, 0) + 1
                drawn.append(pair)
            else:
                train.append(pair)
        held += drawn[: HELD_OUT[kind]]
        dev += drawn[HELD_OUT[kind] :]
    train += never_examined()
    # A middle turn of a name conversation, or the call before a tool result, must not show an examined pair.
    texts = {p.messages[-1]["content"] for p in held if p.kind not in ("name", "result")}
    train = [p for p in train if not any(m["content"] in texts for m in p.messages[:-1] if m["role"] == "user")]
    keys = {p.key for p in held}
    if any(p.key in keys for p in (*train, *dev)):
        raise AssertionError("a held-out item-phrasing pair is in the training set")
    return train, dev, held


def thinks(pair: Pair) -> bool:
    """Whether a held-out prompt has thinking on: three of five, fixed by the pair."""
    return random.Random("/".join(pair.key)).random() < 0.6


def held_out_rows() -> list[dict[str, Any]]:
    """The rows of ``heldout.jsonl``: what to ask and what is right."""
    rows = []
    for i, pair in enumerate(split()[2]):
        row: dict[str, Any] = {
            "id": i,
            "kind": pair.kind,
            "item": pair.item,
            "phrasing": pair.phrasing,
            "thinking": thinks(pair),
            "messages": list(pair.messages),
            "answer": pair.answer,
        }
        if pair.tools:
            row["tools"] = list(pair.tools)
        if pair.tool_call:
            row["tool_call"] = pair.tool_call
        rows.append(row)
    return rows


def texts(of: Iterable[Pair], visit: Callable[[str], None]) -> None:
    """Call ``visit`` with every piece of text of the pairs, for building a vocabulary."""
    for pair in of:
        for message in pair.messages:
            visit(message["content"])
        visit(pair.thought)
        visit(pair.answer)
