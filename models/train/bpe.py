"""Byte-level BPE vocabulary in tiktoken's format, with Kimi-K3's splitting pattern and special tokens.

Written from the tokenizer's description: ids equal ranks, all single bytes are tokens, 256 special ids at the top.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import regex
import tiktoken

N_SPECIAL = 256
# Offsets from the first special id, as in the released tokenizer.
SPECIAL = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_TAIL = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_TAIL}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_TAIL}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def train(texts: Iterable[str], n_base: int) -> list[bytes]:
    """``n_base`` tokens in rank order: the 256 bytes, then merges of the most frequent neighbours (ties: the smaller
    pair). Raises ValueError when the texts have too few distinct pieces for that many tokens."""
    splitter = regex.compile(PATTERN, regex.V1)
    counts: Counter[bytes] = Counter()
    for text in texts:
        counts.update(piece.encode() for piece in splitter.findall(text))
    pieces = [([bytes([b]) for b in piece], n) for piece, n in counts.items()]
    tokens = [bytes([b]) for b in range(256)]
    while len(tokens) < n_base:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for parts, n in pieces:
            for pair in zip(parts, parts[1:], strict=False):
                pairs[pair] += n
        if not pairs:
            raise ValueError(f"texts give only {len(tokens)} tokens, {n_base} wanted")
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merged = best[0] + best[1]
        if merged not in tokens:
            tokens.append(merged)
        for i, (parts, n) in enumerate(pieces):
            if len(parts) > 1:
                out: list[bytes] = []
                for part in parts:
                    if out and (out[-1], part) == best:
                        out[-1] = merged
                    else:
                        out.append(part)
                pieces[i] = (out, n)
    return tokens


def special_tokens(n_base: int) -> dict[str, int]:
    """Name to id of all 256 special tokens."""
    return {SPECIAL.get(i, f"<|reserved_token_{n_base + i}|>"): n_base + i for i in range(N_SPECIAL)}


def encoding(tokens: list[bytes]) -> tiktoken.Encoding:
    """A tiktoken encoding of ``tokens`` (rank order) and the special tokens above them."""
    ranks = {token: i for i, token in enumerate(tokens)}
    specials = special_tokens(len(tokens))
    return tiktoken.Encoding("kimi-k3-nano", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=specials)


def save(tokens: list[bytes], path: Path) -> None:
    path.write_text("".join(f"{base64.b64encode(token).decode()} {i}\n" for i, token in enumerate(tokens)))


def load(path: Path) -> list[bytes]:
    return [base64.b64decode(line.split()[0]) for line in path.read_text().splitlines()]
