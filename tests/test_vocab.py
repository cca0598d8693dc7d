"""The vocabulary: tokens, types, merges and ids from `tiktoken.model`, with tiktoken itself as the witness."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
from tiktoken.load import load_tiktoken_bpe

import tiny
import tiny_vocab
from conversion import ConversionError, merging
from conversion.config import Config
from conversion.vocab import Vocabulary, merges, printable, read_ranks, read_vocabulary
from gguf_ext import Plan
from gguf_ext.constants import TokenType

ANY_PIECE = r"(?s).+"  # everything is one piece: only the merging is under test


def vocabulary(folder: Path) -> Vocabulary:
    return read_vocabulary(folder, Config(folder / "config.json"), None)


BYTES = {printable(bytes((byte,))): byte for byte in range(256)}


def unprintable(text: str) -> bytes:
    """The bytes of a printable spelling."""
    return bytes(BYTES[character] for character in text)


def merged(token: bytes, ranks: dict[bytes, int], below: int) -> list[bytes]:
    """Byte pair encoding with the ranks below a limit, as plainly as it can be said."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while True:
        pairs = [ranks.get(a + b, below) for a, b in zip(parts, parts[1:], strict=False)]
        if not pairs or min(pairs) >= below:
            return parts
        i = pairs.index(min(pairs))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def random_tokens(rng: np.random.Generator, count: int, letters: int = 256) -> list[bytes]:
    """256 bytes and then random concatenations of earlier tokens, all of `letters` different bytes. The fewer letters,
    the more tokens overlap, and the more of them never come out of merging whole."""
    tokens = [bytes((byte,)) for byte in rng.permutation(256).tolist()]
    known = set(tokens)
    first = 256 - letters
    while len(tokens) < count:
        for left, right in rng.integers(first, len(tokens), (count, 2)).tolist():
            token = tokens[left] + tokens[right]
            if len(token) <= 24 and token not in known:
                known.add(token)
                tokens.append(token)
    return tokens[:count]


def write_ranks(path: Path, tokens: list[bytes]) -> Path:
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)))
    return path


def test_printable_spelling_is_gpt2s() -> None:
    assert printable(b" the") == "Ġthe" and printable(b"\n") == "Ċ" and printable(b"\x00\xff") == "Āÿ"
    assert printable("é".encode()) == "Ã©" and printable(b"\xad\x7f") == "Ńġ"
    spelled = {printable(bytes((byte,))) for byte in range(256)}
    assert len(spelled) == 256 and not any(character.isspace() for character in spelled)
    assert {ord(character) for character in spelled if ord(character) > 255} == set(range(256, 256 + 68))


def test_ranks_are_those_tiktoken_reads(tmp_path: Path, rng: np.random.Generator) -> None:
    path = write_ranks(tmp_path / "tiktoken.model", random_tokens(rng, 2000))
    assert {token: rank for rank, token in enumerate(read_ranks(path))} == load_tiktoken_bpe(str(path))


def test_merges_are_what_the_definition_says(rng: np.random.Generator) -> None:
    tokens = random_tokens(rng, 3000, letters=6)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    expected = []
    for rank, token in enumerate(tokens):
        parts = merged(token, ranks, rank)
        if len(parts) == 2:
            expected.append(" ".join(map(printable, parts)))
    found = list(merges(tokens))
    assert found == expected
    assert 300 < len(found) < len(tokens) - 256 - 300  # some resolve, some do not: both ways were taken


def overlapping_tokens(rng: np.random.Generator) -> list[bytes]:
    """What is hard to merge: few letters, runs of one byte, tokens of up to 140 bytes, ranks in any order."""
    letters = [bytes((byte,)) for byte in rng.choice(256, rng.integers(1, 12), replace=False).tolist()]
    pool, known = [*letters, b" ", b"="], {bytes((byte,)) for byte in range(256)}
    tokens = sorted(known)
    for kind in rng.integers(0, 4, 250).tolist():
        left, right = (pool[n] for n in rng.integers(0, len(pool), 2).tolist())
        token = [left + right, left + right[:1], left[:1] + right, left[:1] * int(rng.integers(2, 140))][kind]
        if len(token) <= 140 and token not in known:
            known.add(token)
            pool.append(token)
            tokens.append(token)
    if rng.random() < 0.3:
        tokens = [tokens[n] for n in rng.permutation(len(tokens)).tolist()]
    return tokens


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"FEWEST": 1},  # all short tokens at once
        {"FEWEST": 1, "LONGEST": 100},
        {"FEWEST": 1, "MULTIPLIER": 1, "MAX_CHAIN": 1 << 20},  # all tokens in one slot
        {"FEWEST": 1, "MAX_CHAIN": 0},  # none at once
    ],
    ids=["default", "together", "long", "one slot", "alone"],
)
def test_merging_many_at_once_is_merging_each(
    settings: dict[str, int], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings.items():
        monkeypatch.setattr(merging, name, value)
    n_merges = n_others = 0
    for _ in range(8):
        tokens = overlapping_tokens(rng)
        ranks = {token: rank for rank, token in enumerate(tokens)}
        expected = []
        for rank, token in enumerate(tokens):
            parts = merged(token, ranks, rank)
            expected.append(len(parts[0]) if len(parts) == 2 else 0)
        assert merging.last_merges(tokens) == expected
        n_merges += np.count_nonzero(expected)
        n_others += len(tokens) - 256 - np.count_nonzero(expected)
    assert n_merges > 100 and n_others > 100


def test_merges_equal_tiktoken_with_fewer_ranks(rng: np.random.Generator) -> None:
    """An encoding that knows only the ranks below a token's own leaves its bytes in the pieces of its merge line."""
    tokens = list(tiny_vocab.base_tokens(2000))
    lines = list(merges(tokens))
    assert len(lines) == len(tokens) - 256
    for rank in rng.integers(256, len(tokens), 60).tolist():
        known = {token: n for n, token in enumerate(tokens[:rank])}
        encoding = tiktoken.Encoding("below", pat_str=ANY_PIECE, mergeable_ranks=known, special_tokens={})
        pieces = [encoding.decode_single_token_bytes(n) for n in encoding._encode_single_piece(tokens[rank])]
        assert " ".join(map(printable, pieces)) == lines[rank - 256]


def test_merging_by_the_lines_gives_the_ids_of_tiktoken(rng: np.random.Generator) -> None:
    """Where every token resolves, applying the lines in their order is the same encoding."""
    tokens = list(tiny_vocab.base_tokens(1500))
    ranks = {token: rank for rank, token in enumerate(tokens)}
    encoding = tiktoken.Encoding("all", pat_str=ANY_PIECE, mergeable_ranks=ranks, special_tokens={})
    order = {tuple(map(unprintable, line.split(" "))): n for n, line in enumerate(merges(tokens))}
    corpus = tiny_vocab.CORPUS.encode()
    for start in rng.integers(0, len(corpus) - 40, 60).tolist():
        text = corpus[start : start + 40]
        parts = [text[i : i + 1] for i in range(len(text))]
        while True:
            pairs = [order.get(pair, len(order)) for pair in zip(parts, parts[1:], strict=False)]
            if not pairs or min(pairs) == len(order):
                break
            i = pairs.index(min(pairs))
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        assert [ranks[part] for part in parts] == encoding._encode_single_piece(text)


def test_vocabulary_of_the_released_size(tmp_path: Path, rng: np.random.Generator) -> None:
    """163,840 ids: every token, and the merges of a sample against the definition."""
    folder = tiny.write_checkpoint(tmp_path / "model", vocab_size=163_840, num_hidden_layers=2, hidden_size=32)
    tokens = random_tokens(rng, 163_584, letters=60)
    write_ranks(folder / "tiktoken.model", tokens)
    found = vocabulary(folder)
    assert len(found.tokens) == len(found.types) == 163_840
    assert [unprintable(token) for token in found.tokens[:163_584]] == tokens
    assert found.tokens[163_584:163_591:2] == ["[BOS]", "<|end_of_msg|>", "<|close|>", "[start_header_id]"]
    assert found.tokens[163_592] == "<|reserved_token_163592|>"
    assert (found.bos, found.eos, found.padding) == (163_584, 163_586, 163_839)
    by_token = {left + right: f"{left} {right}" for left, right in (line.split(" ") for line in found.merges)}
    assert len(by_token) == len(found.merges)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    for rank in rng.integers(256, len(tokens), 2000).tolist():
        parts = merged(tokens[rank], ranks, rank)
        line = " ".join(map(printable, parts)) if len(parts) == 2 else None
        assert by_token.get(printable(tokens[rank])) == line
    positions = [ranks[unprintable(line.replace(" ", ""))] for line in found.merges]
    assert positions == sorted(positions)


def test_token_types(tmp_path: Path) -> None:
    """Named and reserved special ids are control tokens; ids beyond the 256 special ones are unused."""
    folder = tiny.write_checkpoint(tmp_path / "model", vocab_size=1000)
    write_ranks(folder / "tiktoken.model", list(tiny_vocab.base_tokens(700)))
    (folder / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"702": {"content": "<|a|>"}}}')
    found = vocabulary(folder)
    assert set(found.types[:700]) == {TokenType.NORMAL}
    assert set(found.types[700:956]) == {TokenType.CONTROL}
    assert set(found.types[956:]) == {TokenType.UNUSED}
    assert found.tokens[701:704] == ["<|reserved_token_701|>", "<|a|>", "<|reserved_token_703|>"]
    assert found.tokens[956] == "[PAD956]" and len(found.tokens) == 1000


@pytest.mark.parametrize("arch", ["kimi-k3", "kimi-linear"])
def test_c4_missing_added_tokens_are_filled(tmp_path: Path, arch: str) -> None:
    full = vocabulary(tiny.write_checkpoint(tmp_path / "full", arch))
    poor = vocabulary(tiny.write_checkpoint(tmp_path / "poor", arch, added_tokens=False))
    assert len(poor.tokens) == len(full.tokens) == 512
    assert (poor.merges, poor.types) == (full.merges, full.types)
    filled = {new for old, new in zip(full.tokens, poor.tokens, strict=True) if old != new}
    assert filled and all(token.startswith("<|reserved_token_") for token in filled)
    assert len(set(poor.tokens)) == 512


def test_c3_pre_tokenizer_is_known_by_family(tiny_checkpoint: Callable[..., Path]) -> None:
    """Two different vocabularies have the same pre-tokenizer: no hash of ids decides."""
    for folder in (tiny_checkpoint("k3"), tiny_checkpoint("kl", vocab_size=700)):
        plan = Plan()
        vocabulary(folder).add_fields(plan)
        assert plan.fields["tokenizer.ggml.pre"][2] == "kimi-k2"
        assert list(plan.fields)[:6] == [
            f"tokenizer.ggml.{key}" for key in ("model", "pre", "tokens", "token_type", "merges", "bos_token_id")
        ]


@pytest.mark.parametrize("value", [[450, 449], 450])
def test_eos_is_the_configs(tmp_path: Path, value: Any) -> None:
    def eos(checkpoint: Any) -> None:
        checkpoint.config["eos_token_id"] = value
        checkpoint.text["eos_token_id"] = 1  # the outer one counts

    assert vocabulary(tiny.write_checkpoint(tmp_path / "model", mutate=eos)).eos == 450


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"", "no token for 256 of the 256 bytes"),
        (b"AA== 0\nAQ==\n", "line 2 is not a base64 token and a rank"),
        (b"AA== 0\nAQ== x\n", "line 2 is not a base64 token and a rank"),
        (b"AA== 0 7\n", "line 1 is not a base64 token and a rank"),
        (b"AA== 0\n\nAA== 1\n", r"line 3: the token b'\\x00' occurs twice, first with rank 0"),
        (b"AA== 1\nAQ== 1\n", "found 1, expected 0"),
        (b"AA== -1\n", "found -1, expected 0"),
        (b"AA== 0\nAQ== 1\n", "no token for 254 of the 256 bytes, the first is 0x02"),
        (b"A*== 0\n", "line 1 is not a base64"),
        (b"AAAA" * 2000 + b" 0\n", "line 1: a token of 6000 bytes, at most 4096"),
    ],
)
def test_bad_ranks_are_named(tmp_path: Path, lines: bytes, message: str) -> None:
    path = tmp_path / "tiktoken.model"
    path.write_bytes(lines)
    with pytest.raises(ConversionError, match=rf"tiktoken\.model: .*{message}"):
        read_ranks(path)


def test_vocabulary_without_merges_is_refused(tmp_path: Path) -> None:
    """Such a file would load elsewhere and split every text into single bytes."""
    folder = tiny.write_checkpoint(tmp_path / "model")
    write_ranks(folder / "tiktoken.model", [bytes((byte,)) for byte in range(256)])
    with pytest.raises(ConversionError, match=r"tiktoken\.model: no token is a merge of two"):
        vocabulary(folder)
