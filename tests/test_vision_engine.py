"""The vision tower of the engine against the float64 reference, and its interface."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conversion
import native
import tiny
from engine import Engine, Tower
from gguf_edit import Edit
from op_runner import nmse
from reference import Checkpoint, vision
from timelines import Fails
from tiny_vision import PREPROCESSOR, VISION, tiny_vision_checkpoint

# Frames, rows and columns: native, smaller, larger, odd ratios, several frames.
GRIDS = [(1, 8, 8), (1, 2, 2), (1, 4, 6), (1, 20, 14), (1, 2, 46), (2, 4, 10), (4, 6, 2)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision_checkpoint(tmp_path_factory.mktemp("sees"))


@pytest.fixture(scope="module")
def mmproj(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``mmproj(outtype)``: the vision file, converted once."""
    folder, done = tmp_path_factory.mktemp("mmproj"), {}

    def convert(outtype: str) -> Path:
        if outtype not in done:
            done[outtype] = conversion.convert(
                checkpoint, outfile=folder / f"mmproj-{outtype}.gguf", outtype=outtype, mmproj=True
            )
        return done[outtype]

    return convert


@pytest.fixture
def text(checkpoint: Path, gguf: Callable[..., Path]) -> Path:
    return gguf(checkpoint)


@pytest.fixture
def tower(text: Path, mmproj: Callable[[str], Path]) -> Iterator[Tower]:
    with Engine(text, activations="fine", n_ctx=64) as engine:
        yield Tower(engine, mmproj("f32"))


def expected(checkpoint: Path, pixels: np.ndarray, grid: tuple[int, int, int]) -> np.ndarray:
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["vision_config"]
    return vision.tower(vision.tower_weights(Checkpoint(checkpoint)), config, pixels, [grid])[0]


def picture(rng: np.random.Generator, grid: tuple[int, int, int]) -> np.ndarray:
    return rng.uniform(-1, 1, (int(np.prod(grid)), 3, 14, 14)).astype(np.float32)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_h6_features_of_every_grid(
    checkpoint: Path, text: Path, mmproj: Callable[[str], Path], rng: np.random.Generator, grid: tuple[int, int, int]
) -> None:
    """Float32 and float64, on one and several threads: the same bits for any number of threads."""
    pixels = picture(rng, grid)
    wanted = expected(checkpoint, pixels, grid)
    for device, activations, bound in (("cpu", "fine", 1e-9), ("cpu", "exact", 1e-13), ("ref", "exact", 1e-13)):
        found = []
        for n_threads in (1, 3):
            options = {"device": device, "activations": activations, "n_threads": n_threads}
            with Engine(text, n_ctx=16, poison=1, **options) as engine:
                found.append(Tower(engine, mmproj("f32")).encode(pixels, grid))
        assert nmse(found[0], wanted) <= bound, (device, activations)
        assert np.array_equal(found[0], found[1])


@pytest.mark.parametrize("outtype,bound", [("f16", 1e-5), ("bf16", 1e-3), ("q8_0", 1e-2)])
def test_features_of_rounded_weights(
    checkpoint: Path, text: Path, mmproj: Callable[[str], Path], rng: np.random.Generator, outtype: str, bound: float
) -> None:
    with Engine(text, activations="fine", n_ctx=16) as engine:
        tower = Tower(engine, mmproj(outtype))
        for grid in GRIDS:
            pixels = picture(rng, grid)
            assert nmse(tower.encode(pixels, grid), expected(checkpoint, pixels, grid)) <= bound, grid


def test_golden_pictures(golden: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    """The published code's features of its own random tower, which is 40 wide: a text model of that width goes with
    it."""
    text = tiny.write_checkpoint(tmp_path / "text", preset="k3", hidden_size=40)
    config = json.loads((text / "config.json").read_text(encoding="utf-8"))
    source = golden / "vision-mini"
    with np.load(source / "golden.npz") as arrays:
        golden_arrays = dict(arrays)
    described = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["vision_config"] = VISION | described["vision_config"]
    (text / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR), encoding="utf-8")
    (text / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (text / "model-vision.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    index = json.loads((text / "model.safetensors.index.json").read_text(encoding="utf-8"))
    index["weight_map"] |= dict.fromkeys(Checkpoint(source), "model-vision.safetensors")
    (text / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    vision_file = conversion.convert(text, outfile=tmp_path / "mmproj.gguf", outtype="f32", mmproj=True)
    text_file = conversion.convert(text, outfile=tmp_path / "text.gguf", outtype="f32")
    with Engine(text_file, activations="fine", n_ctx=16) as engine:
        tower, at = Tower(engine, vision_file), 0
        for number, grid in enumerate(golden_arrays["grid_thws"].tolist()):
            pixels = golden_arrays["pixel_values"][at : at + int(np.prod(grid))]
            at += len(pixels)
            found = tower.encode(pixels, tuple(grid))
            np.testing.assert_allclose(found, golden_arrays[f"features_{number}"], rtol=0, atol=2e-5)


def test_what_a_tower_says_of_itself(tower: Tower) -> None:
    info = tower.info
    sizes = (info.n_layer, info.n_embd, info.n_ff, info.n_head, info.head_dim, info.projection_dim)
    assert sizes == (2, 32, 72, 3, 16, 64)
    assert (info.patch_size, info.merge, info.grid_height, info.grid_width, info.max_frames) == (14, 2, 8, 8, 4)
    assert (info.patch_limit, info.side_limit) == (65536, 512)
    assert list(info.image_mean) == list(info.image_std) == [0.5, 0.5, 0.5]
    assert info.max_patches >= 258 * 258  # the largest that preprocessing yields
    assert info.bytes_now == 0


def test_memory_of_an_image_is_as_planned(tower: Tower, text: Path, rng: np.random.Generator) -> None:
    """It grows to the largest image so far, and no further."""
    tower.encode(picture(rng, (1, 20, 14)), (1, 20, 14))
    held = tower.info.bytes_now
    for grid in [(1, 2, 2), (1, 14, 20)]:
        tower.encode(picture(rng, grid), grid)
        assert tower.info.bytes_now == held
    small = Tower(tower.engine, tower.path, max_patches=20 * 14)
    assert small.info.bytes_most == held
    assert held < tower.info.bytes_most


@pytest.mark.parametrize(
    "grid,words",
    [
        ((0, 2, 2), ["0 frames", "1 to 4"]),
        ((5, 2, 2), ["5 frames"]),
        ((1, 3, 2), ["3 x 2 patches", "whole squares of 2 x 2"]),
        ((1, 2, 0), ["2 x 0 patches"]),
        ((1, 4, 2**31), ["more than the"]),
        ((4, 2**31, 2**31), ["more than the"]),
    ],
    ids=str,
)
def test_grids_that_are_refused(tower: Tower, grid: tuple[int, int, int], words: list[str]) -> None:
    pixels, features = tower.ffi.new("float[]", 4 * 588), tower.ffi.new("float[]", 64)
    null = tower.ffi.NULL
    with Fails("ARG", *words):
        native.check(tower.lib.delta_vision_encode(tower.handle, pixels, *grid, features, 64, null, null))
    with Fails("ARG", "room for 63 values", "need 64"):
        native.check(tower.lib.delta_vision_encode(tower.handle, pixels, 1, 2, 2, features, 63, null, null))


def test_pixels_that_are_no_numbers(tower: Tower) -> None:
    pixels = np.zeros((4, 3, 14, 14), np.float32)
    pixels[2, 1, 3, 3] = np.nan
    with Fails("NUMERIC", "feature row 0 is"):
        tower.encode(pixels, (1, 2, 2))


def test_an_encoding_can_be_cancelled(tower: Tower, rng: np.random.Generator) -> None:
    """By the progress function at any op, and by cancelling the model; the next one is whole."""
    pixels, calls = picture(rng, (1, 4, 6)), []
    whole = tower.encode(pixels, (1, 4, 6))

    @tower.ffi.callback("delta_progress_fn")
    def stop(done: int, total: int, user: Any) -> int:
        calls.append((done, total))
        return int(done == 5)

    with Fails("CANCELLED", "image"):
        tower.encode(pixels, (1, 4, 6), stop)
    assert [done for done, _ in calls] == list(range(6)) and calls[0][1] > 20

    @tower.ffi.callback("delta_progress_fn")
    def cancel(done: int, total: int, user: Any) -> int:
        tower.engine.cancel()
        with Fails("BUSY", "another computation"):
            tower.encode(pixels, (1, 4, 6))
        with Fails("BUSY", "the vision tower computes"):
            tower.close()
        return 0

    with Fails("CANCELLED", "image"):
        tower.encode(pixels, (1, 4, 6), cancel)
    assert np.array_equal(tower.encode(pixels, (1, 4, 6)), whole)


def test_a_profile_of_the_latest_image(tower: Tower, rng: np.random.Generator) -> None:
    ffi, lib = tower.ffi, tower.lib

    def profile() -> list[Any]:
        found = []
        for index in range(lib.delta_vision_op_count(tower.handle)):
            op = ffi.new("delta_op_profile *")
            op.size = ffi.sizeof("delta_op_profile")
            native.check(lib.delta_vision_profile_get(tower.handle, index, op))
            found.append(op)
        return found

    assert not any(op.ns for op in profile())
    for grid in [(1, 4, 6), (1, 8, 8)]:
        tower.encode(picture(rng, grid), grid)
        ops = profile()
        assert all((op.n_runs, op.state_bytes) == (1, 0) for op in ops)
        rows = {ffi.string(op.name).decode(): int(op.n_rows) for op in ops}
        assert rows["v.blk.1.attn_qkv"] == grid[1] * grid[2] and rows["mm.2"] == grid[1] * grid[2] // 4
    assert sum(op.weight_bytes for op in ops) == tower.info.weight_bytes
    with Fails("ARG", f"op {len(ops)} is not in"):
        native.check(lib.delta_vision_profile_get(tower.handle, len(ops), ops[0]))
    assert lib.delta_vision_op_count(ffi.NULL) == 0


def test_a_model_outlives_its_towers(tower: Tower) -> None:
    with Fails("STATE", "vision towers: 1"):
        native.check(tower.lib.delta_model_close(tower.engine.model))


def test_null_and_structs_of_another_size(tower: Tower) -> None:
    ffi, lib, null = tower.ffi, tower.lib, tower.ffi.NULL
    params, info, out = ffi.new("delta_vision_params *"), ffi.new("delta_vision_info *"), ffi.new("delta_vision **")
    lib.delta_vision_params_init(params)
    info.size = ffi.sizeof("delta_vision_info")
    pixels, features = ffi.new("float[]", 4 * 588), ffi.new("float[]", 64)
    calls = [
        (lib.delta_vision_open, [str(tower.path).encode(), tower.engine.model, params, out], 4),
        (lib.delta_vision_info_get, [tower.handle, info], 2),
        (lib.delta_vision_encode, [tower.handle, pixels, 1, 2, 2, features, 64, null, null], 7),
    ]
    for function, arguments, n_required in calls:
        for index in range(n_required):
            if isinstance(arguments[index], int):
                continue
            with Fails("ARG", "null"):
                native.check(function(*arguments[:index], null, *arguments[index + 1 :]))
    assert out[0] == null
    params.size -= 4
    with Fails("ABI", "delta_vision_params"):
        native.check(lib.delta_vision_open(*calls[0][1]))
    info.size += 4
    with Fails("ABI", "delta_vision_info"):
        native.check(lib.delta_vision_info_get(tower.handle, info))
    with Fails("ARG", "max_patches is 4000000000"):
        Tower(tower.engine, tower.path, max_patches=4_000_000_000)
    lib.delta_vision_params_init(null)


# -- files that do not fit ---------------------------------------------------------------------------------------------


def test_h7_a_tower_of_another_width(
    text: Path, mmproj: Callable[[str], Path], tmp_path: Path, gguf: Callable[..., Path]
) -> None:
    other = gguf(tiny.write_checkpoint(tmp_path / "wide", preset="k3", hidden_size=96))
    with Engine(other, n_ctx=16) as engine, Fails("ARG", "rows of 64 values", "embeddings have 96"):
        Tower(engine, mmproj("f32"))


def test_h7_a_model_of_another_kind(
    mmproj: Callable[[str], Path], tiny_checkpoint: Callable[..., Path], gguf: Callable[..., Path]
) -> None:
    other = gguf(tiny_checkpoint("kl"))
    with Engine(other, n_ctx=16) as engine, Fails("ARG", "tower of a kimi-k3 model", "kimi-linear"):
        Tower(engine, mmproj("f32"))


def changed(source: Path, key: str, value: Any, target: Path) -> None:
    edit = Edit(source)
    edit.fields[key] = (value, edit.fields[key][1])
    target.unlink(missing_ok=True)
    edit.write(target)


def test_h7_files_of_another_kind(text: Path, mmproj: Callable[[str], Path], tmp_path: Path) -> None:
    """A projector of Kimi-VL, a text model, an activation nobody knows, sizes that contradict the tensors."""
    with Engine(text, n_ctx=16) as engine:
        with Fails("UNSUPPORTED", "'kimi-k3' is no vision tower", "mmproj"):
            Tower(engine, text)
        for key, value, words in [
            ("clip.projector_type", "kimivl", ["'kimivl'", "'kimik3'"]),
            ("deltallama.vision.ffn_activation", "relu", ["ffn_activation", "'relu'", "gelu_erf, gelu_tanh"]),
            ("deltallama.vision.projector_activation", "silu", ["projector_activation", "'silu'"]),
        ]:
            path = tmp_path / "other.gguf"
            changed(mmproj("f32"), key, value, path)
            with Fails("UNSUPPORTED", *words):
                Tower(engine, path)
        for key, value in [
            ("clip.vision.attention.head_dim", 18),
            ("clip.vision.block_count", 3),
            ("clip.vision.block_count", 1),
            ("clip.vision.embedding_length", 31),
            ("clip.vision.patch_size", 16),
            ("clip.vision.projector.scale_factor", 3),
            ("deltallama.vision.max_frames", 0),
        ]:
            path = tmp_path / "other.gguf"
            changed(mmproj("f32"), key, value, path)
            with Fails("FORMAT"):
                Tower(engine, path)


def test_keys_of_ours_are_optional(
    text: Path, mmproj: Callable[[str], Path], tmp_path: Path, rng: np.random.Generator
) -> None:
    """A file of another converter has none of them: their defaults are what ours writes."""
    edit = Edit(mmproj("f32"))
    for key in [key for key in edit.fields if key.startswith("deltallama.")]:
        del edit.fields[key]
    edit.write(tmp_path / "plain.gguf")
    pixels = picture(rng, (1, 4, 6))
    with Engine(text, n_ctx=16) as engine:
        whole = Tower(engine, mmproj("f32")).encode(pixels, (1, 4, 6))
        assert np.array_equal(Tower(engine, tmp_path / "plain.gguf").encode(pixels, (1, 4, 6)), whole)
