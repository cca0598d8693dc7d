"""Write a GGUF file again with other types of its matrices: `deltallama quantize`.

The same plan, pipeline and journal as conversion, so it streams, uses all processors and continues after a kill.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from gguf_ext import GGUFError, GGUFReader, Plan, PlannedTensor, TensorInfo
from gguf_ext import constants as c
from gguf_ext.constants import GGML_QUANT_SIZES, GGUFValueType, LlamaFileType
from gguf_ext.constants import GGMLQuantizationType as T
from gguf_ext.imatrix import Entry, ImportanceMatrix
from gguf_ext.quants import dequantize_rows, quantize_rows
from gguf_ext.split import Limits, OutputSet
from gguf_ext.writer import Progress

from .errors import ConversionError
from .folds import SLAB_VALUES, slab_rows
from .run import is_same_file
from .shards import LocalShard, Shard
from .types import OUTTYPES, OutType, Types, parse_override

Shards = Mapping[Path, Shard]  # read by range: the maps of the reader would count as memory

_FLOATS = {T.F32: "<f4", T.F16: "<f2", T.BF16: "<u2"}  # what the quantizers take as it is; BF16 as its bits
_FULL_PRECISION = (*_FLOATS, T.Q8_0)
_NAME = re.compile(r"(blk\.\d+\.)?(.+)", re.DOTALL)
_DROPPED = (*c.SPLIT_KEYS, c.KEY_ALIGNMENT)  # the writer's own affair
_WITHOUT_IMPORTANCE = (c.TOKEN_EMBD, c.OUTPUT)  # one is no product, the other's inputs are rarely measured

KEY_IMATRIX_FILE = "quantize.imatrix.file"
KEY_IMATRIX_DATASET = "quantize.imatrix.dataset"
KEY_IMATRIX_ENTRIES = "quantize.imatrix.entries_count"
KEY_IMATRIX_CHUNKS = "quantize.imatrix.chunks_count"

log = logging.getLogger("conversion")


@dataclass(frozen=True)
class Job:
    """What to write again, and how.

    Attributes:
        source: a GGUF file of a Kimi model; the first one of a split set.
        target: the file to write.
        outtype: one of `types.OUTTYPES`.
        imatrix: a file of `gguf_ext.imatrix`; without it all columns count alike.
        tensor_types: "PATTERN=TYPE", as of a conversion. Packed MXFP4 experts are encoded again only if one of these
            is found in their name.
        force: replace an existing output. restart: throw away what an unfinished run has left.
        dry_run: check and plan everything, write nothing.
        limits: of one file of a split.
        threads: that make and write tensors; by default one more than processors.
        progress: called with tensor name, bytes done and bytes in all.
    """

    source: str | Path
    target: str | Path
    outtype: str
    imatrix: str | Path | None = None
    tensor_types: Sequence[str] = ()
    force: bool = False
    restart: bool = False
    dry_run: bool = False
    limits: Limits = Limits()
    threads: int | None = None
    progress: Progress | None = None


def requantize(source: str | Path, target: str | Path, outtype: str, **options: Any) -> list[Path]:
    """Write `source` to `target` with the types of `outtype`; the files written. `options` are attributes of `Job`.

    Raises:
        ConversionError, GGUFError: a file or an argument is wrong; nothing unfinished is under the output's name. An
            interrupted run is continued when the same is asked for again.
        OSError: a file cannot be read.
    """
    return run(Job(source, target, outtype, **options))


def run(job: Job) -> list[Path]:
    """As `requantize`."""
    if job.outtype not in OUTTYPES:
        raise ConversionError(f"type {job.outtype!r}, expected one of {', '.join(OUTTYPES)}")
    imatrix = ImportanceMatrix.read(Path(job.imatrix)) if job.imatrix is not None else None
    with GGUFReader(job.source) as reader, ExitStack() as opened:
        shards: Shards = {path: LocalShard(path.name, path) for path in reader.paths}
        for shard in shards.values():
            opened.callback(shard.close)
        plan = plan_file(reader, shards, job, imatrix)
        facts = {
            "outtype": job.outtype,
            "tensor_types": " ".join(job.tensor_types),
            "imatrix": sha256(Path(job.imatrix).read_bytes()).hexdigest()[:16] if job.imatrix is not None else "none",
        } | _source_facts(shards)
        outputs = OutputSet(plan, Path(job.target), facts, job.limits)
        sources = [*reader.paths, *([Path(job.imatrix)] if job.imatrix is not None else [])]
        for output in outputs.outputs:
            if any(is_same_file(output.path, path) for path in sources):
                raise ConversionError(f"{output.path} is a file that is read; give the output another name")
            log.info("%s: %d tensors, %d bytes", output.path, len(output.plan.tensors), output.size)
        if job.dry_run:
            outputs.check(outputs.outputs, force=job.force, restart=job.restart)
        else:
            outputs.write(
                outputs.outputs,
                force=job.force,
                restart=job.restart,
                progress=job.progress,
                threads=job.threads,
                confirm=_confirm(shards),
            )
    return [output.path for output in outputs.outputs]


def plan_file(reader: GGUFReader, shards: Shards, job: Job, imatrix: ImportanceMatrix | None) -> Plan:
    """The keys of the source with what changes, and its tensors in their order with their new types.

    Raises:
        ConversionError: the file is no Kimi model, or an override decides about nothing.
        GGUFError: a type cannot be written here, or the importance matrix is another model's.
    """
    outtype = OUTTYPES[job.outtype]
    types = _types(reader, outtype, job)
    tensors = [_plan_tensor(shards[info.path], info, types, imatrix) for info in reader.tensors.values()]
    types.check_overrides(reader.tensors)
    for warning in types.warnings:
        log.warning("%s", warning)
    _warn(reader, tensors, imatrix)
    is_packed = any(tensor.type == T.MXFP4 for tensor in tensors)
    plan = Plan()
    new = _new_fields(LlamaFileType.MOSTLY_MXFP4_MOE if is_packed else outtype.file_type, job, imatrix)
    for key, value in reader.fields.items():
        if key in new:
            plan.add_field(key, *new.pop(key))
        elif key not in _DROPPED:
            plan.add_field(key, value.tolist() if isinstance(value, np.ndarray) else value, *reader.types[key])
    for key, (number, type_) in new.items():
        plan.add_field(key, number, type_)
    for tensor in tensors:
        plan.add_tensor(tensor)
        log.debug("%s: %s to %s", tensor.name, reader.tensors[tensor.name].type.name, tensor.type.name)
    return plan


def _types(reader: GGUFReader, outtype: OutType, job: Job) -> Types:
    fields = reader.fields
    architecture = fields.get(c.KEY_ARCHITECTURE)
    if architecture not in (c.ARCH_KIMI_LINEAR, c.ARCH_KIMI_K3):
        expected = f"{c.ARCH_KIMI_LINEAR} or {c.ARCH_KIMI_K3}"
        raise ConversionError(f"{job.source}: {c.KEY_ARCHITECTURE} is {architecture!r}, expected {expected}")
    n_layers = fields.get(f"{architecture}.{c.KEY_BLOCK_COUNT}")
    heads = fields.get(f"{architecture}.{c.KEY_HEAD_COUNT_KV}")
    if not isinstance(n_layers, int) or not isinstance(heads, np.ndarray) or len(heads) != n_layers:
        raise ConversionError(f"{job.source}: {c.KEY_HEAD_COUNT_KV} is not a list of {n_layers} numbers, one per layer")
    kda = {layer for layer, n in enumerate(heads) if n == 0}
    for name in reader.tensors:
        layer = re.fullmatch(r"blk\.(\d+)\." + re.escape(c.ATTN_V), name)
        if layer and int(layer[1]) not in kda:
            raise ConversionError(f"{job.source}: tensor {name} belongs to a KDA layer, which layer {layer[1]} is not")
    return Types(outtype, [parse_override(text) for text in job.tensor_types], n_layers, kda)


def _new_fields(
    file_type: LlamaFileType, job: Job, imatrix: ImportanceMatrix | None
) -> dict[str, tuple[Any, GGUFValueType]]:
    new: dict[str, tuple[Any, GGUFValueType]] = {
        c.KEY_FILE_TYPE: (int(file_type), GGUFValueType.UINT32),
        c.KEY_QUANTIZATION_VERSION: (c.QUANTIZATION_VERSION, GGUFValueType.UINT32),
    }
    if imatrix is not None and job.imatrix is not None:
        new[KEY_IMATRIX_FILE] = (Path(job.imatrix).name, GGUFValueType.STRING)
        if imatrix.datasets:
            new[KEY_IMATRIX_DATASET] = (imatrix.datasets[0], GGUFValueType.STRING)
        new[KEY_IMATRIX_ENTRIES] = (len(imatrix.entries), GGUFValueType.UINT32)
        new[KEY_IMATRIX_CHUNKS] = (imatrix.n_chunks, GGUFValueType.UINT32)
    return new


def _plan_tensor(shard: Shard, info: TensorInfo, types: Types, imatrix: ImportanceMatrix | None) -> PlannedTensor:
    match = _NAME.fullmatch(info.name)
    assert match is not None  # the expression fits every name that is not empty
    prefix, name = match[1] or "", match[2]
    type_: T | None
    if info.type == T.MXFP4 and name in (c.FFN_GATE_EXPS, c.FFN_UP_EXPS, c.FFN_DOWN_EXPS):
        type_ = T.MXFP4 if types.asked_for(info.name) is None else types.of(prefix, name, info.ne)
    else:
        type_ = types.of(prefix, name, info.ne)
    n_rows = info.ne[1] if len(info.ne) > 1 else 1
    piece_rows = min(slab_rows(n_rows, info.ne[0], SLAB_VALUES), prod(info.ne[1:]))
    produce = _producer(shard, info, type_, imatrix)
    return PlannedTensor(info.name, info.ne, type_, produce, piece_rows, 8 * info.ne[0])


@lru_cache(maxsize=4)  # pieces of one tensor follow one another; all tensors' together may take gigabytes
def _importance(entry: Entry, n_mats: int, n_cols: int) -> np.ndarray:
    return entry.importance(n_mats, n_cols)


def _producer(
    shard: Shard, info: TensorInfo, type_: T, imatrix: ImportanceMatrix | None
) -> Callable[[int, int], np.ndarray]:
    """The rows of a tensor in another type, its importance per matrix.

    Raises:
        GGUFError: the importance matrix does not fit the tensor's shape.
    """
    n_cols, n_rows = info.ne[0], info.ne[1] if len(info.ne) > 1 else 1
    n_mats = prod(info.ne[2:])
    block, size = GGML_QUANT_SIZES[info.type]
    row_bytes = n_cols // block * size
    entry = imatrix.entries.get(info.name) if imatrix is not None and type_ not in _FLOATS else None
    if entry is not None:
        try:
            entry.check(n_mats, n_cols)
        except GGUFError as error:
            raise GGUFError(f"tensor {info.name}: the importance matrix is another model's: {error}") from None

    def encode(rows: np.ndarray, first: int) -> np.ndarray:
        """Rows of one matrix."""
        stored = _FLOATS.get(info.type)
        values = rows.view(stored) if stored is not None else dequantize_rows(rows, info.type, n_cols)
        weights = _importance(entry, n_mats, n_cols)[first // n_rows] if entry is not None else None
        return quantize_rows(values, type_, info.name, first, importance=weights)

    def produce(first: int, count: int) -> np.ndarray:
        rows = shard.read(info.offset + first * row_bytes, count * row_bytes).reshape(count, row_bytes)
        if info.type == T.MXFP4:
            _check_scales(rows, info, first)
        if info.type == type_ and type_ not in _FLOATS:
            return rows
        if entry is None:
            return encode(rows, first)
        cuts = range((first // n_rows + 1) * n_rows, first + count, n_rows)  # where the next matrix begins
        parts = np.split(rows, [cut - first for cut in cuts])
        return np.concatenate([encode(part, at) for part, at in zip(parts, (first, *cuts), strict=True)])

    return produce


def _check_scales(rows: np.ndarray, info: TensorInfo, first: int) -> None:
    bad = np.argwhere(rows[:, :: GGML_QUANT_SIZES[T.MXFP4][1]] == 0xFF)
    if len(bad):
        row, block = bad[0]
        raise GGUFError(f"tensor {info.name}: row {first + row}, block {block}: scale byte 255 is not a number")


def _warn(reader: GGUFReader, tensors: Sequence[PlannedTensor], imatrix: ImportanceMatrix | None) -> None:
    """About what costs quality and could be had better."""
    twice: dict[T, list[str]] = {}
    unweighted = []
    for tensor in tensors:
        before = reader.tensors[tensor.name].type
        if before not in _FULL_PRECISION and tensor.type not in (before, *_FLOATS):
            twice.setdefault(before, []).append(tensor.name)
        if tensor.type in _FLOATS or tensor.type == before or tensor.name in _WITHOUT_IMPORTANCE:
            continue
        if imatrix is not None and tensor.name not in imatrix.entries:
            unweighted.append(tensor.name)
    for before, names in twice.items():
        log.warning(
            "%d tensors, such as %s, are %s in the source: what that lost stays lost; quantize from a file of 16 bits",
            len(names),
            names[0],
            before.name,
        )
    if unweighted:
        log.warning("the importance matrix lacks %d tensors, such as %s", len(unweighted), unweighted[0])
    for sentence in imatrix.rare_experts() if imatrix is not None else ():
        log.warning("%s", sentence)


def _source_facts(shards: Shards) -> dict[str, str]:
    return {f"source {path.name}": shard.fingerprint() for path, shard in shards.items()}


def _confirm(shards: Shards) -> Callable[[], None]:
    """Refuses a result whose source was written to while it was read."""
    before = _source_facts(shards)

    def confirm() -> None:
        for shard, was, now in zip(shards.values(), before.values(), _source_facts(shards).values(), strict=True):
            if was != now:
                raise ConversionError(f"{shard.path} was changed while it was read: start over with --restart")

    return confirm
