"""Large arrays in memory that is used again.

The allocator gives a large block back to the system as soon as it is freed, and the system clears every page of the
next one. In a conversion, which asks for a block of much the same size thousands of times, that costs more than reading
and writing do.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque

import numpy as np

SMALL = 128 << 10  # bytes; below, the allocator keeps what is freed
KEPT = 48 << 20  # bytes of memory without a user that are kept at most


class Buffers:
    """Blocks of memory. They may be asked for and let go by any thread.

    Attributes:
        kept_bytes: of all blocks that nobody uses at present.
    """

    def __init__(self, limit: int = KEPT) -> None:
        self.kept_bytes = 0
        self._limit = limit
        self._kept: list[np.ndarray] = []  # the one let go longest ago first
        self._returned: deque[np.ndarray] = deque()  # and not among them yet
        self._lock = threading.Lock()

    def empty(self, n_bytes: int) -> np.ndarray:
        """An array uint8 `[n_bytes]` of any content. Its memory is free again when the last view of it has gone."""
        if n_bytes < SMALL:
            return np.empty(n_bytes, np.uint8)
        block = self._take(n_bytes)
        # Through a memoryview, since a view of a view of an array refers to the array alone, not to what is between:
        # so this one lives as long as any view of it.
        array = np.frombuffer(block.data[:n_bytes], np.uint8)
        weakref.finalize(array, self._put, block).atexit = False
        return array

    def _take(self, n_bytes: int) -> np.ndarray:
        with self._lock:
            self._sort_in()
            for i in reversed(range(len(self._kept))):
                if n_bytes <= len(self._kept[i]) <= 2 * n_bytes:
                    block = self._kept.pop(i)
                    self.kept_bytes -= len(block)
                    return block
        return np.empty(n_bytes, np.uint8)

    def _put(self, block: np.ndarray) -> None:
        # A collection of garbage may call this anywhere, also while this very thread holds the lock: nothing may wait.
        self._returned.append(block)
        if self._lock.acquire(blocking=False):
            try:
                self._sort_in()
            finally:
                self._lock.release()

    def _sort_in(self) -> None:
        """Keep what has been returned, as far as the limit allows."""
        while self._returned:
            block = self._returned.popleft()
            self._kept.append(block)
            self.kept_bytes += len(block)
        while self.kept_bytes > self._limit:
            self.kept_bytes -= len(self._kept.pop(0))


_shared = Buffers()


def empty(n_bytes: int) -> np.ndarray:
    """`Buffers.empty` of the one set of blocks that conversions share."""
    return _shared.empty(n_bytes)
