"""Small reads of remote files through larger windows, so that a request is worth its way.

A window begins where a read does and goes on to the end of the tensor or `WINDOW` bytes, and over the small tensors
right behind it (the scales of packed weights, norms). Windows are dropped when every byte was taken, else the one that
was used longest ago first. Reads from several threads that fall into one window wait for it instead of fetching again.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np

WINDOW = 8 << 20  # bytes; at a gigabit per second a request then takes longer than its way
SMALL = 512 << 10  # a tensor that rides along with the one before it
HEADER = 1 << 20  # read at first, before anything is known about the file
BUDGET = 32 << 20  # of all windows that are kept

Fetch = Callable[[int, memoryview], None]  # offset, where to


class _Window:
    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end = begin, end
        self.data = np.empty(end - begin, dtype=np.uint8)
        self.n_taken = 0
        self.ready = threading.Event()
        self.failed = False


class Windows:
    """The windows of all files of a model. `key` tells files apart."""

    def __init__(self, budget: int = BUDGET) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, int], _Window] = {}  # the one used longest ago first

    def read(self, key: str, offset: int, n_bytes: int, end: int, fetch: Fetch) -> np.ndarray:
        """`n_bytes` from `offset`, uint8, from a window of this file; a new one is fetched up to `end`.

        Raises:
            what `fetch` raises.
        """
        while True:
            window, is_new = self._find(key, offset, n_bytes, end)
            if is_new:
                try:
                    fetch(window.begin, window.data.data)
                except BaseException:
                    window.failed = True
                    self._drop(key, window)
                    raise
                finally:
                    window.ready.set()
            else:
                window.ready.wait()
            if not window.failed:  # else the other thread reports it, and this one tries itself
                return self._take(key, window, offset, n_bytes, is_new)

    def _find(self, key: str, offset: int, n_bytes: int, end: int) -> tuple[_Window, bool]:
        with self._lock:
            for (other, begin), window in self._kept.items():
                if other == key and begin <= offset and offset + n_bytes <= window.end:
                    self._kept[key, begin] = self._kept.pop((key, begin))
                    return window, False
            window = _Window(offset, max(end, offset + n_bytes))
            self._kept.pop((key, offset), None)  # a shorter one
            self._kept[key, offset] = window
            self._shrink()
            return window, True

    def _shrink(self) -> None:
        size = sum(len(window.data) for window in self._kept.values())
        for place, window in list(self._kept.items()):
            if size <= self._budget:
                return
            if window.ready.is_set():
                size -= len(window.data)
                del self._kept[place]

    def _take(self, key: str, window: _Window, offset: int, n_bytes: int, is_own: bool) -> np.ndarray:
        begin = offset - window.begin
        if n_bytes == len(window.data) and is_own:
            self._drop(key, window)
            return window.data
        part: np.ndarray = window.data[begin : begin + n_bytes].copy()  # a view would keep the whole window
        with self._lock:
            window.n_taken += n_bytes
        if window.n_taken >= len(window.data):
            self._drop(key, window)
        return part

    def _drop(self, key: str, window: _Window) -> None:
        with self._lock:
            if self._kept.get((key, window.begin)) is window:
                del self._kept[key, window.begin]


def window_end(offset: int, n_bytes: int, ends: Sequence[int] | np.ndarray, size: int) -> int:
    """Where a window for `n_bytes` from `offset` ends. `ends`: where the header and each tensor end, ascending; empty
    before the header is known."""
    end = offset + n_bytes
    if len(ends) == 0:
        return min(size, max(end, offset + HEADER))
    limit = max(offset + WINDOW, end + SMALL)
    at = bisect_right(ends, end - 1)  # the tensor with the last byte asked for
    if at == len(ends):
        return end
    if ends[at] > limit:
        return max(end, offset + WINDOW)
    end = int(ends[at])
    for following in ends[at + 1 :]:
        if following - end > SMALL or following > limit:
            break
        end = int(following)
    return end
