"""Proof of written files: digests that other programs find too, and every kind of damage by name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import conversion
import tiny
from gguf_ext import GGUFError, GGUFReader
from gguf_ext.split import Limits, Output
from gguf_ext.verify import verify_file
from gguf_ext.writer import write_file
from test_resume import example_plan, flip


@pytest.fixture
def output(tmp_path: Path) -> Output:
    output = Output(example_plan(), tmp_path / "x.gguf")
    write_file(output.plan, output.path)
    return output


def digests(output: Output, **options: int) -> dict[str, str]:
    found: dict[str, str] = {}
    verify_file(output, on_digest=lambda name, digest: found.update({name: digest}), **options)
    return found


@pytest.mark.parametrize("threads", [1, 4])
def test_digests_are_those_of_the_bytes(output: Output, threads: int) -> None:
    with GGUFReader(output.path) as reader:
        expected = {name: hashlib.sha256(reader.data(name)).hexdigest() for name in reader.tensors}
    expected[str(output.path)] = hashlib.sha256(output.path.read_bytes()).hexdigest()
    assert list(digests(output, threads=threads).items()) == list(expected.items())


def test_every_flipped_byte_is_found_and_named(output: Output) -> None:
    """Each byte of the file in turn: header, data, padding."""
    content = output.path.read_bytes()
    where = {offset: "the header: " for offset in range(len(output.header))}
    for piece in output.plan.pieces(len(output.header)):
        row_bytes = piece.n_bytes // piece.n_rows
        for n in range(piece.n_bytes):
            where[piece.offset + n] = f"tensor {piece.tensor.name}: row {piece.first + n // row_bytes}, "
        for n in range(piece.padding):
            where[piece.offset + piece.n_bytes + n] = f"tensor {piece.tensor.name}: padding after it, "
    assert sorted(where) == list(range(len(content)))
    for offset in [*range(0, len(content), 5), *(n for n, what in where.items() if "padding" in what)]:
        flip(output.path, offset)
        with pytest.raises(GGUFError) as caught:
            verify_file(output, threads=2)
        byte = f"byte {offset} of the file is 0x{content[offset] ^ 1:02x}, expected 0x{content[offset]:02x}"
        assert str(caught.value) == f"{output.path} is not what its source gives: {where[offset]}{byte}"
        flip(output.path, offset)
    verify_file(output)


def test_a_damaged_tensor_gets_no_digest(output: Output) -> None:
    first, *_ = output.plan.pieces(len(output.header))
    flip(output.path, first.offset)
    found: dict[str, str] = {}
    with pytest.raises(GGUFError, match="tensor a: row 0"):
        verify_file(output, on_digest=lambda name, digest: found.update({name: digest}))
    assert list(found) == ["b", "c"]


@pytest.mark.parametrize("change", [-1, 1])
def test_another_size_is_named(output: Output, change: int) -> None:
    content = output.path.read_bytes()
    output.path.write_bytes(content[:-1] if change < 0 else content + b"\0")
    message = rf"x\.gguf has {len(content) + change} bytes, expected {len(content)}"
    with pytest.raises(GGUFError, match=message):
        verify_file(output)


def test_a_missing_file_is_named(output: Output) -> None:
    output.path.unlink()
    with pytest.raises(GGUFError, match=r"x\.gguf is not there and cannot be verified"):
        verify_file(output)


# ---- conversions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("preset", ["k3", "kl"])
def test_conversions_verify(tiny_checkpoint: Callable[..., Path], tmp_path: Path, preset: str, outtype: str) -> None:
    found: dict[str, str] = {}
    path = conversion.convert(
        tiny_checkpoint(preset), tmp_path / "x.gguf", outtype, verify=True, on_digest=lambda *d: found.update([d])
    )
    with GGUFReader(path) as reader:
        assert list(found) == [*reader.tensors, str(path)]
    assert found[str(path)] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_another_source_is_found(tmp_path: Path) -> None:
    """A weight that has changed since, and one that was converted otherwise."""
    model = tiny.write_checkpoint(tmp_path / "model", "kimi-linear")
    path = conversion.convert(model, tmp_path / "x.gguf", "bf16")
    shard = max(model.glob("*.safetensors"))
    flip(shard, shard.stat().st_size - 2)  # the low bits of the last weight
    with pytest.raises(GGUFError, match=r"x\.gguf is not what its source gives: tensor \S+: row \d+, byte \d+"):
        conversion.convert(model, path, "bf16", verify_only=True)
    with pytest.raises(GGUFError, match=r"x\.gguf has \d+ bytes, expected \d+"):
        conversion.convert(model, path, "f32", verify_only=True)
    with pytest.raises(GGUFError, match=r"x\.gguf is not what its source gives: the header: .* and \d+ more tensors"):
        conversion.convert(model, path, "f16", verify_only=True)


def test_cli_verifies_splits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny.write_checkpoint(tmp_path / "model", "kimi-linear")
    arguments = [str(model), "--outfile", str(tmp_path / "x.gguf"), "--split-max-size", "300K"]
    assert conversion.cli_main([*arguments, "--verify-only"]) == 1
    assert re.search(r"error: .*x-00001-of-\d+\.gguf is not there", capsys.readouterr().err)
    assert conversion.cli_main([*arguments, "--verify"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    files = sorted(tmp_path.glob("x-*.gguf"))
    assert len(files) > 2 and captured.err.count("every byte is what its source gives") == len(files)
    for path in files:
        assert f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path}" in lines
    assert conversion.cli_main([*arguments, "--verify-only"]) == 0
    assert capsys.readouterr().out.splitlines() == lines
    flip(files[1], files[1].stat().st_size - 40)
    files[2].unlink()
    assert conversion.cli_main([*arguments, "--verify-only"]) == 1
    error = capsys.readouterr().err
    assert f"error: {files[1]} is not what its source gives" in error
    assert f"\n{files[2]} is not there" in error  # and the others are proven nevertheless
    assert error.count("every byte is what its source gives") == len(files) - 2
    assert conversion.cli_main([*arguments, "--verify-only", "--only-split", "1"]) == 0


def test_a_file_moved_away_is_not_called_verified(tmp_path: Path) -> None:
    model = tiny.write_checkpoint(tmp_path / "model", "kimi-linear")
    limits = Limits(max_bytes=300_000)
    conversion.convert(model, tmp_path / "x.gguf", limits=limits, only=[1])
    for path in tmp_path.glob("x-00001-of-*.gguf"):
        path.unlink()
    with pytest.raises(GGUFError, match=r"x-00001-of-\d+\.gguf is not there and cannot be verified"):
        conversion.convert(model, tmp_path / "x.gguf", limits=limits, only=[1], verify=True)
