"""Importance matrices: how much each input column of a tensor's products matters, measured on a text.

The error of a weight w[r, c] adds error^2 * x[c]^2 to the squared error of output r, so a quantizer should weigh the
error of column c by the mean of x[c]^2. A file holds, for every tensor and each of its matrices (experts, heads), the
sum of squares of each column of the inputs and the number of input rows.

Two formats are read, told apart by their first bytes: GGUF (`general.type` "imatrix"; tensors `NAME.in_sum2` F32
{n_cols, n_mats} and `NAME.counts` F32 {1, n_mats}), which is also the one written, and the older binary one.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from . import constants as c
from .constants import GGMLQuantizationType, GGUFValueType
from .errors import GGUFError
from .plan import Plan, PlannedTensor
from .reader import GGUFReader
from .writer import write_file

TYPE = "imatrix"
KEY_DATASETS = "imatrix.datasets"
KEY_CHUNK_COUNT = "imatrix.chunk_count"
KEY_CHUNK_SIZE = "imatrix.chunk_size"
SUMS, COUNTS = ".in_sum2", ".counts"

PRIOR_ROWS = 16
"""So many rows of the average matrix are added to those of every matrix of a stack (see `Entry.importance`)."""
_LEAST = 1e-6  # importance of a column that is never fed, of its matrix's mean: its weights are still to be kept


@dataclass(frozen=True, eq=False)
class Entry:
    """Statistics of one tensor.

    Attributes:
        sums: `[n_mats * n_cols]`, sums of squares, one matrix after the other.
        counts: `[n_mats]`, rows that each matrix saw; `[1]` where a file has one number for all.
    """

    sums: np.ndarray
    counts: np.ndarray

    def importance(self, n_mats: int, n_cols: int) -> np.ndarray:
        """The mean of squares of every column, float32 `[n_mats, n_cols]`.

        A matrix that saw few rows knows little: with S its sums, n its rows and m the mean over all rows of all
        matrices of the tensor, its importance is (S + k m) / (n + k), k = `PRIOR_ROWS`. So an expert that was never
        used gets the average expert's importance, and one with n much larger than k its own. A tensor without any
        rows, or whose inputs were all zero, has importance 1 everywhere.

        Raises:
            GGUFError: as `check`.
        """
        self.check(n_mats, n_cols)
        sums, rows = self.sums.reshape(n_mats, n_cols).astype(np.float64), self.rows(n_mats)
        if not sums.any():
            return np.ones((n_mats, n_cols), np.float32)
        prior = 0 if n_mats == 1 else PRIOR_ROWS
        mean = sums.sum(axis=0) / rows.sum()
        importance = (sums + prior * mean) / (rows + prior)[:, None]
        least = _LEAST * importance.mean(axis=1, keepdims=True)
        # Only ratios within a matrix matter; a mean of 1 keeps them away from the ends of float32.
        importance = np.maximum(importance, least)
        return np.asarray(importance / importance.mean(axis=1, keepdims=True), np.float32)

    def check(self, n_mats: int, n_cols: int) -> None:
        """Raise unless these are statistics of a tensor of `n_mats` matrices with `n_cols` columns.

        Raises:
            GGUFError: says what they are.
        """
        if self.sums.size != n_mats * n_cols or self.counts.size not in (1, n_mats):
            raise GGUFError(
                f"{self.sums.size} sums and {self.counts.size} counts, expected {n_mats * n_cols} and {n_mats}"
            )

    def rows(self, n_mats: int) -> np.ndarray:
        """Rows that each matrix saw, float64 `[n_mats]`. Where a file has one number for all, a matrix whose sums are
        all zero saw none."""
        used = self.sums.reshape(n_mats, -1).any(axis=1)
        return np.where(used | (self.counts.size > 1), self.counts, 0.0).astype(np.float64)


@dataclass
class ImportanceMatrix:
    """Entries by tensor name, and where they come from."""

    entries: dict[str, Entry] = field(default_factory=dict)
    datasets: list[str] = field(default_factory=list)
    n_chunks: int = 0
    chunk_size: int = 0  # tokens

    def rare_experts(self) -> list[str]:
        """A sentence for every layer in which some experts saw no row, or less than `PRIOR_ROWS`."""
        found = []
        for name, entry in self.entries.items():
            if not name.endswith(c.FFN_DOWN_EXPS) or entry.counts.size == 1:
                continue  # the three tensors of a layer's experts saw the same rows
            never, rarely = (entry.counts == 0).sum(), ((entry.counts > 0) & (entry.counts < PRIOR_ROWS)).sum()
            if never + rarely:
                layer = name.removesuffix("." + c.FFN_DOWN_EXPS)
                found.append(
                    f"{layer}: of {entry.counts.size} experts {never} were never used and {rarely} for less than "
                    f"{PRIOR_ROWS} rows; they take importance from the average of the others"
                )
        return found

    def write(self, path: Path, force: bool = False) -> None:
        """Write the GGUF form.

        Raises:
            GGUFError: as `write_file`.
        """
        plan = Plan()
        plan.add_field(c.KEY_TYPE, TYPE, GGUFValueType.STRING)
        plan.add_field(KEY_DATASETS, self.datasets, GGUFValueType.ARRAY, GGUFValueType.STRING)
        plan.add_field(KEY_CHUNK_COUNT, self.n_chunks, GGUFValueType.UINT32)
        plan.add_field(KEY_CHUNK_SIZE, self.chunk_size, GGUFValueType.UINT32)
        for name, entry in sorted(self.entries.items()):
            n_mats = entry.counts.size
            plan.add_tensor(_floats(name + SUMS, entry.sums, (entry.sums.size // n_mats, n_mats)))
            plan.add_tensor(_floats(name + COUNTS, entry.counts, (1, n_mats)))
        write_file(plan, path, force=force)

    @classmethod
    def read(cls, path: Path) -> ImportanceMatrix:
        """Read either form.

        Raises:
            GGUFError: it is neither, or damaged; names what is wrong.
            OSError: the file cannot be read.
        """
        with open(path, "rb") as file:
            is_gguf = file.read(4) == c.MAGIC
        found = _read_gguf(cls(), path) if is_gguf else _read_binary(cls(), path)
        for name, entry in found.entries.items():
            for what, values in (("sums", entry.sums), ("counts", entry.counts)):
                if not (np.isfinite(values).all() and (values >= 0).all()):
                    raise GGUFError(f"{path}: {what} of {name} are not all finite and at least 0")
            if (entry.rows(entry.counts.size) == 0).all() and entry.sums.any():
                raise GGUFError(f"{path}: {name} has sums, but no rows")
        return found


def _floats(name: str, values: np.ndarray, ne: tuple[int, int]) -> PlannedTensor:
    data = values.astype("<f4").tobytes()
    return PlannedTensor(name, ne, GGMLQuantizationType.F32, lambda first, count: data)


def _read_gguf(found: ImportanceMatrix, path: Path) -> ImportanceMatrix:
    with GGUFReader(path) as reader:
        if reader.fields.get(c.KEY_TYPE) != TYPE:
            raise GGUFError(f"{path}: {c.KEY_TYPE} is {reader.fields.get(c.KEY_TYPE)!r}, expected {TYPE!r}")
        for name, info in reader.tensors.items():
            if info.type != GGMLQuantizationType.F32:
                raise GGUFError(f"{path}: tensor {name} is {info.type.name}, expected F32")
            if not name.endswith(SUMS):
                continue
            base = name[: -len(SUMS)]
            if base + COUNTS not in reader.tensors:
                raise GGUFError(f"{path}: tensor {base + COUNTS} is missing")
            sums, counts = (reader.dequantize(n).reshape(-1) for n in (name, base + COUNTS))
            if sums.size % counts.size:
                raise GGUFError(f"{path}: {base}: {sums.size} sums for {counts.size} matrices")
            found.entries[base] = Entry(sums, counts)
        found.datasets = list(reader.fields.get(KEY_DATASETS, []))
        found.n_chunks = int(reader.fields.get(KEY_CHUNK_COUNT, 0))
        found.chunk_size = int(reader.fields.get(KEY_CHUNK_SIZE, 0))
    return found


def _read_binary(found: ImportanceMatrix, path: Path) -> ImportanceMatrix:
    """int32 number of entries; of each: int32 length of the name, name, int32 calls, int32 n, float32[n] of sums; then,
    not in all files, int32 number of chunks, int32 length, name of the text. Importance is sum / calls."""
    data, at = path.read_bytes(), 0

    def take(n_bytes: int) -> bytes:
        nonlocal at
        if not 0 <= n_bytes <= len(data) - at:
            raise GGUFError(f"{path}: neither a GGUF file nor a whole importance matrix of the older form")
        at += n_bytes
        return data[at - n_bytes : at]

    def integer() -> int:
        return int(struct.unpack("<i", take(4))[0])

    n_entries = integer()
    if n_entries < 1:
        raise GGUFError(f"{path}: not an importance matrix: it begins with a number of {n_entries} entries")
    for _ in range(n_entries):
        name = _text(take(integer()), path)
        calls, n = integer(), integer()
        if calls < 1 or n < 1:
            raise GGUFError(f"{path}: {name}: {n} sums of {calls} calls")
        sums = np.frombuffer(take(4 * n), "<f4")
        found.entries[name] = Entry(sums, np.array([calls], np.float32))
    if at < len(data):
        found.n_chunks = integer()
        found.datasets = [_text(take(integer()), path)]
    return found


def _text(raw: bytes, path: Path) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise GGUFError(f"{path}: a name in it is not UTF-8: not an importance matrix") from None
