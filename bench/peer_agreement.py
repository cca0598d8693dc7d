"""Does an independent engine continue the same GGUF file with the same greedy text as ours?

    python bench/peer_agreement.py MODEL.gguf models/kimi-k3-nano/heldout.jsonl -n 200
    python bench/peer_agreement.py MODEL.gguf --random 50 --f32-peer

Both engines get the same token ids and keep their caches in float32. Ours runs with exact activations; llama.cpp rounds
the inputs of products to the type of the weights, to 8 bits per value for quantized ones. With `--f32-peer` it gets a
float32 copy of the same weights and rounds nothing: what differs then is not a matter of rounding.

Where two texts first part, `gap` is what our exact logits put between their two best tokens, and `lead` what they put
between our token and the peer's. A rounding can only decide between tokens that are close.

Ends with status 1 when fewer than 95 % of the texts are equal or a lead is 0.5 or more (a lead is never below the gap),
with 2 when one of the engines or the input fails. Random prompts are for random models, which also emit tokens that
only one of the engines takes for the end of a text: there, texts are compared as far as both go.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from peer import Peer, PeerError
from tqdm import tqdm

from deltallama import DeltaError, Llama
from gguf_ext import GGUFReader, Plan, PlannedTensor, write_file
from gguf_ext.constants import GGMLQuantizationType

MIN_SHARE = 0.95
MAX_LEAD = 0.5


class InputError(ValueError):
    """The prompts cannot be read."""


@dataclass(frozen=True)
class Prompt:
    kind: str
    ids: list[int]


@dataclass(frozen=True)
class Difference:
    """Where the two texts of a prompt first differ.

    Attributes:
        index: number of the prompt.
        at: number of generated tokens before the difference.
        ours, peer: the tokens there; None where that engine had ended its text.
        gap: difference of our two best exact logits; None when only one of the engines had ended.
        lead: our exact logit of our best token minus that of the peer's token; None likewise.
    """

    index: int
    kind: str
    at: int
    ours: int | None
    peer: int | None
    gap: float | None
    lead: float | None


@dataclass(frozen=True)
class Report:
    prompts: Sequence[Prompt]
    differences: Sequence[Difference]

    @property
    def share(self) -> float:
        """Share of prompts with equal texts."""
        return 1.0 - len(self.differences) / len(self.prompts)

    @property
    def accepted(self) -> bool:
        """Whether enough texts are equal and every difference is a near-tie."""
        ties = all(d.lead is not None and d.lead < MAX_LEAD for d in self.differences)
        return self.share >= MIN_SHARE and ties


# -- comparison --------------------------------------------------------------------------------------------------------


def first_difference(ours: Sequence[int], peer: Sequence[int]) -> int | None:
    """Index of the first token that only one of the texts has; None when they are equal."""
    if list(ours) == list(peer):
        return None
    both = min(len(ours), len(peer))
    return next((i for i in range(both) if ours[i] != peer[i]), both)


def compare(
    llm: Llama, prompts: Sequence[Prompt], texts: Sequence[Sequence[int]], max_tokens: int, ends: bool = True
) -> Report:
    """Our greedy texts against the peer's.

    Args:
        llm: open with exact activations and an F32 cache.
        texts: the peer's tokens for each prompt.
        ends: whether ending earlier is a difference; if not, texts are compared as far as both go.
    """
    differences = []
    for index, (prompt, peer) in enumerate(zip(_progress(prompts, "deltallama"), texts, strict=True)):
        ours = llm.generate(prompt.ids, max_tokens=max_tokens, temperature=0.0).tokens
        both = min(len(ours), len(peer))
        at = first_difference(ours, peer) if ends else first_difference(ours[:both], peer[:both])
        if at is None:
            continue
        our_token = ours[at] if at < len(ours) else None
        peer_token = peer[at] if at < len(peer) else None
        gap = lead = None
        if our_token is not None and peer_token is not None:
            llm.sync([*prompt.ids, *ours[:at]])
            logits = llm.logits().astype(np.float64)
            second, best = np.partition(logits, -2)[-2:]
            gap, lead = float(best - second), float(best - logits[peer_token])
        differences.append(Difference(index, prompt.kind, at, our_token, peer_token, gap, lead))
    return Report(prompts, differences)


def run(
    model: str | os.PathLike[str],
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    n_threads: int = 1,
    ends: bool = True,
    f32_peer: bool = False,
) -> Report:
    """Both engines on the same prompts, one after the other (see `compare`).

    Args:
        f32_peer: the peer gets a float32 copy of the weights.

    Raises:
        PeerError: the peer failed.
        deltallama.DeltaError: ours did.
    """
    longest = max(len(prompt.ids) for prompt in prompts) + max_tokens
    n_ctx = -(-longest // 256) * 256  # the peer rounds up to this, too
    with tempfile.TemporaryDirectory(prefix="peer-") as folder:
        peer_model = Path(model)
        if f32_peer:
            peer_model = Path(folder) / "f32.gguf"
            write_f32_copy(model, peer_model)
        with Peer(peer_model, n_ctx=n_ctx, n_threads=n_threads) as peer:
            texts = [peer.greedy(prompt.ids, max_tokens) for prompt in _progress(prompts, "peer")]
    with Llama(model, n_ctx=n_ctx, n_threads=n_threads, activations="exact", cache_type="f32") as llm:
        return compare(llm, prompts, texts, max_tokens, ends)


def write_f32_copy(source: str | os.PathLike[str], target: Path) -> None:
    """Writes the same keys and the same weights, every tensor as F32."""
    with GGUFReader(os.fspath(source)) as reader:
        plan = Plan()
        for key, value in reader.fields.items():
            plan.add_field(key, value, *reader.types[key])
        for name, info in reader.tensors.items():
            produce = partial(_dequantized, reader, name)
            plan.add_tensor(PlannedTensor(name, info.ne, GGMLQuantizationType.F32, produce))
        write_file(plan, target)


def _dequantized(reader: GGUFReader, name: str, first: int, count: int) -> np.ndarray:
    return reader.dequantize(name)


def _progress(prompts: Sequence[Prompt], name: str) -> Iterable[Prompt]:
    return tqdm(prompts, desc=name, unit="prompt", disable=None, leave=False)


# -- prompts -----------------------------------------------------------------------------------------------------------


def held_out_prompts(llm: Llama, path: str | os.PathLike[str], n: int, seed: int) -> list[Prompt]:
    """`n` rows of a held-out file, drawn without replacement, as prompts in the chat format of the model.

    A row is a JSON object with `kind`, `messages`, `thinking` and perhaps `tools`.

    Raises:
        InputError: the file cannot be read or has fewer rows, or a row is not such an object; names the line.
    """
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except OSError as error:
        raise InputError(f"{os.fspath(path)}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{os.fspath(path)}: {error}") from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if len(numbered) < n:
        raise InputError(f"{os.fspath(path)}: {len(numbered)} prompts, asked for {n}")
    prompts = []
    for number, line in sorted(random.Random(seed).sample(numbered, n)):
        try:
            row = json.loads(line)
            ids = llm.chat_tokens(row["messages"], tools=row.get("tools"), thinking=row["thinking"])
            prompts.append(Prompt(str(row["kind"]), ids))
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{os.fspath(path)}:{number}: {type(error).__name__}: {error}") from None
    return prompts


def random_prompts(n_vocab: int, n: int, seed: int, longest: int = 64) -> list[Prompt]:
    """`n` prompts of 1 to `longest` ids drawn evenly from the whole vocabulary."""
    rng = random.Random(seed)
    return [Prompt("random", [rng.randrange(n_vocab) for _ in range(rng.randint(1, longest))]) for _ in range(n)]


# -- command line ------------------------------------------------------------------------------------------------------


def describe(report: Report, name: Callable[[int], str] = str) -> str:
    """The shares by kind, the verdict, and a line for each difference; `name` makes a token readable."""
    total = Counter(prompt.kind for prompt in report.prompts)
    different = Counter(difference.kind for difference in report.differences)
    lines = [f"{'kind':<12} {'prompts':>7} {'equal':>6}"]
    lines += [f"{kind:<12} {total[kind]:>7} {total[kind] - different[kind]:>6}" for kind in sorted(total)]
    for d in report.differences:
        ours, peer = ("the end" if token is None else repr(name(token)) for token in (d.ours, d.peer))
        how = "one ended" if d.gap is None else f"gap {d.gap:.4f}, lead {d.lead:.4f}"
        lines.append(f"prompt {d.index} ({d.kind}), token {d.at}: ours {ours}, peer {peer}: {how}")
    n_equal = len(report.prompts) - len(report.differences)
    leads = [d.lead for d in report.differences if d.lead is not None]
    widest = f"{max(leads):.4f}" if leads else "none"
    lines.append(
        f"{n_equal} of {len(report.prompts)} texts equal: {report.share:.1%} (at least {MIN_SHARE:.0%}); "
        f"largest lead at a difference: {widest} (below {MAX_LEAD})"
    )
    return "\n".join(lines)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare greedy texts of llama.cpp and deltallama on one GGUF file.")
    parser.add_argument("model", help="GGUF file")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("heldout", nargs="?", help="JSON lines with kind, messages, thinking and perhaps tools")
    source.add_argument("--random", type=_positive, metavar="N", help="instead: N prompts of random token ids")
    parser.add_argument("-n", type=_positive, default=200, help="held-out prompts to draw (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of that choice (default: %(default)s)")
    parser.add_argument(
        "--max-tokens", type=_positive, default=128, help="tokens of a text at most (default: %(default)s)"
    )
    parser.add_argument("--f32-peer", action="store_true", help="give the peer a float32 copy of the weights")
    parser.add_argument("--threads", type=_positive, default=1, help="of each engine (default: %(default)s)")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        with Llama(arguments.model, n_ctx=64) as llm:
            name = llm.tokenizer.name
            if arguments.random:
                prompts = random_prompts(llm.n_vocab, arguments.random, arguments.seed)
            else:
                prompts = held_out_prompts(llm, arguments.heldout, arguments.n, arguments.seed)
        report = run(
            arguments.model,
            prompts,
            max_tokens=arguments.max_tokens,
            n_threads=arguments.threads,
            ends=not arguments.random,
            f32_peer=arguments.f32_peer,
        )
    except KeyboardInterrupt:
        return 130
    except (InputError, PeerError, DeltaError, OSError) as error:
        print(f"peer_agreement: {error}", file=sys.stderr)
        return 2
    print(describe(report, name))
    return 0 if report.accepted else 1


if __name__ == "__main__":
    sys.exit(main())
