"""Waiting, redirects and windows of remote reads, each on its own; `test_remote.py` has whole conversions."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conversion import ConversionError
from conversion.http_ranges import Http, Patience, RemoteFile
from conversion.windows import SMALL, WINDOW, Windows, window_end
from hub_server import COMMIT, Fault, Hub

CONTENT = bytes(range(256)) * 64


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "x.safetensors").write_bytes(CONTENT)
    with Hub(tmp_path) as server:
        yield server


def waits_of(hub: Hub, patience: Patience, fault: Fault, times: int) -> list[float]:
    """What a read waits before it succeeds, after so many faults."""
    http = Http(hub.url, None, patience)
    waits: list[float] = []
    http.sleep = waits.append
    hub.faults = lambda request: fault if request.server == "cdn" and request.number < times else None
    view = memoryview(bytearray(100))
    RemoteFile(http, f"{hub.url}/org/tiny/resolve/{COMMIT}/x.safetensors", "x").read_into(7, view)
    assert view.tobytes() == CONTENT[7:107]
    http.close()
    return waits


def test_waits_grow_and_differ(hub: Hub) -> None:
    waits = waits_of(hub, Patience(first_wait=1.0, longest_wait=8.0), Fault(status=503), 6)
    assert len(waits) == 6
    for wait, nominal in zip(waits, (1, 2, 4, 8, 8, 8), strict=True):
        assert 0.5 * nominal <= wait <= 1.5 * nominal
    assert len(set(waits)) == 6


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("headers", [{"Retry-After": "300"}, {"RateLimit": '"resolvers";r=0;t=300'}, "date"])
def test_servers_are_given_the_time_they_ask_for(hub: Hub, status: int, headers: Any) -> None:
    if headers == "date":
        headers = {"Retry-After": formatdate(time.time() + 300.9, usegmt=True)}
    (wait,) = waits_of(hub, Patience(first_wait=1.0), Fault(status=status, headers=headers), 1)
    assert 290 <= wait <= 302


def test_progress_begins_the_count_anew(hub: Hub) -> None:
    """Ten cuts are more than the attempts; each brought some bytes."""
    waits = waits_of(hub, Patience(attempts=3, first_wait=0.5), Fault(drop_after=10), 10)
    assert len(waits) == 9 and max(waits) <= 0.75


def test_encrypted_connections_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer:
        status_code = 302
        headers = {"Location": "http://elsewhere.example/x?secret"}
        raw = type("Raw", (), {"read": lambda *_, **__: b""})()

        def close(self) -> None:
            pass

    http = Http("https://hub.example", "sesame")
    monkeypatch.setattr(http, "_get", lambda *_: Answer())
    with pytest.raises(ConversionError, match=r"redirects to http://elsewhere\.example, which is not encrypted"):
        http.follow("https://hub.example/x", 0, 1)


@pytest.mark.parametrize(
    "url", ["http://hub.example/x", "https://hub.example:444/x", "https://hub.example.org/x", "https://a@other/x"]
)
def test_what_is_not_the_endpoint(url: str) -> None:
    http = Http("https://hub.example", None)
    assert not http.is_endpoint(url)
    assert http.is_endpoint("https://hub.example/y")
    assert http.is_endpoint("https://hub.example:443/y")


# ---- windows ---------------------------------------------------------------------------------------------------------


class Source:
    """A file in memory that counts what is fetched of it."""

    def __init__(self) -> None:
        self.content = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
        self.fetched: list[tuple[int, int]] = []

    def fetch(self, offset: int, view: memoryview) -> None:
        self.fetched.append((offset, len(view)))
        view[:] = self.content[offset : offset + len(view)].data


def test_a_window_ends_with_its_tensor_and_the_small_ones_behind() -> None:
    header, weight, scale = 1000, 5 << 20, 300 << 10
    sizes = [header, weight, scale, weight, scale, 100, 200, 40 << 20, 5]
    ends = np.cumsum(sizes)
    size = int(ends[-1])
    assert window_end(header, weight, ends, size) == ends[2]  # the scale rides along, the next weight does not
    assert window_end(header, 10, ends, size) == ends[2]
    assert window_end(int(ends[2]), weight, ends, size) == ends[6]  # so do more small ones
    assert window_end(int(ends[3]), 10, ends, size) == ends[6]
    assert window_end(int(ends[6]), 100, ends, size) == ends[6] + WINDOW  # part of a large one
    assert (
        window_end(int(ends[6]), (40 << 20) - SMALL + 9, ends, size) == size
    )  # what is left is less than a request is worth
    assert window_end(int(ends[6]), 30 << 20, ends, size) == ends[6] + (30 << 20)
    assert window_end(size - 5, 5, ends, size) == size
    assert window_end(0, 8, (), size) == 1 << 20 and window_end(0, 8, (), 100) == 100
    assert SMALL < WINDOW


def test_windows_serve_what_lies_in_them() -> None:
    source, windows = Source(), Windows()
    for offset, n in ((0, 100), (100, 900), (500, 10)):
        assert (windows.read("a", offset, n, 1000, source.fetch) == source.content[offset : offset + n]).all()
    # The third came after every byte had been taken: it is a window of its own, as is another file's.
    windows.read("b", 0, 10, 1000, source.fetch)
    assert source.fetched == [(0, 1000), (500, 500), (0, 1000)]


def test_windows_keep_to_their_budget() -> None:
    source, windows = Source(), Windows(budget=5000)
    for offset in range(0, 1 << 19, 1000):
        windows.read("a", offset, 10, offset + 1000, source.fetch)
        assert sum(len(window.data) for window in windows._kept.values()) <= 6000
    windows.read("a", offset - 1000, 10, offset, source.fetch)  # one of the last ones is still there
    assert len(source.fetched) == (1 << 19) // 1000 + 1


def test_threads_share_a_window_and_its_failure() -> None:
    source, windows = Source(), Windows()
    begun, go = threading.Event(), threading.Event()

    def fail_once(offset: int, view: memoryview) -> None:
        is_first = not begun.is_set()
        begun.set()
        go.wait()
        if is_first:
            raise ConversionError("lost")
        source.fetch(offset, view)

    results: list[Any] = []

    def read(offset: int) -> None:
        try:
            results.append(
                (windows.read("a", offset, 10, 1000, fail_once) == source.content[offset : offset + 10]).all()
            )
        except ConversionError as error:
            results.append(str(error))

    first = threading.Thread(target=read, args=(0,))
    first.start()
    begun.wait()
    others = [threading.Thread(target=read, args=(offset,)) for offset in range(0, 80, 10)]
    for thread in others:
        thread.start()
    go.set()
    for thread in (first, *others):
        thread.join()
    assert results.count("lost") == 1 and results.count(True) == 8
    assert len(source.fetched) < 9


def test_random_reads_from_many_threads(rng: np.random.Generator) -> None:
    source, windows = Source(), Windows(budget=50_000)
    reads = [(int(offset), int(n)) for offset, n in rng.integers(1, 5000, (2000, 2))]
    wrong: list[tuple[int, int]] = []

    def read(first: int) -> None:
        for offset, n in reads[first::4]:
            found = windows.read("a", offset, n, offset + n + n // 2, source.fetch)
            if found.tobytes() != source.content[offset : offset + n].tobytes():
                wrong.append((offset, n))

    threads = [threading.Thread(target=read, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
