"""`--mmproj`: the vision part of Kimi-K3 to a file of its own, and what is refused."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import conversion
import tiny
from conversion import ConversionError, folds
from conversion.checkpoint import Checkpoint
from conversion.cli import cli_main
from conversion.config import Config
from conversion.run import Request, plan_file
from conversion.validate import validate
from crash import run_in_child
from gguf_ext import GGUFError, GGUFReader
from gguf_ext import writer as writer_module
from gguf_ext.constants import GGMLQuantizationType as T
from gguf_ext.constants import GGUFValueType as V
from gguf_ext.split import Limits
from hub_server import Hub
from reference import Checkpoint as Reference
from reference import vision
from test_remote import hub  # noqa: F401
from test_resume import contents, flip
from tiny import ABSENT
from tiny_files import Checkpoint as HfCheckpoint
from tiny_files import HfTensor
from tiny_vision import PREPROCESSOR, VISION, tiny_vision_checkpoint

sys.path.append(str(Path(__file__).resolve().parent.parent / "bench"))

import released_k3  # noqa: E402

TEXT_WIDTH = 64
# What other programs expect of a file of this projector, in their order; then what they have no key for.
KEYS: dict[str, tuple[Any, ...]] = {
    "general.architecture": (V.STRING, "clip"),
    "general.type": (V.STRING, "mmproj"),
    "general.name": (V.STRING, "Sees"),
    "general.size_label": (V.STRING, "67K"),
    "general.file_type": (V.UINT32, 0),
    "clip.has_vision_encoder": (V.BOOL, True),
    "clip.vision.projection_dim": (V.UINT32, TEXT_WIDTH),
    "clip.vision.image_size": (V.UINT32, 8 * 14),
    "clip.vision.patch_size": (V.UINT32, 14),
    "clip.vision.embedding_length": (V.UINT32, 32),
    "clip.vision.feed_forward_length": (V.UINT32, 72),
    "clip.vision.block_count": (V.UINT32, 2),
    "clip.vision.attention.head_count": (V.UINT32, 3),
    "clip.vision.image_mean": (V.ARRAY, V.FLOAT32, [0.5, 0.5, 0.5]),
    "clip.vision.image_std": (V.ARRAY, V.FLOAT32, [0.5, 0.5, 0.5]),
    "clip.projector_type": (V.STRING, "kimik3"),
    "clip.vision.attention.head_dim": (V.UINT32, 16),
    "clip.use_gelu": (V.BOOL, True),
    "clip.vision.attention.layer_norm_epsilon": (V.FLOAT32, float(np.float32(1e-5))),
    "clip.vision.projector.scale_factor": (V.UINT32, 2),
    "clip.vision.image_min_pixels": (V.UINT32, 1568),
    "clip.vision.image_max_pixels": (V.UINT32, 65536 * 14 * 14),
    "deltallama.vision.tower_norm_epsilon": (V.FLOAT32, 2.0**-23),
    "deltallama.vision.projector_norm_epsilon": (V.FLOAT32, float(np.float32(1e-5))),
    "deltallama.vision.ffn_activation": (V.STRING, "gelu_tanh"),
    "deltallama.vision.projector_activation": (V.STRING, "gelu_erf"),
    "deltallama.vision.rope_freq_base": (V.FLOAT32, 10000.0),
    "deltallama.vision.patch_limit": (V.UINT32, 65536),
    "deltallama.vision.patch_limit_on_one_side": (V.UINT32, 512),
    "deltallama.vision.max_frames": (V.UINT32, 4),
    "general.quantization_version": (V.UINT32, 2),
}
FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_checkpoint(tmp_path_factory.mktemp("mmproj") / "sees")


def tensors_of_table(hidden: int, mlp: int, attention: int, grid: int, text: int, blocks: int) -> dict[str, Any]:
    """Name -> shape, fastest dimension first, and whether it takes the output type."""
    table: dict[str, tuple[tuple[int, ...], bool]] = {
        "v.patch_embd.weight": ((14, 14, 3, hidden), False),
        "v.position_embd.weight": ((hidden, grid, grid), False),
        "v.post_ln.weight": ((hidden,), False),
        "mm.1.weight": ((4 * hidden, 4 * hidden), True),
        "mm.2.weight": ((4 * hidden, text), True),
        "mm.post_norm.weight": ((text,), False),
    }
    for block in range(blocks):
        table |= {
            f"v.blk.{block}.attn_qkv.weight": ((hidden, 3 * attention), True),
            f"v.blk.{block}.attn_out.weight": ((attention, hidden), True),
            f"v.blk.{block}.ffn_up.weight": ((hidden, mlp), True),
            f"v.blk.{block}.ffn_down.weight": ((mlp, hidden), True),
            f"v.blk.{block}.ln1.weight": ((hidden,), False),
            f"v.blk.{block}.ln2.weight": ((hidden,), False),
        }
    return table


TINY_TENSORS = tensors_of_table(hidden=32, mlp=72, attention=48, grid=8, text=TEXT_WIDTH, blocks=2)


def expected_type(name: str, outtype: str) -> T:
    ne, takes_outtype = TINY_TENSORS[name]
    if name == "v.patch_embd.weight" and outtype == "f16":
        return T.F16
    if not takes_outtype:
        return T.F32
    if outtype == "q8_0" and ne[0] % 32:
        return T.F16  # rows that are not whole blocks
    return T[outtype.upper()]


@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0"])
def test_keys_and_tensors_of_the_table(model: Path, tmp_path: Path, outtype: str) -> None:
    path = conversion.convert(model, tmp_path / "x.gguf", outtype, mmproj=True)
    with GGUFReader(path) as reader:
        found = {}
        for key, value in reader.fields.items():
            found[key] = (*reader.types[key], value.tolist() if isinstance(value, np.ndarray) else value)
        assert list(found) == list(KEYS)
        assert found == KEYS | {"general.file_type": (V.UINT32, FILE_TYPES[outtype])}
        assert {name: info.ne for name, info in reader.tensors.items()} == {
            n: ne for n, (ne, _) in TINY_TENSORS.items()
        }
        assert {n: info.type for n, info in reader.tensors.items()} == {
            n: expected_type(n, outtype) for n in TINY_TENSORS
        }


def test_tensors_of_the_released_model(tmp_path: Path) -> None:
    """168 of them, 447,358,976 values, in the shapes of the published files."""
    folder = tmp_path / "K3"
    released_k3.write(folder, 2, 1)
    config = json.loads((folder / "config.json").read_bytes())
    config["vision_config"] = VISION | {
        "init_pos_emb_height": 64,
        "init_pos_emb_width": 64,
        "mm_hidden_size": 1024,
        "qkv_hidden_size": 1536,
        "text_hidden_size": 7168,
        "vt_hidden_size": 1024,
        "vt_intermediate_size": 4096,
        "vt_num_attention_heads": 12,
        "vt_num_hidden_layers": 27,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR), encoding="utf-8")
    converter = conversion.get_converter("KimiK3ForConditionalGeneration", "mmproj")(Config(folder / "config.json"))
    with Checkpoint(folder, only=converter.wanted) as checkpoint:
        plan, path = plan_file(Request(folder, mmproj=True), converter, None, checkpoint)
    table = tensors_of_table(hidden=1024, mlp=4096, attention=1536, grid=64, text=7168, blocks=27)
    assert {name: tensor.ne for name, tensor in plan.tensors.items()} == {name: ne for name, (ne, _) in table.items()}
    assert len(table) == 168 and path.name == "mmproj-K3-BF16.gguf"
    # The tower's 401,214,464 and the projector's 46,144,512 of the fact sheet.
    assert sum(int(np.prod(tensor.ne)) for tensor in plan.tensors.values()) == 401_214_464 + 46_144_512
    assert plan.fields["clip.vision.attention.head_dim"][2] == 128


HF_NAMES = {
    "v.patch_embd.weight": "vision_tower.patch_embed.proj.weight",
    "v.position_embd.weight": "vision_tower.patch_embed.pos_emb.weight",
    "v.post_ln.weight": "vision_tower.encoder.final_layernorm.weight",
    "mm.1.weight": "mm_projector.proj.0.weight",
    "mm.2.weight": "mm_projector.proj.2.weight",
    "mm.post_norm.weight": "mm_projector.post_norm.weight",
}
IN_BLOCK = {
    "ln1": "norm0",
    "ln2": "norm1",
    "attn_qkv": "wqkv",
    "attn_out": "wo",
    "ffn_up": "mlp.fc0",
    "ffn_down": "mlp.fc1",
}


def hf_name(name: str) -> str:
    if name in HF_NAMES:
        return HF_NAMES[name]
    _, _, block, part, _ = name.split(".")
    return f"vision_tower.encoder.blocks.{block}.{IN_BLOCK[part]}.weight"


def reordered(qkv: np.ndarray, heads: int) -> np.ndarray:
    """Rows of Q and K as the file has them, one at a time: row 4a + 2b + c of a head goes to b d/2 + 2a + c."""
    out, d = qkv.copy(), len(qkv) // (3 * heads)
    for head in range(2 * heads):  # those of Q, then those of K
        for r in range(d):
            a, b, c = r // 4, r // 2 % 2, r % 2
            out[head * d + b * d // 2 + 2 * a + c] = qkv[head * d + r]
    return out


def test_values(model: Path, tmp_path: Path) -> None:
    """Those of the checkpoint, which its BF16 holds exactly in F32, with reordered rows of Q and K."""
    path = conversion.convert(model, tmp_path / "x.gguf", "f32", mmproj=True)
    source = Reference(model, np.float32)
    with GGUFReader(path) as reader:
        assert sorted(map(hf_name, reader.tensors)) == sorted(vision.tower_weights(source))
        for name in reader.tensors:
            wanted = source.tensor(hf_name(name))
            wanted = reordered(wanted, 3) if "attn_qkv" in name else wanted
            found = np.frombuffer(reader.data(name), np.float32).reshape(wanted.shape)
            np.testing.assert_array_equal(found, wanted, err_msg=name)


@pytest.mark.parametrize("outtype", ["f16", "bf16", "q8_0"])
def test_values_in_other_types(model: Path, tmp_path: Path, outtype: str) -> None:
    """What the package `gguf` makes of the values of the F32 file."""
    exact = conversion.convert(model, tmp_path / "f32.gguf", "f32", mmproj=True)
    path = conversion.convert(model, tmp_path / "x.gguf", outtype, mmproj=True)
    with GGUFReader(exact) as values, GGUFReader(path) as reader:
        for name, info in reader.tensors.items():
            rows = np.frombuffer(values.data(name), np.float32).reshape(-1, info.ne[0])
            assert bytes(reader.data(name)) == gguf.quants.quantize(rows, info.type).tobytes(), name


def test_turning_the_reordered_rows(rng: np.random.Generator) -> None:
    """In the order of the file the first half of a head turns with x and the second with y, both as neighbouring
    pairs: the same scores as turning in the order of the checkpoint."""
    heads, d, grid = 3, 16, (1, 4, 6)
    q, k = rng.standard_normal((2, 24, heads, d))
    order = reordered(np.arange(3 * d), 1)[:d]
    angles = np.stack([np.tile(np.arange(6), 4), np.repeat(np.arange(4), 6)])  # x, y of each patch
    turn = np.exp(1j * angles[:, :, None] * 10000.0 ** (-4 * np.arange(d // 4) / d))  # [2, N, d / 4]

    def turned(x: np.ndarray) -> np.ndarray:
        pairs = x[..., order].reshape(24, heads, 2, d // 4, 2)
        return (pairs[..., 0] + 1j * pairs[..., 1]) * turn.transpose(1, 0, 2)[:, None]

    found = np.einsum("nhij,mhij->hnm", turned(q), turned(k).conj()).real
    wanted = np.einsum("nhd,mhd->hnm", vision.rope_2d(q, grid), vision.rope_2d(k, grid))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


def test_overrides(model: Path, tmp_path: Path) -> None:
    path = conversion.convert(model, tmp_path / "x.gguf", "q8_0", mmproj=True, tensor_types=[r"mm\.2=f32"])
    with GGUFReader(path) as reader:
        assert reader.tensors["mm.2.weight"].type == T.F32 and reader.tensors["mm.1.weight"].type == T.Q8_0
    with pytest.raises(ConversionError, match="decides about no tensor; it matches 1, such as v.position_embd.weight"):
        conversion.convert(model, tmp_path / "y.gguf", "q8_0", mmproj=True, tensor_types=["position=f16"])


# ---- names and the text model beside it ------------------------------------------------------------------------------


def test_names(model: Path, tmp_path: Path) -> None:
    """After the model, with a prefix and without its size; a name that is given stays."""
    (tmp_path / "out").mkdir()
    named = {"mmproj": True, "model_name": "Kimi K3"}
    assert conversion.convert(model, dry_run=True, **named) == model / "mmproj-Kimi-K3-BF16.gguf"
    assert conversion.convert(model, tmp_path / "out", "f16", **named).name == "mmproj-Kimi-K3-F16.gguf"
    assert conversion.convert(model, tmp_path / "eyes-{ftype}.gguf", "q8_0", **named).name == "eyes-q8_0.gguf"


def test_text_conversion_leaves_vision_out(model: Path, tmp_path: Path) -> None:
    blind = tiny.write_checkpoint(tmp_path / "sees", "kimi-k3")
    with_vision = conversion.convert(model, tmp_path / "a.gguf").read_bytes()
    assert with_vision == conversion.convert(blind, tmp_path / "b.gguf").read_bytes()


def test_shards_without_vision_are_not_needed(tmp_path: Path) -> None:
    folder = tiny_vision_checkpoint(tmp_path / "sees")
    expected = conversion.convert(folder, tmp_path / "a.gguf", mmproj=True).read_bytes()
    for number in (1, 2):
        (folder / f"model-{number:05d}-of-000003.safetensors").unlink()
    with pytest.raises(ConversionError, match="listed but not in the folder"):
        conversion.convert(folder, tmp_path / "text.gguf")
    (folder / "tiktoken.model").unlink()
    assert conversion.convert(folder, tmp_path / "b.gguf", mmproj=True).read_bytes() == expected
    (folder / "model-00003-of-000003.safetensors").unlink()
    with pytest.raises(ConversionError, match="listed but not in the folder: model-00003-of-000003.safetensors"):
        conversion.convert(folder, tmp_path / "c.gguf", mmproj=True)


def test_from_the_hub(hub: Hub, model: Path, tmp_path: Path) -> None:  # noqa: F811
    """The vision shard only, and a name in the current folder."""
    hub.folder = model
    path = conversion.convert("org/tiny", remote=True, mmproj=True, model_name="x")
    assert path.name == "mmproj-org-tiny-bf16.gguf" and path.parent.resolve() == Path.cwd()
    local = conversion.convert(model, tmp_path / "local.gguf", mmproj=True, model_name="x")
    assert path.read_bytes() == local.read_bytes()
    read = {Path(request.path).name for request in hub.payload_requests()}
    assert {name for name in read if name.endswith(".safetensors")} == {"model-00003-of-000003.safetensors"}


# ---- streaming, resuming, verifying, splitting -----------------------------------------------------------------------


@pytest.mark.parametrize("slab", [1, 100, 1000, 10_000])
def test_pieces_of_any_size(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slab: int) -> None:
    expected = conversion.convert(model, tmp_path / "whole.gguf", "q8_0", mmproj=True).read_bytes()
    monkeypatch.setattr(folds.slab_rows, "__defaults__", (slab,))
    for threads in (1, 4):
        path = conversion.convert(model, tmp_path / f"{threads}.gguf", "q8_0", mmproj=True, threads=threads)
        assert path.read_bytes() == expected


@pytest.fixture
def killed(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`killed(operation, **options)`: convert into `out`, killed at that operation; the exit status."""
    monkeypatch.setattr(writer_module, "_SYNC_BYTES", 1)
    monkeypatch.setattr(folds.slab_rows, "__defaults__", (1000,))
    (tmp_path / "out").mkdir()

    def run(operation: int, **options: Any) -> int:
        def convert() -> None:
            conversion.convert(model, tmp_path / "out" / "x.gguf", "f16", mmproj=True, **options)

        return run_in_child(convert, kill_at=operation)

    return run


@pytest.mark.parametrize("limits", [Limits(), Limits(0, 5, True)])
def test_killed_and_continued(tmp_path: Path, model: Path, killed: Callable[..., int], limits: Limits) -> None:
    """Killed at more and more operations of each run, until one reaches its end: the files of an undisturbed run."""
    (tmp_path / "whole").mkdir()
    conversion.convert(model, tmp_path / "whole" / "x.gguf", "f16", mmproj=True, limits=limits)
    statuses = []
    for operation in range(2, 300, 9):
        statuses.append(killed(operation, limits=limits))
        if statuses[-1] == 0:
            break
    assert statuses[-1] == 0 and len(statuses) > 3 and set(statuses[:-1]) == {-9}
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_changed_preprocessor_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "_SYNC_BYTES", 1)
    monkeypatch.setattr(folds.slab_rows, "__defaults__", (1000,))
    model = tiny_vision_checkpoint(tmp_path / "sees")
    assert run_in_child(lambda: conversion.convert(model, tmp_path / "x.gguf", mmproj=True) and None, kill_at=40) == -9
    path = model / "preprocessor_config.json"
    path.write_text(path.read_text(encoding="utf-8").replace("65536", "1024"), encoding="utf-8")
    with pytest.raises(GGUFError, match="preprocessor_config.json"):
        conversion.convert(model, tmp_path / "x.gguf", mmproj=True)
    conversion.convert(model, tmp_path / "x.gguf", mmproj=True, restart=True)
    with GGUFReader(tmp_path / "x.gguf") as reader:
        assert reader.fields["deltallama.vision.patch_limit"] == 1024
        assert reader.fields["clip.vision.image_max_pixels"] == 1024 * 196


def test_split_set(model: Path, tmp_path: Path) -> None:
    """Some files now, the others later; together they hold what one file does."""
    (tmp_path / "out").mkdir()
    single = conversion.convert(model, tmp_path / "single.gguf", mmproj=True)
    for only in ([2], [1, 3]):
        conversion.convert(model, tmp_path / "out" / "x.gguf", mmproj=True, limits=Limits(max_tensors=7), only=only)
    parts = sorted((tmp_path / "out").glob("*.gguf"))
    assert [part.name for part in parts] == [f"x-{n:05d}-of-00003.gguf" for n in (1, 2, 3)]
    with GGUFReader(single) as whole, GGUFReader(parts[0]) as split:
        assert {name: bytes(whole.data(name)) for name in whole.tensors} == {
            n: bytes(split.data(n)) for n in split.tensors
        }


def test_verification(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(model), "--mmproj", "--outfile", str(tmp_path / "x.gguf")]
    assert cli_main([*arguments, "--outtype", "q8_0", "--verify"]) == 0
    written = capsys.readouterr().out
    assert len(re.findall(r"^[0-9a-f]{64}  (?:v|mm)\.", written, re.MULTILINE)) == 18
    assert cli_main([*arguments, "--outtype", "q8_0", "--verify-only"]) == 0
    assert capsys.readouterr().out == written
    with GGUFReader(tmp_path / "x.gguf") as reader:
        offset = reader.tensors["v.blk.1.attn_qkv.weight"].offset + 34 * 5 + 7  # in row 5
    flip(tmp_path / "x.gguf", offset)
    assert cli_main([*arguments, "--outtype", "q8_0", "--verify-only"]) == 1
    assert f"tensor v.blk.1.attn_qkv.weight: row 5, byte {offset} of the file" in capsys.readouterr().err


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_time_weight_is_dropped_with_a_notice(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = "vision_tower.patch_embed.pos_emb.time_weight"

    def add(checkpoint: HfCheckpoint) -> None:
        checkpoint.shards[-1][name] = HfTensor.from_float(np.zeros((4, 32)))

    folder = tiny_vision_checkpoint(tmp_path / "sees", mutate=add)
    with caplog.at_level(logging.WARNING, "conversion"):
        path = conversion.convert(folder, tmp_path / "x.gguf", mmproj=True)
    assert [record.getMessage() for record in caplog.records] == [f"{name} is left out: the code computes it"]
    assert path.read_bytes() == conversion.convert(model, tmp_path / "y.gguf", mmproj=True).read_bytes()


def drop(name: str) -> Callable[[HfCheckpoint], None]:
    def mutate(checkpoint: HfCheckpoint) -> None:
        del checkpoint.shards[-1][name]

    return mutate


def put(name: str, *shape: int, dtype: str = "BF16", value: float = 1.0) -> Callable[[HfCheckpoint], None]:
    def mutate(checkpoint: HfCheckpoint) -> None:
        checkpoint.shards[-1][name] = HfTensor.from_float(np.full(shape, value), dtype)

    return mutate


def set_outer(field: str, value: Any) -> Callable[[HfCheckpoint], None]:
    def mutate(checkpoint: HfCheckpoint) -> None:
        checkpoint.config[field] = value

    return mutate


BLOCK = "vision_tower.encoder.blocks."
# What is written into the checkpoint, what the message says.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another model's projector": (
        {"vision": {"text_hidden_size": 40}},
        "vision_config.text_hidden_size is 40, expected hidden_size of the text model, 64: the projector is another",
    ),
    "a projector of another width than it says": (
        {"mutate": put("mm_projector.post_norm.weight", 40)},
        "mm_projector.post_norm.weight: axis 0 is 40, expected 64 (vision_config.text_hidden_size)",
    ),
    "another projector": ({"vision": {"mm_projector_type": "patchmerger"}}, 'mm_projector_type is "patchmerger"'),
    "another tower": ({"vision": {"norm_type": "layernorm"}}, 'norm_type is "layernorm", expected "rmsnorm"'),
    "biases": ({"vision": {"attn_bias": True}}, "attn_bias is true, expected false"),
    "biases nobody announced": (
        {"mutate": put(f"{BLOCK}1.wqkv.bias", 144)},
        f"vision_config.attn_bias is false; unexpected: {BLOCK}1.wqkv.bias",
    ),
    "bicubic positions": ({"vision": {"pos_emb_interpolation_mode": "bicubic"}}, "pos_emb_interpolation_mode is"),
    "an activation": (
        {"vision": {"activation_func": "silu"}},
        'activation_func is "silu", expected "gelu_pytorch_tanh"',
    ),
    "no activation": ({"vision": {"activation_func": ABSENT}}, "vision_config.activation_func is missing"),
    "a projector's activation": ({"vision": {"projector_hidden_act": "gelu_new"}}, "projector_hidden_act is"),
    "merged squares": ({"vision": {"merge_kernel_size": [1, 2]}}, "merge_kernel_size is [1, 2], expected [2, 2]"),
    "heads": ({"vision": {"vt_num_attention_heads": 5}}, "qkv_hidden_size is 48, expected 5 heads"),
    "widths of tower and projector": (
        {"vision": {"mm_hidden_size": 16}},
        "mm_hidden_size is 16, expected vt_hidden_size",
    ),
    "a missing tensor": (
        {"mutate": drop(f"{BLOCK}1.norm1.weight")},
        f"KimiK3ForConditionalGeneration with 2 layers: missing: {BLOCK}1.norm1.weight",
    ),
    "an extra tensor": (
        {"mutate": put("mm_projector.pre_norm.weight", 32)},
        "unexpected: mm_projector.pre_norm.weight",
    ),
    "too few blocks": (
        {"mutate": put(f"{BLOCK}2.norm0.weight", 32)},
        f"vision_config.vt_num_hidden_layers is 2, but there are later layers: {BLOCK}2.norm0.weight",
    ),
    "a shape": (
        {"mutate": put(f"{BLOCK}0.wo.weight", 32, 32)},
        f"tensor {BLOCK}0.wo.weight: axis 1 is 32, expected 48 (vision_config.qkv_hidden_size); shape [32, 32]",
    ),
    "flat positions": (
        {"mutate": put("vision_tower.patch_embed.pos_emb.weight", 64, 32)},
        "pos_emb.weight: shape [64, 32], expected [8, 8, 32]",
    ),
    "a dtype": ({"mutate": put("mm_projector.proj.0.weight", 128, 128, dtype="F64")}, "proj.0.weight: dtype F64"),
    "packed weights": (
        {"mutate": put(f"{BLOCK}0.wo.weight_packed", 32, 24)},
        f"quantized where nothing may be: {BLOCK}0.wo.weight_packed",
    ),
    "a number that is none": (
        {"mutate": put(f"{BLOCK}0.wqkv.weight", 144, 32, value=np.nan)},
        f"tensor {BLOCK}0.wqkv.weight, rows reordered: row 0, column 0: nan is not a finite number",
    ),
    "no vision_config": ({"mutate": set_outer("vision_config", None)}, "vision_config is null: this checkpoint has no"),
    "a fixed number of tokens": ({"preprocessor": {"fixed_output_tokens": 64}}, "fixed_output_tokens is 64: images of"),
    "another patch": ({"preprocessor": {"patch_size": 16}}, "media_proc_cfg.patch_size is 16, expected 14"),
    "another background": (
        {"preprocessor": {"transparent_bg_config": {"pattern": "white"}}},
        'transparent_bg_config.pattern is "white", expected "chessboard"',
    ),
    "another stage": ({"preprocessor": {"transparent_bg_fill_stage": "before_resize"}}, "transparent_bg_fill_stage is"),
    "a deviation of zero": (
        {"preprocessor": {"image_std": [0.5, 0, 0.5]}},
        "image_std is [0.5, 0, 0.5], expected three numbers above 0",
    ),
    "no mean": (
        {"preprocessor": {"image_mean": ABSENT}},
        "media_proc_cfg.image_mean is missing, expected three numbers",
    ),
    "too many patches": (
        {"preprocessor": {"in_patch_limit": 2**30}},
        "in_patch_limit is 1073741824, expected at most 219",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    options, message = REFUSED[case]
    folder = tiny_vision_checkpoint(tmp_path / "sees", **options)
    with pytest.raises((ConversionError, GGUFError), match=re.escape(message)):
        conversion.convert(folder, tmp_path / "x.gguf", mmproj=True)
    assert not list(tmp_path.glob("x.gguf*"))
    if case != "a number that is none":  # which headers do not tell
        assert any(message in problem for problem in validate(Request(folder, mmproj=True)).problems)


def test_all_problems_at_once(tmp_path: Path) -> None:
    folder = tiny_vision_checkpoint(
        tmp_path / "sees",
        vision={"norm_type": "layernorm", "vt_num_attention_heads": 5},
        preprocessor={"patch_size": 16, "image_std": None},
        mutate=put("mm_projector.pre_norm.weight", 32),
    )
    found = validate(Request(folder, mmproj=True)).problems
    fields = ["norm_type", "qkv_hidden_size", "media_proc_cfg.patch_size", "image_std"]
    assert len(found) == 4 and all(field in problem for field, problem in zip(fields, found, strict=True))


def test_a_right_model_validates(model: Path, tmp_path: Path) -> None:
    findings = validate(Request(model, tmp_path / "x.gguf", mmproj=True))
    assert findings.problems == []
    assert findings.size == conversion.convert(model, tmp_path / "x.gguf", mmproj=True).stat().st_size


def test_a_folder_without_preprocessor(tmp_path: Path) -> None:
    folder = tiny_vision_checkpoint(tmp_path / "sees")
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ConversionError, match="preprocessor_config.json cannot be read: No such file"):
        conversion.convert(folder, tmp_path / "x.gguf", mmproj=True)


def test_checkpoints_without_vision(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ConversionError, match="vision_config is missing: this checkpoint has no vision part"):
        conversion.convert(tiny_checkpoint("k3"), tmp_path / "x.gguf", mmproj=True)
    only = "KimiLinearForCausalLM has no vision part; architectures with one: KimiK3ForConditionalGeneration"
    with pytest.raises(ConversionError, match=only):
        conversion.convert(tiny_checkpoint("kl"), tmp_path / "x.gguf", mmproj=True)

    def blind(checkpoint: HfCheckpoint) -> None:
        for shard in checkpoint.shards:
            for name in [name for name in shard if not name.startswith("language_model.")]:
                del shard[name]

    folder = tiny_vision_checkpoint(tmp_path / "blind", mutate=blind)
    with pytest.raises(
        ConversionError, match="no tensor begins with vision_tower. or mm_projector.: this checkpoint has"
    ):
        conversion.convert(folder, tmp_path / "x.gguf", mmproj=True)


def test_requests_that_make_no_sense(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli_main([str(model), "--mmproj", "--vocab-only"])
    assert caught.value.code == 2 and "only one of them" in capsys.readouterr().err
    with pytest.raises(ConversionError, match="mmproj and vocab_only exclude each other"):
        conversion.convert(model, tmp_path / "x.gguf", mmproj=True, vocab_only=True)
    assert cli_main([str(model), "--mmproj", "--outtype", "q4_k"]) == 1
    error = capsys.readouterr().err
    assert "error: output type 'q4_k' of a vision part, expected one of f32, f16, bf16, q8_0, auto\n" in error
