"""Checkpoints of compressed-tensors that are dequantized, against the definition of the formats in numpy.

What needs the package itself is marked `torch`; refusals need nothing.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conversion
import tiny
import tiny_compressed
from conversion import ConversionError
from conversion.checkpoint import Checkpoint
from conversion.compressed import Dequantized, dequantized, prepare, read_scheme
from conversion.config import Config
from test_convert_inputs import same_contents
from tiny_compressed import Mutate
from tiny_files import Checkpoint as HfCheckpoint
from tiny_files import HfTensor

SCHEMES: dict[str, Callable[[bool], Mutate]] = {
    "int4 groups": lambda plain: tiny_compressed.int4(32, plain=plain),
    "int4 groups with zero points": lambda plain: tiny_compressed.int4(32, symmetric=False, plain=plain),
    "int4 rows": lambda plain: tiny_compressed.int4(None, plain=plain),
    "int4 rows with zero points": lambda plain: tiny_compressed.int4(None, symmetric=False, plain=plain),
    "FP8 tensor": lambda plain: tiny_compressed.fp8("tensor", plain=plain),
    "FP8 rows": lambda plain: tiny_compressed.fp8("channel", plain=plain),
    "FP8 blocks": lambda plain: tiny_compressed.fp8("block", plain=plain),
}


def write(folder: Path, arch: str, mutate: Mutate, **options: Any) -> Path:
    packed: dict[str, Any] = {"packed": False, "q_lora_rank": 64} if arch == "kimi-k3" else {}
    return tiny.write_checkpoint(folder, arch, num_hidden_layers=4, num_experts=3, mutate=mutate, **packed, **options)


def need_the_package() -> None:
    pytest.importorskip("torch", reason="the extra `compressed` (torch) is not installed")
    pytest.importorskip("compressed_tensors", reason="the extra `compressed` is not installed")


@pytest.mark.torch
@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("arch", tiny.ARCHS)
def test_dequantized_weights_are_those_of_the_definition(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, arch: str, name: str
) -> None:
    """The file equals that of a checkpoint that holds the decoded weights, whatever becomes of them."""
    need_the_package()
    scheme = SCHEMES[name]
    plain = write(tmp_path / "plain", arch, scheme(True))
    quantized = write(tmp_path / "quantized", arch, scheme(False))
    for outtype in ("auto", "f32", "q8_0"):
        a = conversion.convert(plain, tmp_path / f"a-{outtype}.gguf", outtype, model_name="X")
        with caplog.at_level(logging.WARNING, "conversion"):
            b = conversion.convert(quantized, tmp_path / f"b-{outtype}.gguf", outtype, model_name="X")
        same_contents(a, b)
    assert re.search(r"\d+ weights are dequantized as compressed-tensors 0\.20\S* does it: \S+-quantized", caplog.text)


@pytest.mark.torch
@pytest.mark.parametrize("name", SCHEMES)
def test_any_part_of_a_dequantized_weight(tmp_path: Path, rng: np.random.Generator, name: str) -> None:
    """Zero points and blocks span several rows; a part may begin and end anywhere."""
    need_the_package()
    folder = write(tmp_path, "kimi-linear", SCHEMES[name](False))
    scheme = read_scheme(Config(folder / "config.json"))
    assert scheme is not None
    with Checkpoint(folder) as checkpoint:
        sources = dequantized(checkpoint.tensors, scheme)
        prepare(sources)
        for stem in ("layers.0.self_attn.f_b_proj", "layers.0.mlp.down_proj", "layers.3.self_attn.q_proj"):
            source = sources[f"model.{stem}.weight"]
            assert isinstance(source, Dequantized)
            whole = source.floats()
            assert whole.shape == (source.n_elements,)
            for _ in range(40):
                first, last = np.sort(rng.integers(0, source.n_elements + 1, 2)).tolist()
                if first < last:
                    np.testing.assert_array_equal(source.floats(first, last - first), whole[first:last])


@pytest.mark.torch
@pytest.mark.parametrize("name", SCHEMES)
def test_the_package_writes_what_the_tests_write(name: str) -> None:
    """Decoded and encoded again by the package, a weight has the parts it had, by name, type, shape and bytes."""
    need_the_package()
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    checkpoint = tiny.build_checkpoint("kimi-linear", num_hidden_layers=4, num_experts=3)
    SCHEMES[name](False)(checkpoint)
    config = checkpoint.text["quantization_config"]
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    compressor: Any = BaseCompressor.get_value_from_registry(config["format"])
    stem = "model.layers.0.mlp.down_proj."
    parts = {key.removeprefix(stem): t for shard in checkpoint.shards for key, t in shard.items() if stem in key}
    types = {"BF16": torch.bfloat16, "I32": torch.int32, "I64": torch.int64, "F8_E4M3": torch.float8_e4m3fn}
    state = {
        key: torch.frombuffer(bytearray(part.data), dtype=types[part.dtype]).reshape(part.shape)
        for key, part in parts.items()
    }
    if (zero := state.get("weight_zero_point")) is not None:  # see the converter about this layout
        state["weight_zero_point"] = zero.t().clone(memory_format=torch.contiguous_format).t()
    written = compressor.compress(compressor.decompress(state, scheme), scheme)
    assert set(written) == set(parts)
    for key, part in parts.items():
        assert written[key].dtype == types[part.dtype] and tuple(written[key].shape) == part.shape, key
        data = written[key].clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()
        assert data == part.data, key


@pytest.mark.torch
def test_a_shape_that_lies_is_found(tmp_path: Path) -> None:
    need_the_package()

    def lie(checkpoint: HfCheckpoint) -> None:
        tiny_compressed.int4()(checkpoint)
        shape = HfTensor("I64", (2,), np.array([64, 95], "<i8").tobytes())
        checkpoint.set("model.layers.0.mlp.down_proj.weight_shape", shape)

    folder = write(tmp_path / "model", "kimi-linear", lie)
    with pytest.raises(ConversionError, match=r"down_proj\.weight_shape: the shape is \[64, 95\], expected \[64, 96\]"):
        conversion.convert(folder, tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


@pytest.mark.torch
def test_a_code_that_is_not_a_number_is_found(tmp_path: Path) -> None:
    need_the_package()

    def break_one(checkpoint: HfCheckpoint) -> None:
        tiny_compressed.fp8()(checkpoint)
        name = "model.layers.0.mlp.down_proj.weight"
        codes = checkpoint.get(name).bytes_array()
        codes[7, 5] = 0xFF
        checkpoint.set(name, HfTensor("F8_E4M3", codes.shape, codes.tobytes()))

    folder = write(tmp_path / "model", "kimi-linear", break_one)
    with pytest.raises(ValueError, match=r"down_proj\.weight: row 7, column 5"):
        conversion.convert(folder, tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["torch", "compressed_tensors"])
def test_without_the_extra_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    folder = write(tmp_path, "kimi-linear", tiny_compressed.int4())
    for name in ("torch", "compressed_tensors"):
        if name == module or name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, None)  # importing it raises
    pattern = (
        r"int4, group of 32, symmetric\), and what decodes them is not installed .*: pip install '.*\[compressed\]'"
    )
    with pytest.raises(ConversionError, match=pattern):
        conversion.convert(folder, dry_run=True)


def group(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda scheme: scheme["config_groups"]["group_0"].update({key: value})


def weights(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda scheme: scheme["config_groups"]["group_0"]["weights"].update({key: value})


def top(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda scheme: scheme.update({key: value})


def second_group(scheme: dict[str, Any]) -> None:
    first = scheme["config_groups"]["group_0"]
    other = {**first, "weights": {**first["weights"], "group_size": 64}}
    scheme["config_groups"]["group_1"] = other


@pytest.mark.parametrize(
    ("format_", "change", "message"),
    [
        ("int4", top("quant_method", "gptq"), r"quant_method is 'gptq', expected 'compressed-tensors'; supported: "),
        ("int4", top("format", "nvfp4-pack-quantized"), r"\.format is 'nvfp4-pack-quantized', expected 'mxfp4-pack-"),
        ("int4", top("format", "mixed-precision"), r"\.format is 'mixed-precision'"),
        ("int4", top("format", "int-quantized"), r"\.format is 'int-quantized'"),
        ("int4", top("quantization_status", "frozen"), r"quantization_status is 'frozen', expected 'compressed'"),
        ("int4", top("kv_cache_scheme", {"num_bits": 8}), "kv_cache_scheme is set, which is not supported"),
        ("int4", top("transform_config", {"r1": {}}), "transform_config is set, which is not supported"),
        ("int4", top("sparsity_config", {"format": "dense"}), "sparsity_config is set, which is not supported"),
        ("int4", top("config_groups", {}), "config_groups is missing or empty"),
        ("int4", second_group, "config_groups quantize weights in different ways; expected one"),
        ("int4", group("weights", None), r"group_0\.weights is missing"),
        ("int4", group("format", "float-quantized"), r"group_0\.format is 'float-quantized', expected None or 'pack-"),
        ("int4", group("input_activations", {"dynamic": False}), r"input_activations is not dynamic"),
        ("int4", group("output_activations", {}), r"output_activations is \{\}, expected None"),
        ("int4", weights("num_bits", 8), r"weights\.num_bits is 8, expected 4"),
        ("int4", weights("num_bits", 4.0), r"weights\.num_bits is 4\.0, expected 4"),
        ("int4", weights("type", "float"), r"weights\.type is 'float', expected 'int'"),
        ("int4", weights("strategy", "tensor"), r"weights\.strategy is 'tensor', expected 'group' or 'channel'"),
        ("int4", weights("symmetric", None), r"weights\.symmetric is None, expected True or False"),
        ("int4", weights("dynamic", True), r"weights\.dynamic is True, expected False"),
        ("int4", weights("actorder", "group"), r"weights\.actorder is 'group', expected None"),
        ("int4", weights("group_size", 0), r"weights\.group_size is 0"),
        ("fp8", weights("num_bits", 4), r"weights\.num_bits is 4, expected 8"),
        ("fp8", weights("type", "int"), r"weights\.type is 'int', expected 'float'"),
        ("fp8", weights("symmetric", False), r"weights\.symmetric is False, expected True"),
        (
            "fp8",
            weights("strategy", "group"),
            r"weights\.strategy is 'group', expected 'tensor' or 'channel' or 'block'",
        ),
        ("fp8", weights("strategy", "block"), r"weights\.block_structure is None, expected two numbers"),
        ("fp8 blocks", weights("block_structure", [128, 2048]), r"is \[128, 2048\], expected two numbers up to 1024"),
    ],
)
def test_scheme_that_is_not_proven_is_refused(
    tmp_path: Path, format_: str, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    def mutate(checkpoint: HfCheckpoint) -> None:
        formats = {"int4": tiny_compressed.int4(), "fp8": tiny_compressed.fp8()}
        (formats | {"fp8 blocks": tiny_compressed.fp8("block")})[format_](checkpoint)
        change(checkpoint.text["quantization_config"])

    folder = write(tmp_path, "kimi-linear", mutate)
    with pytest.raises(ConversionError, match=message):
        conversion.convert(folder, dry_run=True)


STEM = "model.layers.0.mlp.down_proj"


def resized(part: str, axis: int) -> Callable[[HfCheckpoint], None]:
    return lambda c: c.set(f"{STEM}.{part}", c.get(f"{STEM}.{part}").resized(axis, 1))


def retyped(part: str, dtype: str) -> Callable[[HfCheckpoint], None]:
    return lambda c: c.set(
        f"{STEM}.{part}", HfTensor(dtype, c.get(f"{STEM}.{part}").shape, c.get(f"{STEM}.{part}").data)
    )


@pytest.mark.parametrize(
    ("format_", "change", "message"),
    [
        ("int4", lambda c: c.delete(f"{STEM}.weight_scale"), r"weight_packed has no \S+down_proj\.weight_scale beside"),
        ("int4", lambda c: c.delete(f"{STEM}.weight_shape"), r"weight_packed has no \S+down_proj\.weight_shape beside"),
        ("int4", lambda c: c.delete(f"{STEM}.weight_zero_point"), r"has no \S+down_proj\.weight_zero_point beside"),
        (
            "int4",
            lambda c: c.delete(f"{STEM}.weight_packed"),
            r"quantized where nothing may be: \S+down_proj\.weight_scale",
        ),
        ("int4", resized("weight_scale", 1), r"weight_scale: shape \[64, 4\], expected \[64, 3\] \(pack-quantized"),
        ("int4", resized("weight_packed", 1), r"weight_packed: rows of 104 values are not whole groups of 32"),
        ("int4", resized("weight_zero_point", 0), r"weight_zero_point: shape \[9, 3\], expected \[8, 3\]"),
        ("int4", retyped("weight_packed", "F32"), r"weight_packed: dtype F32, expected I32"),
        (
            "int4",
            lambda c: c.set(f"{STEM}.weight_g_idx", c.get(f"{STEM}.weight_shape")),
            "unexpected: \\S*weight_g_idx",
        ),
        ("fp8", lambda c: c.delete(f"{STEM}.weight_scale"), r"down_proj\.weight has no \S+weight_scale beside it"),
        (
            "fp8",
            resized("weight_scale", 1),
            r"weight_scale: shape \[64, 2\], expected \[64, 1\] \(float-quantized, FP8",
        ),
        ("fp8", resized("weight", 0), r"weight_scale: shape \[64, 1\], expected \[65, 1\]"),
        ("fp8", retyped("weight", "F8_E5M2"), r"quantized where nothing may be: .*down_proj\.weight_scale"),
    ],
)
def test_parts_of_a_quantized_weight_are_checked(
    tmp_path: Path, format_: str, change: Callable[[HfCheckpoint], None], message: str
) -> None:
    def mutate(checkpoint: HfCheckpoint) -> None:
        {"int4": tiny_compressed.int4(symmetric=False), "fp8": tiny_compressed.fp8()}[format_](checkpoint)
        change(checkpoint)

    folder = write(tmp_path, "kimi-linear", mutate)
    with pytest.raises(ConversionError, match=message):
        conversion.convert(folder, dry_run=True)


def test_an_announcement_without_quantized_weights(tmp_path: Path) -> None:
    """Everything may be on the list of what is left as it is; then nothing needs the package."""

    def mutate(checkpoint: HfCheckpoint) -> None:
        tiny_compressed.int4(plain=True)(checkpoint)
        announced: list[Any] = []

        def note(other: HfCheckpoint) -> None:
            tiny_compressed.int4()(other)
            announced.append(other.text["quantization_config"])

        note(tiny.build_checkpoint("kimi-linear", num_hidden_layers=4, num_experts=3))
        checkpoint.text["quantization_config"] = announced[0]

    plain = write(tmp_path / "plain", "kimi-linear", tiny_compressed.int4(plain=True))
    folder = write(tmp_path / "announced", "kimi-linear", mutate)
    a = conversion.convert(plain, tmp_path / "a.gguf", model_name="X")
    same_contents(a, conversion.convert(folder, tmp_path / "b.gguf", model_name="X"))
