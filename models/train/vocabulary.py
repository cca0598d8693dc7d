"""Build the BPE vocabulary of Kimi-K3-nano from the training half of the world: ``vocabulary.py OUT_FILE``."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import bpe
import data
import world
from config import N_BASE

FIXED_REPEATS = 50


def corpus() -> list[str]:
    """Texts weighted roughly as training draws them; the chat format's own words count as frequent."""
    rng = random.Random(0)
    by_kind: dict[str, list[world.Pair]] = {}
    also = {pair.key for pair in world.never_examined()}
    for pair in (p for p in world.split()[0] if p.key not in also):
        by_kind.setdefault(pair.kind, []).append(pair)
    texts: list[str] = []
    for kind, pairs in by_kind.items():
        n = 4000 if kind == "fact" else 1000
        world.texts(rng.choices(pairs, k=n), texts.append)
    fixed = [data.EFFORT.format(effort) for effort in ("low", "high", "max")]
    for tool in world.TOOLS:
        declared = json.dumps([tool], sort_keys=True, separators=(",", ":"))
        fixed += [data.DECLARE.format(declared), tool["function"]["name"]]
    for tag in ("message", "think", "response", "tools", "call", "argument"):
        fixed += [tag]
    for piece in (" role", '="', '"', " type", " tool", " index", " key", "1", "user", "assistant", "system", "tool"):
        fixed += [piece]
    fixed += ["thinking-effort", "tool-declare", "string", "number", "boolean"]
    return texts + fixed * FIXED_REPEATS


if __name__ == "__main__":
    bpe.save(bpe.train(corpus(), N_BASE), Path(sys.argv[1]))
