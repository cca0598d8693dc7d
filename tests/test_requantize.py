"""A GGUF file written again with other types: the same bytes as a conversion, what must not change, importance, and
interruptions."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conversion
import native as test_native
from conversion import ConversionError
from conversion.requantize import requantize
from conversion.types import OUTTYPES, Types
from crash import delays, run_in_child
from deltallama.cli import main
from gguf_edit import Edit
from gguf_ext import GGUFError, GGUFReader, native
from gguf_ext import writer as writer_module
from gguf_ext.constants import GGMLQuantizationType as T
from gguf_ext.constants import GGUFValueType as V
from gguf_ext.imatrix import Entry, ImportanceMatrix
from gguf_ext.quants import dequantize_rows, quantize_rows
from gguf_ext.split import Limits

WIDE = {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}


@pytest.fixture(autouse=True)
def tested_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library that the other tests use."""
    monkeypatch.setenv("DELTALLAMA_LIBRARY", str(test_native.library_path()))
    native.library.cache_clear()
    yield
    native.library.cache_clear()


@pytest.fixture(scope="module")
def wide(tiny_checkpoint: Callable[..., Path]) -> Callable[[str], Path]:
    """Checkpoints with rows of 256 and more; of K3 one with packed experts."""
    return lambda preset: tiny_checkpoint(preset, **WIDE)


@pytest.fixture
def k3(wide: Callable[[str], Path], gguf: Callable[..., Path]) -> Path:
    return gguf(wide("k3"), "f32")


@pytest.fixture
def kl(wide: Callable[[str], Path], gguf: Callable[..., Path]) -> Path:
    return gguf(wide("kl"), "f32")


def types_of(path: Path) -> dict[str, T]:
    with GGUFReader(path) as reader:
        return {name: info.type for name, info in reader.tensors.items()}


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outtype", OUTTYPES)
@pytest.mark.parametrize("preset", ["kl", "k3"])
def test_the_file_is_that_of_a_conversion(
    preset: str, outtype: str, wide: Callable[[str], Path], gguf: Callable[..., Path], tmp_path: Path
) -> None:
    """From a file that holds the checkpoint's values exactly, every type gives the bytes that converting gives."""
    (path,) = requantize(gguf(wide(preset), "f32"), tmp_path / "out.gguf", outtype)
    converted = conversion.convert(wide(preset), tmp_path / "converted.gguf", outtype)
    if (preset, outtype) == ("kl", "mxfp4"):  # a conversion puts experts that become MXFP4 first
        with GGUFReader(path) as one, GGUFReader(converted) as other:
            assert list(one.fields) == list(other.fields) and one.tensors.keys() == other.tensors.keys()
            for name, info in one.tensors.items():
                assert info.type == other.tensors[name].type
                np.testing.assert_array_equal(one.data(name), other.data(name))
    else:
        assert path.read_bytes() == converted.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["converted.gguf", "out.gguf"]


@pytest.mark.parametrize("before", ["f16", "bf16", "q8_0", "q4_k_m", "q3_k_m"])
def test_any_readable_source_gives_its_values_quantized(
    before: str, wide: Callable[[str], Path], gguf: Callable[..., Path], tmp_path: Path
) -> None:
    source = gguf(wide("kl"), before)
    (path,) = requantize(source, tmp_path / "out.gguf", "q5_k_m")
    with GGUFReader(source) as old, GGUFReader(path) as new:
        assert new.tensors.keys() == old.tensors.keys()
        for name, info in new.tensors.items():
            assert info.ne == old.tensors[name].ne
            if info.type == old.tensors[name].type:
                expected = old.data(name)
            else:
                values = old.dequantize(name).reshape(-1, info.ne[0])
                expected = quantize_rows(values, info.type, name).reshape(-1)
            np.testing.assert_array_equal(new.data(name), np.asarray(expected).view(np.uint8), err_msg=name)


def test_keys_are_kept_but_for_those_of_the_types(k3: Path, tmp_path: Path) -> None:
    source = Edit(k3).set("general.alignment", 32, V.UINT32).set("general.license", "mit", V.STRING)
    source.fields["array.of.flags"] = ([True, False], (V.ARRAY, V.BOOL))
    source.fields["array.of.floats"] = ([0.5, 1.5], (V.ARRAY, V.FLOAT64))
    source.drop("general.quantization_version")
    source = source.write(tmp_path / "in.gguf")
    (path,) = requantize(source, tmp_path / "out.gguf", "q8_0")
    with GGUFReader(source) as old, GGUFReader(path) as new:
        own = ("general.alignment", "general.file_type", "general.quantization_version")
        kept = [key for key in old.fields if key not in own]
        assert [key for key in new.fields if key not in own] == kept
        for key in kept:
            assert new.types[key] == old.types[key] and np.array_equal(new.fields[key], old.fields[key]), key
        assert "general.alignment" not in new.fields and new.fields["general.quantization_version"] == 2
        assert new.fields["general.file_type"] == 38  # the packed experts are still there


def test_packed_experts_change_only_when_named(k3: Path, tmp_path: Path) -> None:
    packed = {name for name, type_ in types_of(k3).items() if type_ == T.MXFP4}
    assert packed
    for outtype in ("f32", "q4_k", "q8_0"):
        (path,) = requantize(k3, tmp_path / f"{outtype}.gguf", outtype)
        with GGUFReader(k3) as old, GGUFReader(path) as new:
            for name in packed:
                assert new.tensors[name].type == T.MXFP4
                np.testing.assert_array_equal(new.data(name), old.data(name))
    (path,) = requantize(k3, tmp_path / "named.gguf", "q8_0", tensor_types=[r"ffn_down_exps=q6_k", "attn_q=q4_k"])
    found = types_of(path)
    assert {name for name in packed if found[name] != T.MXFP4} == {n for n in packed if "ffn_down_exps" in n}
    assert found["blk.1.ffn_down_exps.weight"] == T.Q6_K and found["blk.0.attn_q.weight"] == T.Q4_K
    with GGUFReader(k3) as old, GGUFReader(path) as new:
        rows = old.dequantize("blk.1.ffn_down_exps.weight")
        expected = quantize_rows(rows.reshape(-1, rows.shape[-1]), T.Q6_K, "x").reshape(-1)
        np.testing.assert_array_equal(new.data("blk.1.ffn_down_exps.weight"), expected)
    every = requantize(k3, tmp_path / "all.gguf", "q8_0", tensor_types=["_exps=q8_0"])[0]
    with GGUFReader(every) as new:
        assert new.fields["general.file_type"] == 7


def test_split_files_are_read_and_written(k3: Path, wide: Callable[[str], Path], tmp_path: Path) -> None:
    first = conversion.convert(wide("k3"), tmp_path / "in.gguf", "f32", limits=Limits(max_tensors=50))
    (whole,) = requantize(k3, tmp_path / "whole.gguf", "q4_k_m")
    (path,) = requantize(first, tmp_path / "out.gguf", "q4_k_m")
    assert path.read_bytes() == whole.read_bytes()
    parts = requantize(first, tmp_path / "parts.gguf", "q4_k_m", limits=Limits(max_bytes=200_000))
    assert len(parts) > 1 and parts[0].name == f"parts-00001-of-{len(parts):05d}.gguf"
    with GGUFReader(whole) as one, GGUFReader(parts[0]) as many:
        assert many.tensors.keys() == one.tensors.keys()
        for name in one.tensors:
            np.testing.assert_array_equal(many.data(name), one.data(name))


# -- mixes -------------------------------------------------------------------------------------------------------------


def mix(outtype: str, n_layers: int) -> dict[str, list[T]]:
    """Types by kind of tensor, over the layers that have it: every fourth layer is MLA, as in the released models."""
    kda = [layer for layer in range(n_layers) if layer % 4 != 3]
    types = Types(OUTTYPES[outtype], (), n_layers, kda)
    names = ("attn_output.weight", "ffn_down.weight", "ffn_up.weight")
    found = {name: [types.of(f"blk.{n}.", name, (512, 64)) for n in range(n_layers)] for name in names}
    return found | {"attn_v.weight": [types.of(f"blk.{n}.", "attn_v.weight", (512, 64)) for n in kda]}


@pytest.mark.parametrize("n_layers", [27, 93])
@pytest.mark.parametrize(
    ("outtype", "base", "attn_v", "attn_output", "ffn_down"),
    [
        ("q4_k_s", T.Q4_K, (4, T.Q5_K, T.Q4_K), T.Q4_K, ("eighth", T.Q5_K, T.Q4_K)),
        ("q3_k_s", T.Q3_K, (0, T.Q3_K, T.Q3_K), T.Q3_K, (0, T.Q3_K, T.Q3_K)),
        ("q3_k_m", T.Q3_K, (2, T.Q5_K, T.Q4_K), T.Q4_K, ("sixteenth", T.Q5_K, T.Q4_K)),
        ("q3_k_l", T.Q3_K, (0, T.Q5_K, T.Q5_K), T.Q5_K, (0, T.Q5_K, T.Q5_K)),
        ("q2_k", T.Q2_K, (0, T.Q3_K, T.Q3_K), T.Q3_K, (0, T.Q3_K, T.Q3_K)),
        ("q2_k_s", T.Q2_K, (0, T.Q2_K, T.Q2_K), T.Q2_K, ("eighth", T.Q4_K, T.Q2_K)),
        ("iq4_xs", T.IQ4_XS, (0, T.IQ4_XS, T.IQ4_XS), T.IQ4_XS, ("eighth", T.Q5_K, T.IQ4_XS)),
        ("iq4_nl", T.IQ4_NL, (0, T.IQ4_NL, T.IQ4_NL), T.IQ4_NL, ("eighth", T.Q5_K, T.IQ4_NL)),
    ],
)
def test_mixes_are_those_of_existing_files(
    outtype: str, base: T, attn_v: Any, attn_output: T, ffn_down: Any, n_layers: int
) -> None:
    first = {"eighth": {27: 3, 93: 11}[n_layers], "sixteenth": {27: 1, 93: 5}[n_layers]}  # layers 0-2, 0-10; 0, 0-4
    found = mix(outtype, n_layers)
    for name, (n, one, other) in (("attn_v.weight", attn_v), ("ffn_down.weight", ffn_down)):
        n = first.get(n, n)
        assert found[name] == [one] * n + [other] * (len(found[name]) - n)
    assert set(found["attn_output.weight"]) == {attn_output} and set(found["ffn_up.weight"]) == {base}
    assert Types(OUTTYPES[outtype], (), n_layers, ()).of("", "output.weight", (512, 64)) == T.Q6_K


def test_rows_that_are_no_whole_blocks_get_the_next_type() -> None:
    for outtype, short in [
        ("q2_k", T.Q4_0), ("q3_k_m", T.Q4_0), ("q4_k_m", T.Q5_0), ("q5_k_m", T.Q5_1), ("q6_k", T.Q8_0),
        ("iq4_xs", T.IQ4_NL), ("iq4_nl", T.IQ4_NL),
    ]:  # fmt: skip
        types = Types(OUTTYPES[outtype], (), 8, range(8))
        assert types.of("blk.7.", "attn_k_b.weight", (128, 512, 8)) == short
        assert types.of("blk.7.", "attn_k_b.weight", (40, 512, 8)) == T.F16


# -- importance --------------------------------------------------------------------------------------------------------


def random_imatrix(path: Path, rng: np.random.Generator) -> ImportanceMatrix:
    """Very different columns, and experts of which the first never saw a row."""
    found = ImportanceMatrix(datasets=["text"], n_chunks=3, chunk_size=64)
    with GGUFReader(path) as reader:
        for name, info in reader.tensors.items():
            if len(info.ne) < 2 or "conv1d" in name or not name.endswith(".weight") or name == "token_embd.weight":
                continue
            n_mats = info.ne[2] if len(info.ne) > 2 else 1
            counts = np.full(n_mats, 500.0)
            counts[0] = 500.0 if n_mats == 1 or "_exps" not in name else 0
            sums = rng.lognormal(0, 2, size=(n_mats, info.ne[0])) * counts[:, None]
            found.entries[name] = Entry(sums.reshape(-1).astype(np.float32), counts.astype(np.float32))
    return found


def weighted_error(old: GGUFReader, new: GGUFReader, name: str, importance: np.ndarray) -> float:
    """The sum of importance times squared error, each matrix with its own."""
    error = (new.dequantize(name).astype(np.float64) - old.dequantize(name)) ** 2
    return float((error.reshape(len(importance), -1, importance.shape[1]) * importance[:, None]).sum())


@pytest.mark.parametrize("outtype", ["q4_k_m", "q3_k_m", "q2_k", "q6_k", "iq4_xs", "iq4_nl", "q4_0", "q5_1"])
def test_importance_lowers_the_weighted_error_of_every_tensor(
    outtype: str, kl: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    imatrix = random_imatrix(kl, rng)
    imatrix.write(tmp_path / "im.gguf")
    (plain,) = requantize(kl, tmp_path / "plain.gguf", outtype)
    (weighted,) = requantize(kl, tmp_path / "weighted.gguf", outtype, imatrix=tmp_path / "im.gguf")
    ratios = []
    with GGUFReader(kl) as old, GGUFReader(plain) as a, GGUFReader(weighted) as b:
        for name, entry in imatrix.entries.items():
            info = b.tensors[name]
            assert info.type == a.tensors[name].type
            if info.type in (T.F32, T.F16, T.Q8_0):  # nothing to choose there
                np.testing.assert_array_equal(a.data(name), b.data(name))
                continue
            importance = entry.importance(info.ne[2] if len(info.ne) > 2 else 1, info.ne[0])
            before, after = (weighted_error(old, new, name, importance) for new in (a, b))
            assert after <= before, name
            ratios.append(after / before)
        assert b.fields["quantize.imatrix.file"] == "im.gguf" and b.fields["quantize.imatrix.dataset"] == "text"
        assert b.types["quantize.imatrix.entries_count"] == b.types["quantize.imatrix.chunks_count"] == (V.UINT32,)
        assert b.fields["quantize.imatrix.entries_count"] == len(imatrix.entries)
        assert b.fields["quantize.imatrix.chunks_count"] == 3
    assert np.median(ratios) < 0.9


def test_every_expert_has_its_own_importance(kl: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    imatrix = random_imatrix(kl, rng)
    imatrix.write(tmp_path / "im.gguf")
    (path,) = requantize(kl, tmp_path / "out.gguf", "q4_k", imatrix=tmp_path / "im.gguf")
    name = "blk.1.ffn_up_exps.weight"
    with GGUFReader(kl) as old, GGUFReader(path) as new:
        values, info = old.dequantize(name), new.tensors[name]
        importance = imatrix.entries[name].importance(len(values), info.ne[0])
        parts = [quantize_rows(v, info.type, name, importance=w) for v, w in zip(values, importance, strict=True)]
        np.testing.assert_array_equal(new.data(name), np.concatenate(parts).reshape(-1))
        alike = quantize_rows(values.reshape(-1, info.ne[0]), info.type, name)
        assert (new.data(name) != alike.reshape(-1)).any()
        assert (np.concatenate(parts) == alike).reshape(len(values), -1).all(axis=1).sum() == 0


def test_the_matrix_of_another_model_is_refused(kl: Path, k3: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    imatrix = random_imatrix(kl, rng)
    entry = imatrix.entries["blk.0.attn_q.weight"]
    imatrix.entries["blk.0.attn_q.weight"] = Entry(entry.sums[:-1], entry.counts)
    imatrix.write(tmp_path / "im.gguf")
    with pytest.raises(GGUFError, match=r"tensor blk\.0\.attn_q\.weight: the importance matrix is another model's"):
        requantize(kl, tmp_path / "out.gguf", "q4_k", imatrix=tmp_path / "im.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["im.gguf"]


# -- interruptions -----------------------------------------------------------------------------------------------------


def test_killed_at_every_operation_and_continued(k3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_SYNC_BYTES", 1 << 18)
    out = tmp_path / "out" / "out.gguf"
    out.parent.mkdir()
    expected = requantize(k3, tmp_path / "whole.gguf", "q4_k_m")[0].read_bytes()
    operation, kills = 1, 0
    while run_in_child(lambda: requantize(k3, out, "q4_k_m", threads=2) and None, kill_at=operation) == -signal.SIGKILL:
        kills += 1
        assert not out.exists() or out.read_bytes() == expected
        (path,) = requantize(k3, out, "q4_k_m")
        assert path.read_bytes() == expected and [p.name for p in out.parent.iterdir()] == ["out.gguf"]
        out.unlink()
        operation += 7
    assert kills > 5


def test_killed_again_and_again_it_still_gets_done(k3: Path, tmp_path: Path, seed: int) -> None:
    out = tmp_path / "out.gguf"
    statuses = [
        run_in_child(lambda: requantize(k3, out, "q4_k_m") and None, kill_after=s) for s in delays(0.4, 6, seed)
    ]
    assert set(statuses) <= {-signal.SIGKILL, 0, 1}  # 1: it was there already
    if not out.exists():
        requantize(k3, out, "q4_k_m")
    assert out.read_bytes() == requantize(k3, tmp_path / "whole.gguf", "q4_k_m")[0].read_bytes()


def test_another_request_does_not_continue_an_unfinished_file(
    k3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(writer_module, "_SYNC_BYTES", 1)
    out = tmp_path / "out.gguf"
    random_imatrix(k3, rng).write(tmp_path / "im.gguf")
    assert run_in_child(lambda: requantize(k3, out, "q4_k_m") and None, kill_at=60) == -signal.SIGKILL
    for options, message in [
        ({"outtype": "q5_k_m"}, "outtype was q4_k_m, is q5_k_m"),
        ({"imatrix": tmp_path / "im.gguf"}, "imatrix was none"),
        ({"tensor_types": ["attn_q=q8_0"]}, "tensor_types was not given, is attn_q=q8_0"),
    ]:
        with pytest.raises(GGUFError, match=message):
            requantize(k3, out, **{"outtype": "q4_k_m", **options})
    assert not out.exists()
    requantize(k3, out, "q5_k_m", restart=True)


def test_a_source_that_changes_meanwhile_gives_no_file(k3: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in.gguf", tmp_path / "out.gguf"
    content = k3.read_bytes()

    def change(new: bytes) -> Callable[[str, int, int], None]:
        def progress(name: str, done: int, total: int) -> None:
            with open(source, "r+b") as file:
                file.write(new)
                file.truncate(len(new))

        return progress

    for new, message in [
        (content[: len(content) // 2], r"in\.gguf: ends at byte \d+, expected \d+ or more"),
        (content[:-1] + bytes([content[-1] ^ 1]), r"in\.gguf was changed while it was read"),
    ]:
        source.write_bytes(content)
        with pytest.raises(ConversionError, match=message):
            requantize(source, out, "q4_k_m", progress=change(new), threads=1, restart=True)
        assert not out.exists()


def test_the_source_is_not_resident(k3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped pages would count as memory: only the header is read through the map."""
    monkeypatch.setattr(GGUFReader, "data", lambda *a: pytest.fail("tensors are read through the map"))
    monkeypatch.setattr(GGUFReader, "dequantize", lambda *a: pytest.fail("tensors are read through the map"))
    requantize(k3, tmp_path / "out.gguf", "q4_k_m")


# -- mistakes ----------------------------------------------------------------------------------------------------------


def test_values_that_cannot_be_written_are_named(kl: Path, k3: Path, tmp_path: Path) -> None:
    edit = Edit(kl)
    values = edit.values("blk.0.attn_q.weight").copy()
    values[3, 5] = np.inf
    bad = edit.put("blk.0.attn_q.weight", values).write(tmp_path / "bad.gguf")
    with pytest.raises(GGUFError, match=r"tensor blk\.0\.attn_q\.weight: row 3, column 5: inf is not a finite number"):
        requantize(bad, tmp_path / "out.gguf", "q4_k")
    edit = Edit(k3)
    edit.tensors["blk.1.ffn_down_exps.weight"].data[17 * 9] = 255
    bad = edit.write(tmp_path / "scale.gguf")
    with pytest.raises(GGUFError, match=r"tensor blk\.1\.ffn_down_exps\.weight: row 1, block 1: scale byte 255"):
        requantize(bad, tmp_path / "out.gguf", "q4_k")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.gguf", "scale.gguf"]


def test_requests_without_sense_are_refused(kl: Path, k3: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    weights = tmp_path / "im.gguf"
    random_imatrix(kl, rng).write(weights)
    (taken,) = requantize(kl, tmp_path / "taken.gguf", "q8_0")
    before = taken.read_bytes()
    other = Edit(kl).set("general.architecture", "llama", V.STRING)
    other = other.write(tmp_path / "llama.gguf")
    heads = Edit(kl).set("attention.head_count_kv", 1, V.UINT32).write(tmp_path / "heads.gguf")
    for source, target, outtype, options, message in [
        (kl, taken, "q4_k", {}, "already exists"),
        (taken, taken, "q4_k", {"force": True}, "is a file that is read"),
        (kl, weights, "q4_k", {"force": True, "imatrix": weights}, "is a file that is read"),
        (kl, tmp_path, "q4_k", {}, "is a folder"),
        (kl, tmp_path / "x", "q9", {}, "type 'q9', expected one of f32"),
        (kl, tmp_path / "x", "q8_0", {"tensor_types": ["nothing=q8_0"]}, "'nothing=q8_0' matches no tensor"),
        (kl, tmp_path / "x", "q8_0", {"tensor_types": ["attn_norm=q8_0"]}, "decides about no tensor"),
        (other, tmp_path / "x", "q8_0", {}, "general.architecture is 'llama', expected kimi-linear or kimi-k3"),
        (heads, tmp_path / "x", "q8_0", {}, "attention.head_count_kv is not a list of 8 numbers"),
        (kl, tmp_path / "x", "q8_0", {"imatrix": kl}, "general.type is 'model'"),
    ]:
        with pytest.raises((ConversionError, GGUFError), match=message):
            requantize(source, target, outtype, **options)
    assert taken.read_bytes() == before and not (tmp_path / "x").exists()


def test_dry_runs_write_nothing(kl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.gguf"
    assert main(["quantize", str(kl), str(out), "Q4_K_M", "--dry-run"]) == 0
    assert capsys.readouterr().out == f"{out}\n" and not list(tmp_path.iterdir())
    out.write_text("mine")
    assert main(["quantize", str(kl), str(out), "q4_k_m", "--dry-run"]) == 1
    assert "already exists" in capsys.readouterr().err


def test_command_line(kl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.gguf"
    assert main(["quantize", str(kl), str(out), "q4_k", "--tensor-type", "attn_q=q8_0", "--threads", "1"]) == 0
    err = capsys.readouterr().err
    assert f"written: {out}" in err
    assert types_of(out)["blk.0.attn_q.weight"] == T.Q8_0
    assert main(["quantize", str(out), str(tmp_path / "again.gguf"), "q6_k"]) == 0
    assert "are Q4_K in the source: what that lost stays lost" in capsys.readouterr().err
    assert main(["quantize", "nothing.gguf", str(tmp_path / "x.gguf"), "q6_k"]) == 1
    assert "nothing.gguf" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        main(["quantize", str(kl), str(out), "q9_k"])
    assert end.value.code == 2


def test_what_is_read_back_is_what_the_type_can_hold(kl: Path, tmp_path: Path) -> None:
    """Relative error of one matrix falls from type to type as the bits grow."""
    with GGUFReader(kl) as old:
        values = old.dequantize("blk.0.attn_q.weight")
    errors = []
    for type_ in (T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K, T.Q8_0):
        back = dequantize_rows(quantize_rows(values, type_, "x"), type_, values.shape[1])
        errors.append(float(((back - values) ** 2).sum() / (values**2).sum()))
    assert errors == sorted(errors, reverse=True)
