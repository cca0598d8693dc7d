"""Types whose encoding is searched for (K-quants, IQ4, and any with choice under weights), by their error."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

import native
from quant_rows import Floats, decode, encode, row_bytes
from test_quants import SEARCHED, block_of, matrices, name_of

WEIGHTED = [*SEARCHED, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1]

# Root of the mean squared error over that of the values, of 64 x 3072 normal and Laplace numbers.
RELATIVE_ERRORS = {
    Type.Q2_K: (0.2623, 0.2901),
    Type.Q3_K: (0.1433, 0.1671),
    Type.Q4_K: (0.0699, 0.0826),
    Type.Q5_K: (0.0344, 0.0406),
    Type.Q6_K: (0.0172, 0.0210),
    Type.IQ4_NL: (0.0733, 0.0846),
    Type.IQ4_XS: (0.0738, 0.0852),
}


def rms(values: Floats, weight: Floats | float = 1.0) -> float:
    return float(np.sqrt((weight * values.astype(np.float64) ** 2).mean()))


def error_of(x: Floats, kind: Type, importance: Floats | None = None, weight: Floats | float = 1.0) -> float:
    return rms(decode(encode(x, kind, importance=importance), kind, x.shape[1]) - x, weight)


@pytest.mark.parametrize("kind", SEARCHED, ids=name_of)
def test_error_of_searched_types(kind: Type, rng: np.random.Generator) -> None:
    normal = rng.standard_normal((64, 3072), dtype=np.float32)
    laplace = rng.laplace(size=(64, 3072)).astype(np.float32)
    for x, expected in zip((normal, laplace), RELATIVE_ERRORS[kind], strict=True):
        assert error_of(x, kind) / rms(x) < 1.015 * expected
        assert error_of(x * np.float32(1e-3), kind) / rms(x) < 1.03e-3 * expected  # scales are further from 1 as f16


# Largest code, and steps from the lowest to the highest; types with a minimum divide the range of the values, which
# includes zero, the others that of twice the largest magnitude.
GRIDS = {
    Type.Q2_K: (3, 3),
    Type.Q3_K: (4, 7),
    Type.Q4_K: (15, 15),
    Type.Q5_K: (31, 31),
    Type.Q6_K: (32, 63),
    Type.IQ4_NL: (127, 15),
    Type.IQ4_XS: (127, 15),
}
WITH_MINIMUM = (Type.Q2_K, Type.Q4_K, Type.Q5_K)


@pytest.mark.parametrize("kind", SEARCHED, ids=name_of)
def test_searched_types_at_the_edges(kind: Type, rng: np.random.Generator) -> None:
    """Whatever is in a block, its error is less than a step of the grid over all of its range; where that is finer than
    scales in half precision are, less than their step times the largest code."""
    block = block_of(kind)[0]
    largest, steps = GRIDS[kind]
    for name, x in matrices(rng, 3 * block).items():
        back = decode(encode(x, kind), kind, x.shape[1])
        assert np.isfinite(back).all(), name
        blocks = x.reshape(-1, block)
        error = np.sqrt(((back - x).reshape(-1, block).astype(np.float64) ** 2).mean(axis=1))
        width = 2 * np.abs(blocks).max(axis=1)
        if kind in WITH_MINIMUM:
            width = blocks.max(axis=1).clip(0) - blocks.min(axis=1).clip(None, 0)
        assert (error <= np.maximum(width / steps, largest * 2.0**-24)).all(), name


@pytest.mark.parametrize("kind", SEARCHED, ids=name_of)
def test_zeros_stay_zeros(kind: Type) -> None:
    block = block_of(kind)[0]
    assert not decode(encode(np.zeros((2, block), np.float32), kind), kind, block).any()


@pytest.mark.parametrize("kind", SEARCHED, ids=name_of)
def test_what_a_type_can_hold_comes_back(kind: Type, rng: np.random.Generator) -> None:
    """Decoded values encode again almost without an error: the search finds their grid."""
    x = rng.standard_normal((20, 768), dtype=np.float32)
    once = decode(encode(x, kind), kind, 768)
    assert error_of(once, kind) < 0.35 * error_of(x, kind)


@pytest.mark.parametrize("kind", WEIGHTED, ids=name_of)
def test_importance_moves_the_error_where_it_matters_less(kind: Type, rng: np.random.Generator) -> None:
    x = rng.standard_normal((64, 1024), dtype=np.float32)
    importance = rng.gamma(0.5, size=1024).astype(np.float32)
    weighted = error_of(x, kind, importance, importance)
    assert weighted < 0.97 * error_of(x, kind, None, importance)
    assert error_of(x, kind, importance) < 1.5 * error_of(x, kind)
    # Only ratios count.
    np.testing.assert_array_equal(
        encode(x, kind, importance=importance), encode(x, kind, importance=importance * np.float32(2**-20))
    )


@pytest.mark.parametrize("kind", SEARCHED, ids=name_of)
def test_no_importance_at_all_is_none(kind: Type, rng: np.random.Generator) -> None:
    """An expert that no token was routed to."""
    x = rng.standard_normal((5, 512), dtype=np.float32)
    plain = encode(x, kind)
    np.testing.assert_array_equal(encode(x, kind, importance=np.zeros(512, np.float32)), plain)
    np.testing.assert_array_equal(encode(x, kind, importance=np.full(512, 3, np.float32)), plain)


@pytest.mark.parametrize("kind", WEIGHTED, ids=name_of)
def test_columns_without_importance_are_sensible(kind: Type, rng: np.random.Generator) -> None:
    x = rng.standard_normal((20, 512), dtype=np.float32)
    importance = (np.arange(512) < 64).astype(np.float32)
    back = decode(encode(x, kind, importance=importance), kind, 512)
    assert rms(back[:, 64:] - x[:, 64:]) < 0.5


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_importance_is_checked(bad: float) -> None:
    importance = np.ones(256, np.float32)
    importance[37] = bad
    with pytest.raises(native.NativeError, match="importance of column 37") as error:
        encode(np.zeros((1, 256), np.float32), Type.Q4_K, importance=importance)
    assert error.value.name == "ARG"


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.MXFP4, Type.TQ1_0, Type.BF16], ids=name_of)
def test_importance_changes_nothing_where_there_is_no_choice(kind: Type, rng: np.random.Generator) -> None:
    x = rng.standard_normal((5, 512), dtype=np.float32)
    importance = rng.random(512, dtype=np.float32)
    np.testing.assert_array_equal(encode(x, kind, importance=importance), encode(x, kind))


@pytest.fixture(scope="module")
def peer() -> Any:
    """The quantizers of an independent engine."""
    spec = importlib.util.find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        pytest.skip("the independent engine is not installed (extra `peer`)")
    (path,) = Path(spec.origin).parent.glob("xllamacpp*.so")
    library = ctypes.CDLL(str(path))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    return library


@pytest.mark.parametrize("kind", WEIGHTED, ids=name_of)
@pytest.mark.parametrize("with_importance", [False, True])
def test_error_is_no_larger_than_the_peers(
    kind: Type, with_importance: bool, peer: Any, rng: np.random.Generator
) -> None:
    importance = rng.gamma(0.5, size=1024).astype(np.float32) + np.float32(1e-3) if with_importance else None
    outliers = np.where(rng.random((64, 1024)) < 0.01, 8, 1)
    for x in (rng.standard_normal((64, 1024)), rng.laplace(size=(64, 1024)), outliers * rng.random((64, 1024)) + 0.5):
        x = (0.02 * x).astype(np.float32)
        out = np.zeros((64, row_bytes(kind, 1024)), np.uint8)
        weight = None if importance is None else ctypes.c_void_p(importance.ctypes.data)
        arguments = (ctypes.c_int(kind), ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(out.ctypes.data))
        n_bytes = peer.ggml_quantize_chunk(
            *arguments, ctypes.c_int64(0), ctypes.c_int64(64), ctypes.c_int64(1024), weight
        )
        assert n_bytes == out.size
        judged = 1.0 if importance is None else importance
        theirs = rms(decode(out, kind, 1024) - x, judged)
        assert error_of(x, kind, importance, judged) <= 1.0001 * theirs
