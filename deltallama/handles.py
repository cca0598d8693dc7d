"""Native models and sessions: opening options, ownership, and callbacks into Python."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from ._ffi import call, ffi, fill, lib, new_struct, struct_values
from .checks import brief, choice, flag, function, path_bytes, token_ids, whole
from .errors import ArgumentError, StateError
from .interrupt import interruptible

Progress = Callable[[int, int], object]
"""Called with tokens done and tokens in all; a true result stops the computation with CancelledError."""

_ACTIVATIONS = {"exact": lib.DELTA_EXACT, "fine": lib.DELTA_FINE, "fast": lib.DELTA_FAST, "auto": lib.DELTA_AUTO}
_CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8}


def devices() -> list[dict[str, Any]]:
    """The devices this build can use here: kind, name, isa, bytes_free, bytes_total of each."""
    found = []
    for index in range(lib.delta_device_count()):
        info = new_struct("delta_device_info")
        call(lib.delta_device_info_get(index, info))
        found.append(struct_values(info))
    return found


def plan(model_path: str | os.PathLike[str], **options: Any) -> tuple[dict[str, Any], dict[str, int]]:
    """Checks a model file as opening does and tells its sizes and planned bytes, without allocating them.

    Takes the options of `Llama` but those about images. Returns the fields of `delta_model_info` and of `delta_memory`.
    """
    params = Params(**options)
    info, memory = new_struct("delta_model_info"), new_struct("delta_memory")
    call(lib.delta_model_plan(path_bytes(model_path), params.struct, info, memory))
    params.reraise()
    return struct_values(info), struct_values(memory)


class Params:
    """Checked opening options in the library's form; keeps alive what the struct borrows."""

    def __init__(
        self,
        *,
        n_ctx: int = 0,
        n_threads: int = 0,
        n_threads_batch: int = 0,
        pin_threads: bool = False,
        interleave_memory: bool = False,
        n_batch: int = 0,
        n_outputs: int = 0,
        activations: str = "auto",
        cache_type: str = "f16",
        device: str = "cpu",
        checkpoint_bytes: int | None = None,
        checkpoint_every: int = 0,
        progress: Progress | None = None,
    ) -> None:
        if not isinstance(device, str) or "\0" in device:
            raise ArgumentError(f"device must be the name of a kind of device, got {brief(device)}")
        self.struct = ffi.new("delta_model_params *")
        lib.delta_model_params_init(self.struct)
        self._report = ProgressCallback(progress)
        self._device = ffi.new("char[]", device.encode(errors="backslashreplace"))
        fill(
            self.struct,
            n_ctx=n_ctx,
            n_threads=n_threads,
            n_threads_batch=n_threads_batch,
            pin_threads=int(flag("pin_threads", pin_threads)),
            interleave_memory=int(flag("interleave_memory", interleave_memory)),
            n_batch=n_batch,
            n_outputs=n_outputs,
            checkpoint_every=checkpoint_every,
            activations=choice("activations", activations, _ACTIVATIONS),
            cache_type=choice("cache_type", cache_type, _CACHE_TYPES),
            device=self._device,
            progress=self._report.function,
        )
        if checkpoint_bytes is not None:
            fill(self.struct, checkpoint_bytes=checkpoint_bytes)

    def reraise(self) -> None:
        """Raises what the progress function raised."""
        self._report.reraise()


@dataclass(frozen=True, eq=False)
class Features:
    """Rows that stand in place of token embeddings, such as those of an image.

    Attributes:
        rows: float32 `[n, n_embd]`.
        digest: 64 bits that identify what they were made from: equal digests promise equal rows.
    """

    rows: np.ndarray
    digest: int


class Handles:
    """The native model and its session. Every use holds the lock, so that closing waits for the running call."""

    def __init__(self, path: str | os.PathLike[str], params: Params) -> None:
        # Both can be taken again by their own thread: a signal handler may run while they are held.
        self._lock = threading.RLock()
        self._in_use = False
        self._alive = threading.RLock()  # held for moments only: cancelling cannot wait for the running call
        self._pid = os.getpid()
        self.closed = False
        model, session = ffi.new("delta_model **"), ffi.new("delta_session **")
        status = lib.delta_model_open(path_bytes(path), params.struct, model)
        self.model = model[0]  # null after a failure, which closing allows
        try:
            params.reraise()
            call(status)
            call(lib.delta_session_create(self.model, session))
        except BaseException:
            lib.delta_model_close(self.model)
            raise
        self.session = session[0]
        self.vision = ffi.NULL

    def open_vision(self, path: bytes) -> None:
        """Opens a vision tower beside the model; once, before anybody else has the handles."""
        params, vision = ffi.new("delta_vision_params *"), ffi.new("delta_vision **")
        lib.delta_vision_params_init(params)
        call(lib.delta_vision_open(path, self.model, params, vision))
        self.vision = vision[0]

    def check(self) -> None:
        """Raises StateError when closed or forked."""
        if self.closed:
            raise StateError("the model is closed")
        if self._pid != os.getpid():
            raise StateError(
                f"the model was opened by process {self._pid} and cannot be used after a fork; open it again here"
            )

    @contextmanager
    def use(self) -> Iterator[None]:
        """The right to call the library with these handles.

        Raises:
            StateError: closed, forked, or inside a call already (from a progress function or a signal handler).
        """
        self.check()
        with self._exclusive():
            self.check()
            yield

    def cancel(self) -> None:
        """Cancels the running call, if there is one."""
        self.check()  # before the lock: a forked child may find it taken by a thread that it does not have
        with self._alive:
            self.check()
            lib.delta_model_cancel(self.model)

    def compute(self, work: Callable[[], int]) -> None:
        """Calls the library for a computation of several steps, which Ctrl-C ends at the next step."""
        with self.use():
            interruptible(lambda: call(work()), lambda: lib.delta_model_cancel(self.model))

    def close(self) -> None:
        """Frees the model once the running call has ended; nothing happens when closed already, or after a fork."""
        if self.closed or self._pid != os.getpid():
            return
        with self._exclusive(), self._alive:
            if not self.closed:
                self.closed = True
                lib.delta_session_free(self.session)
                lib.delta_vision_close(self.vision)
                lib.delta_model_close(self.model)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._lock:
            if self._in_use:  # by this very thread
                raise StateError("the model is computing: a progress function or signal handler can only cancel it")
            try:
                self._in_use = True
                yield
            finally:
                self._in_use = False


class ProgressCallback:
    """A native progress function that calls a Python one, stops when that raises, and raises it again afterwards.

    It is used without a Python function too: returning to the interpreter is what lets Ctrl-C interrupt a long prompt.
    `stopped` is asked as well, whether to stop.
    """

    def __init__(self, progress: Progress | None, stopped: Callable[[], bool] = lambda: False) -> None:
        self._error: BaseException | None = None
        function("progress", progress)

        def report(done: int, total: int, user: Any) -> int:
            return 1 if (progress is not None and progress(done, total)) or stopped() else 0

        def failed(kind: Any, error: BaseException, traceback: Any) -> None:
            self._error = error

        self.function = ffi.callback("delta_progress_fn", report, error=1, onerror=failed)

    def reraise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def native_ids(tokens: Sequence[int]) -> Any:
    """Token ids as `int32_t[]`."""
    ids = token_ids(tokens)
    try:
        return ffi.new("int32_t[]", ids)
    except OverflowError as error:
        raise ArgumentError(f"tokens must be ids: {error}") from None


def native_pieces(timeline: Sequence[int | Features], n_embd: int) -> tuple[Any, list[Any]]:
    """Ids and features as `delta_piece[]`, and what has to stay alive with it.

    Raises:
        ArgumentError: something else, features of another width or without rows.
    """
    pieces: list[dict[str, Any]] = []
    keep: list[Any] = []
    for is_features, items in groupby(timeline, key=lambda item: isinstance(item, Features)):
        if not is_features:
            keep.append(native_ids(list(items)))  # type: ignore[arg-type]
            pieces.append({"tokens": keep[-1], "n": len(keep[-1])})
            continue
        for item in items:
            assert isinstance(item, Features)
            rows = np.ascontiguousarray(item.rows, np.float32)
            if rows.ndim != 2 or rows.shape[1] != n_embd or not len(rows):
                raise ArgumentError(f"features have the shape {rows.shape}, expected (rows, {n_embd})")
            keep.append(ffi.from_buffer("float[]", rows))
            digest = whole("digest", item.digest, 0, 2**64 - 1)
            pieces.append({"features": keep[-1], "n": len(rows), "digest": digest})
    return ffi.new("delta_piece[]", pieces), keep
