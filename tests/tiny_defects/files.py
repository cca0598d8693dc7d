"""Shards, index and tokenizer files that are damaged or disagree."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tiny_files import Checkpoint, HfTensor, write_safetensors

from .registry import defect, file_defect


def last_shard(checkpoint: Checkpoint, folder: Path) -> Path:
    return folder / checkpoint.shard_name(len(checkpoint.shards) - 1)


def edit_header(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the JSON header of a safetensors file, leaving the payload as it is."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    edit(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


def tensor_names(header: dict[str, Any]) -> list[str]:
    return [name for name in header if name != "__metadata__"]


@file_defect("the last shard is cut by one byte")
def truncated_shard(checkpoint: Checkpoint, folder: Path) -> None:
    path = last_shard(checkpoint, folder)
    path.write_bytes(path.read_bytes()[:-1])


@file_defect("the last shard has four bytes after the last tensor")
def trailing_bytes(checkpoint: Checkpoint, folder: Path) -> None:
    with last_shard(checkpoint, folder).open("ab") as file:
        file.write(b"\0\0\0\0")


@file_defect("the last shard is empty")
def empty_shard(checkpoint: Checkpoint, folder: Path) -> None:
    last_shard(checkpoint, folder).write_bytes(b"")


@file_defect("the last shard's header length is 2^63 - 1")
def header_len_huge(checkpoint: Checkpoint, folder: Path) -> None:
    path = last_shard(checkpoint, folder)
    path.write_bytes((2**63 - 1).to_bytes(8, "little") + path.read_bytes()[8:])


@file_defect("the last shard's header is said to be one byte longer than the file")
def header_past_end(checkpoint: Checkpoint, folder: Path) -> None:
    path = last_shard(checkpoint, folder)
    raw = path.read_bytes()
    path.write_bytes((len(raw) - 7).to_bytes(8, "little") + raw[8:])


@file_defect("the last shard's header is not JSON")
def header_not_json(checkpoint: Checkpoint, folder: Path) -> None:
    path = last_shard(checkpoint, folder)
    raw = bytearray(path.read_bytes())
    raw[8] = ord("[")
    path.write_bytes(raw)


@file_defect("one name is in the last shard's header twice")
def duplicate_key(checkpoint: Checkpoint, folder: Path) -> None:
    path = last_shard(checkpoint, folder)
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    text = raw[8 : 8 + size].rstrip()
    header = json.loads(text)
    name = tensor_names(header)[0]
    again = json.dumps({name: header[name]}, separators=(",", ":")).encode()[1:]
    text = text[:-1] + b"," + again
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + size :])


@file_defect("two tensors of the last shard share bytes")
def offset_overlap(checkpoint: Checkpoint, folder: Path) -> None:
    def edit(header: dict[str, Any]) -> None:
        first, second = tensor_names(header)[:2]
        length = header[second]["data_offsets"][1] - header[second]["data_offsets"][0]
        start = header[first]["data_offsets"][0]
        header[second]["data_offsets"] = [start, start + length]

    edit_header(last_shard(checkpoint, folder), edit)


@file_defect("a tensor of the last shard ends near 2^63")
def offset_huge(checkpoint: Checkpoint, folder: Path) -> None:
    def edit(header: dict[str, Any]) -> None:
        offsets = header[tensor_names(header)[-1]]["data_offsets"]
        offsets[0] += 2**63 - 4096
        offsets[1] += 2**63 - 4096

    edit_header(last_shard(checkpoint, folder), edit)


@file_defect("a tensor of the last shard ends before it starts")
def offset_reversed(checkpoint: Checkpoint, folder: Path) -> None:
    def edit(header: dict[str, Any]) -> None:
        header[tensor_names(header)[-1]]["data_offsets"].reverse()

    edit_header(last_shard(checkpoint, folder), edit)


@file_defect("a tensor of the last shard has a negative dimension")
def shape_negative(checkpoint: Checkpoint, folder: Path) -> None:
    def edit(header: dict[str, Any]) -> None:
        header[tensor_names(header)[-1]]["shape"][0] *= -1

    edit_header(last_shard(checkpoint, folder), edit)


@file_defect("a BF16 tensor of the last shard is described as F32, so its byte count does not fit")
def dtype_lies(checkpoint: Checkpoint, folder: Path) -> None:
    def edit(header: dict[str, Any]) -> None:
        name = next(n for n in tensor_names(header) if header[n]["dtype"] == "BF16")
        header[name]["dtype"] = "F32"

    edit_header(last_shard(checkpoint, folder), edit)


@file_defect("a tensor of the last shard has a dtype that does not exist: F13")
def dtype_unknown(checkpoint: Checkpoint, folder: Path) -> None:
    def edit(header: dict[str, Any]) -> None:
        header[tensor_names(header)[0]]["dtype"] = "F13"

    edit_header(last_shard(checkpoint, folder), edit)


@file_defect("the last shard's header entry of a tensor has no data_offsets")
def header_entry_incomplete(checkpoint: Checkpoint, folder: Path) -> None:
    def edit(header: dict[str, Any]) -> None:
        del header[tensor_names(header)[0]]["data_offsets"]

    edit_header(last_shard(checkpoint, folder), edit)


@file_defect("a shard file that the index does not list lies in the folder")
def unlisted_shard(checkpoint: Checkpoint, folder: Path) -> None:
    write_safetensors(folder / "model-extra.safetensors", {"model.extra.weight": HfTensor.from_float(np.ones((2, 2)))})


@defect("the index names a file that is not there")
def index_names_absent_file(checkpoint: Checkpoint) -> None:
    checkpoint.weight_map["model.extra.weight"] = "model-00099-of-00099.safetensors"


@defect("the index lists a tensor that is not in its shard")
def index_names_absent_tensor(checkpoint: Checkpoint) -> None:
    checkpoint.weight_map["model.extra.weight"] = checkpoint.shard_name(0)


@defect("the index places embed_tokens in another shard than the one that holds it")
def index_names_wrong_file(checkpoint: Checkpoint) -> None:
    shard, name = checkpoint.find("model.embed_tokens.weight")
    other = next(i for i, s in enumerate(checkpoint.shards) if s is not shard)
    checkpoint.weight_map[name] = checkpoint.shard_name(other)


@defect("the index points outside of the folder")
def index_leaves_folder(checkpoint: Checkpoint) -> None:
    checkpoint.weight_map["model.extra.weight"] = "../model.safetensors"


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    edit(index)
    path.write_text(json.dumps(index), encoding="utf-8")


@file_defect("a tensor of the first shard is not in the index")
def index_omits_tensor(checkpoint: Checkpoint, folder: Path) -> None:
    name = checkpoint.prefix + "model.layers.0.input_layernorm.weight"
    edit_index(folder, lambda index: index["weight_map"].pop(name))


@file_defect("the index has no weight_map")
def index_without_map(checkpoint: Checkpoint, folder: Path) -> None:
    edit_index(folder, lambda index: index.pop("weight_map"))


@file_defect("the index is cut in the middle")
def index_not_json(checkpoint: Checkpoint, folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_bytes(path.read_bytes()[:200])


@file_defect("no index, and the second of the numbered shards is missing")
def numbered_shard_missing(checkpoint: Checkpoint, folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    (folder / checkpoint.shard_name(1)).unlink()


@file_defect("there is no safetensors file at all")
def no_shards(checkpoint: Checkpoint, folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    for path in folder.glob("*.safetensors"):
        path.unlink()


@file_defect("tiktoken.model is missing")
def tiktoken_missing(checkpoint: Checkpoint, folder: Path) -> None:
    (folder / "tiktoken.model").unlink()


@defect("tiktoken.model skips rank 300")
def tiktoken_gap(checkpoint: Checkpoint) -> None:
    lines = checkpoint.tiktoken.splitlines(keepends=True)
    checkpoint.tiktoken = b"".join(lines[:300] + lines[301:])


@defect("tiktoken.model has one token under two ranks")
def tiktoken_duplicate(checkpoint: Checkpoint) -> None:
    lines = checkpoint.tiktoken.splitlines(keepends=True)
    lines[300] = lines[299].split()[0] + b" 300\n"
    checkpoint.tiktoken = b"".join(lines)


@defect("line 11 of tiktoken.model is not base64")
def tiktoken_not_base64(checkpoint: Checkpoint) -> None:
    lines = checkpoint.tiktoken.splitlines(keepends=True)
    lines[10] = b"!!!! 10\n"
    checkpoint.tiktoken = b"".join(lines)


@defect("tiktoken.model has more tokens than vocab_size")
def tiktoken_too_long(checkpoint: Checkpoint) -> None:
    lines = checkpoint.tiktoken.splitlines(keepends=True)
    extra = [b"%s %d\n" % (b"AAAAAA" + bytes([65 + i % 26, 65 + i // 26]), len(lines) + i) for i in range(100)]
    checkpoint.tiktoken = b"".join(lines + extra)


@defect("two special tokens have the same text")
def special_text_twice(checkpoint: Checkpoint) -> None:
    entries = checkpoint.tokenizer_config["added_tokens_decoder"]
    ids = sorted(entries, key=int)
    entries[ids[1]]["content"] = entries[ids[0]]["content"]


@defect("a special token id beyond vocab_size")
def special_beyond_vocab(checkpoint: Checkpoint) -> None:
    entries = checkpoint.tokenizer_config["added_tokens_decoder"]
    entries[str(checkpoint.text["vocab_size"])] = {"content": "<|beyond|>", "special": True}
