"""GGUF reader and dump: round trips, the PyPI package as witness, split and hostile files."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from gguf_ext import GGUFError, GGUFReader, Plan, PlannedTensor, write_file
from gguf_ext import dump as dump_module
from gguf_ext.constants import GGMLQuantizationType as T
from gguf_ext.constants import GGUFValueType as V
from gguf_ext.quants import quantize_rows
from hostile import make_hostile

FIELDS: list[tuple[str, Any, V, V | None]] = [
    ("general.architecture", "test", V.STRING, None),
    ("a.u8", 200, V.UINT8, None),
    ("a.i8", -100, V.INT8, None),
    ("a.u16", 60000, V.UINT16, None),
    ("a.i16", -30000, V.INT16, None),
    ("a.u32", 4_000_000_000, V.UINT32, None),
    ("a.i32", -2_000_000_000, V.INT32, None),
    ("a.u64", 2**63 + 5, V.UINT64, None),
    ("a.i64", -(2**62), V.INT64, None),
    ("a.f32", 0.5, V.FLOAT32, None),
    ("a.f64", 0.1, V.FLOAT64, None),
    ("a.true", True, V.BOOL, None),
    ("a.text", "naïve 你好", V.STRING, None),
    ("a.empty", "", V.STRING, None),
    ("b.strings", ["a", "", "Ġthe"], V.ARRAY, V.STRING),
    ("b.ints", [0, 1, -1], V.ARRAY, V.INT32),
    ("b.floats", [0.5, -2.0], V.ARRAY, V.FLOAT32),
    ("b.bools", [True, False], V.ARRAY, V.BOOL),
]


def tensor(name: str, values: np.ndarray, type_: T = T.F32) -> PlannedTensor:
    """A planned tensor that is produced row by row."""
    rows = values.reshape(-1, values.shape[-1])

    def produce(first: int, count: int) -> np.ndarray:
        return quantize_rows(rows[first : first + count].astype(np.float32), type_, name, first)

    return PlannedTensor(name, values.shape[::-1], type_, produce, 1)


def example_plan(rng: np.random.Generator) -> tuple[Plan, dict[str, np.ndarray]]:
    plan = Plan()
    for key, value, type_, element in FIELDS:
        plan.add_field(key, value, type_, element)
    values = {
        "one": rng.standard_normal(3),
        "two.weight": rng.standard_normal((5, 64)),
        "three.weight": rng.standard_normal((2, 3, 32)),
        "four": rng.standard_normal((1, 2, 1, 4)),
    }
    for name, type_ in zip(values, (T.F32, T.Q8_0, T.BF16, T.F16), strict=True):
        plan.add_tensor(tensor(name, values[name], type_))
    return plan, values


@pytest.fixture
def example(tmp_path: Path, rng: np.random.Generator) -> tuple[Path, dict[str, np.ndarray]]:
    plan, values = example_plan(rng)
    path = tmp_path / "example.gguf"
    assert write_file(plan, path) == path.stat().st_size
    return path, values


# ---- round trips -----------------------------------------------------------------------------------------------------


def test_round_trip(example: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, values = example
    with GGUFReader(path) as reader:
        assert list(reader.fields) == [key for key, *_ in FIELDS]
        for key, value, type_, element in FIELDS:
            found = reader.fields[key]
            assert (found.tolist() if isinstance(found, np.ndarray) else found) == value, key
            assert reader.types[key] == ((type_,) if element is None else (type_, element))
        assert list(reader.tensors) == list(values)
        tolerance = {T.F32: 1e-7, T.F16: 1e-3, T.BF16: 1e-2, T.Q8_0: 1e-2}
        for name, expected in values.items():
            info = reader.tensors[name]
            assert info.ne == expected.shape[::-1] and info.shape == expected.shape
            assert info.offset % reader.alignment == 0
            assert reader.data(name).nbytes == info.n_bytes
            found = reader.dequantize(name)
            assert found.shape == expected.shape and found.dtype == np.float32
            np.testing.assert_allclose(found, expected, rtol=tolerance[info.type], atol=3 * tolerance[info.type])


def test_pypi_package_reads_our_files(example: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, _ = example
    theirs = gguf.GGUFReader(path)
    with GGUFReader(path) as ours:
        keys = [key for key in theirs.fields if not key.startswith("GGUF.")]
        assert keys == list(ours.fields)
        for key in keys:
            found = ours.fields[key]
            assert theirs.fields[key].contents() == (found.tolist() if isinstance(found, np.ndarray) else found), key
        assert [t.name for t in theirs.tensors] == list(ours.tensors)
        for t in theirs.tensors:
            info = ours.tensors[t.name]
            assert (t.tensor_type, t.n_bytes, t.data_offset) == (info.type, info.n_bytes, info.offset)
            assert tuple(t.shape) == info.ne
            assert t.data.tobytes() == ours.data(t.name).tobytes()


def pypi_file(path: Path, rng: np.random.Generator, **options: Any) -> dict[str, np.ndarray]:
    writer = gguf.GGUFWriter(path, "test", **options)
    writer.add_uint32("a.number", 7)
    writer.add_array("a.texts", ["x", "y"])
    values = {f"t{n}.weight": rng.standard_normal((4, 32), dtype=np.float32) for n in range(5)}
    for name, value in values.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def test_we_read_files_of_the_pypi_package(tmp_path: Path, rng: np.random.Generator) -> None:
    values = pypi_file(tmp_path / "a.gguf", rng)
    with GGUFReader(tmp_path / "a.gguf") as reader:
        assert reader.fields == {"general.architecture": "test", "a.number": 7, "a.texts": ["x", "y"]}
        for name, value in values.items():
            np.testing.assert_array_equal(reader.dequantize(name), value)


def test_split_files_read_as_one(tmp_path: Path, rng: np.random.Generator) -> None:
    values = pypi_file(tmp_path / "a.gguf", rng, split_max_tensors=2)
    with GGUFReader(tmp_path / "a-00001-of-00003.gguf") as reader:
        assert len(reader.paths) == 3
        assert reader.fields["a.number"] == 7
        for name, value in values.items():
            np.testing.assert_array_equal(reader.dequantize(name), value)


def test_split_file_faults_are_named(tmp_path: Path, rng: np.random.Generator) -> None:
    pypi_file(tmp_path / "a.gguf", rng, split_max_tensors=2)
    parts = [tmp_path / f"a-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    with pytest.raises(GGUFError, match="part 2 of a split file of 3"):
        GGUFReader(parts[1])
    (tmp_path / "renamed.gguf").write_bytes(parts[0].read_bytes())
    with pytest.raises(GGUFError, match="not named NAME-00001-of-00003.gguf"):
        GGUFReader(tmp_path / "renamed.gguf")
    third = parts[2].read_bytes()
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(GGUFError, match=r"split.no is 1, expected 2"):
        GGUFReader(parts[0])
    parts[2].unlink()
    with pytest.raises(GGUFError, match="part 3 of 3 is missing"):
        GGUFReader(parts[0])
    parts[2].write_bytes(third.replace(b"t4.weight", b"t0.weight"))
    with pytest.raises(GGUFError, match="'t0.weight' occurs twice"):
        GGUFReader(parts[0])


def test_a_released_vocabulary_survives(tmp_path: Path) -> None:
    """163,840 tokens, as many merges: every string comes back."""
    tokens = [f"Ġtoken{n}" for n in range(163_840)]
    plan = Plan()
    plan.add_field("tokens", tokens, V.ARRAY, V.STRING)
    plan.add_field("merges", tokens[::-1], V.ARRAY, V.STRING)
    write_file(plan, tmp_path / "v.gguf")
    with GGUFReader(tmp_path / "v.gguf") as reader:
        assert reader.fields["tokens"] == tokens
        assert reader.fields["merges"] == tokens[::-1]


def test_views_outlive_the_reader(example: tuple[Path, dict[str, np.ndarray]]) -> None:
    path, values = example
    reader = GGUFReader(path)
    view = reader.data("one")
    reader.close()
    reader.close()
    np.testing.assert_array_equal(view.view(np.float32), values["one"].astype(np.float32))
    with pytest.raises(GGUFError, match="closed"):
        reader.data("one")


def test_unknown_tensor_and_nan_scale_are_errors(tmp_path: Path) -> None:
    plan = Plan()
    block = bytes([255]) + bytes(16)
    plan.add_tensor(PlannedTensor("x", (32,), T.MXFP4, lambda first, count: block))
    write_file(plan, tmp_path / "x.gguf")
    with GGUFReader(tmp_path / "x.gguf") as reader:
        with pytest.raises(GGUFError, match="no tensor 'y'"):
            reader.data("y")
        with pytest.raises(GGUFError, match="tensor x: MXFP4 block with scale byte 255"):
            reader.dequantize("x")


# ---- hostile files ---------------------------------------------------------------------------------------------------


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def field(key: str, type_: int = 4, value: bytes = struct.pack("<I", 1)) -> bytes:
    return text(key) + struct.pack("<I", type_) + value


def head(name: str | bytes = "x", ne: tuple[int, ...] = (4,), type_: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(ne)}Q", len(ne), *ne)
    return text(name) + dims + struct.pack("<IQ", type_, offset)


def raw_file(
    fields: list[bytes] | None = None,
    heads: list[bytes] | None = None,
    data: bytes = bytes(64),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    n_heads: int | None = None,
    n_fields: int | None = None,
) -> bytes:
    fields, heads = fields or [], heads or []
    n_heads = len(heads) if n_heads is None else n_heads
    n_fields = len(fields) if n_fields is None else n_fields
    header = magic + struct.pack("<IQQ", version, n_heads, n_fields) + b"".join(fields) + b"".join(heads)
    return header.ljust(-(-len(header) // 32) * 32, b"\0") + data


def array(element: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", element, count) + items


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too short"),
    "short": (b"GGUF\3\0\0\0", "too short"),
    "magic": (raw_file(magic=b"GGML"), "not a GGUF file"),
    "version_1": (raw_file(version=1), "GGUF version 1, expected 2 or 3"),
    "big_endian": (raw_file(version=3 << 24), "big-endian"),
    "key_count_huge": (raw_file(n_fields=2**63), "9223372036854775808 keys announced"),
    "tensor_count_huge": (raw_file(n_heads=2**64 - 1), "tensors announced"),
    "key_empty": (raw_file([field("")]), "key number 0 is empty"),
    "key_twice": (raw_file([field("a"), field("a")]), "key 'a' occurs twice"),
    "key_length_huge": (raw_file([struct.pack("<Q", 2**63 - 1) + bytes(60)]), "key number 0: .* beyond the end"),
    "key_not_utf8": (raw_file([text(b"\xff\xfe") + struct.pack("<II", 4, 1)]), "key number 0: text is not UTF-8"),
    "value_type_unknown": (raw_file([field("a", 99)]), "key a: unknown value type 99"),
    "text_length_huge": (raw_file([field("a", 8, struct.pack("<Q", 2**64 - 1))]), "key a: .* beyond the end"),
    "array_nested": (raw_file([field("a", 9, array(9, 1, array(4, 0)))]), "key a: an array of arrays"),
    "array_count_huge": (raw_file([field("a", 9, array(4, 2**62))]), "key a: array of 4611686018427387904"),
    "array_type_unknown": (raw_file([field("a", 9, array(77, 1))]), "key a: unknown value type 77"),
    "strings_count_huge": (raw_file([field("a", 9, array(8, 2**61))]), "key a: array of 2305843009213693952 strings"),
    "strings_beyond_end": (
        raw_file([field("a", 9, array(8, 2, text("ok") + struct.pack("<Q", 2**40)))]),
        "key a: string 1 of 2 lies beyond",
    ),
    "strings_not_utf8": (raw_file([field("a", 9, array(8, 1, text(b"\xc0")))]), "key a: string 0 is not UTF-8"),
    "alignment_zero": (raw_file([field("general.alignment", 4, struct.pack("<I", 0))]), "alignment is 0"),
    "alignment_odd": (raw_file([field("general.alignment", 4, struct.pack("<I", 24))]), "alignment is 24"),
    "alignment_text": (raw_file([field("general.alignment", 8, text("32"))]), "alignment is '32'"),
    "name_empty": (raw_file(heads=[head("")]), "tensor number 0: name '' is empty"),
    "name_long": (raw_file(heads=[head("n" * 64)]), "tensor number 0: .* over 63 bytes"),
    "name_twice": (raw_file(heads=[head(), head(offset=32)]), "tensor 'x' occurs twice"),
    "dims_none": (raw_file(heads=[head(ne=())]), "tensor x: 0 dimensions"),
    "dims_many": (raw_file(heads=[head(ne=(1,) * 5)]), "tensor x: 5 dimensions"),
    "dim_zero": (raw_file(heads=[head(ne=(4, 0))]), "tensor x: impossible dimensions"),
    "dims_overflow": (raw_file(heads=[head(ne=(2**32, 2**32))]), "tensor x: impossible dimensions"),
    "type_unknown": (raw_file(heads=[head(type_=1000)]), "tensor x: unknown type number 1000"),
    "type_removed": (raw_file(heads=[head(type_=4)]), "tensor x: unknown type number 4"),
    "row_not_whole_blocks": (raw_file(heads=[head(ne=(33,), type_=8)]), "tensor x: rows of 33 values"),
    "offset_first": (raw_file(heads=[head(offset=32)]), "tensor x: offset 32, expected 0"),
    "offset_overlap": (raw_file(heads=[head("x"), head("y", offset=0)]), "tensor y: offset 0, expected 32"),
    "offset_huge": (raw_file(heads=[head("x"), head("y", offset=2**63)]), "tensor y: offset 9223372036854775808"),
    "data_truncated": (raw_file(heads=[head(ne=(17,))]), "tensor x: .* the file is truncated"),
    "size_near_2_63": (raw_file(heads=[head(ne=(2**61,))]), "tensor x: .* the file is truncated"),
    "split_count_text": (raw_file([field("split.count", 8, text("2"))]), "split.count is '2'"),
    "split_count_zero": (raw_file([field("split.count", 2, struct.pack("<H", 0))]), "split.count is 0"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_refused(tmp_path: Path, name: str) -> None:
    content, message = HOSTILE[name]
    path = tmp_path / f"{name}.gguf"
    path.write_bytes(content)
    with pytest.raises(GGUFError, match=message):
        GGUFReader(path)


CASES = list(make_hostile.cases())


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_what_the_engine_refuses_is_refused_here(tmp_path: Path, case: make_hostile.Case) -> None:
    with pytest.raises((GGUFError, FileNotFoundError), match=tmp_path.name):
        GGUFReader(case.write(tmp_path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lfs_pointer", "Git LFS pointer"),
        ("key_long", "key number 1 is over 65535 bytes"),
        ("key_control", r"key number 1: 'a\\x00b' holds a control character"),
        ("bool", "key a.b: a boolean of byte value 2"),
        ("bools", "key a.b: a boolean of byte value 255"),
        ("alignment_2", "general.alignment is 2, .* at least 4"),
        ("alignment_type", r"general.alignment is 32 \(int64\), expected a uint32"),
        ("name_control", r"tensor number 0: name 'a\\nb' holds a control character"),
        ("split_no_keys", "split.count is missing, expected an integer of at least 1"),
        ("split_totals", "key split.tensors.count differs from the first part"),
        ("split_architecture", "key general.architecture differs from the first part"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, message: str) -> None:
    case = next(case for case in CASES if case.name == name)
    with pytest.raises(GGUFError, match=message):
        GGUFReader(case.write(tmp_path))


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(GGUFError, match="pipe.gguf: not a regular file"):
        GGUFReader(tmp_path / "pipe.gguf")


def test_every_truncation_is_refused(example: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    path, _ = example
    whole = path.read_bytes()
    with GGUFReader(path) as reader:
        last = list(reader.tensors.values())[-1]
    cut = tmp_path / "cut.gguf"
    for size in range(0, last.offset + last.n_bytes, 7):
        cut.write_bytes(whole[:size])
        with pytest.raises(GGUFError):
            GGUFReader(cut)


def test_damaged_bytes_give_a_value_or_an_error(
    example: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, rng: np.random.Generator
) -> None:
    path, _ = example
    whole = np.frombuffer(path.read_bytes(), np.uint8)
    damaged_path = tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(400):
        damaged = whole.copy()
        at = rng.integers(0, 1200, size=3)
        damaged[at] = rng.integers(0, 256, size=3)
        damaged_path.write_bytes(damaged.tobytes())
        try:
            GGUFReader(damaged_path).close()
        except GGUFError:
            refused += 1
    assert refused > 100


# ---- dump ------------------------------------------------------------------------------------------------------------


def test_dump_lists_keys_and_tensors(
    example: tuple[Path, dict[str, np.ndarray]], capsys: pytest.CaptureFixture[str]
) -> None:
    path, values = example
    assert dump_module.main([str(path)]) == 0
    out = capsys.readouterr().out
    for key, *_ in FIELDS:
        assert key in out
    for name in values:
        assert name in out
    assert "{64, 5}" in out and "Q8_0" in out


def test_dump_of_a_bad_file_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"nonsense" * 10)
    assert dump_module.main([str(tmp_path / "bad.gguf")]) == 1
    assert dump_module.main([str(tmp_path / "missing.gguf")]) == 1
    err = capsys.readouterr().err
    assert "not a GGUF file" in err and "No such file" in err


def test_dump_runs_as_a_module(example: tuple[Path, dict[str, np.ndarray]]) -> None:
    command = [sys.executable, "-m", "gguf_ext.dump", str(example[0]), "--full"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "a.text (string) = 'naïve 你好'" in done.stdout
