"""The chat templates we write into files, rendered as transformers does: worked examples and random conversations."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from conversion.kimi_k3 import CHAT_TEMPLATE
from conversion.kimi_linear import KimiLinear


@lru_cache
def compiled(template: str) -> Any:
    """A template in an environment with the filters and functions that chat templates may count on."""

    def tojson(value: Any, ensure_ascii: bool = False, separators: Any = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, separators=separators, **options)

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    extensions = ["jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = fail
    return environment.from_string(template)


def k3(**variables: Any) -> str:
    return str(compiled(CHAT_TEMPLATE).render(**variables))


def user(text: str) -> str:
    return f'<|open|>message role="user"<|sep|>{text}<|close|>message<|sep|><|end_of_msg|>'


def system(kind: str, body: str) -> str:
    return f'<|open|>message role="system" type="{kind}"<|sep|>{body}<|close|>message<|sep|><|end_of_msg|>'


def effort(level: str) -> str:
    return system(
        "thinking-effort",
        "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
        "supported values include `low`, `medium`, `high`, and `max`.\n"
        f"Now the system is invoked with `thinking_effort={level}`.",
    )


THINK = '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
HI = [{"role": "user", "content": "Hi"}]


def test_e1_one_user_message() -> None:
    assert k3(messages=HI, add_generation_prompt=True) == effort("max") + user("Hi") + THINK


def test_e2_tools_parallel_calls_and_reordered_results() -> None:
    parameters = {
        "type": "object",
        "required": ["city"],
        "properties": {"days": {"type": "integer"}, "city": {"type": "string"}},
    }
    function = {"name": "get_weather", "description": "Current weather", "parameters": parameters}
    second = {"city": "Oslo", "opts": {"u": "C", "x": [1, 2]}, "flag": True, "none": None, "f": 1.5}
    calls = [
        {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}},
        {"id": "b", "type": "function", "function": {"name": "get_weather", "arguments": second}},
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Rome & Oslo?"},
        {"role": "assistant", "reasoning_content": "Two calls.", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": "-3 C"},
        {"role": "tool", "tool_call_id": "a", "content": "18 C"},
    ]

    def argument(key: str, kind: str, value: str) -> str:
        return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'

    def call(number: int, *arguments: str) -> str:
        opened = f'<|open|>call tool="get_weather" index="{number}"<|sep|>'
        return opened + "".join(arguments) + "<|close|>call<|sep|>"

    def result(number: int, text: str) -> str:
        opened = f'<|open|>message role="tool" tool="get_weather" index="{number}"<|sep|>'
        return f"{opened}{text}<|close|>message<|sep|><|end_of_msg|>"

    expected = [
        system(
            "tool-declare",
            "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n"
            '[{"function":{"description":"Current weather","name":"get_weather","parameters":{"properties":{"city":'
            '{"type":"string"},"days":{"type":"integer"}},"required":["city"],"type":"object"}},"type":"function"}]\n```',
        ),
        effort("low"),
        '<|open|>message role="system"<|sep|>Be brief.<|close|>message<|sep|><|end_of_msg|>',
        user("Weather in Rome & Oslo?"),
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>Two calls.<|close|>think<|sep|>',
        "<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>",
        call(1, argument("city", "string", "Rome"), argument("days", "number", "2")),
        call(
            2,
            argument("city", "string", "Oslo"),
            argument("opts", "object", '{"u": "C", "x": [1, 2]}'),
            argument("flag", "boolean", "true"),
            argument("none", "null", "null"),
            argument("f", "number", "1.5"),
        ),
        "<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>",
        result(1, "18 C"),
        result(2, "-3 C"),
        THINK,
    ]
    tools = [{"type": "function", "function": function}]
    found = k3(messages=messages, tools=tools, thinking_effort="low", add_generation_prompt=True)
    assert found == "".join(expected)


def test_e3_thinking_off() -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello", "reasoning_content": "dropped"},
        {"role": "user", "content": "Bye"},
    ]
    answer = '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'
    closed = "Hello<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    found = k3(messages=messages, thinking=False, add_generation_prompt=True)
    assert found == user("Hi") + answer + closed + user("Bye") + answer


def test_e4_image_then_text() -> None:
    content = [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "What is this?"}]
    image = "<|media_begin|>image 640x480<|media_content|><|media_pad|><|media_end|>"
    options = {"messages": [{"role": "user", "content": content}], "thinking": False}
    assert k3(**options, image_prompts=[image]) == user(image + "What is this?")
    assert k3(**options) == user("<|kimi_image_placeholder|>What is this?")


def test_e5_names_late_tools_no_effort_unknown_role() -> None:
    messages = [
        {"role": "user", "name": 'An"n&', "content": "Hi"},
        {"role": "developer", "content": "dropped"},
        {"role": "system", "content": "ignored", "tools": [{"z": 1, "a": {"n": 2, "m": 3}}]},
        {"role": "assistant", "content": "x"},
    ]
    expected = [
        '<|open|>message role="user" name="An&quot;n&amp;"<|sep|>Hi<|close|>message<|sep|><|end_of_msg|>',
        system(
            "tool-declare",
            "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
            "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
            '```json\n[{"a":{"m":3,"n":2},"z":1}]\n```',
        ),
        THINK,
        "<|close|>think<|sep|><|open|>response<|sep|>x<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>",
    ]
    assert k3(messages=messages, thinking_effort=None) == "".join(expected)


def test_e6_unparsable_arguments_and_a_nameless_result() -> None:
    call = {"function": {"name": "f", "arguments": "not json"}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "r"}]
    expected = (
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>json type="object"<|sep|>not json'
        "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>"
        '<|open|>message role="tool" tool="f" index="1"<|sep|>r<|close|>message<|sep|><|end_of_msg|>'
    )
    assert k3(messages=messages).endswith(expected)


def test_e7_tool_choice_and_schema() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "number"}}}
    choice = system(
        "tool-choice", "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message."
    )
    response_format = system(
        "response-format",
        "The system is invoked with `response_format=json_schema`.\nYour response must be raw JSON data without "
        "markdown code blocks (```json) or any additional formatting.\nThe JSON data must match the following schema:\n"
        '```json\n{"properties":{"a":{"type":"number"},"b":{"type":"string"}},"type":"object"}\n```',
    )
    found = k3(
        messages=HI,
        tool_choice="required",
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        add_generation_prompt=True,
    )
    assert found.endswith(user("Hi") + choice + response_format + THINK)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"messages": HI, "thinking_effort": "medium"}, "thinking_effort is medium"),
        ({"messages": [{"role": "tool", "content": "r"}]}, "a tool message has no tool name"),
    ],
)
def test_k3_refuses(variables: dict[str, Any], message: str) -> None:
    with pytest.raises(jinja2.TemplateError, match=message):
        k3(**variables)


def test_random_conversations_render_as_the_encoder(golden: Path) -> None:
    """All conversations of an encoder port; it parses arguments given as JSON text, callers of a template do that."""
    lines = (golden / "chat.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 60
    for line in lines:
        case = json.loads(line)
        for message in case["messages"]:
            for call in message.get("tool_calls") or []:
                function = call.get("function", call)
                if isinstance(function.get("arguments"), str):
                    function["arguments"] = parsed(function["arguments"])
        expected = "".join(text for text, _ in case["segments"])
        assert k3(messages=case["messages"], **case["kwargs"]) == expected, case["name"]


def parsed(text: str) -> Any:
    try:
        return json.loads(text) if text else {}
    except ValueError:
        return text


def test_kimi_linear_conversation() -> None:
    call = {"id": "functions.f:0", "function": {"name": "f", "arguments": {"a": 1}}}
    plain = {"function": {"name": "g", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "name": "Ann", "content": [{"type": "text", "text": "U"}]},
        {"role": "assistant", "content": "A", "tool_calls": [call, plain]},
        {"role": "tool", "name": "f", "tool_call_id": "functions.f:0", "content": "R"},
        {"role": "assistant", "content": None},
    ]
    assert KimiLinear.chat_template is not None
    template = compiled(KimiLinear.chat_template)
    found = template.render(messages=messages, tools=[{"type": "function"}], add_generation_prompt=True)
    assert found == (
        '<|im_system|>tool_declare<|im_middle|>[{"type":"function"}]<|im_end|>'
        "<|im_system|>system<|im_middle|>S<|im_end|><|im_user|>Ann<|im_middle|>U<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>A<|tool_calls_section_begin|>"
        '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
        "<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
        "<|im_end|><|im_system|>f<|im_middle|>## Return of functions.f:0\nR<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><|im_end|><|im_assistant|>assistant<|im_middle|>"
    )
