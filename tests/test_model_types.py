"""Whole models with weights of every tensor type against the float64 reference on the decoded weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import conversion
import native
import reference as ref
import tiny
from engine import Engine
from file_constants import as_the_file_holds
from gguf_edit import Edit, Tensor, Type
from random_blocks import TYPES, random_rows
from tiny_files import Checkpoint, HfTensor

pytestmark = pytest.mark.skipif(not native.has_test_api(), reason="the library was built without its test interface")

COLUMNS = 256  # the longest block
# Every row of a matrix has whole blocks of every type. All experts are chosen, so that no route can turn: what is left
# is the rounding of inputs and sums.
SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": COLUMNS,
    "intermediate_size": COLUMNS,
    "moe_intermediate_size": COLUMNS,
    "kv_lora_rank": COLUMNS,
    "num_attention_heads": 2,
    "linear_attn_config": {"head_dim": COLUMNS // 2},
    "v_head_dim": COLUMNS // 2,
    "num_experts": 4,
    "num_experts_per_token": 4,
}
K3_SHAPE = {"q_lora_rank": COLUMNS, "routed_expert_hidden_size": COLUMNS, "packed": False}

# Normalised mean squared error of all logits.
#   exact: nothing but the rounding of the logits to float32, 7e-16 on average.
#   fine, weights of integers: inputs rounded to 16 bits, a step of the largest of 32 values over 32767. That loses
#     (2.2 / 32767)^2 / 12 = 4e-10 of a product of normal values; the gates and norms of four layers make up to 1.3e-7
#     of it here.
#   fast, weights of integers: inputs rounded to 8 bits, 258 times the step: up to 7e-3.
#   auto: as fast with the K-quants, as fine with others.
#   other weights, also those without kernels of their own, which are decoded: float32 sums, up to 4e-12.
EXACT = 1e-14
ROUNDED = {"fine": 1e-6, "fast": 5e-2}
FLOAT = 1e-10
K_QUANTS = [Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K]
INTEGERS = [
    *(Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, *K_QUANTS, Type.IQ4_NL, Type.IQ4_XS, Type.MXFP4),
]


def encoded_checkpoint(arch: str, kind: Type, rng: np.random.Generator) -> tuple[Checkpoint, dict[bytes, bytes]]:
    """A checkpoint whose matrices hold values of the type, and each of their rows of float32 with its encoding."""
    shape = {**SHAPE, **(K3_SHAPE if arch == "kimi-k3" else {})}
    checkpoint = tiny.build_checkpoint(arch, seed=int(rng.integers(1 << 30)), **shape)
    encodings: dict[bytes, bytes] = {}
    for shard in checkpoint.shards:
        for name, tensor in shard.items():
            if len(tensor.shape) != 2 or tensor.shape[1] % COLUMNS != 0 or tensor.shape[0] == 1:
                continue  # vectors, convolutions
            raw, values = random_rows(rng, kind, tensor.shape, 1 / np.sqrt(tensor.shape[1]))
            shard[name] = HfTensor.from_float(values, "F32")
            encodings.update((v.tobytes(), r.tobytes()) for v, r in zip(values, raw, strict=True))
    return checkpoint, encodings


def encode(source: Path, target: Path, kind: Type, encodings: dict[bytes, bytes]) -> int:
    """Writes the file with the matrices whose rows all have an encoding as `kind`; returns how many these are.

    The rest stays float32: vectors, routers, and the transposed half of kv_b.
    """
    edit = Edit(source)
    n_encoded = 0
    for name, tensor in edit.tensors.items():
        if tensor.type != Type.F32 or tensor.ne[0] % COLUMNS != 0 or "ffn_gate_inp" in name:
            continue  # routers are float32 in every file
        rows = [encodings.get(row.tobytes()) for row in edit.values(name).reshape(-1, tensor.ne[0])]
        if all(row is not None for row in rows):
            edit.tensors[name] = Tensor(tensor.ne, kind, np.frombuffer(b"".join(map(bytes, rows)), np.uint8))  # type: ignore[arg-type]
            n_encoded += 1
    edit.write(target)
    return n_encoded


def magnification(model: ref.Model, tokens: list[int], expected: np.ndarray, rng: np.random.Generator) -> float:
    """How much larger than a small random change of the embeddings the change of the logits is, both normalised."""
    change, embedding = 1e-6, model.embedding
    model.embedding = embedding * (1 + change * rng.standard_normal(embedding.shape))
    changed = model.forward(tokens)
    model.embedding = embedding
    return float(np.sum((changed - expected) ** 2) / np.sum(expected**2)) / change**2


@pytest.mark.parametrize("arch", ["kimi-k3", "kimi-linear"])
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_logits_equal_the_reference_on_decoded_weights(
    tmp_path: Path, rng: np.random.Generator, arch: str, kind: Type
) -> None:
    # Most of these models magnify a change 10 to 100 times, one in some hundred 10,000 times: a norm of nearly nothing.
    # Its error would tell of the draw, so another is drawn.
    while True:
        folder = tmp_path / str(rng.integers(1 << 30))
        checkpoint, encodings = encoded_checkpoint(arch, kind, rng)
        checkpoint.write(folder)
        model = as_the_file_holds(ref.Model.from_checkpoint(folder))
        tokens = rng.integers(0, model.embedding.shape[0], 14).tolist()
        expected = model.forward(tokens)
        if magnification(model, tokens, expected, rng) < 200:
            break
    wide = conversion.convert(folder, outfile=tmp_path / "f32.gguf", outtype="f32")
    n_encoded = encode(wide, tmp_path / "encoded.gguf", kind, encodings)
    assert n_encoded > 20, "matrices of the model were not found"
    # A prompt of many inputs, and single ones.
    for activations in ("exact", "fine", "fast", "auto") if kind in INTEGERS else ("exact", "fine"):
        with Engine(tmp_path / "encoded.gguf", n_ctx=16, activations=activations) as engine:
            found = engine.logits(tokens, [11, 1, 1]).astype(np.float64)
        error = np.sum((found - expected) ** 2) / np.sum(expected**2)
        rounding = ("fast" if kind in K_QUANTS else "fine") if activations == "auto" else activations
        bound = EXACT if activations == "exact" else ROUNDED[rounding] if kind in INTEGERS else FLOAT
        assert error < bound, f"{activations}: {error:.2e}"


def test_every_type_is_here() -> None:
    ffi, lib = native.load()
    known = [kind for kind in Type if lib.delta_row_bytes(int(kind), COLUMNS) > 0]
    assert sorted(known) == sorted(TYPES)
