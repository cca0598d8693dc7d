"""Convert Kimi-K3-nano to GGUF and ask it three questions it was not trained on.

    python models/demo.py build/kimi-k3-nano-q8_0.gguf [--convert-only] [--seed N]

The questions are drawn at random from the held-out set beside the weights; each answer is shown beside the right one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import conversion
from deltallama import DeltaError, Llama, Reply
from gguf_ext import console

NANO = Path(__file__).resolve().parent / "kimi-k3-nano"
N_QUESTIONS = 3
MAX_TOKENS = 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path, help="GGUF file to write")
    parser.add_argument("--convert-only", action="store_true", help="ask nothing")
    parser.add_argument("--seed", type=int, help="repeat a choice of questions")

    def command() -> int:
        options = parser.parse_args()
        convert(options.model)
        if not options.convert_only:
            ask(options.model, random.randrange(10**6) if options.seed is None else options.seed)
        return console.OK

    return console.run(command, (DeltaError, conversion.ConversionError), "demo: ")


def convert(model: Path) -> None:
    """Converts the shipped checkpoint, unless `model` is newer than all of it."""
    sources = list(NANO.iterdir())
    if model.is_file() and model.stat().st_mtime > max(source.stat().st_mtime for source in sources):
        print(f"{model} is up to date")
        return
    start = time.perf_counter()
    model.parent.mkdir(parents=True, exist_ok=True)
    conversion.convert(NANO, outfile=model, outtype="q8_0", force=True)
    before = sum(source.stat().st_size for source in sources if source.suffix == ".safetensors") / 2**20
    after = model.stat().st_size / 2**20
    print(f"{NANO.name}: {before:.1f} MiB of safetensors -> {model} ({after:.1f} MiB)", end="")
    print(f" in {time.perf_counter() - start:.1f} s")


def ask(model: Path, seed: int) -> None:
    """Asks the questions and prints answers, right answers and speed."""
    rows = [json.loads(line) for line in (NANO / "heldout.jsonl").read_text(encoding="utf-8").splitlines()]
    chosen = random.Random(seed).sample(rows, N_QUESTIONS)
    n_right = n_tokens = 0
    with Llama(model) as llm:
        for row in chosen:
            reply = llm.chat(
                row["messages"],
                tools=row.get("tools"),
                thinking=row["thinking"],
                temperature=0,
                max_tokens=MAX_TOKENS,
            )
            n_right += right(reply, row)
            n_tokens += reply.usage.total_tokens
            print()
            for message in row["messages"]:
                calls = [call_text(**call["function"]) for call in message.get("tool_calls", [])]
                show(message["role"], " ".join(filter(None, [message.get("content"), *calls])))
            if reply.reasoning:
                show("thought", reply.reasoning)
            show("answer", answer(reply))
            show("right", row["answer"] or call_text(**row["tool_call"]))
        seconds = llm.stats["compute_ns"] / 1e9
    print(f"\n{n_right} of {N_QUESTIONS} right; {n_tokens} tokens in {seconds:.1f} s. Ask more: make demo,")
    print(f'or {os.path.relpath(sys.executable)} -m deltallama run {model} "What is GGUF?"')


def right(reply: Reply, row: Mapping[str, Any]) -> bool:
    """Whether a reply has the expected content and the expected call."""
    calls = [(call["function"]["name"], arguments(call["function"]["arguments"])) for call in reply.tool_calls]
    call = row.get("tool_call")
    return reply.content == row["answer"] and calls == ([(call["name"], call["arguments"])] if call else [])


def arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def answer(reply: Reply) -> str:
    calls = [call_text(**call["function"]) for call in reply.tool_calls]
    return " ".join(filter(None, [reply.content, *calls])) or "(nothing)"


def call_text(name: str, arguments: Any) -> str:
    return f"[call {name} {arguments if isinstance(arguments, str) else json.dumps(arguments)}]"


def show(label: str, text: str) -> None:
    print(textwrap.fill(text, 100, initial_indent=f"{label:>9}: ", subsequent_indent=" " * 11))


if __name__ == "__main__":
    sys.exit(main())
