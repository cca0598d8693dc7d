"""What does rounding the inputs of products cost? KL divergence and top-1 agreement of each mode against exact inputs.

    python bench/activation_modes.py build/kimi-k3-nano-q8_0.gguf models/kimi-k3-nano/heldout.jsonl -n 100 --peer
    python bench/activation_modes.py --tiny --peer
    python bench/make_models.py kl-bench FOLDER --experts 8 --gguf q8_0,q4_k_m
    python bench/activation_modes.py FOLDER/kl-bench-q8_0.gguf --random -n 4 --peer

With a held-out file: every position of the greedy replies to `n` prompts. With `--random`: `n` texts of 60 random
tokens. With `--tiny`: 40 such texts and random models of both architectures as `q8_0`. Those choose all experts, as
do models of `make_models.py` with `--experts 8`, so that no choice of an expert can flip. All modes read the same file
and keep their latents in F32. With `--peer` (`pip install '.[peer]'`) an independent llama.cpp, which rounds its inputs
to 8 bits, is compared with our exact mode too, and all modes at the few positions of each text that
it is asked about.

Prints a Markdown table; KL is in nats, exact against rounded.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from peer import Peer, PeerError

import conversion
from deltallama import DeltaError, Llama

MODES = ("auto", "fine", "fast")
MAX_NEW = 96
PEER_POSITIONS = 5  # of each text; the peer reads the text anew for each


@dataclass
class Text:
    """Token ids, of which the distributions after positions `first` .. end are compared."""

    ids: list[int]
    first: int


@dataclass
class Row:
    kl: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)

    def add(self, exact: np.ndarray, other: np.ndarray) -> None:
        """Both [n, vocab], natural logarithms of probabilities."""
        self.kl += np.sum(np.exp(exact) * (exact - other), axis=1).tolist()
        self.same += (exact.argmax(axis=1) == other.argmax(axis=1)).tolist()

    def cells(self) -> str:
        share = 100 * np.mean(self.same)
        return f"{np.mean(self.kl):.1e} | {np.quantile(self.kl, 0.99):.1e} | {share:.2f} % | {len(self.kl)}"


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.sum(np.exp(x), axis=-1, keepdims=True))


def distributions(llm: Llama, text: Text) -> np.ndarray:
    """[positions, vocab]: logarithms of the probabilities after each compared position."""
    llm.reset()
    if text.first:
        llm.eval(text.ids[: text.first], logits="none")
    llm.eval(text.ids[text.first :], logits="all")
    return log_softmax(np.stack([llm.logits(row) for row in range(llm.n_logits)]))


def reply_texts(model: Path, held_out: Path, n: int, seed: int) -> list[Text]:
    """Prompts in the chat format with the model's own greedy reply."""
    rows = [json.loads(line) for line in held_out.read_text("utf-8").splitlines() if line.strip()]
    texts = []
    with Llama(model, n_ctx=1024, activations="exact", cache_type="f32") as llm:
        for row in random.Random(seed).sample(rows, min(n, len(rows))):
            prompt = llm.chat_tokens(row["messages"], tools=row.get("tools"), thinking=row["thinking"])
            reply = llm.generate(prompt, max_tokens=MAX_NEW, temperature=0)
            texts.append(Text(prompt + reply.tokens[:-1], len(prompt) - 1))
    return texts


def compare(model: Path, texts: Sequence[Text], peer: bool, seed: int) -> dict[str, Row]:
    rows = {name: Row() for name in MODES}
    options: dict[str, Any] = {"n_ctx": max(len(text.ids) for text in texts) + 1, "cache_type": "f32"}
    with Llama(model, activations="exact", **options) as llm:
        exact = [distributions(llm, text) for text in texts]
    positions = [list(range(len(expected))) for expected in exact]
    if peer:
        rows["llama.cpp"] = Row()
        draw = random.Random(seed)
        with Peer(model, n_ctx=options["n_ctx"]) as other:
            for number, (text, expected) in enumerate(zip(texts, exact, strict=True)):
                told = []
                for index in sorted(draw.sample(positions[number], min(PEER_POSITIONS, len(expected)))):
                    found = other.distribution(text.ids[: text.first + index + 1], expected.shape[1])
                    if found is not None:
                        # Its float32 probabilities do not quite add up to one.
                        row = log_softmax(np.array([[found.get(token, -100.0) for token in range(expected.shape[1])]]))
                        rows["llama.cpp"].add(expected[index : index + 1], row)
                        told.append(index)
                positions[number] = told
    for mode in MODES:
        with Llama(model, activations=mode, **options) as llm:
            for text, expected, chosen in zip(texts, exact, positions, strict=True):
                rows[mode].add(expected[chosen], distributions(llm, text)[chosen])
    return rows


def random_texts(n_vocab: int, n: int, seed: int) -> list[Text]:
    draw = random.Random(seed)
    return [Text([draw.randrange(n_vocab) for _ in range(60)], 0) for _ in range(n)]


def tiny_models(folder: Path, seed: int) -> Iterator[tuple[str, Path, list[Text]]]:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    import tiny

    for preset, name in (("k3", "random Kimi-K3, MXFP4 experts"), ("kl", "random Kimi-Linear")):
        checkpoint = tiny.write_checkpoint(folder / preset, preset=preset, num_experts_per_token=8)
        path = conversion.convert(checkpoint, outfile=folder / f"{preset}.gguf", outtype="q8_0")
        yield name, path, random_texts(448, 40, seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("held_out", type=Path, nargs="?")
    parser.add_argument("-n", type=int, default=100, help="held-out prompts, or random texts (default: 100)")
    parser.add_argument("--random", action="store_true", help="random tokens instead of a held-out file")
    parser.add_argument("--tiny", action="store_true", help="random models that choose all experts")
    parser.add_argument("--peer", action="store_true", help="also ask an independent engine")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.tiny + args.random + (args.held_out is not None) != 1 or args.tiny == (args.model is not None):
        parser.error("give a model and a held-out file, a model and --random, or --tiny")
    print("| file | inputs | mean KL | 99th percentile | same best token | positions |\n|---|---|---|---|---|---|")
    try:
        with tempfile.TemporaryDirectory() as folder:
            if args.tiny:
                cases = tiny_models(Path(folder), args.seed)
            elif args.random:
                with Llama(args.model, n_ctx=64) as llm:
                    n_vocab = llm.n_vocab
                cases = iter([(args.model.name, args.model, random_texts(n_vocab, args.n, args.seed))])
            else:
                texts = reply_texts(args.model, args.held_out, args.n, args.seed)
                cases = iter([(args.model.name, args.model, texts)])
            for name, path, texts in cases:
                for mode, row in compare(path, texts, args.peer, args.seed).items():
                    print(f"| {name} | {mode} | {row.cells()} |", flush=True)
    except (DeltaError, PeerError, OSError) as error:
        print(f"activation_modes: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
