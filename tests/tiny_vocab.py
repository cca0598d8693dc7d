"""A small byte-level BPE vocabulary in the files of the released checkpoints: tiktoken.model and tokenizer_config.json.

All 256 bytes come first, then merges trained on a few sentences, then two- and three-byte tokens as filler. Every
multi-byte token resolves into exactly two parts when its bytes are merged with lower ranks only, as in a real table.
"""

from __future__ import annotations

import base64
import re
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

CORPUS = """
The quick model reads one token after another and keeps what it needs in a small state. A gate decides how fast each
channel forgets, and a learned rate decides how much of the new value is written. Every fourth layer looks back at all
tokens instead. The router picks a few experts for each token; the others stay asleep. The answer to the question is
forty-two, or 42, or 1234567890. The capital of France is Paris and the capital of Italy is Rome. It isn't easy, we'll
see, they're here, I've been there, you'd better not, I'm sure, can't won't CAN'T. HelloWorld camelCase HTMLParser
iPhone. def forward(self, x): return self.norm(x + self.attn(x)) * 0.5  # comment
for (int i = 0; i < n; ++i) { sum += a[i] * b[i]; }   "key": "value", [1, 2, 3]
你好世界 你好 世界 模型 语言 模型 Grüße, naïve café, año, Ελλάδα, привет мир привет, こんにちは世界, 안녕하세요
"""

# Offsets from the first special id, the same in both models up to the names.
K3_SPECIALS = {
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
    -2: "[UNK]",
    -1: "[PAD]",
}
KL_SPECIALS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    -2: "[UNK]",
    -1: "[PAD]",
}
# Kept visible when special tokens are skipped, because K3's reply parsers read them.
K3_VISIBLE = {"<|open|>", "<|close|>", "<|sep|>"}

KL_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_{{ message.role }}|>{{ message.role }}<|im_middle|>"
    "{{ message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
)


def special_count(vocab_size: int) -> int:
    """Special ids at the top of the vocabulary: 256 as released, 64 where the vocabulary is too small for that."""
    return 256 if vocab_size >= 2048 else 64


def merge_bytes(piece: bytes, ranks: dict[bytes, int], below: int) -> list[bytes]:
    """Merge the bytes of ``piece`` by lowest rank, leftmost first, using only ranks lower than ``below``."""
    parts = [piece[i : i + 1] for i in range(len(piece))]
    while len(parts) > 1:
        best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], below))
        if ranks.get(parts[best] + parts[best + 1], below) >= below:
            break
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    return parts


@lru_cache(maxsize=1)
def trained_tokens() -> list[bytes]:
    """Multi-byte tokens learned from ``CORPUS`` by byte-pair counting, most frequent pair first."""
    words = [
        [bytes([byte]) for byte in word.encode()] for word in re.findall(r" ?[^\W\d]+| ?\d{1,3}| ?[^\w\s]+|\s+", CORPUS)
    ]
    ranks = {bytes([i]): i for i in range(256)}
    learned: list[bytes] = []
    while True:
        counts: dict[tuple[bytes, bytes], int] = {}
        for word in words:
            for pair in pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        repeated = {pair: count for pair, count in counts.items() if count > 1}
        if not repeated:
            return learned
        left, right = max(repeated, key=lambda pair: (repeated[pair], pair))
        token = left + right
        for word in words:
            i = 0
            while i < len(word) - 1:
                if word[i] == left and word[i + 1] == right:
                    word[i : i + 2] = [token]
                i += 1
        rank = len(ranks)
        # A token made of overlapping equal pairs may not resolve on its own; such a one is left out of the table.
        if token not in ranks and len(merge_bytes(token, ranks, rank)) == 2:
            ranks[token] = rank
            learned.append(token)


@lru_cache(maxsize=8)
def base_tokens(count: int) -> tuple[bytes, ...]:
    """``count`` byte-level tokens in rank order: 256 bytes, trained merges, filler pairs, filler triples."""
    if count < 256:
        raise ValueError(f"a byte-level vocabulary needs at least 256 tokens, not {count}")
    tokens = [bytes([i]) for i in range(256)] + trained_tokens()
    if len(tokens) < count:
        known = set(tokens)
        order = np.random.default_rng(1).permutation(65536).astype(">u2").tobytes()
        for i in range(0, len(order), 2):
            if order[i : i + 2] not in known:
                tokens.append(order[i : i + 2])
    if len(tokens) < count:
        # With every pair in the table, any triple resolves into a pair and a byte.
        triple = 0x202020
        while len(tokens) < count:
            token = triple.to_bytes(3, "big")
            if token not in known:
                tokens.append(token)
            triple += 1
    return tuple(tokens[:count])


def tiktoken_model(vocab_size: int) -> bytes:
    """Text of tiktoken.model: ``base64(token) rank`` a line."""
    tokens = base_tokens(vocab_size - special_count(vocab_size))
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def special_tokens(arch: str, vocab_size: int) -> dict[int, str]:
    """Named special tokens: id -> text. Ids in between are reserved and have no entry."""
    first = vocab_size - special_count(vocab_size)
    names = K3_SPECIALS if arch == "kimi-k3" else KL_SPECIALS
    return {
        (first + offset if offset >= 0 else vocab_size + offset): text
        for offset, text in names.items()
        if offset < special_count(vocab_size) - 2
    }


def tokenizer_config(arch: str, vocab_size: int, added_tokens: bool = True) -> dict[str, Any]:
    """tokenizer_config.json; ``added_tokens=False`` leaves out all but bos, eos, end of turn and pad."""
    entries = {}
    for token_id, text in sorted(special_tokens(arch, vocab_size).items()):
        if not added_tokens and text not in ("[BOS]", "[EOS]", "<|end_of_msg|>", "<|im_end|>", "[PAD]"):
            continue
        entries[str(token_id)] = {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": text not in K3_VISIBLE,
        }
    config: dict[str, Any] = {
        "added_tokens_decoder": entries,
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1048576,
        "tokenizer_class": "TikTokenTokenizer",
    }
    if arch == "kimi-linear":
        config["chat_template"] = KL_CHAT_TEMPLATE
    return config
