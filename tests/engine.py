"""The engine for tests: a model and its sessions over the C interface, numpy in and out, no Python layer in between."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

import native

ACTIVATIONS = {"exact": 0, "fine": 1, "fast": 2, "auto": 3}
CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8}


class Engine:
    """`Engine(path, device="ref", n_ctx=64)`: keyword arguments are fields of delta_model_params.

    Defaults are those of an exact comparison: exact activations and an F32 cache.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        activations: str = "exact",
        cache_type: str = "f32",
        device: str = "cpu",
        **params: int,
    ) -> None:
        self.ffi, self.lib = native.load()
        p = self.ffi.new("delta_model_params *")
        self.lib.delta_model_params_init(p)
        device_name = self.ffi.new("char[]", device.encode())
        p.device, p.activations, p.cache_type = device_name, ACTIVATIONS[activations], CACHE_TYPES[cache_type]
        for name, value in params.items():
            setattr(p, name, value)
        model = self.ffi.new("delta_model **")
        native.check(self.lib.delta_model_open(str(path).encode(), p, model))
        self.model = model[0]
        info = self.ffi.new("delta_model_info *")
        info.size = self.ffi.sizeof("delta_model_info")
        native.check(self.lib.delta_model_info_get(self.model, info))
        self.info = info
        self.n_vocab = int(info.n_vocab)
        self.sessions: list[Session] = []
        self.towers: list[Tower] = []

    def session(self) -> Session:
        return Session(self)

    def eval_batch(self, items: Sequence[tuple[Session, Sequence[int]]]) -> None:
        """One delta_eval_batch; every session keeps the logits of all its rows."""
        array = self.ffi.new("delta_batch_item[]", len(items))
        keep = [self.ffi.new("int32_t[]", list(map(int, tokens))) for _, tokens in items]
        for item, (session, tokens), data in zip(array, items, keep, strict=True):
            item.session, item.tokens, item.n_tokens = session.handle, data, len(tokens)
            item.logits = self.lib.DELTA_LOGITS_ALL
        native.check(self.lib.delta_eval_batch(self.model, array, len(items)))

    def stats(self) -> dict[str, int]:
        """delta_model_stats."""
        return _stats(self.ffi, self.lib.delta_model_stats, self.model)

    def cancel(self) -> None:
        self.lib.delta_model_cancel(self.model)

    def logits(self, tokens: Sequence[int], pieces: Sequence[int] | None = None) -> np.ndarray:
        """[n, vocab] of a fresh session, evaluated in pieces of the given lengths (the rest in one)."""
        session = self.session()
        try:
            return session.eval_pieces(tokens, pieces or [])
        finally:
            session.free()

    def close(self) -> None:
        if self.model is not None:
            for session in list(self.sessions):
                session.free()
            for tower in list(self.towers):
                tower.close()
            native.check(self.lib.delta_model_close(self.model))
            self.model = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Session:
    """One timeline. Methods raise native.NativeError."""

    def __init__(self, engine: Engine, handle: Any = None) -> None:
        self.engine, self.ffi, self.lib = engine, engine.ffi, engine.lib
        if handle is None:
            out = self.ffi.new("delta_session **")
            native.check(self.lib.delta_session_create(engine.model, out))
            handle = out[0]
        self.handle = handle
        engine.sessions.append(self)

    def eval(self, tokens: Sequence[int], logits: str = "ALL") -> np.ndarray:
        """Appends tokens; the logits kept, [rows, vocab]."""
        mode = getattr(self.lib, f"DELTA_LOGITS_{logits}")
        native.check(self.lib.delta_session_eval(self.handle, list(map(int, tokens)), len(tokens), mode))
        return self.kept()

    def eval_pieces(self, tokens: Sequence[int], pieces: Sequence[int]) -> np.ndarray:
        out, start = [], 0
        for n in [*pieces, len(tokens)]:
            part = tokens[start : start + n]
            if len(part):
                out.append(self.eval(part))
            start += len(part)
        return np.concatenate(out)

    def sync(self, tokens: Sequence[int]) -> dict[str, int]:
        result = self.ffi.new("delta_sync_result *")
        result.size = self.ffi.sizeof("delta_sync_result")
        null = self.ffi.NULL
        native.check(self.lib.delta_session_sync(self.handle, list(map(int, tokens)), len(tokens), null, null, result))
        return {name: int(getattr(result, name)) for name in ("n_reused", "n_computed", "n_replayed")}

    def sync_pieces(self, pieces: Sequence[Sequence[int] | tuple[np.ndarray, int]]) -> dict[str, int]:
        """Tokens, or feature rows [n, n_embd] and their digest."""
        result = self.ffi.new("delta_sync_result *")
        result.size = self.ffi.sizeof("delta_sync_result")
        array, keep = self.ffi.new("delta_piece[]", len(pieces)), []
        for item, piece in zip(array, pieces, strict=True):
            if isinstance(piece, tuple):
                rows = np.ascontiguousarray(piece[0], np.float32)
                keep.append(self.ffi.from_buffer("float[]", rows))
                item.features, item.digest, item.n = keep[-1], piece[1], len(rows)
            else:
                keep.append(self.ffi.new("int32_t[]", list(map(int, piece))))
                item.tokens, item.n = keep[-1], len(piece)
        null = self.ffi.NULL
        native.check(self.lib.delta_session_sync_pieces(self.handle, array, len(pieces), null, null, result))
        return {name: int(getattr(result, name)) for name in ("n_reused", "n_computed", "n_replayed")}

    def truncate(self, length: int) -> None:
        native.check(self.lib.delta_session_truncate(self.handle, length))

    def checkpoint(self) -> None:
        native.check(self.lib.delta_session_checkpoint(self.handle))

    def fork(self) -> Session:
        out = self.ffi.new("delta_session **")
        native.check(self.lib.delta_session_fork(self.handle, out))
        return Session(self.engine, out[0])

    def save(self, path: Path) -> None:
        native.check(self.lib.delta_session_save(self.handle, str(path).encode()))

    def load(self, path: Path) -> None:
        native.check(self.lib.delta_session_load(self.handle, str(path).encode()))

    def stats(self) -> dict[str, int]:
        """delta_session_stats."""
        return _stats(self.ffi, self.lib.delta_session_stats, self.handle)

    def sample(
        self, *, logit_bias: dict[int, float] | None = None, allow: Sequence[int] | None = None, **params: float
    ) -> int:
        """A token. `allow`: the ids of the token mask; other keywords are fields of delta_sampling_params."""
        p = self.ffi.new("delta_sampling_params *")
        self.lib.delta_sampling_params_init(p)
        for name, value in params.items():
            setattr(p, name, value)
        bias = self.ffi.new("delta_token_bias[]", list((logit_bias or {}).items()))
        p.logit_bias, p.n_logit_bias = bias, len(bias)
        mask = self.ffi.NULL
        if allow is not None:
            bits = np.zeros((self.engine.n_vocab + 31) // 32 * 32, np.uint8)
            bits[list(allow)] = 1
            mask = self.ffi.new("uint32_t[]", np.packbits(bits, bitorder="little").view("<u4").tolist())
        p.token_mask = mask
        token = self.ffi.new("int32_t *")
        native.check(self.lib.delta_session_sample(self.handle, p, token))
        return int(token[0])

    def top(self, n: int, row: int = -1) -> list[tuple[int, float, float]]:
        """(token, logit, log-probability), best first."""
        out = self.ffi.new("delta_top_token[]", n)
        native.check(self.lib.delta_session_top(self.handle, row, out, n))
        return [(int(t.token), float(t.logit), float(t.logprob)) for t in out]

    def kept(self) -> np.ndarray:
        """Logits of all rows the last evaluation kept."""
        rows = range(self.lib.delta_session_logits_count(self.handle))
        return np.stack([self.row(i) for i in rows]) if rows else np.empty((0, self.engine.n_vocab), np.float32)

    def row(self, index: int = -1) -> np.ndarray:
        data, n = self.ffi.new("const float **"), self.ffi.new("uint32_t *")
        native.check(self.lib.delta_session_logits(self.handle, index, data, n))
        return np.frombuffer(self.ffi.buffer(data[0], 4 * n[0]), np.float32).copy()

    def greedy(self, prompt: Sequence[int], n: int) -> list[int]:
        """`n` greedy tokens after syncing to the prompt."""
        self.sync(prompt)
        out: list[int] = []
        for _ in range(n):
            out.append(int(np.argmax(self.row())))
            self.eval(out[-1:], "LAST")
        return out

    @property
    def tokens(self) -> list[int]:
        """The timeline."""
        out, n = self.ffi.new("int32_t[]", max(1, self.length)), self.ffi.new("size_t *")
        native.check(self.lib.delta_session_tokens(self.handle, out, self.length, n))
        return list(out[0 : n[0]])

    @property
    def length(self) -> int:
        return int(self.lib.delta_session_length(self.handle))

    def free(self) -> None:
        if self.handle is not None:
            native.check(self.lib.delta_session_free(self.handle))
            self.engine.sessions.remove(self)
            self.handle = None


def _stats(ffi: Any, function: Any, handle: Any) -> dict[str, int]:
    stats = ffi.new("delta_stats *")
    stats.size = ffi.sizeof("delta_stats")
    native.check(function(handle, stats))
    return {name: int(getattr(stats, name)) for name, _ in ffi.typeof("delta_stats").fields if name != "size"}


class Tower:
    """A vision tower beside a model."""

    def __init__(self, engine: Engine, path: Path, max_patches: int = 0) -> None:
        self.engine, self.ffi, self.lib, self.path = engine, engine.ffi, engine.lib, path
        params, out = self.ffi.new("delta_vision_params *"), self.ffi.new("delta_vision **")
        self.lib.delta_vision_params_init(params)
        params.max_patches = max_patches
        native.check(self.lib.delta_vision_open(str(path).encode(), engine.model, params, out))
        self.handle = out[0]
        engine.towers.append(self)

    @property
    def info(self) -> Any:
        info = self.ffi.new("delta_vision_info *")
        info.size = self.ffi.sizeof("delta_vision_info")
        native.check(self.lib.delta_vision_info_get(self.handle, info))
        return info

    def encode(self, pixels: np.ndarray, grid: tuple[int, int, int], progress: Any = None) -> np.ndarray:
        """Feature rows [n, projection_dim] of patches [frames * rows * columns, 3, side, side]."""
        info = self.info
        pixels = np.ascontiguousarray(pixels, np.float32)
        features = np.full((grid[1] * grid[2] // info.merge**2, info.projection_dim), np.nan, np.float32)
        source, target = self.ffi.from_buffer("float[]", pixels), self.ffi.from_buffer("float[]", features)
        report = self.ffi.NULL if progress is None else progress
        null = self.ffi.NULL
        native.check(
            self.lib.delta_vision_encode(self.handle, source, *grid, target, features.size, report, null)
        )  # fmt: skip
        return features

    def close(self) -> None:
        native.check(self.lib.delta_vision_close(self.handle))
        self.engine.towers.remove(self)
