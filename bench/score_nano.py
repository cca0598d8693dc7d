"""Score Kimi-K3-nano on its 500 held-out prompts: greedy replies of the numpy reference or of a converted file.

    score_nano.py reference [--first 20] [--out replies.json]
    score_nano.py engine MODEL.gguf [--out replies.json]
    score_nano.py compare A.json B.json

A reply is right when what the user sees equals the expected text to the last character: the content and, for tool
prompts, the whole call. The thought before it is not judged. `compare` lists prompts with different greedy tokens and
how close the two best logits of the first file's run were there, if it recorded that (the reference does).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

for _variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_variable, "2")

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "gguf-py"), str(ROOT / "tests"), str(ROOT / "models" / "train")]

import bpe  # noqa: E402
import data  # noqa: E402
import world  # noqa: E402

NANO = ROOT / "models" / "kimi-k3-nano"
MAX_NEW = 96  # the longest right reply has fewer tokens
BATCH = 25

Row = dict[str, Any]


def prompts() -> tuple[Any, list[Row], list[list[int]], list[str]]:
    """Encoding, rows of heldout.jsonl, prompt ids and expected visible text of each."""
    enc = bpe.encoding(bpe.load(NANO / "tiktoken.model"))
    rows = [json.loads(line) for line in (NANO / "heldout.jsonl").read_text().splitlines()]
    ids, wanted = [], []
    for row, pair in zip(rows, world.split()[2], strict=True):
        sample = data.conversation(enc, pair, row["thinking"])
        n_reply = sample.learn[::-1].index(False)
        at = len(sample.ids) - n_reply
        ids.append(data.prefix(enc, pair.tools, "max" if row["thinking"] else None) + sample.ids[:at])
        wanted.append(visible(enc.decode(sample.ids[at:])))
    return enc, rows, ids, wanted


def visible(reply: str) -> str:
    """A reply without its thought and without the end of the turn."""
    return reply.removesuffix("<|end_of_msg|>").rpartition("<|close|>think<|sep|><|open|>response<|sep|>")[2]


def from_reference(ids: list[list[int]], stop: int) -> Iterator[tuple[list[int], list[float]]]:
    from reference import Model

    model = Model.from_checkpoint(NANO)
    for at in range(0, len(ids), BATCH):
        yield from model.greedy_batch(ids[at : at + BATCH], MAX_NEW, {stop})


def from_engine(ids: list[list[int]], stop: int, path: Path) -> Iterator[tuple[list[int], list[float]]]:
    from deltallama import Llama

    with Llama(path, n_ctx=512) as model:
        for prompt in ids:
            tokens = model.generate(prompt, max_tokens=MAX_NEW, temperature=0.0).tokens
            yield tokens[:-1] if tokens and tokens[-1] == stop else tokens, []


def table(rows: list[Row], right: list[bool]) -> str:
    """Markdown: exact replies per kind, the gated kinds together, and all."""
    lines = ["| kind | prompts | exact | % |", "|---|---|---|---|"]

    def line(name: str, of: list[bool]) -> None:
        if of:
            lines.append(f"| {name} | {len(of)} | {sum(of)} | {100 * sum(of) / len(of):.1f} |")

    for kind in world.HELD_OUT:
        line(kind, [r for row, r in zip(rows, right, strict=True) if row["kind"] == kind])
    line(
        "facts, spelling, next, copy, tools",
        [r for row, r in zip(rows, right, strict=True) if row["kind"] in world.GATED],
    )
    for on in (True, False):
        line(
            f"thinking {'on' if on else 'off'}",
            [r for row, r in zip(rows, right, strict=True) if row["thinking"] == on],
        )
    line("all", right)
    return "\n".join(lines)


def score(args: argparse.Namespace) -> None:
    enc, rows, ids, wanted = prompts()
    rows, ids, wanted = rows[: args.first], ids[: args.first], wanted[: args.first]
    stop = enc.encode_single_token("<|end_of_msg|>")
    replies = from_engine(ids, stop, args.model) if args.mode == "engine" else from_reference(ids, stop)
    right, kept = [], []
    began = time.monotonic()
    for row, want, (tokens, margins) in zip(rows, wanted, replies, strict=True):
        text = enc.decode(tokens)
        right.append(visible(text) == want)
        kept.append({"id": row["id"], "tokens": tokens, "margins": margins, "text": text, "exact": right[-1]})
        if not right[-1]:
            print(f"{row['id']} {row['kind']}: {row['messages'][-1]['content']!r}: {visible(text)!r}, right: {want!r}")
    print(f"\n{table(rows, right)}\n\n{len(rows)} prompts in {time.monotonic() - began:.0f} s")
    if args.out:
        args.out.write_text(json.dumps(kept))


def compare(args: argparse.Namespace) -> None:
    first, second = (json.loads(path.read_text()) for path in (args.first, args.second))
    same = 0
    for a, b in zip(first, second, strict=True):
        if a["tokens"] == b["tokens"]:
            same += 1
            continue
        pairs = enumerate(zip(a["tokens"], b["tokens"], strict=False))
        at = next((i for i, (x, y) in pairs if x != y), min(len(a["tokens"]), len(b["tokens"])))
        gap = f", gap of the two best there {a['margins'][at]:.4f}" if a["margins"] else ""
        print(f"{a['id']} differs at reply token {at}{gap}: {a['text']!r} / {b['text']!r}")
    print(f"{same} of {len(first)} replies are the same tokens ({100 * same / len(first):.1f} %)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    modes = parser.add_subparsers(dest="mode", required=True)
    for name in ("reference", "engine"):
        mode = modes.add_parser(name)
        if name == "engine":
            mode.add_argument("model", type=Path)
        mode.add_argument("--first", type=int, help="only so many prompts")
        mode.add_argument("--out", type=Path, help="keep all replies in this JSON file")
    mode = modes.add_parser("compare")
    mode.add_argument("first", type=Path)
    mode.add_argument("second", type=Path)
    args = parser.parse_args()
    if args.mode == "compare":
        compare(args)
    else:
        score(args)


if __name__ == "__main__":
    main()
