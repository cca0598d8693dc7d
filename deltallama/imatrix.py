"""Measure on a text how much each input column of every product matters (`gguf_ext.imatrix` has the file format)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gguf_ext import constants as c
from gguf_ext.imatrix import Entry, ImportanceMatrix

from ._ffi import call, ffi, lib, new_struct
from .errors import NumericError
from .model import Llama
from .quality import chunks_of

OnChunk = Callable[[int, int], None]
"""Called after each chunk with how many are done and how many there are."""


def collect(
    model: Llama,
    tokens: Sequence[int],
    n_ctx: int,
    *,
    dataset: str = "",
    with_output: bool = False,
    on_chunk: OnChunk | None = None,
) -> ImportanceMatrix:
    """Run whole chunks of `n_ctx` tokens through a model, each from an empty state, and add up what its products read.

    Args:
        dataset: name of the text, for the file.
        with_output: also for `output.weight`, for which the logits of all positions are computed.

    Raises:
        ArgumentError: the text is shorter than a chunk.
        NumericError: an input was not finite.
    """
    chunks = chunks_of(tokens, n_ctx)
    with model._handles.use():
        call(lib.delta_model_collect_inputs(model._handles.model))
    for number, chunk in enumerate(chunks, start=1):
        model.reset()
        model.eval(chunk, logits="all" if with_output else "none")
        if on_chunk is not None:
            on_chunk(number, len(chunks))
    return ImportanceMatrix(_entries(model, with_output), [dataset], len(chunks), n_ctx)


def _entries(model: Llama, with_output: bool) -> dict[str, Entry]:
    entries = {}
    with model._handles.use():
        stats = new_struct("delta_input_stats")
        for index in range(lib.delta_model_input_count(model._handles.model)):
            call(lib.delta_model_input_stats(model._handles.model, index, stats))
            name = ffi.string(stats.name).decode()
            n_mats, n_sums = stats.n_mats, stats.n_mats * stats.n_cols
            sums = np.frombuffer(ffi.buffer(stats.sum_squares, 8 * n_sums), np.float64).astype(np.float32)
            rows = np.frombuffer(ffi.buffer(stats.n_rows, 8 * n_mats), np.uint64).astype(np.float32)
            if not np.isfinite(sums).all():
                raise NumericError(f"the inputs of {name} are not finite numbers, or too large for a float32 sum")
            if with_output or name != c.OUTPUT:
                entries[name] = Entry(sums, rows)
    return entries
