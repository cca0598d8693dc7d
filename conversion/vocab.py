"""The vocabulary of a Kimi checkpoint as GGUF arrays, read directly from its files.

`tiktoken.model` has one line `base64(bytes) rank` per byte-level token; the id is the rank. `tokenizer_config.json`
names the special ids above. No tokenizer library and none of the checkpoint's own code is run. A `tokenizer.json` is
not read: its merges need not be the ranks the model was trained with.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from gguf_ext import Plan
from gguf_ext import constants as c
from gguf_ext.constants import GGUFValueType, TokenType

from .config import Config, read_bytes, read_json
from .errors import ConversionError
from .headers import LFS_POINTER_PROBLEM, is_lfs_pointer
from .merging import last_merges

RANKS_NAME = "tiktoken.model"
CONFIG_NAME = "tokenizer_config.json"
MAX_TOKENS = 1 << 20  # far beyond any model; a damaged count must not fill the memory
MAX_TOKEN_BYTES = 4096  # likewise: finding a merge takes the square of it
N_RESERVED = 256  # special ids directly above the ranks; those without a name of their own are reserved


def _byte_to_unicode() -> dict[int, int]:
    """GPT-2's table: printable bytes stand for themselves, the other 68 for the code points from 256 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {byte: 256 + n for n, byte in enumerate(others)}


_TABLE = _byte_to_unicode()


def printable(token: bytes) -> str:
    """Token bytes in the printable spelling that GGUF files use for byte-level tokens."""
    return token.decode("latin-1").translate(_TABLE)


def _all_printable(tokens: list[bytes]) -> list[str]:
    """The same for many at once: a byte is one character, so the spelling of all can be cut where the tokens end."""
    text = printable(b"".join(tokens))
    ends = list(accumulate(map(len, tokens), initial=0))
    return [text[begin:end] for begin, end in pairwise(ends)]


@dataclass(frozen=True)
class Vocabulary:
    """`tokens[id]`, `types[id]` (NORMAL, CONTROL, UNUSED) and `merges` in order of rank; the token ids are of the
    config."""

    tokens: list[str]
    types: list[TokenType]
    merges: list[str]
    bos: int | None
    eos: int
    padding: int | None
    chat_template: str | None
    named_templates: dict[str, str]

    def add_fields(self, plan: Plan) -> None:
        """Add the tokenizer keys in file order."""
        string, array, u32 = GGUFValueType.STRING, GGUFValueType.ARRAY, GGUFValueType.UINT32
        plan.add_field(c.KEY_TOKENIZER_MODEL, "gpt2", string)
        plan.add_field(c.KEY_TOKENIZER_PRE, "kimi-k2", string)  # known by family; no hash of sample ids is involved
        plan.add_field(c.KEY_TOKENS, self.tokens, array, string)
        plan.add_field(c.KEY_TOKEN_TYPE, [int(type_) for type_ in self.types], array, GGUFValueType.INT32)
        plan.add_field(c.KEY_MERGES, self.merges, array, string)
        for key, token in ((c.KEY_BOS, self.bos), (c.KEY_EOS, self.eos), (c.KEY_PADDING, self.padding)):
            if token is not None:
                plan.add_field(key, token, u32)
        for name, template in self.named_templates.items():
            plan.add_field(f"{c.KEY_CHAT_TEMPLATE}.{name}", template, string)
        if self.named_templates:
            plan.add_field(c.KEY_CHAT_TEMPLATES, sorted(self.named_templates), array, string)
        if self.chat_template:
            plan.add_field(c.KEY_CHAT_TEMPLATE, self.chat_template, string)


def read_vocabulary(folder: Path, config: Config, default_template: str | None) -> Vocabulary:
    """Read and check the vocabulary of a model folder; `default_template` serves when the folder has no chat template.

    Where `config.checks` gathers problems, what is wrong is missing in the result.

    Raises:
        ConversionError: a file is missing or malformed, ranks or names are not a consistent vocabulary, or its size is
            not the config's `vocab_size`.
    """
    checks = config.checks
    size = config.integer("vocab_size", maximum=MAX_TOKENS)
    vocabulary = Vocabulary([], [], [], None, 0, None, default_template, {})
    with checks:
        ranks = read_ranks(folder / RANKS_NAME)
        if not config.has_stand_ins:
            tokens, types = _tokens(folder, ranks, size)
            vocabulary = replace(vocabulary, tokens=tokens, types=types, merges=_merges(folder, ranks))
    with checks:
        template, named = read_chat_templates(folder)
        vocabulary = replace(vocabulary, chat_template=template or default_template, named_templates=named)
    if config.has_stand_ins:
        return vocabulary
    with checks:
        vocabulary = replace(vocabulary, bos=_token_id(config, "bos_token_id", size))
    with checks:
        vocabulary = replace(vocabulary, eos=_required_token_id(config, "eos_token_id", size))
    with checks:
        vocabulary = replace(vocabulary, padding=_token_id(config, "pad_token_id", size))
    return vocabulary


def _tokens(folder: Path, ranks: list[bytes], size: int) -> tuple[list[str], list[TokenType]]:
    """Text and type of every id below `size`."""
    names = _special_names(folder / CONFIG_NAME, len(ranks), size)
    tokens = _all_printable(ranks)
    types = [TokenType.NORMAL] * len(ranks)
    for token_id in range(len(ranks), size):
        reserved = token_id < len(ranks) + N_RESERVED
        fallback = f"<|reserved_token_{token_id}|>" if reserved else f"[PAD{token_id}]"
        tokens.append(names.get(token_id, fallback))
        types.append(TokenType.CONTROL if reserved or token_id in names else TokenType.UNUSED)
    _check_unique(folder, tokens)
    return tokens, types


def _merges(folder: Path, ranks: list[bytes]) -> list[str]:
    lines = list(merges(ranks))
    if not lines:
        raise ConversionError(
            f"{folder / RANKS_NAME}: no token is a merge of two others; text would fall into single bytes"
        )
    return lines


def read_ranks(path: Path) -> list[bytes]:
    """The byte-level tokens of a `tiktoken.model`, by rank.

    Raises:
        ConversionError: names the line; also when a rank is missing, a token occurs twice or one of the 256 bytes is no
            token.
    """
    if not path.is_file():
        other = path.with_name("tokenizer.json")
        hint = f" ({other.name} is there, but its merges are not the model's ranks)" if other.is_file() else ""
        raise ConversionError(f"{path} is missing{hint}")
    ranks: dict[bytes, int] = {}
    content = read_bytes(path)
    if is_lfs_pointer(content):
        raise ConversionError(f"{path} {LFS_POINTER_PROBLEM}")
    for number, line in enumerate(content.splitlines(), start=1):
        if not line:
            continue
        parts = line.split()
        try:
            token, rank = base64.b64decode(parts[0], validate=True), int(parts[1])
        except (binascii.Error, ValueError, IndexError):
            raise ConversionError(f"{path}: line {number} is not a base64 token and a rank") from None
        if len(parts) != 2 or not token:
            raise ConversionError(f"{path}: line {number} is not a base64 token and a rank")
        if len(token) > MAX_TOKEN_BYTES:
            raise ConversionError(f"{path}: line {number}: a token of {len(token)} bytes, at most {MAX_TOKEN_BYTES}")
        if token in ranks:
            raise ConversionError(
                f"{path}: line {number}: the token {token!r} occurs twice, first with rank {ranks[token]}"
            )
        ranks[token] = rank
    tokens = sorted(ranks, key=ranks.__getitem__)
    for expected, token in enumerate(tokens):
        if ranks[token] != expected:
            raise ConversionError(
                f"{path}: ranks do not count from 0 without gaps: found {ranks[token]}, expected {expected}"
            )
    absent = [byte for byte in range(256) if bytes((byte,)) not in ranks]
    if absent:
        raise ConversionError(f"{path}: no token for {len(absent)} of the 256 bytes, the first is {absent[0]:#04x}")
    return tokens


def merges(tokens: list[bytes]) -> Iterator[str]:
    """Merge lines `left right` in order of rank.

    Ranks are all a tiktoken file has. The merge of a token is what byte pair encoding with only the ranks below its own
    leaves of its bytes, if that is two pieces; a token that ends in more is never made by merging and has no line.
    """
    for text, at in zip(_all_printable(tokens), last_merges(tokens), strict=True):
        if at:
            yield f"{text[:at]} {text[at:]}"


def read_chat_templates(folder: Path) -> tuple[str | None, dict[str, str]]:
    """The default chat template and the named ones: `chat_template.jinja`, else `chat_template.json`, else the
    tokenizer's.

    Raises:
        ConversionError: a template is neither text nor a list of named texts.
    """
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        try:
            return read_bytes(jinja).decode("utf-8").replace("\r\n", "\n"), {}
        except UnicodeDecodeError as error:
            raise ConversionError(f"{jinja} is not UTF-8: {error.reason}") from None
    for path in (folder / "chat_template.json", folder / CONFIG_NAME):
        if path.is_file():
            value = read_json(path).get("chat_template")
            if value is not None:
                return _templates(path, value)
    return None, {}


def _templates(path: Path, value: Any) -> tuple[str | None, dict[str, str]]:
    if isinstance(value, str):
        return value, {}
    named: dict[str, str] = {}
    for entry in value if isinstance(value, list) else [None]:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
            raise ConversionError(f"{path}: chat_template is neither text nor a list of named templates")
        name = "".join(ch if ch.isascii() and ch.isalnum() else "_" for ch in entry["name"])  # it becomes part of a key
        if not name or name in named:
            raise ConversionError(f"{path}: chat_template: the name {entry['name']!r} is empty or occurs twice")
        named[name] = entry["template"]
    return named.pop("default", None), named


def _special_names(path: Path, n_ranks: int, size: int) -> dict[int, str]:
    if size < n_ranks:
        raise ConversionError(f"{path.with_name(RANKS_NAME)} has {n_ranks} tokens, but vocab_size is {size}")
    entries = read_json(path).get("added_tokens_decoder", {})
    if not isinstance(entries, dict):
        raise ConversionError(f"{path}: added_tokens_decoder is not an object")
    names: dict[int, str] = {}
    for key, entry in entries.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not key.isascii() or not key.isdecimal() or not isinstance(content, str) or not content:
            raise ConversionError(f"{path}: added_tokens_decoder: entry {key!r} is not a token id with its content")
        token_id = int(key)
        if not n_ranks <= token_id < size:
            raise ConversionError(
                f"{path}: token {content!r} has id {token_id}, expected {n_ranks} to {size - 1} "
                f"({n_ranks} ranks in {RANKS_NAME}, vocab_size {size})"
            )
        names[token_id] = content
    return names


def _check_unique(folder: Path, tokens: list[str]) -> None:
    if len(set(tokens)) == len(tokens):
        return
    first: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        if first.setdefault(token, token_id) != token_id:
            raise ConversionError(f"{folder}: tokens {first[token]} and {token_id} have the same text {token!r}")


def _token_id(config: Config, field: str, size: int) -> int | None:
    """An optional token id: the outer configuration's first, then the text model's. Of a list, the first counts."""
    for values in (config.raw, config.values):
        value = values.get(field)
        if isinstance(value, list) and value:
            value = value[0]
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < size:
            raise ConversionError(f"{config.path}: {field} is {value!r}, expected a token id below vocab_size {size}")
        return value
    return None


def _required_token_id(config: Config, field: str, size: int) -> int:
    value = _token_id(config, field, size)
    if value is None:
        raise ConversionError(f"{config.path}: {field} is missing: generation would not know where to stop")
    return value
