"""Importance matrices: what the engine collects against the definition, the file format, and what importance means."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as peer
import numpy as np
import pytest

import native
from deltallama import Llama
from deltallama.cli import main
from deltallama.imatrix import collect
from engine import Engine
from gguf_edit import Edit
from gguf_ext import GGUFError, GGUFReader
from gguf_ext.imatrix import PRIOR_ROWS, Entry, ImportanceMatrix
from reference import moe

TOKENS = [5, 17, 3, 99, 41, 3, 200, 7, 8, 64, 23, 11]

# -- the definition ----------------------------------------------------------------------------------------------------

# Tensor -> the op whose output its product reads, by name without "blk.N."; heads read the first columns of a stride.
READS = {
    **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_q_a", "attn_kv_a_mqa", "attn_gate"), ("attn_norm",)),
    **dict.fromkeys(("ssm_f_a", "ssm_g_a", "ssm_g", "ssm_beta"), ("attn_norm",)),
    **dict.fromkeys(("ffn_gate", "ffn_up", "ffn_gate_shexp", "ffn_up_shexp", "ffn_gate_inp"), ("ffn_norm",)),
    **dict.fromkeys(("ffn_down", "ffn_down_shexp"), ("glu",)),
    "ffn_routed_down": ("ffn_norm",),
    "ffn_routed_up": ("ffn_routed_norm",),
    "attn_q_b": ("attn_q_a_norm",),
    "ssm_f_b": ("ssm_f_a",),
    "ssm_g_b": ("ssm_g_a",),
    "attn_k_b": ("attn_q_b", "attn_q"),
    "attn_v_b": ("mla_attention",),
    "attn_output": ("ssm_norm", "mul_sigmoid", "attn_v_b"),
}


def observe(path: Path, tokens: list[int]) -> dict[str, np.ndarray]:
    """The outputs of all ops by name, float64, from another run than the one that collects."""
    ffi, lib = native.load()
    outputs: dict[str, np.ndarray] = {}

    @ffi.callback("void(const char *, const char *, int32_t, const double *, int32_t, int32_t, void *)")
    def keep(op: Any, name: Any, layer: int, data: Any, rows: int, cols: int, user: Any) -> None:
        if data != ffi.NULL:
            values = np.frombuffer(ffi.buffer(data, 8 * rows * cols), np.float64).reshape(rows, cols).copy()
            outputs[ffi.string(name).decode()] = values

    with Engine(path, n_ctx=64, n_outputs=64) as engine:
        native.check(lib.delta_test_observe(engine.model, keep, ffi.NULL))
        engine.logits(tokens)
        native.check(lib.delta_test_observe(engine.model, ffi.NULL, ffi.NULL))
    return outputs


def expected_stats(path: Path, tokens: list[int]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Sums of squares `[mats, cols]` and rows `[mats]` of every tensor that a product multiplies with."""
    outputs = observe(path, tokens)
    stats = {}
    with GGUFReader(path) as file:
        arch = file.fields["general.architecture"]
        k3 = arch == "kimi-k3"
        beta, linear_beta = (file.fields.get(f"{arch}.activation.{n}", 0.0) for n in ("situ_beta", "situ_linear_beta"))
        for name, info in file.tensors.items():
            if len(info.ne) < 2 or name == "token_embd.weight" or "conv1d" in name or name.endswith("ssm_a"):
                continue
            n_cols, n_mats = info.ne[0], info.ne[2] if len(info.ne) > 2 else 1
            prefix, _, base = name.removesuffix(".weight").rpartition(".")
            prefix = prefix + "." if prefix else ""
            if base == "output":
                x = outputs["output_norm"]
                stats[name] = ((x**2).sum(axis=0)[None], np.array([len(x)]))
            elif base.endswith("_exps"):
                z = outputs[prefix + ("ffn_routed_down" if prefix + "ffn_routed_down" in outputs else "ffn_norm")]
                route = outputs[prefix + "moe_route"]
                chosen = route[:, : route.shape[1] // 2].astype(int)
                gate, up = (file.dequantize(f"{prefix}ffn_{n}_exps.weight").astype(np.float64) for n in ("gate", "up"))
                sums, rows = np.zeros((n_mats, n_cols)), np.zeros(n_mats, int)
                for t, experts in enumerate(chosen):
                    for e in experts:
                        x = z[t]
                        if base == "ffn_down_exps":
                            g, u = gate[e] @ x, up[e] @ x
                            x = moe.situ(g, u, beta, linear_beta) if k3 else moe.swiglu(g, u)
                        sums[e] += x**2
                        rows[e] += 1
                stats[name] = (sums, rows)
            else:
                x = next(outputs[prefix + op] for op in READS[base] if prefix + op in outputs)
                heads = x.reshape(len(x), n_mats, -1)[:, :, :n_cols]
                stats[name] = ((heads**2).sum(axis=0), np.full(n_mats, len(x)))
    return stats


def collected(path: Path, tokens: list[int], **options: Any) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    ffi, lib = native.load()
    found = {}
    with Engine(path, n_ctx=64, **options) as engine:
        native.check(lib.delta_model_collect_inputs(engine.model))
        engine.logits(tokens)
        stats = ffi.new("delta_input_stats *")
        stats.size = ffi.sizeof("delta_input_stats")
        for index in range(lib.delta_model_input_count(engine.model)):
            native.check(lib.delta_model_input_stats(engine.model, index, stats))
            shape = (stats.n_mats, stats.n_cols)
            sums = np.frombuffer(ffi.buffer(stats.sum_squares, 8 * shape[0] * shape[1]), np.float64).reshape(shape)
            rows = np.frombuffer(ffi.buffer(stats.n_rows, 8 * shape[0]), np.uint64)
            found[ffi.string(stats.name).decode()] = (sums.copy(), rows.astype(int))
    return found


def test_every_product_is_collected_as_defined(mini: Path) -> None:
    expected = expected_stats(mini, TOKENS)
    found = collected(mini, TOKENS)
    assert found.keys() == expected.keys()
    for name, (sums, rows) in expected.items():
        np.testing.assert_array_equal(found[name][1], rows, err_msg=name)
        np.testing.assert_allclose(found[name][0], sums, rtol=1e-9, atol=1e-15, err_msg=name)
    unused = [name for name, (_, rows) in found.items() if (rows == 0).any()]
    assert unused and all("_exps" in name for name in unused)  # so few tokens do not reach every expert


def test_experts_wider_than_their_input_are_collected_as_defined(
    tiny_checkpoint: Callable[..., Path], gguf: Callable[..., Path]
) -> None:
    """Their hidden rows come in several passes, the last one narrower."""
    sizes = {"routed_expert_hidden_size": 32, "moe_intermediate_size": 80, "num_hidden_layers": 4}
    path = gguf(tiny_checkpoint("k3", packed=False, **sizes))
    with GGUFReader(path) as file:
        assert file.tensors["blk.1.ffn_down_exps.weight"].ne[:2] == (80, 32)
    expected, found = expected_stats(path, TOKENS), collected(path, TOKENS)
    for name in (name for name in expected if "_exps" in name):
        np.testing.assert_array_equal(found[name][1], expected[name][1])
        np.testing.assert_allclose(found[name][0], expected[name][0], rtol=1e-9, atol=1e-15, err_msg=name)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [({"n_batch": 3}, 1e-12), ({"n_threads": 1}, 0.0), ({"device": "ref"}, 1e-9), ({"activations": "fine"}, 1e-3)],
)
def test_statistics_do_not_depend_on_the_way(mini: Path, options: dict[str, Any], tolerance: float) -> None:
    """Pieces of three rows (so experts' pairs take several passes), one thread, the other device, rounded inputs."""
    plain, other = collected(mini, TOKENS), collected(mini, TOKENS, **options)
    for name, (sums, rows) in plain.items():
        np.testing.assert_array_equal(other[name][1], rows)
        np.testing.assert_allclose(other[name][0], sums, rtol=tolerance, atol=tolerance * sums.max(), err_msg=name)


def test_collecting_changes_no_logits_and_begins_anew(mini: Path) -> None:
    _, lib = native.load()
    with Engine(mini, n_ctx=64) as engine:
        before = engine.logits(TOKENS)
        assert lib.delta_model_input_count(engine.model) == 0
        native.check(lib.delta_model_collect_inputs(engine.model))
        np.testing.assert_array_equal(engine.logits(TOKENS), before)
    with Llama(mini, n_ctx=64) as llm:
        first = collect(llm, TOKENS, 6).entries
        second = collect(llm, TOKENS, 6).entries
    for name, entry in first.items():
        np.testing.assert_array_equal(entry.sums, second[name].sums)


def test_arguments_of_the_interface_are_checked(k3_mini: Path) -> None:
    ffi, lib = native.load()
    with Engine(k3_mini, n_ctx=64) as engine:
        stats = ffi.new("delta_input_stats *")
        with pytest.raises(native.NativeError, match=r"ABI: delta_input_stats\.size is 0"):
            native.check(lib.delta_model_input_stats(engine.model, 0, stats))
        stats.size = ffi.sizeof("delta_input_stats")
        with pytest.raises(native.NativeError, match="ARG: index is 0, but statistics of 0 tensors"):
            native.check(lib.delta_model_input_stats(engine.model, 0, stats))
        with pytest.raises(native.NativeError, match="ARG: model is null"):
            native.check(lib.delta_model_collect_inputs(ffi.NULL))
        assert lib.delta_model_input_count(ffi.NULL) == 0


# -- the file ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "some text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog. 0123456789! " * 20, "utf-8")
    return path


def test_the_file_is_the_format_of_others(k3_path: Path, text: Path, tmp_path: Path) -> None:
    """As another reader of GGUF sees it."""
    out = tmp_path / "out.gguf"
    assert main(["imatrix", str(k3_path), str(text), "-o", str(out), "-c", "32", "--chunks", "3"]) == 0
    file = peer.GGUFReader(out)
    values = {key: file.fields[key].contents() for key in file.fields}
    assert values["general.type"] == "imatrix"
    assert values["imatrix.datasets"] == ["some text.txt"]
    assert (values["imatrix.chunk_count"], values["imatrix.chunk_size"]) == (3, 32)
    tensors = {tensor.name: tensor for tensor in file.tensors}
    with GGUFReader(k3_path) as model:
        shapes = {
            name: (info.ne[0], info.ne[2] if len(info.ne) > 2 else 1)
            for name, info in model.tensors.items()
            if len(info.ne) > 1 and "conv1d" not in name and name not in ("token_embd.weight", "output.weight")
            if not name.endswith("ssm_a")
        }
    assert tensors.keys() == {f"{name}.{part}" for name in shapes for part in ("in_sum2", "counts")}
    for name, (n_cols, n_mats) in shapes.items():
        sums, counts = tensors[f"{name}.in_sum2"], tensors[f"{name}.counts"]
        assert sums.tensor_type == counts.tensor_type == peer.GGMLQuantizationType.F32
        assert tuple(sums.shape) == (n_cols, n_mats) and tuple(counts.shape) == (1, n_mats)
        if "_exps" not in name:
            assert (counts.data == 96).all()
    again = ImportanceMatrix.read(out)
    assert again.entries.keys() == shapes.keys() and (again.n_chunks, again.chunk_size) == (3, 32)


def test_output_is_measured_when_asked(k3_path: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    arguments = ["imatrix", str(k3_path), str(text), "-o", str(out), "-c", "32", "--chunks", "1", "--process-output"]
    assert main(arguments) == 0
    entry = ImportanceMatrix.read(out).entries["output.weight"]
    assert entry.counts.tolist() == [32.0] and entry.sums.all()


def test_an_output_is_replaced_only_when_forced_and_checked_first(
    k3_path: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.gguf"
    out.write_text("mine")
    arguments = ["imatrix", str(k3_path), str(text), "-o", str(out), "-c", "32", "--chunks", "1"]
    monkeypatch.setattr("deltallama.imatrix.collect", lambda *a, **k: pytest.fail("worked for nothing"))
    assert main(arguments) == 1
    assert "already exists" in capsys.readouterr().err and out.read_text() == "mine"
    monkeypatch.undo()
    assert main([*arguments, "--force"]) == 0
    assert ImportanceMatrix.read(out).n_chunks == 1


def older(entries: dict[str, tuple[int, np.ndarray]], tail: bytes = b"") -> bytes:
    parts = [struct.pack("<i", len(entries))]
    for name, (calls, sums) in entries.items():
        parts += [struct.pack("<i", len(name)), name.encode(), struct.pack("<ii", calls, sums.size)]
        parts.append(sums.astype("<f4").tobytes())
    return b"".join(parts) + tail


def test_the_older_form_is_read(tmp_path: Path) -> None:
    path = tmp_path / "old.dat"
    sums = np.array([[4.0, 12.0], [0.0, 0.0]])
    path.write_bytes(older({"a": (4, sums), "b": (2, np.array([2.0, 6.0]))}, struct.pack("<ii", 7, 3) + b"abc"))
    found = ImportanceMatrix.read(path)
    assert (found.n_chunks, found.datasets) == (7, ["abc"])
    np.testing.assert_allclose(found.entries["b"].importance(1, 2), [[0.5, 1.5]])
    assert found.entries["a"].rows(2).tolist() == [4, 0]  # only one number in the file, but nothing ever came here
    np.testing.assert_allclose(found.entries["a"].importance(2, 2), [[0.5, 1.5]] * 2)
    path.write_bytes(older({"b": (2, np.array([2.0, 6.0]))}))
    assert ImportanceMatrix.read(path).datasets == []


def test_damaged_files_are_refused(tmp_path: Path, k3_path: Path) -> None:
    good = older({"some.weight": (4, np.array([4.0, 12.0]))})
    for data, message in [
        (good[:-1], "neither a GGUF file nor a whole"),
        (good[:10], "neither a GGUF file nor a whole"),
        (b"", "neither a GGUF file nor a whole"),
        (struct.pack("<i", 0), "number of 0 entries"),
        (older({"x": (0, np.ones(2))}), "x: 2 sums of 0 calls"),
        (older({"x": (1, np.array([np.nan]))}), "sums of x are not all finite"),
        (older({"x": (1, np.array([-1.0]))}), "sums of x are not all finite"),
        (struct.pack("<ii", 1, 2) + b"\xff\xff" + bytes(8), "not UTF-8"),
    ]:
        path = tmp_path / "bad.dat"
        path.write_bytes(data)
        with pytest.raises(GGUFError, match=message):
            ImportanceMatrix.read(path)
    with pytest.raises(GGUFError, match=r"general.type is 'model', expected 'imatrix'"):
        ImportanceMatrix.read(k3_path)
    path = tmp_path / "im.gguf"
    ImportanceMatrix({"a.weight": Entry(np.ones(4), np.ones(2))}).write(path)
    edit = Edit(path)
    del edit.tensors["a.weight.counts"]
    edit.write(tmp_path / "bad.gguf")
    with pytest.raises(GGUFError, match="tensor a.weight.counts is missing"):
        ImportanceMatrix.read(tmp_path / "bad.gguf")


# -- importance --------------------------------------------------------------------------------------------------------


def test_importance_is_the_mean_square_for_matrices_that_saw_enough(rng: np.random.Generator) -> None:
    x = rng.normal(size=(50, 8)) * rng.uniform(0.1, 10, size=8)
    found = Entry((x**2).sum(axis=0), np.array([50.0])).importance(1, 8)
    expected = (x**2).mean(axis=0)
    np.testing.assert_allclose(found[0], expected / expected.mean(), rtol=1e-6)


def test_rarely_used_experts_lean_on_the_average_expert(rng: np.random.Generator) -> None:
    counts = np.array([0, 1, 4 * PRIOR_ROWS, 100_000], float)
    true = rng.uniform(0.5, 5, size=(4, 6))
    sums = true * counts[:, None]
    found = Entry(sums.reshape(-1), counts).importance(4, 6)
    mean = sums.sum(axis=0) / counts.sum()
    for e, n in enumerate(counts):
        expected = (sums[e] + PRIOR_ROWS * mean) / (n + PRIOR_ROWS)
        np.testing.assert_allclose(found[e], expected / expected.mean(), rtol=1e-6)
    np.testing.assert_allclose(found[0], mean / mean.mean(), rtol=1e-6)
    np.testing.assert_allclose(found[3], true[3] / true[3].mean(), rtol=1e-3)


def test_importance_is_never_zero() -> None:
    """Weights of a column that the text never fed are still to be kept, and a tensor nothing reached has equal ones."""
    found = Entry(np.array([9.0, 0.0, 1e-30]), np.array([3.0])).importance(1, 3)
    assert (found > 0).all() and found[0, 1] == pytest.approx(1e-6, rel=1e-3)
    assert Entry(np.zeros(4), np.zeros(2)).importance(2, 2).tolist() == [[1.0, 1.0]] * 2
    assert Entry(np.full(2, 1e-38), np.ones(1)).importance(1, 2).tolist() == [[1.0, 1.0]]


def test_shapes_are_checked() -> None:
    with pytest.raises(GGUFError, match="6 sums and 2 counts, expected 8 and 2"):
        Entry(np.ones(6), np.ones(2)).importance(2, 4)
    with pytest.raises(GGUFError, match="6 sums and 2 counts, expected 6 and 3"):
        Entry(np.ones(6), np.ones(2)).check(3, 2)


def test_rare_experts_are_named_once_per_layer(
    k3_path: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = np.array([0, 3, 100, 0], float)
    entries = {
        f"blk.{layer}.ffn_{part}_exps.weight": Entry(np.ones(8), counts + 100 * layer)
        for layer in range(2)
        for part in ("gate", "up", "down")
    }
    (sentence,) = ImportanceMatrix(entries).rare_experts()
    assert sentence.startswith("blk.0: of 4 experts 2 were never used and 1 for less than 16 rows")
    arguments = ["imatrix", str(k3_path), str(text), "-o", str(tmp_path / "x.gguf"), "-c", "4", "--chunks", "1"]
    assert main(arguments) == 0
    assert re.search(r"warning: blk\.\d+: of \d+ experts \d+ were never used", capsys.readouterr().err)


def test_mistakes_end_in_one_sentence(
    k3_path: Path, text: Path, tmp_path: Path, gguf: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in [
        ([str(k3_path), str(text), "-o", str(tmp_path / "x"), "-c", "10000000"], "n_ctx"),
        ([str(k3_path), str(text), "-o", str(tmp_path / "x"), "--chunks", "0"], "0 tokens, less than one chunk"),
        ([str(k3_path), str(tmp_path / "no.txt"), "-o", str(tmp_path / "x")], "no.txt"),
        ([str(k3_path), str(k3_path), "-o", str(tmp_path / "x")], "is not UTF-8"),
        ([str(text), str(text), "-o", str(tmp_path / "x")], "not a GGUF file"),
        ([str(k3_path), str(text), "-o", str(tmp_path / "no" / "x")], "does not exist"),
    ]:
        assert main(["imatrix", *arguments]) == 1
        err = capsys.readouterr().err
        assert message in err and err.startswith("deltallama: error: ") and err.count("\n") == 1, err
    assert not (tmp_path / "x").exists()
