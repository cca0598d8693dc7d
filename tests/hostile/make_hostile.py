"""Small GGUF files with one thing wrong each, built in memory. Every case says what is wrong, in words.

    for case in cases():
        case.write(folder)   # returns the path to open

`python make_hostile.py FOLDER` writes them all, to look at or to feed to another reader.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
F32_TENSOR, Q8_0_TENSOR, Q4_K_TENSOR, MXFP4_TENSOR = 0, 8, 12, 39
_FORMAT = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}


def string(text: bytes | str, *, length: int | None = None) -> bytes:
    """A GGUF string; `length` lies about its length."""
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def scalar(kind: int, value: float | str) -> bytes:
    return string(value) if isinstance(value, str) else struct.pack("<" + _FORMAT[kind], value)


def kv(key: bytes | str, kind: int, value: float | str) -> bytes:
    return string(key) + struct.pack("<I", kind) + scalar(kind, value)


def kv_array(key: str, kind: int, items: list[float] | list[str], *, count: int | None = None) -> bytes:
    """An array value; `count` lies about the number of items."""
    head = struct.pack("<IIQ", ARR, kind, len(items) if count is None else count)
    return string(key) + head + b"".join(scalar(kind, item) for item in items)


@dataclass
class Tensor:
    """One tensor: its info fields as written and its bytes. `offset` None: the running padded sum."""

    name: bytes | str = "t"
    dims: tuple[int, ...] = (4,)
    type: int = F32_TENSOR
    data: bytes = bytes(16)
    offset: int | None = None
    n_dims: int | None = None


@dataclass
class File:
    """A GGUF file as it should be; each field can be made to lie."""

    kvs: list[bytes] = field(default_factory=lambda: [kv("general.architecture", STR, "kimi-k3")])
    tensors: list[Tensor] = field(default_factory=lambda: [Tensor()])
    magic: bytes = b"GGUF"
    version: int = 3
    n_kvs: int | None = None
    n_tensors: int | None = None
    alignment: int = 32

    def header(self) -> bytes:
        """All up to the padding before the data."""
        out = self.magic + struct.pack("<I", self.version)
        out += struct.pack("<Q", len(self.tensors) if self.n_tensors is None else self.n_tensors)
        out += struct.pack("<Q", len(self.kvs) if self.n_kvs is None else self.n_kvs)
        out += b"".join(self.kvs)
        offset = 0
        for t in self.tensors:
            out += string(t.name) + struct.pack("<I", len(t.dims) if t.n_dims is None else t.n_dims)
            out += b"".join(struct.pack("<Q", d) for d in t.dims)
            out += struct.pack("<IQ", t.type, offset if t.offset is None else t.offset)
            offset += -(-len(t.data) // self.alignment) * self.alignment
        return out

    def bytes(self) -> bytes:
        def padded(part: bytes) -> bytes:
            return part + bytes(-len(part) % self.alignment)

        return padded(self.header()) + b"".join(padded(t.data) for t in self.tensors)


@dataclass
class Case:
    """Files of which the first is opened; what is wrong; the status it must give; words its message must contain."""

    name: str
    wrong: str
    files: dict[str, bytes]
    status: str
    message: tuple[str, ...]

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        return folder / next(iter(self.files))


def split_piece(number: int, count: int, tensors: list[Tensor], total: int, *more: bytes) -> File:
    kvs = [*more, kv("split.no", U16, number), kv("split.count", U16, count), kv("split.tensors.count", I32, total)]
    return File(kvs=kvs, tensors=tensors)


ARCHITECTURE = kv("general.architecture", STR, "kimi-k3")


def split_set() -> dict[str, File]:
    """A good set of three pieces, the first without tensors."""
    return {
        "m-00001-of-00003.gguf": split_piece(0, 3, [], 3, ARCHITECTURE),
        "m-00002-of-00003.gguf": split_piece(1, 3, [Tensor("a"), Tensor("b")], 3),
        "m-00003-of-00003.gguf": split_piece(2, 3, [Tensor("c")], 3),
    }


def good() -> File:
    """A small file with every kind of value and tensor, as the base for random damage."""
    return File(
        kvs=[
            kv("general.architecture", STR, "kimi-k3"),
            kv("general.alignment", U32, 32),
            *(kv(f"scalar.{kind}", kind, 1) for kind in _FORMAT),
            *(kv_array(f"array.{kind}", kind, [0, 1, 1]) for kind in _FORMAT),
            kv_array("array.strings", STR, ["", "one", "zwei"]),
            kv_array("array.empty", STR, []),
        ],
        tensors=[
            Tensor("f32", (3, 5), F32_TENSOR, bytes(60)),
            Tensor("q8_0", (64, 2, 3), Q8_0_TENSOR, bytes(34 * 12)),
            Tensor("mxfp4", (32, 1, 2, 2), MXFP4_TENSOR, bytes(17 * 4)),
        ],
    )


def case(name: str, wrong: str, data: File | bytes, status: str, *message: str) -> Case:
    return Case(name, wrong, {"model.gguf": data if isinstance(data, bytes) else data.bytes()}, status, message)


def kvs(*values: bytes) -> File:
    return File(kvs=[ARCHITECTURE, *values])


def tensors(*values: Tensor) -> File:
    return File(tensors=list(values))


def split(name: str, wrong: str, change: dict[str, File | None], status: str, *message: str, first: str = "") -> Case:
    """The good set with some pieces replaced (None: removed); `first` is opened, else the first piece."""
    files = {**split_set(), **change}
    ordered = dict(sorted(files.items(), key=lambda item: (item[0] != first, item[0])))
    return Case(name, wrong, {k: f.bytes() for k, f in ordered.items() if f is not None}, status, message)


def cases() -> Iterator[Case]:
    """Every hostile file."""
    yield from file_cases()
    yield from key_cases()
    yield from tensor_cases()
    yield from split_cases()


def file_cases() -> Iterator[Case]:
    yield case("empty", "no byte at all", b"", "FORMAT", "empty")
    yield case("short_magic", "three bytes", b"GGU", "FORMAT", "magic", "truncated")
    yield case("magic", "another magic", File(magic=b"GGML"), "FORMAT", "not a GGUF file", "'GGML'")
    yield case(
        "lfs_pointer",
        "a Git LFS pointer in place of the file",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "FORMAT",
        "Git LFS pointer",
    )
    yield case("version_1", "version 1, with 32-bit lengths", File(version=1), "UNSUPPORTED", "version 1", "2 and 3")
    yield case("version_0", "version 0", File(version=0), "UNSUPPORTED", "version 0")
    yield case("version_4", "a version to come", File(version=4), "UNSUPPORTED", "version 4")
    yield case("big_endian", "a big-endian file", File(version=3 << 24), "UNSUPPORTED", "big-endian")
    yield case("no_counts", "ends after the version", File().bytes()[:8], "FORMAT", "number of tensors", "truncated")
    yield case("cut_header", "ends inside the tensor table", File().header()[:-3], "FORMAT", "tensor 't'", "truncated")
    yield case("cut_padding", "ends before the tensor data", File().header(), "FORMAT", "tensor 't'", "16 bytes")
    yield case(
        "cut_data",
        "the last byte of the tensor data is missing",
        File().bytes()[:-17],
        "FORMAT",
        "tensor 't'",
        "16 bytes",
    )
    yield case(
        "no_tensor_table",
        "says one tensor, ends before it",
        File(tensors=[], n_tensors=1).header(),
        "FORMAT",
        "tensor name",
        "truncated",
    )
    yield case("tensor_count", "2^60 tensors", File(n_tensors=1 << 60), "FORMAT", "number of tensors", str(1 << 60))
    yield case("tensor_count_max", "2^64 - 1 tensors", File(n_tensors=2**64 - 1), "FORMAT", "number of tensors")
    yield case("key_count", "2^60 keys", File(n_kvs=1 << 60), "FORMAT", "number of keys", str(1 << 60))
    yield case("key_count_over", "one key more than there is", File(n_kvs=2), "FORMAT")


def key_cases() -> Iterator[Case]:
    yield case("key_length", "a key of 2^63 bytes", kvs(string("k", length=1 << 63)), "FORMAT", "key", str(1 << 63))
    yield case("key_empty", "an empty key", kvs(kv("", U32, 1)), "FORMAT", "key", "0 bytes")
    yield case("key_long", "a key of 65536 bytes", kvs(kv("k" * 65536, U32, 1)), "FORMAT", "65536 bytes")
    yield case("key_control", "a key with a zero byte", kvs(kv(b"a\0b", U32, 1)), "FORMAT", r"'a\x00b'", "control")
    yield case("key_twice", "a key twice", kvs(kv("a.b", U32, 1), kv("a.b", U32, 1)), "FORMAT", "'a.b'", "twice")
    yield case(
        "value_type", "value type 13", kvs(string("a.b") + struct.pack("<II", 13, 0)), "FORMAT", "'a.b'", "type 13"
    )
    yield case(
        "array_type",
        "array of type 99",
        kvs(string("a.b") + struct.pack("<IIQ", ARR, 99, 0)),
        "FORMAT",
        "'a.b'",
        "type 99",
    )
    yield case(
        "array_nested",
        "an array of arrays",
        kvs(string("a.b") + struct.pack("<IIQ", ARR, ARR, 1) + struct.pack("<IQI", U32, 1, 7)),
        "UNSUPPORTED",
        "'a.b'",
        "array of arrays",
    )
    yield case(
        "array_count", "2^61 items", kvs(kv_array("a.b", U32, [1], count=1 << 61)), "FORMAT", "'a.b'", str(1 << 61)
    )
    yield case(
        "array_count_wrap",
        "a count whose bytes wrap to 4",
        kvs(kv_array("a.b", U32, [1], count=(1 << 62) + 1)),
        "FORMAT",
        "'a.b'",
    )
    yield case("strings_count", "2^60 strings", kvs(kv_array("a.b", STR, ["x"], count=1 << 60)), "FORMAT", "'a.b'")
    yield case(
        "string_length",
        "a string longer than the file",
        kvs(string("a.b") + struct.pack("<I", STR) + string("x", length=1 << 40)),
        "FORMAT",
        "'a.b'",
        str(1 << 40),
    )
    yield case(
        "string_length_max",
        "a string of 2^64 - 1 bytes",
        kvs(string("a.b") + struct.pack("<I", STR) + string("x", length=2**64 - 1)),
        "FORMAT",
        "'a.b'",
    )
    yield case(
        "string_in_array",
        "the second string of an array is too long",
        kvs(string("a.b") + struct.pack("<IIQ", ARR, STR, 2) + string("x") + string("y", length=1 << 33)),
        "FORMAT",
        "'a.b'",
    )
    yield case("bool", "a boolean of value 2", kvs(kv("a.b", BOOL, 2)), "FORMAT", "'a.b'", "2")
    yield case(
        "bools", "an array with a boolean of value 255", kvs(kv_array("a.b", BOOL, [1, 255])), "FORMAT", "'a.b'", "255"
    )
    yield case("alignment_0", "alignment 0", kvs(kv("general.alignment", U32, 0)), "FORMAT", "general.alignment", "0")
    yield case(
        "alignment_24", "alignment 24", kvs(kv("general.alignment", U32, 24)), "FORMAT", "general.alignment", "24"
    )
    yield case(
        "alignment_2", "alignment 2", kvs(kv("general.alignment", U32, 2)), "UNSUPPORTED", "general.alignment", "2"
    )
    yield case(
        "alignment_type",
        "alignment as i64",
        kvs(kv("general.alignment", I64, 32)),
        "FORMAT",
        "general.alignment",
        "i64",
    )
    yield case(
        "alignment_other",
        "alignment 64, but the tensors are packed for 32",
        File(kvs=[kv("general.alignment", U32, 64)], tensors=[Tensor("a"), Tensor("b")]),
        "FORMAT",
        "'b'",
        "offset is 32",
        "64",
    )


def tensor_cases() -> Iterator[Case]:
    yield case("name_empty", "an empty tensor name", tensors(Tensor("")), "FORMAT", "tensor name", "0 bytes")
    yield case("name_long", "a tensor name of 64 bytes", tensors(Tensor("n" * 64)), "FORMAT", "64 bytes")
    yield case(
        "name_control", "a tensor name with a line feed", tensors(Tensor("a\nb")), "FORMAT", r"'a\x0ab'", "control"
    )
    yield case("name_twice", "a tensor twice", tensors(Tensor("a"), Tensor("b"), Tensor("a")), "FORMAT", "'a'", "twice")
    yield case("dims_0", "no dimension", tensors(Tensor(dims=())), "FORMAT", "'t'", "0 dimensions")
    yield case("dims_5", "five dimensions", tensors(Tensor(dims=(4, 1, 1, 1, 1))), "FORMAT", "'t'", "5 dimensions")
    yield case("dims_many", "2^32 - 1 dimensions", tensors(Tensor(n_dims=2**32 - 1)), "FORMAT", "'t'", "4294967295")
    yield case("dim_zero", "a dimension of 0", tensors(Tensor(dims=(4, 0))), "FORMAT", "'t'", "dimension 1 is 0")
    yield case("dims_overflow", "2^80 values", tensors(Tensor(dims=(1 << 40, 1 << 40))), "FORMAT", "'t'", "values")
    yield case("dims_wrap", "2^64 values", tensors(Tensor(dims=(1 << 32, 1 << 32))), "FORMAT", "'t'", "values")
    yield case("dim_sign", "a dimension of 2^63", tensors(Tensor(dims=(1 << 63,))), "FORMAT", "'t'", "values")
    yield case("bytes_overflow", "2^62 floats", tensors(Tensor(dims=(1 << 62,))), "FORMAT", "'t'", "bytes")
    yield case(
        "too_large", "more data than the file has", tensors(Tensor(dims=(1 << 40,))), "FORMAT", "'t'", str(1 << 42)
    )
    yield case(
        "block", "48 columns of MXFP4", tensors(Tensor(dims=(48,), type=MXFP4_TENSOR)), "FORMAT", "'t'", "48", "MXFP4"
    )
    yield case(
        "type_q8_k",
        "a type that no file has",
        tensors(Tensor(dims=(256,), type=15)),
        "UNSUPPORTED",
        "'t'",
        "15",
        "Q8_K",
    )
    yield case("type_removed", "a type that was removed", tensors(Tensor(type=4)), "UNSUPPORTED", "'t'", "type 4")
    yield case("type_unknown", "type 2^31", tensors(Tensor(type=1 << 31)), "UNSUPPORTED", "'t'", str(1 << 31))
    yield case(
        "offset_hole",
        "a hole before the second tensor",
        tensors(Tensor("a"), Tensor("b", offset=64)),
        "FORMAT",
        "'b'",
        "64",
        "32",
    )
    yield case(
        "offset_overlap", "two tensors in one place", tensors(Tensor("a"), Tensor("b", offset=0)), "FORMAT", "'b'", "32"
    )
    yield case(
        "offset_unaligned",
        "an offset between alignments",
        tensors(Tensor("a"), Tensor("b", offset=16)),
        "FORMAT",
        "'b'",
        "16",
    )
    yield case(
        "offset_max", "an offset of 2^64 - 1", tensors(Tensor(offset=2**64 - 1)), "FORMAT", "'t'", str(2**64 - 1)
    )
    yield case(
        "data_wrap",
        "two tensors of 2^63 bytes",
        tensors(Tensor("a", dims=(1 << 61,)), Tensor("b", dims=(1 << 61,), offset=1 << 63)),
        "FORMAT",
        "'b'",
        "2^64",
    )
    yield case(
        "offset_order",
        "tensors in another order than their data",
        tensors(Tensor("a", offset=32), Tensor("b", offset=0)),
        "FORMAT",
        "'a'",
    )


def split_cases() -> Iterator[Case]:
    one, two, three = split_set()
    yield split(
        "split_missing", "the last piece is missing", {three: None}, "IO", "piece 3 of 3", three, "No such file"
    )
    yield split("split_not_first", "the second piece is opened", {}, "FORMAT", two, "piece 2", one, first=two)
    yield split(
        "split_renamed",
        "the first piece has another name",
        {one: None, "m.gguf": split_set()[one]},
        "FORMAT",
        "-00001-of-00003.gguf",
        first="m.gguf",
    )
    yield split(
        "split_name_count",
        "the name counts four pieces",
        {one: None, "m-00001-of-00004.gguf": split_set()[one]},
        "FORMAT",
        "-00001-of-00003.gguf",
        first="m-00001-of-00004.gguf",
    )
    yield split(
        "split_number",
        "a piece has another piece's number",
        {two: split_piece(2, 3, [Tensor("a")], 3)},
        "FORMAT",
        two,
        "split.no is 2",
        "expected 1",
    )
    yield split(
        "split_no_keys",
        "a piece without split keys",
        {two: File(tensors=[Tensor("a")])},
        "FORMAT",
        two,
        "split.no",
        "missing",
    )
    yield split(
        "split_counts",
        "pieces disagree on their number",
        {two: split_piece(1, 4, [Tensor("a"), Tensor("b")], 3)},
        "FORMAT",
        two,
        "'split.count'",
    )
    yield split(
        "split_totals",
        "pieces disagree on the number of tensors",
        {two: split_piece(1, 3, [Tensor("a"), Tensor("b")], 4)},
        "FORMAT",
        two,
        "'split.tensors.count'",
    )
    yield split(
        "split_total",
        "a tensor less than the set says",
        {two: split_piece(1, 3, [Tensor("a")], 3)},
        "FORMAT",
        "2 tensors",
        "3",
    )
    yield split(
        "split_twice",
        "a tensor in two pieces",
        {three: split_piece(2, 3, [Tensor("a")], 3)},
        "FORMAT",
        three,
        "'a'",
        "twice",
    )
    yield split(
        "split_architecture",
        "pieces of two models",
        {two: split_piece(1, 3, [Tensor("a"), Tensor("b")], 3, kv("general.architecture", STR, "kimi-linear"))},
        "FORMAT",
        two,
        "'general.architecture'",
    )
    yield split("split_piece_damaged", "a damaged piece", {three: File(version=9)}, "UNSUPPORTED", three, "version 9")
    yield split(
        "split_count_type",
        "split.count as text",
        {one: File(kvs=[ARCHITECTURE, kv("split.no", U16, 0), kv("split.count", STR, "3")], tensors=[])},
        "FORMAT",
        one,
        "split.count",
    )
    yield split(
        "split_count_negative",
        "split.count negative",
        {
            one: File(
                kvs=[kv("split.no", U16, 0), kv("split.count", I32, -1), kv("split.tensors.count", I32, 3)], tensors=[]
            )
        },
        "FORMAT",
        one,
        "split.count",
    )
    yield split(
        "split_count_zero",
        "split.count zero",
        {one: split_piece(0, 0, [], 0)},
        "FORMAT",
        one,
        "split.count",
    )


def main(folder: str) -> None:
    for case in cases():
        print(f"{case.write(Path(folder) / case.name)}: {case.wrong}")


if __name__ == "__main__":
    main(sys.argv[1])
