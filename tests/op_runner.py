"""One op of the engine on one device, from numpy arrays: a thin view of delta_test_op."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES

import native

F32 = int(Type.F32)
ACTIVATIONS = {"exact": 0, "fine": 1, "fast": 2, "auto": 3}


@dataclass
class Weight:
    """`mats` matrices [rows, cols] encoded as a tensor type; `values` are the exact decoded numbers, float64."""

    type: int
    data: np.ndarray  # bytes
    values: np.ndarray  # [mats, rows, cols] or fewer dimensions

    @classmethod
    def encode(cls, values: np.ndarray, type_: int = F32) -> Weight:
        kind = Type(type_)
        data = quants.quantize(np.ascontiguousarray(values, np.float32), kind)
        decoded = quants.dequantize(data, kind).astype(np.float64).reshape(values.shape)
        return cls(int(kind), np.frombuffer(data.tobytes(), np.uint8), decoded)


    @classmethod
    def random(cls, rng: np.random.Generator, type_: int, *shape: int) -> Weight:
        """Random bytes as blocks of the type, of those whose values are finite and of a sane size."""
        kind = Type(type_)
        columns, size = GGML_QUANT_SIZES[kind]
        wanted, blocks = int(np.prod(shape)) // columns, np.empty((0, size), np.uint8)
        while len(blocks) < wanted:
            more = rng.integers(0, 256, (4 * wanted, size), np.uint8)
            with np.errstate(all="ignore"):
                largest = np.abs(quants.dequantize(more, kind)).reshape(len(more), columns).max(axis=1)
            blocks = np.concatenate([blocks, more[(largest > 1e-2) & (largest < 1e2)]])
        data = blocks[:wanted].reshape(-1)
        values = quants.dequantize(data.reshape(wanted, size), kind).astype(np.float64).reshape(shape)
        return cls(int(kind), data, values)


@dataclass
class Sequence:
    slot: int
    first_row: int
    n_rows: int
    position: int


@dataclass
class State:
    """Memory of `n_slots` sequences for one KDA and one MLA layer; see StateLayout of csrc/graph/value.h."""

    n_head: int = 0
    head_dim: int = 0
    conv_rows: int = 0
    latent_width: int = 0
    n_ctx: int = 0
    cache_type: int = F32
    n_slots: int = 1
    recurrent: np.ndarray = field(init=False)  # [n_slots, values], float64; the device holds its own value type
    latent: np.ndarray = field(init=False)  # [n_slots, n_ctx, bytes per row]

    def __post_init__(self) -> None:
        inner = self.n_head * self.head_dim
        self.recurrent = np.zeros((self.n_slots, 3 * self.conv_rows * inner + inner * self.head_dim))
        columns, size = GGML_QUANT_SIZES[Type(self.cache_type)]
        row = self.latent_width // columns * size
        self.latent = np.zeros((self.n_slots, self.n_ctx, row), np.uint8)

    def conv(self, slot: int, stream: int) -> np.ndarray:
        """[conv_rows, inner], a view."""
        inner = self.n_head * self.head_dim
        size = self.conv_rows * inner
        return self.recurrent[slot, stream * size : (stream + 1) * size].reshape(self.conv_rows, inner)

    def scan(self, slot: int) -> np.ndarray:
        """S as [n_head, v, k], a view."""
        inner = self.n_head * self.head_dim
        return self.recurrent[slot, 3 * self.conv_rows * inner :].reshape(self.n_head, self.head_dim, self.head_dim)

    def latents(self, slot: int) -> np.ndarray:
        """[n_ctx, latent_width] float64, decoded."""
        rows = quants.dequantize(self.latent[slot].reshape(-1), Type(self.cache_type))
        return rows.reshape(self.n_ctx, self.latent_width).astype(np.float64)


def run(
    op: str,
    inputs: list[np.ndarray],
    weights: list[Weight | None] | None = None,
    params: list[float] | None = None,
    *,
    device: str,
    out_cols: int,
    activations: str = "exact",
    n_threads: int = 2,
    n_rows: int | None = None,
    tokens: np.ndarray | None = None,
    output_rows: list[int] | None = None,
    state: State | None = None,
    sequences: list[Sequence] | None = None,
    image: tuple[int, int, int] | None = None,
    pixels: np.ndarray | None = None,
    features: np.ndarray | None = None,
) -> np.ndarray:
    """Runs `op` and returns its output [rows, out_cols], float64; `state` is updated in place.

    `device` "ref" and "cpu" compute in float64; "cpu-float" is the cpu device with float32 between its ops, and with
    rounded inputs of products with integer weights (`activations` "fine"). `image`: frames, rows and columns of the
    patches that ops of a vision tower have as rows. `features`: rows that tokens -1, -2, ... stand for.
    """
    if device == "cpu-float":
        device, activations = "cpu", "fine"
    ffi, lib = native.load()
    rows = n_rows if n_rows is not None else len(inputs[0])
    keep: list[Any] = []

    def pointer(array: np.ndarray, ctype: str) -> Any:
        keep.append(array)
        return ffi.cast(ctype, ffi.from_buffer(array))

    case = ffi.new("delta_test_case *")
    case.size = ffi.sizeof("delta_test_case")
    names = [ffi.new("char[]", text.encode()) for text in (device, op)]
    case.device, case.op = names
    case.activations, case.n_threads, case.n_rows, case.out_cols = ACTIVATIONS[activations], n_threads, rows, out_cols
    for i, value in enumerate(params or []):
        case.params[i] = value
    for i, weight in enumerate(weights or []):
        if weight is None:
            continue
        shape = (1,) * (3 - weight.values.ndim) + weight.values.shape
        keep.append(ffi.new("char[]", f"w{i}.weight".encode()))
        w = case.weights[i]
        w.name, w.type, w.data = keep[-1], weight.type, pointer(weight.data, "void *")
        w.mats, w.rows, w.cols = shape
    for i, array in enumerate(inputs):
        array = np.ascontiguousarray(array, np.float64)
        case.inputs[i], case.input_cols[i] = pointer(array, "double *"), array.shape[1]
    if tokens is not None:
        case.tokens = pointer(np.ascontiguousarray(tokens, np.int32), "int32_t *")
    if image is not None:
        case.image = list(image)
    if pixels is not None:
        case.pixels = pointer(np.ascontiguousarray(pixels, np.float32), "float *")
    if features is not None:
        case.features = pointer(np.ascontiguousarray(features, np.float32), "float *")
    picked = np.asarray(output_rows if output_rows is not None else [], np.int32)
    case.output_rows, case.n_output_rows = pointer(picked, "int32_t *"), len(picked)
    if state is not None:
        case.n_head, case.head_dim, case.conv_rows = state.n_head, state.head_dim, state.conv_rows
        case.latent_width, case.n_ctx, case.cache_type = state.latent_width, state.n_ctx, state.cache_type
        case.n_slots = state.n_slots
        # A device of float64 holds float64 in a cache of type F32.
        widened = state.cache_type == F32 and (device == "ref" or activations == "exact")
        latent = state.latent.view(np.float32).astype(np.float64) if widened else state.latent
        case.recurrent, case.latent = pointer(state.recurrent, "double *"), pointer(latent, "void *")
        default = [Sequence(0, 0, rows, 0)]
        seqs = np.array([[s.slot, s.first_row, s.n_rows, s.position] for s in sequences or default], np.int32)
        case.seqs, case.n_seqs = pointer(seqs, "int32_t *"), len(seqs)
    n_out = len(picked) if op == "pick_rows" else rows
    if op == "merge_squares" and image is not None and params is not None:
        n_out = image[1] * image[2] // int(params[0]) ** 2
    out = np.full((n_out, max(out_cols, 1)), np.nan)
    case.out = pointer(out, "double *")
    native.check(lib.delta_test_op(case))
    if state is not None and widened:
        state.latent[:] = latent.astype(np.float32).view(np.uint8)
    return out


def nmse(found: np.ndarray, expected: np.ndarray) -> float:
    """Mean squared error over mean squared value, in float64. NaN in either makes it NaN."""
    found, expected = found.astype(np.float64), np.asarray(expected, np.float64)
    return float(np.sum((found - expected) ** 2) / max(float(np.sum(expected**2)), 1e-300))
