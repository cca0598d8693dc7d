"""`--validate`: everything that is wrong at once, what would be written when nothing is, locally and remotely."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import conversion
import tiny
from conversion.run import Request
from conversion.validate import validate
from gguf_ext import GGUFReader
from hub_server import Hub
from test_convert_faults import CASES, MESSAGES
from tiny_files import Checkpoint as HfCheckpoint
from tiny_files import HfTensor

PAYLOAD = {"scale_255", "f16_overflow"}  # defects that no header tells of


def problems(folder: Path, **options: Any) -> list[str]:
    return validate(Request(folder, **options)).problems


@pytest.mark.parametrize("preset", ["k3", "kl", "k3-bf16-experts", "k3-dense-only", "k3-93-layers"])
def test_a_right_model_gives_the_planned_file(tmp_path: Path, preset: str) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model", preset=preset)
    findings = validate(Request(folder, tmp_path / "x.gguf"))
    assert findings.problems == [] and findings.path == tmp_path / "x.gguf" and not findings.path.exists()
    path = conversion.convert(folder, tmp_path / "x.gguf")
    assert findings.size == path.stat().st_size
    with GGUFReader(path) as reader:
        names = [tensor.type.name for tensor in reader.tensors.values()]
        assert {name: count for name, (count, _) in findings.types.items()} == {n: names.count(n) for n in names}
        for name, (_, n_bytes) in findings.types.items():
            of_type = [tensor for tensor in reader.tensors.values() if tensor.type.name == name]
            assert n_bytes == sum(reader.data(tensor.name).nbytes for tensor in of_type)


@pytest.mark.parametrize(("name", "arch"), CASES)
def test_defects_are_among_the_problems(tmp_path: Path, name: str, arch: str) -> None:
    """Whatever a conversion says first, validation says too; but for what only payloads show."""
    folder = tiny.write_checkpoint(tmp_path / "model", arch, defect=name)
    found = problems(folder, outtype="f16")
    if name in PAYLOAD:
        assert found == []
    else:
        assert any(re.search(MESSAGES[name], problem) for problem in found), found


def test_independent_problems_are_all_named(tmp_path: Path) -> None:
    def spoil(checkpoint: HfCheckpoint) -> None:
        text = checkpoint.text
        text["rms_norm_eps"] = 0.0
        text["routed_scaling_factor"] = "1"
        text["num_expert_group"] = 2
        text["num_nextn_predict_layers"] = 1
        checkpoint.config["eos_token_id"] = text["eos_token_id"] = 9999
        checkpoint.delete("model.norm.weight")
        checkpoint.delete("model.layers.1.block_sparse_moe.experts.3.w2.weight_packed")
        checkpoint.delete("model.layers.2.block_sparse_moe.experts.1.w2.weight_scale")
        for name in ("model.embed_tokens.weight", "model.layers.4.self_attn.q_proj.weight"):
            checkpoint.set(name, checkpoint.get(name).resized(0, 1))
        checkpoint.set("model.layers.0.extra.weight", HfTensor("F32", (1,), b"1234"))
        a_log = checkpoint.get("model.layers.0.self_attn.A_log")
        checkpoint.set("model.layers.0.self_attn.A_log", HfTensor("F32", a_log.shape, a_log.data[:-4] + b"\0\0\x80?"))

    folder = tiny.write_checkpoint(tmp_path / "model", mutate=spoil)
    (folder / "tiktoken.model").write_text("x")
    shard = folder / "model-00003-of-000003.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    (folder / "model-extra.safetensors").write_bytes(b"")
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    expected = [
        r"rms_norm_eps is 0\.0, expected a number above 0",
        'routed_scaling_factor is "1", expected a finite number',
        "num_expert_group is 2, expected 1",
        "num_nextn_predict_layers is 1, expected 0",
        "eos_token_id is 9999, expected a token id below vocab_size 512",
        r"tiktoken\.model: line 1 is not a base64 token and a rank",
        r"chat_template\.jinja is not UTF-8",
        r"in the folder but not listed: model-extra\.safetensors",
        "model-00003-of-000003.safetensors is truncated",
        r"missing: language_model\.model\.norm\.weight; unexpected: .*layers\.0\.extra\.weight",
        "layer 1, w2: weight_packed of expert 3 is missing",
        "layer 2, w2: weight_scale of expert 1 is missing",
        r"embed_tokens\.weight: axis 0 is 513, expected 512 \(vocab_size\)",
        r"layers\.4\.self_attn\.q_proj\.weight: axis 0 is 65, expected 64",
        r"layers\.0\.self_attn\.A_log: element \d+ is 1, expected 0",
    ]
    found = problems(folder)
    for pattern in expected:
        assert sum(bool(re.search(pattern, problem)) for problem in found) == 1, (pattern, found)
    assert len(found) == len(expected)


def test_what_depends_on_a_wrong_field_is_no_problem_of_its_own(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["hidden_size"], config["text_config"]["linear_attn_config"]["kda_layers"]
    config["text_config"]["vocab_size"] = "512"
    (folder / "config.json").write_text(json.dumps(config))
    found = problems(folder)
    assert [re.sub(r".*config\.json: ", "", problem) for problem in found] == [
        "hidden_size is missing",
        'vocab_size is "512", expected a whole number of at least 1',
        "linear_attn_config.kda_layers is missing",
    ]
    config = json.loads((tiny.write_checkpoint(tmp_path / "other") / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = 0
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    (problem,) = problems(tmp_path / "other")
    assert problem.endswith("num_hidden_layers is 0, expected a whole number of at least 1")


def test_shards_are_checked_without_a_configuration(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model")
    (folder / "config.json").unlink()
    (folder / "tiktoken.model").unlink()
    for number, change in ((1, b""), (2, b"\xff" * 16)):
        (folder / f"model-{number:05d}-of-000003.safetensors").write_bytes(change)
    patterns = (r"config\.json cannot be read", r"tiktoken\.model is missing", "00001.*: 0 bytes", "00002.*: header of")
    found = problems(folder)
    assert all(any(re.search(pattern, problem) for problem in found) for pattern in patterns), found


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.write_checkpoint(tmp_path / "tiny")
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    assert conversion.cli_main([str(folder), "--validate"]) == 0
    local = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{re.escape(str(folder))}/.*-MXFP4_MOE\.gguf: \d+ bytes, 213 tensors", local[0])
    assert [line.split()[0] for line in local[1:]] == ["BF16", "F32", "MXFP4"]
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with Hub(folder) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert conversion.cli_main(["--remote", "org/tiny", "--validate"]) == 0
        remote = capsys.readouterr().out.splitlines()
        assert remote[0].startswith("org-tiny-mxfp4_moe.gguf: ") and remote[1:] == local[1:]
        (folder / "tokenizer_config.json").write_text("{")
        (folder / "model-00002-of-000003.safetensors").write_bytes(b"1234567")
        assert conversion.cli_main(["--remote", "org/tiny", "--validate"]) == 1
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.endswith("2 problems\n")
        assert "error: org/tiny/tokenizer_config.json is not valid JSON" in captured.err
        assert "error: org/tiny/model-00002-of-000003.safetensors: 7 bytes, too short" in captured.err
        assert conversion.cli_main(["--remote", "org/other", "--validate"]) == 1
    assert list(Path().iterdir()) == []
