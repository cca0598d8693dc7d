"""Which type each tensor gets: output types, mixes, rows too short for a type, and overrides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T

import conversion
import native as test_native
from conversion import ConversionError
from conversion.types import OUTTYPES, Types, matters_more, parse_override
from gguf_ext import GGUFError, GGUFReader, native
from gguf_ext.quants import quantize_rows


@pytest.fixture(autouse=True)
def tested_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The library that the other tests use."""
    monkeypatch.setenv("DELTALLAMA_LIBRARY", str(test_native.library_path()))
    library = native.library  # a test may put something else in its place
    library.cache_clear()
    yield
    library.cache_clear()


def layers(text: str) -> set[int]:
    """ "0-2,5" -> {0, 1, 2, 5}."""
    bounds = [[int(n) for n in part.split("-")] for part in text.split(",")]
    return {n for bound in bounds for n in range(bound[0], bound[-1] + 1)}


# -- the choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outtype", OUTTYPES)
def test_what_always_stays_f32(outtype: str) -> None:
    types = Types(OUTTYPES[outtype], [parse_override(".=q8_0")], 4, {0, 1, 2})
    for name, ne in [
        ("output_norm.weight", (512,)),
        ("blk.0.ffn_gate_inp.weight", (512, 64)),
        ("blk.0.exp_probs_b.bias", (64,)),
        ("blk.0.ssm_conv1d_q.weight", (4, 1, 512, 1)),
        ("blk.0.ssm_a", (1, 8, 1, 1)),
        ("blk.0.ssm_dt.bias", (512,)),
        ("blk.0.ssm_norm.weight", (128,)),
        ("blk.0.attn_res_score.weight", (512,)),
    ]:
        prefix, name = ("blk.0.", name[6:]) if name.startswith("blk") else ("", name)
        assert types.of(prefix, name, ne) == T.F32
    assert types.warnings == []


@pytest.mark.parametrize(
    ("outtype", "matrix", "token_embd", "output", "experts", "short", "tiny"),
    [
        ("f32", T.F32, T.F32, T.F32, T.F32, T.F32, T.F32),
        ("bf16", T.BF16, T.BF16, T.BF16, T.BF16, T.BF16, T.BF16),
        ("q8_0", T.Q8_0, T.Q8_0, T.Q8_0, T.Q8_0, T.Q8_0, T.F16),
        ("q6_k", T.Q6_K, T.Q6_K, T.Q6_K, T.Q6_K, T.Q8_0, T.F16),
        ("q5_k", T.Q5_K, T.Q5_K, T.Q6_K, T.Q5_K, T.Q5_1, T.F16),
        ("q4_k", T.Q4_K, T.Q4_K, T.Q6_K, T.Q4_K, T.Q5_0, T.F16),
        ("q4_0", T.Q4_0, T.Q4_0, T.Q6_K, T.Q4_0, T.Q4_0, T.F16),
        ("mxfp4", T.Q8_0, T.Q8_0, T.Q8_0, T.MXFP4, T.Q8_0, T.F16),
        ("tq1_0", T.TQ1_0, T.F16, T.F16, T.TQ1_0, T.F16, T.F16),
        ("tq2_0", T.TQ2_0, T.F16, T.F16, T.TQ2_0, T.F16, T.F16),
    ],
)
def test_types_of_matrices(outtype: str, matrix: T, token_embd: T, output: T, experts: T, short: T, tiny: T) -> None:
    types = Types(OUTTYPES[outtype], (), 8, set(range(6)))
    assert types.of("blk.1.", "attn_q.weight", (512, 64)) == matrix
    assert types.of("blk.1.", "ffn_down.weight", (512, 64)) == matrix
    assert types.of("blk.1.", "ssm_beta.weight", (512, 8)) == matrix
    assert types.of("", "token_embd.weight", (512, 1000)) == token_embd
    assert types.of("", "output.weight", (512, 1000)) == output
    assert types.of("blk.1.", "ffn_up_exps.weight", (512, 64, 8)) == experts
    assert types.of("blk.1.", "attn_k_b.weight", (128, 512, 8)) == short
    assert types.of("blk.1.", "attn_k_b.weight", (48, 512, 8)) == tiny


@pytest.mark.parametrize(
    ("n_layers", "expected"),
    [(27, "0-2,5,8,11,14,17,20,23-26"), (93, "0-10," + ",".join(map(str, range(13, 81, 3))) + ",81-92")],
)
@pytest.mark.parametrize("outtype", ["q4_k_m", "q5_k_m"])
def test_mixes_spend_more_where_it_matters(n_layers: int, expected: str, outtype: str) -> None:
    kda = {layer for layer in range(n_layers) if layer % 4 != 3}
    kind = OUTTYPES[outtype]
    types = Types(kind, (), n_layers, kda)
    for name in ("ffn_down.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight"):
        found = {n for n in range(n_layers) if types.of(f"blk.{n}.", name, (512, 64)) == T.Q6_K}
        assert found == layers(expected)
    # Value projections are counted among the layers that have one.
    found = {n for n in kda if types.of(f"blk.{n}.", "attn_v.weight", (512, 64)) == T.Q6_K}
    assert found == {layer for index, layer in enumerate(sorted(kda)) if matters_more(index, len(kda))}
    assert types.of("blk.0.", "ffn_up.weight", (512, 64)) == kind.matrices
    assert types.of("", "output.weight", (512, 64)) == T.Q6_K


def test_short_rows_are_one_warning_per_kind_of_tensor() -> None:
    types = Types(OUTTYPES["q4_k"])
    for layer in range(4):
        types.of(f"blk.{layer}.", "ssm_f_b.weight", (128, 512))
    types.of("blk.3.", "attn_k_b.weight", (40, 512, 4))
    assert types.warnings == [
        "blk.0.ssm_f_b.weight and 3 like it: rows of 128 values are not whole Q4_K blocks; written as Q5_0",
        "blk.3.attn_k_b.weight: rows of 40 values are not whole Q4_K blocks; written as F16",
    ]


def test_types_that_need_the_library_say_so_while_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    with pytest.raises(GGUFError, match="Q4_K needs the native library"):
        Types(OUTTYPES["q4_k"]).of("blk.0.", "attn_q.weight", (512, 64))


# -- overrides -------------------------------------------------------------------------------------------------------


def test_the_first_pattern_decides() -> None:
    overrides = [parse_override(text) for text in (r"blk\.[01]\.ffn_down=q6_k", "ffn_down=Q5_0", "^output=bf16")]
    types = Types(OUTTYPES["q8_0"], overrides)
    assert types.of("blk.1.", "ffn_down.weight", (512, 64)) == T.Q6_K
    assert types.of("blk.2.", "ffn_down.weight", (512, 64)) == T.Q5_0
    assert types.of("", "output.weight", (512, 64)) == T.BF16
    assert types.of("blk.1.", "attn_output.weight", (512, 64)) == T.Q8_0
    assert types.of("blk.0.", "ffn_down.weight", (128, 64)) == T.Q8_0  # rows too short for Q6_K
    types.check_overrides([])


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["attn_w=q8_0"], "tensor type 'attn_w=q8_0' matches no tensor"),
        (
            ["attn=f16", "attn_q=q8_0"],
            "'attn_q=q8_0' decides about no tensor; it matches 1, such as blk.0.attn_q.weight",
        ),
        (["norm=q8_0"], "'norm=q8_0' decides about no tensor; it matches 1, such as output_norm.weight"),
    ],
)
def test_overrides_without_effect_are_errors(patterns: list[str], message: str) -> None:
    types = Types(OUTTYPES["bf16"], [parse_override(text) for text in patterns])
    types.of("blk.0.", "attn_q.weight", (512, 64))
    types.of("", "output_norm.weight", (512,))
    with pytest.raises(ConversionError) as error:
        types.check_overrides(["blk.0.attn_q.weight", "output_norm.weight"])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ffn_down", "expected PATTERN=TYPE"),
        ("=q8_0", "expected PATTERN=TYPE"),
        ("ffn_down=", "expected PATTERN=TYPE"),
        ("ffn_down=q9_0", "no type 'q9_0', expected one of f32, f16"),
        ("ffn_down=iq2_xs", "no type 'iq2_xs'"),
        ("ffn_(down=q8_0", "is no regular expression: missing )"),
    ],
)
def test_overrides_are_checked(text: str, message: str) -> None:
    with pytest.raises(ConversionError) as error:
        parse_override(text)
    assert message in str(error.value)
    assert repr(text) in str(error.value)


# -- whole files -----------------------------------------------------------------------------------------------------

WIDE = {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}


@pytest.fixture(scope="module")
def wide(tiny_checkpoint: Callable[..., Path]) -> Callable[[str], Path]:
    """Models with rows of 256 and more; of K3 one with packed experts."""
    return lambda preset: tiny_checkpoint(preset, **WIDE)


FILE_TYPES = {
    **{"q4_0": 2, "q8_0": 7, "q4_k": 14, "q4_k_m": 15, "q5_k": 16, "q5_k_m": 17, "q6_k": 18, "bf16": 32},
    **{"tq1_0": 36, "tq2_0": 37, "mxfp4": 38},
}


@pytest.mark.parametrize("preset", ["kl", "k3"])
def test_every_output_type_holds_the_quantized_values(
    preset: str, wide: Callable[[str], Path], gguf: Callable[..., Path], tmp_path: Path
) -> None:
    """Each tensor is the F32 file's, quantized to its type; packed experts are the same bytes in all files."""
    with GGUFReader(gguf(wide(preset), "f32")) as plain:
        for outtype, file_type in FILE_TYPES.items():
            path = conversion.convert(wide(preset), tmp_path / f"{outtype}.gguf", outtype)
            seen = set()
            with GGUFReader(path) as reader:
                is_packed = preset == "k3"
                assert reader.fields["general.file_type"] == (38 if is_packed else file_type)
                for name, info in reader.tensors.items():
                    seen.add(info.type)
                    data = np.asarray(reader.data(name)).reshape(-1)
                    if plain.tensors[name].type == T.MXFP4:
                        assert info.type == T.MXFP4
                        expected = np.asarray(plain.data(name)).reshape(-1)
                    else:
                        rows = plain.dequantize(name).reshape(-1, info.ne[0])
                        expected = quantize_rows(rows, info.type, name).reshape(-1)
                    np.testing.assert_array_equal(
                        data.view(np.uint8), expected.view(np.uint8), err_msg=f"{outtype} {name}"
                    )
            kind = OUTTYPES[outtype]
            assert {kind.matrices, T.F32} <= seen
            assert (T.MXFP4 in seen) == (is_packed or outtype == "mxfp4")
            assert kind.better is None or kind.better in seen


def test_overrides_reach_the_file_and_not_packed_experts(wide: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "x.gguf"
    conversion.convert(wide("k3"), out, "q8_0", tensor_types=["attn_=q4_k", r"^output\.=bf16"])
    with GGUFReader(out) as reader:
        assert reader.tensors["output.weight"].type == T.BF16
        assert reader.tensors["blk.0.attn_q.weight"].type == T.Q4_K
        assert reader.tensors["blk.0.attn_norm.weight"].type == T.F32
        assert reader.tensors["blk.1.ffn_up_exps.weight"].type == T.MXFP4
    with pytest.raises(ConversionError, match="'_exps=q4_k' decides about no tensor.*packed experts"):
        conversion.convert(wide("k3"), tmp_path / "y.gguf", "q8_0", tensor_types=["_exps=q4_k"])
    assert [path.name for path in tmp_path.iterdir()] == ["x.gguf"]
