"""The engine's GGUF parser: good files read in full, bad ones refused by name, damaged ones never a crash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gguf as pygguf
import numpy as np
import pytest

import native
from gguf_ext import GGUFError, GGUFReader
from hostile import make_hostile
from hostile.make_hostile import ARCHITECTURE, ARR, File, Tensor, kv, split_piece, split_set

if not native.has_test_api():
    pytest.skip("the library was built without DELTA_TESTS", allow_module_level=True)

ffi, lib = native.load()
HOSTILE = list(make_hostile.cases())


def read(path: Path) -> dict[str, int]:
    """Counts and checksums of a file, all of it read."""
    info = ffi.new("delta_test_gguf_info *")
    native.check(lib.delta_test_gguf(os.fsencode(path), info))
    return {name: getattr(info, name) for name, _ in ffi.typeof("delta_test_gguf_info").fields}


def text(path: Path, key: str) -> str:
    buffer = ffi.new("char[]", 4096)
    native.check(lib.delta_test_gguf_text(os.fsencode(path), key.encode(), buffer, len(buffer)))
    return bytes(ffi.string(buffer)).decode()


def data_checksum(tensors: list[tuple[str, bytes]]) -> int:
    raw = b"".join(name.encode() + data for name, data in tensors)
    return int(lib.delta_test_checksum(raw, len(raw)))


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# -- good files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [2, 3])
def test_reads_every_kind_of_value_and_tensor(tmp_path: Path, version: int, rng: np.random.Generator) -> None:
    file = make_hostile.good()
    file.version = version
    for tensor in file.tensors:
        tensor.data = rng.bytes(len(tensor.data))
    info = read(written(tmp_path / "a.gguf", file.bytes()))
    assert (info["n_files"], info["n_values"], info["n_tensors"]) == (1, len(file.kvs), 3)
    assert info["n_bytes"] == sum(len(t.data) for t in file.tensors)
    assert info["data_checksum"] == data_checksum([(str(t.name), t.data) for t in file.tensors])


def test_reads_what_the_gguf_package_writes(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "a.gguf"
    arrays = [
        ("f32", rng.standard_normal((2, 3, 5), dtype=np.float32), None),
        ("f16", rng.standard_normal((7, 9)).astype(np.float16), None),
        ("q8_0", rng.standard_normal((4, 96), dtype=np.float32), pygguf.GGMLQuantizationType.Q8_0),
        ("mxfp4", rng.standard_normal((2, 3, 64), dtype=np.float32), pygguf.GGMLQuantizationType.MXFP4),
        ("bf16", rng.standard_normal((3,), dtype=np.float32), pygguf.GGMLQuantizationType.BF16),
    ]
    writer = pygguf.GGUFWriter(path, "kimi-k3")
    writer.add_custom_alignment(64)
    stored = []
    for name, values, kind in arrays:
        raw = values if kind is None else pygguf.quants.quantize(values, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
        stored.append((name, raw.tobytes()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    info = read(path)
    assert info["n_bytes"] == sum(len(raw) for _, raw in stored)
    assert info["data_checksum"] == data_checksum(stored)


def test_reads_a_set_that_the_gguf_package_splits(tmp_path: Path, rng: np.random.Generator) -> None:
    writer = pygguf.GGUFWriter(tmp_path / "m.gguf", "kimi-k3", split_max_tensors=2)
    stored = []
    for i in range(5):
        values = rng.standard_normal((3, 4), dtype=np.float32)
        writer.add_tensor(f"t{i}", values)
        stored.append((f"t{i}", values.tobytes()))
    writer.write_header_to_file(tmp_path / "m.gguf")
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    info = read(tmp_path / "m-00001-of-00003.gguf")
    assert (info["n_files"], info["n_tensors"]) == (3, 5)
    assert info["data_checksum"] == data_checksum(stored)


def test_reads_a_set_whose_first_piece_has_no_tensors(tmp_path: Path) -> None:
    for name, file in split_set().items():
        written(tmp_path / name, file.bytes())
    info = read(tmp_path / "m-00001-of-00003.gguf")
    assert (info["n_files"], info["n_tensors"], info["n_values"]) == (3, 3, 4)


def test_split_of_one_may_have_any_name(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", split_piece(0, 1, [Tensor()], 1, ARCHITECTURE).bytes())
    assert read(path)["n_files"] == 1


def test_split_name_without_split_keys_is_one_file(tmp_path: Path) -> None:
    assert read(written(tmp_path / "m-00002-of-00003.gguf", File().bytes()))["n_files"] == 1


def test_keys_without_tensors_and_padding(tmp_path: Path) -> None:
    """A vocabulary-only file ends with its keys."""
    file = File(tensors=[])
    assert read(written(tmp_path / "a.gguf", file.header()))["n_tensors"] == 0


def test_last_tensor_needs_no_padding(tmp_path: Path) -> None:
    file = File()
    assert read(written(tmp_path / "a.gguf", file.bytes()[:-16]))["n_bytes"] == 16


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (kv("k", make_hostile.U8, 255), "255"),
        (kv("k", make_hostile.I8, -128), "-128"),
        (kv("k", make_hostile.U16, 65535), "65535"),
        (kv("k", make_hostile.I16, -32768), "-32768"),
        (kv("k", make_hostile.U32, 2**32 - 1), "4294967295"),
        (kv("k", make_hostile.I32, -(2**31)), "-2147483648"),
        (kv("k", make_hostile.U64, 2**64 - 1), "18446744073709551615"),
        (kv("k", make_hostile.I64, -(2**63)), "-9223372036854775808"),
        (kv("k", make_hostile.F32, 0.1), "0.1"),
        (kv("k", make_hostile.F32, 1e-5), "1e-05"),
        (kv("k", make_hostile.F64, 0.1), "0.1"),
        (kv("k", make_hostile.F64, float("-inf")), "-inf"),
        (kv("k", make_hostile.BOOL, 1), "true"),
        (kv("k", make_hostile.BOOL, 0), "false"),
        (kv("k", make_hostile.STR, "über"), "über"),
        (kv("k", make_hostile.STR, ""), ""),
        (make_hostile.kv_array("k", make_hostile.I32, [0, -1, 7]), "[0, -1, 7]"),
        (make_hostile.kv_array("k", make_hostile.BOOL, [0, 1]), "[false, true]"),
        (make_hostile.kv_array("k", make_hostile.F64, [0.5, 2.0]), "[0.5, 2]"),
        (make_hostile.kv_array("k", make_hostile.STR, ["a", "", "b c"]), "[a, , b c]"),
        (make_hostile.kv_array("k", make_hostile.U16, []), "[]"),
    ],
)
def test_value_as_text(tmp_path: Path, value: bytes, expected: str) -> None:
    assert text(written(tmp_path / "a.gguf", File(kvs=[value]).bytes()), "k") == expected


# -- bad files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", HOSTILE, ids=[case.name for case in HOSTILE])
def test_hostile_file_is_refused_by_name(tmp_path: Path, case: make_hostile.Case) -> None:
    path = case.write(tmp_path)
    with pytest.raises(native.NativeError) as error:
        read(path)
    assert error.value.name == case.status
    for part in (path.parent.name, *case.message):
        assert part in error.value.message


def test_names_in_messages_are_printable(tmp_path: Path) -> None:
    tensor = Tensor(b"\xff\x80", dims=(0,))
    with pytest.raises(native.NativeError, match=r"'\\xff\\x80'"):
        read(written(tmp_path / "a.gguf", File(tensors=[tensor]).bytes()))


@pytest.mark.parametrize("name", ["", "missing.gguf"])
def test_path_that_is_no_file(tmp_path: Path, name: str) -> None:
    """The folder itself, and a file that is not there."""
    with pytest.raises(native.NativeError) as error:
        read(tmp_path / name)
    assert error.value.name == "IO"
    assert str(tmp_path / name) in error.value.message


def test_every_truncation_is_refused() -> None:
    file = make_hostile.good()
    data = file.bytes()
    end_of_data = len(data) - (-len(file.tensors[-1].data) % file.alignment)
    info = ffi.new("delta_test_gguf_info *")
    for size in range(end_of_data):
        assert lib.delta_test_gguf_bytes(data, size, info) == lib.DELTA_FORMAT, size
    native.check(lib.delta_test_gguf_bytes(data, end_of_data, info))
    assert info.n_tensors == 3


def test_array_claims_do_not_allocate(tmp_path: Path) -> None:
    """A count that fits the file's size in bytes but not in strings is refused before memory is taken for it."""
    claim = make_hostile.string("k") + make_hostile.struct.pack("<IIQ", ARR, make_hostile.STR, 2**40)
    with pytest.raises(native.NativeError) as error:
        read(written(tmp_path / "a.gguf", File(kvs=[claim]).bytes()))
    assert error.value.name == "FORMAT"


def test_the_python_reader_refuses_damage_that_the_engine_refuses(tmp_path: Path, rng: np.random.Generator) -> None:
    """Both read what a model opens: the Python reader the vocabulary, the engine the rest."""
    whole = np.frombuffer(make_hostile.good().bytes(), np.uint8)
    info = ffi.new("delta_test_gguf_info *")
    seen = {True: 0, False: 0}
    for _ in range(2000):
        damaged = whole.copy()
        damaged[rng.integers(len(make_hostile.good().header()))] = rng.integers(256)
        status = lib.delta_test_gguf_bytes(damaged.tobytes(), len(damaged), info)
        refused = status == lib.DELTA_FORMAT  # UNSUPPORTED: a type that the Python reader knows and the engine lacks
        seen[refused] += 1
        if refused:
            with pytest.raises(GGUFError):
                GGUFReader(written(tmp_path / "damaged.gguf", damaged.tobytes()))
    assert min(seen.values()) > 100


def test_random_damage_gives_a_status(seed: int) -> None:
    """In a process of its own: a crash there is a failure here."""
    script = Path(make_hostile.__file__).with_name("fuzz_gguf.py")
    run = subprocess.run(
        [sys.executable, str(script), str(seed), "20000"],
        env={**os.environ, "DELTALLAMA_LIBRARY": str(native.library_path())},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, f"seed {seed}: {run.stdout}{run.stderr}"
    assert "FORMAT" in run.stdout and "OK" in run.stdout
