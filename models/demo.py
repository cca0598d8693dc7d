"""Convert Kimi-K3-nano to GGUF, ask it three questions it was not trained on, and show it a picture.

    python models/demo.py build/kimi-k3-nano-q8_0.gguf [--convert-only] [--seed N]

Questions and picture are drawn at random from the held-out sets beside the weights; each answer is shown beside the
right one. The picture lies beside the model afterwards.
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

MODELS = Path(__file__).resolve().parent
sys.path.insert(0, str(MODELS / "train"))

import pictures  # noqa: E402

NANO = MODELS / "kimi-k3-nano"
N_QUESTIONS = 3
SEEN_KINDS = ("shape", "colour", "both")
MAX_TOKENS = 200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path, help="GGUF file to write")
    parser.add_argument("--convert-only", action="store_true", help="ask nothing")
    parser.add_argument("--seed", type=int, help="repeat a choice of questions")

    def command() -> int:
        options = parser.parse_args()
        tower = options.model.with_name(f"mmproj-{options.model.name}")
        convert(options.model, tower)
        if not options.convert_only:
            ask(options.model, tower, random.randrange(10**6) if options.seed is None else options.seed)
        return console.OK

    return console.run(command, (DeltaError, conversion.ConversionError), "demo: ")


def convert(model: Path, tower: Path) -> None:
    """Converts the shipped checkpoint and its vision part, unless both files are newer than all of it."""
    sources = list(NANO.iterdir())
    newest = max(source.stat().st_mtime for source in sources)
    if all(file.is_file() and file.stat().st_mtime > newest for file in (model, tower)):
        print(f"{model} and {tower} are up to date")
        return
    start = time.perf_counter()
    model.parent.mkdir(parents=True, exist_ok=True)
    conversion.convert(NANO, outfile=model, outtype="q8_0", force=True)
    conversion.convert(NANO, outfile=tower, outtype="q8_0", force=True, mmproj=True)
    before = sum(source.stat().st_size for source in sources if source.suffix == ".safetensors") / 2**20
    after = " and ".join(f"{file} ({file.stat().st_size / 2**20:.1f} MiB)" for file in (model, tower))
    print(f"{NANO.name}: {before:.1f} MiB of safetensors -> {after} in {time.perf_counter() - start:.1f} s")


def ask(model: Path, tower: Path, seed: int) -> None:
    """Asks the questions and prints answers, right answers and speed."""
    rows = [json.loads(line) for line in (NANO / "heldout.jsonl").read_text(encoding="utf-8").splitlines()]
    chosen = random.Random(seed).sample(rows, N_QUESTIONS)
    n_right = n_tokens = 0
    with Llama(model, mmproj=tower) as llm:
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
        describe(llm, model.parent, seed)
        seconds = llm.stats["compute_ns"] / 1e9
    print(f"\n{n_right} of {N_QUESTIONS} right; {n_tokens} tokens in {seconds:.1f} s. Ask more: make demo,")
    print(f'or {os.path.relpath(sys.executable)} -m deltallama run {model} "What is GGUF?"')


def describe(llm: Llama, folder: Path, seed: int) -> None:
    """Draws a held-out picture, asks what can be asked about it and prints answers beside the right ones."""
    rows = [json.loads(line) for line in (NANO / "heldout_vision.jsonl").read_text(encoding="utf-8").splitlines()]
    row = random.Random(seed).choice([row for row in rows if row["kind"] in SEEN_KINDS])
    scene = pictures.Scene.from_json(row["scene"])
    file = folder / f"kimi-k3-nano-picture.{'jpg' if scene.quality else 'png'}"
    file.write_bytes(pictures.encoded(scene))
    print()
    show("picture", f"{file}, {scene.width} x {scene.height} pixels")
    for kind in SEEN_KINDS:
        content = [
            {"type": "image", "image": file.read_bytes()},
            {"type": "text", "text": pictures.ASKS[kind]},
        ]
        reply = llm.chat([{"role": "user", "content": content}], thinking=False, temperature=0, max_tokens=MAX_TOKENS)
        show("user", pictures.ASKS[kind])
        show("answer", f"{answer(reply)}   (right: {scene.truth[kind]})")


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
