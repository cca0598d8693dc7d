"""Text to token ids and back: a `tiktoken.Encoding` made of the token list inside a GGUF file.

The vocabulary is byte-level BPE with the rank of a token being its id. The GGUF stores the bytes of ordinary tokens
through the byte-to-character table of GPT-2, and control tokens by their literal name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tiktoken

from .checks import brief, token_ids, whole
from .errors import ArgumentError, FormatError, UnsupportedError

# Letters that may begin, and that may continue, a word. Lm, Lo and marks are in both; Han is cut out of both.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""Where text is cut before BPE: the first matching alternative wins, leftmost and greedy."""

MAX_BLOCK = 400_000
"""Characters per block: longer input is cut here first, as the Hugging Face tokenizer of these models does."""
MAX_RUN = 25_000
"""Longest run of whitespace, or of anything else, inside a block; a cut is also a border for BPE."""
_LONG_RUN = re.compile(rf"\s{{{MAX_RUN + 1},}}|\S{{{MAX_RUN + 1},}}")

PRE_TOKENIZERS = ("kimi-k2",)
NORMAL, CONTROL, UNUSED = 1, 3, 5  # tokenizer.ggml.token_type
# Structure that stays visible when other control tokens are hidden: these three are not "special" in the
# tokenizer_config.json of Kimi-K3, so that decoded text still shows where a reply's parts begin.
_ALWAYS_SHOWN = ("<|open|>", "<|close|>", "<|sep|>")


def byte_characters() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 characters stand for their own byte, the other bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def split_long(text: str) -> Iterator[str]:
    """Cuts pathological input: blocks of `MAX_BLOCK` characters, and inside them runs of at most `MAX_RUN`."""
    for start in range(0, len(text), MAX_BLOCK):
        block = text[start : start + MAX_BLOCK]
        at = 0
        for run in _LONG_RUN.finditer(block):
            for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                yield block[at:cut]
                at = cut
        yield block[at:]


class Tokenizer:
    """The vocabulary of a model file.

    Attributes:
        n_vocab: number of ids, reserved and unused ones included.
        special_tokens: name -> id of the control tokens.
        encoding: the `tiktoken.Encoding` of the ordinary and control tokens.
        bos, eos, pad: ids the file names, None where it does not.

    Text is decoded with U+FFFD in place of what is not UTF-8. Text given as `bytes` is decoded the same way, and a lone
    surrogate in a `str` also becomes U+FFFD: every input has a tokenization.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        """Builds the vocabulary from GGUF metadata.

        Raises:
            FormatError: a key is missing or contradicts another; names the key or token.
            UnsupportedError: another kind of tokenizer.
        """
        model, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
        if not (isinstance(model, str) and isinstance(pre, str) and model == "gpt2" and pre in PRE_TOKENIZERS):
            expected, found = "/".join(PRE_TOKENIZERS), f"{brief(model)} with pre-tokenizer {brief(pre)}"
            raise UnsupportedError(f"tokenizer.ggml.model {found}, expected 'gpt2' with {expected}")
        tokens, types = fields.get("tokenizer.ggml.tokens"), fields.get("tokenizer.ggml.token_type")
        if not isinstance(tokens, list):
            raise FormatError("tokenizer.ggml.tokens is missing or not a list of strings")
        kinds = _integers("tokenizer.ggml.token_type", types)
        if len(kinds) != len(tokens):
            raise FormatError(f"tokenizer.ggml.token_type: {len(kinds)} entries, expected {len(tokens)}")
        self._pieces, ranks, self.special_tokens = _read_tokens(tokens, kinds)
        self.n_vocab = len(tokens)
        self.bos = self._special_id(fields, "bos")
        self.eos = self._special_id(fields, "eos")
        self.pad = self._special_id(fields, "pad")
        shown = {self.special_tokens[name] for name in _ALWAYS_SHOWN if name in self.special_tokens}
        self._hidden = frozenset(i for i, kind in enumerate(kinds) if kind != NORMAL and i not in shown)
        self.encoding = tiktoken.Encoding(
            name="gguf", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self.special_tokens
        )

    def encode(self, text: str | bytes, special: bool = False) -> list[int]:
        """Token ids of `text`. Text that spells a control token stays text unless `special` is set. No BOS is added."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", errors="replace")
        elif not isinstance(text, str):
            raise ArgumentError(f"text must be str or bytes, got {type(text).__name__}")
        ids: list[int] = []
        for part in split_long(text):
            if special:
                ids += self.encoding.encode(part, allowed_special="all")
            else:
                ids += self.encoding.encode_ordinary(part)
        return ids

    def encode_segments(self, segments: Sequence[tuple[str, bool]]) -> list[int]:
        """Token ids of segments `(text, is_special)`; BPE never crosses a segment's border."""
        return [token for text, special in segments for token in self.encode(text, special=special)]

    def piece(self, token: int, special: bool = False) -> bytes:
        """The bytes of one token: empty for a hidden control token unless `special` is set, else its literal name.

        Raises:
            ArgumentError: no such token.
        """
        token = whole("token", token)
        if not 0 <= token < self.n_vocab:
            raise ArgumentError(f"token {brief(token)} is outside the vocabulary of {self.n_vocab}")
        return b"" if token in self._hidden and not special else self._pieces[token]

    def decode_bytes(self, tokens: Sequence[int], special: bool = False) -> bytes:
        """The bytes of tokens; may begin or end inside a UTF-8 character."""
        return b"".join(self.piece(token, special) for token in token_ids(tokens))

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """The text of tokens.

        Control, reserved and unused tokens give nothing unless `special` is set, except the structure tokens
        `<|open|>`, `<|close|>` and `<|sep|>`.
        """
        return self.decode_bytes(tokens, special).decode("utf-8", errors="replace")

    def name(self, token: int) -> str:
        """A printable name of one token."""
        return self.piece(token, special=True).decode("utf-8", errors="backslashreplace")

    def _special_id(self, fields: Mapping[str, Any], which: str) -> int | None:
        key = f"tokenizer.ggml.{which}_token_id"
        value = fields.get(key)
        if value is None:
            return None
        [token] = _integers(key, [value])
        if not 0 <= token < self.n_vocab:
            raise FormatError(f"{key} is {token}, outside the vocabulary of {self.n_vocab}")
        return token


def _integers(key: str, values: Any) -> list[int]:
    """The integers of a key; one of another type is a FormatError."""
    try:
        return token_ids(() if values is None else values)
    except ArgumentError:
        raise FormatError(f"{key} is {brief(values)}, expected integers") from None


def _read_tokens(tokens: list[str], types: list[int]) -> tuple[list[bytes], dict[bytes, int], dict[str, int]]:
    """Bytes of every id, ranks of the ordinary tokens, ids of the control tokens."""
    to_byte = byte_characters()
    table = {ord(character): chr(byte) for character, byte in to_byte.items()}
    pieces: list[bytes] = []
    ranks: dict[bytes, int] = {}
    special: dict[str, int] = {}
    for token, (text, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == NORMAL:
            if not text or not to_byte.keys() >= set(text):
                raise FormatError(f"tokenizer.ggml.tokens: token {token} ({text!r}) is not in the byte-level alphabet")
            piece = text.translate(table).encode("latin-1")
            first = ranks.setdefault(piece, token)
        elif kind in (CONTROL, UNUSED):
            if not text:
                raise FormatError(f"tokenizer.ggml.tokens: control token {token} has no name")
            piece = text.encode()
            first = special.setdefault(text, token) if kind == CONTROL else token
        else:
            raise FormatError(
                f"tokenizer.ggml.token_type: token {token} ({text!r}) has type {kind}, expected 1, 3 or 5"
            )
        if first != token:
            raise FormatError(f"tokenizer.ggml.tokens: tokens {first} and {token} are both {text!r}")
        pieces.append(piece)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise FormatError(
            f"tokenizer.ggml.tokens: no token for byte 0x{missing[0]:02x} ({len(missing)} of 256 missing)"
        )
    return pieces, ranks, special
