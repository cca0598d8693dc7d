"""Memory that is used again (`gguf_ext/buffers.py`)."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from gguf_ext.buffers import SMALL, Buffers


def test_memory_is_used_again_only_when_the_last_view_has_gone() -> None:
    buffers = Buffers()
    first = buffers.empty(4 * SMALL)
    address = first.ctypes.data
    view = first.reshape(4, SMALL)[1:].view(np.float32).T
    lent = memoryview(view)
    del first, view
    gc.collect()
    assert buffers.kept_bytes == 0
    assert buffers.empty(4 * SMALL).ctypes.data != address
    del lent
    gc.collect()
    assert buffers.kept_bytes == 8 * SMALL
    assert {buffers.empty(3 * SMALL).ctypes.data, buffers.empty(2 * SMALL).ctypes.data} & {address}


def test_size_is_what_was_asked_for() -> None:
    buffers = Buffers()
    buffers.empty(8 * SMALL)
    for n_bytes in (0, 1, SMALL - 1, SMALL, 5 * SMALL + 3, 8 * SMALL):
        found = buffers.empty(n_bytes)
        assert found.shape == (n_bytes,) and found.dtype == np.uint8 and found.flags.writeable
        assert found.flags.c_contiguous


def test_a_block_far_too_large_is_left_for_others() -> None:
    buffers = Buffers()
    buffers.empty(20 * SMALL)
    assert buffers.kept_bytes == 20 * SMALL
    small = buffers.empty(2 * SMALL)
    assert buffers.kept_bytes == 20 * SMALL and len(small) == 2 * SMALL


def test_what_is_kept_is_bounded() -> None:
    buffers = Buffers(limit=6 * SMALL)
    arrays = [buffers.empty(size * SMALL) for size in (1, 2, 3, 4)]
    while arrays:
        arrays.pop(0)
        assert buffers.kept_bytes <= 6 * SMALL
    assert buffers.kept_bytes == 4 * SMALL  # the others were let go before it
    buffers.empty(7 * SMALL)  # more than may be kept
    assert buffers.kept_bytes == 0


def test_threads_never_share_a_block() -> None:
    buffers = Buffers(limit=8 * SMALL)

    def work(number: int) -> bool:
        for step in range(200):
            array = buffers.empty((1 + (number + step) % 3) * SMALL)
            array[:: SMALL // 4] = number
            if not (array[:: SMALL // 4] == number).all():
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(1, 9)))


def test_garbage_that_is_collected_while_blocks_are_handed_out() -> None:
    """Newer interpreters collect garbage between any two instructions, in whatever thread that is."""
    buffers = Buffers()

    class Collecting(list[np.ndarray]):
        def __len__(self) -> int:
            gc.collect()
            return super().__len__()

    class Cycle:
        def __init__(self) -> None:
            self.itself, self.array = self, buffers.empty(2 * SMALL)

    buffers._kept = Collecting()
    Cycle()
    thread = threading.Thread(target=buffers.empty, args=(2 * SMALL,), daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    buffers.empty(SMALL)
    assert buffers.kept_bytes == sum(map(len, buffers._kept)) > 0
