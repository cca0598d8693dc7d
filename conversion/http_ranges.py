"""Files behind HTTP(S), whole or by byte ranges, over connections that fail.

A read goes on where it was cut off. Answers that say "later" are waited for, as long as they ask. Whatever could give
wrong bytes is refused: another range than asked for, a server that ignores ranges, a file that was changed meanwhile.
(RFC 9110, sections 10.2.3, 13 and 14.)
"""

from __future__ import annotations

import email.utils
import logging
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

import requests
import urllib3

from gguf_ext import pipeline

from .errors import ConversionError

log = logging.getLogger("conversion")

MAX_REDIRECTS = 10
MAX_WHOLE_FILE = 512 << 20  # bytes; an index of a million tensors has a fifth of it

_CHUNK = 1 << 18  # bytes taken from a connection at a time
_REDIRECTS = (301, 302, 303, 307, 308)
_LATER = (408, 425, 429, 500, 502, 503, 504)
_REFUSED = (401, 403)
_GONE = (404, 410)
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_RATE_LIMIT_SECONDS = re.compile(r";\s*t=(\d+)")  # the hub's form: RateLimit: "resolvers";r=0;t=55


@dataclass(frozen=True)
class Patience:
    """How long to bear with a connection. Times in seconds."""

    attempts: int = 8  # in a row without a byte of progress
    first_wait: float = 1.0  # doubled with each failure, and varied by half, so that many readers do not come at once
    longest_wait: float = 60.0
    longest_asked: float = 900.0  # of what a server may ask for
    connect: float = 10.0
    read: float = 60.0

    def wait(self, failures: int, asked: float | None) -> float:
        """Seconds to wait after so many failures in a row; `asked` is what the server asked for."""
        own = float(min(self.first_wait * 2 ** (failures - 1), self.longest_wait)) * random.uniform(0.5, 1.5)
        return own if asked is None else asked + random.uniform(0, self.first_wait)


class _Later(Exception):
    """An attempt failed in a way that another may not; `asked` is what the server said about when."""

    def __init__(self, why: str, asked: float | None = None) -> None:
        super().__init__(why)
        self.asked = asked


class _Attempts:
    """Counts the failures of one read, and waits after each."""

    def __init__(self, http: Http, what: str) -> None:
        self._http, self._what, self._failures = http, what, 0

    def failed(self, error: _Later, progress: bool = False) -> None:
        """Wait for the next attempt.

        Raises:
            ConversionError: it was one too many, or the server asks for more time than anybody has.
        """
        patience = self._http.patience
        self._failures = 1 if progress else self._failures + 1
        if self._failures >= patience.attempts:
            raise ConversionError(f"{self._what}: given up after {self._failures} attempts: {error}")
        if error.asked is not None and error.asked > patience.longest_asked:
            raise ConversionError(f"{self._what}: {error}, and asks to wait for {error.asked:.0f} s")
        wait = patience.wait(self._failures, error.asked)
        log.log(logging.DEBUG if progress else logging.INFO, "%s: %s; again in %.1f s", self._what, error, wait)
        self._http.sleep(wait)


class Http:
    """Connections, one set per thread and kept open. The token is sent to `endpoint` and nowhere else."""

    def __init__(self, endpoint: str, token: str | None, patience: Patience = Patience()) -> None:  # noqa: B008
        self.endpoint, self.patience = endpoint, patience
        self.sleep: Callable[[float], object] = pipeline.wait  # an interruption does not wait for a server
        self._token = token
        self._local = threading.local()
        self._sessions: list[requests.Session] = []

    def close(self) -> None:
        for session in self._sessions:
            session.close()

    def is_endpoint(self, url: str) -> bool:
        """Whether a URL has the scheme, host and port of the endpoint."""
        return _origin(url) == _origin(self.endpoint)

    def follow(self, url: str, begin: int | None, end: int | None) -> tuple[requests.Response, str, str | None]:
        """One GET, redirects followed: the answer, where it came from, and the identity a redirect gave the file."""
        linked: str | None = None
        for _ in range(MAX_REDIRECTS):
            response = self._get(url, begin, end)
            if response.status_code not in _REDIRECTS or "Location" not in response.headers:
                return response, url, linked
            linked = response.headers.get("X-Linked-ETag") or linked
            _drain(response)
            try:
                target = urljoin(url, response.headers["Location"])
                _origin(target)
            except ValueError:
                raise ConversionError(f"{place(url)} redirects to something that is no address") from None
            if urlsplit(target).scheme not in ("https", urlsplit(url).scheme):
                raise ConversionError(f"{self.endpoint} redirects to {place(target)}, which is not encrypted")
            url = target
        raise ConversionError(f"{self.endpoint}: more than {MAX_REDIRECTS} redirects, the last to {place(url)}")

    def _get(self, url: str, begin: int | None, end: int | None) -> requests.Response:
        headers = {"Accept-Encoding": "identity", "User-Agent": "deltallama"}
        if begin is not None:
            headers["Range"] = f"bytes={begin}-{'' if end is None else end - 1}"
        if self._token is not None and self.is_endpoint(url):
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            return self._session().get(
                url,
                headers=headers,
                stream=True,
                allow_redirects=False,
                timeout=(self.patience.connect, self.patience.read),
                auth=_as_it_is,
            )
        except (requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema) as error:
            raise ConversionError(f"{place(url)}: {error}") from None
        except requests.exceptions.RequestException as error:
            reason = _reason(error)
            if "CERTIFICATE_VERIFY_FAILED" in reason:
                raise ConversionError(f"{place(url)}: its certificate is not trusted: {reason}") from None
            raise _Later(f"{place(url)}: {reason}") from None

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = _Session()
            self._sessions.append(session)
        return session


class _Session(requests.Session):
    """Redirects are followed by `Http`, which knows where the token may go; the library is not even to look at them."""

    def get_redirect_target(self, resp: requests.Response) -> None:
        return None


def _as_it_is(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Stands for "no other credentials", which would else be looked up in the user's .netrc for any host."""
    return request


class RemoteFile:
    """A file under a URL. `what` names it in messages; `size` in bytes, if it is known beforehand."""

    def __init__(self, http: Http, url: str, what: str, size: int | None = None) -> None:
        self.http, self.url, self.what = http, url, what
        self._size = size
        self._lock = threading.Lock()
        self._target: str | None = None  # where the redirects led; used until it is refused
        self._linked: str | None = None  # identity by the endpoint
        self._identities: dict[str, str] = {}  # host -> the identity it gave

    def size(self) -> int:
        """The size in bytes; asks for the first byte if need be."""
        if self._size is None:
            self.read_into(0, memoryview(bytearray(1)))
        assert self._size is not None
        return self._size

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes from `offset`.

        Raises:
            ConversionError: see the module; also when no progress is made for too long.
        """
        attempts = _Attempts(self.http, self.what)
        n_bytes, done = len(view), 0
        while done < n_bytes:
            try:
                with self._open(offset + done, offset + n_bytes) as response:
                    end = self._range(response, offset + done, offset + n_bytes) - offset
                    before = done
                    for chunk in _body(response, end - done):
                        view[done : done + len(chunk)] = chunk
                        done += len(chunk)
            except _Later as error:
                attempts.failed(error)
                continue
            if done < end:
                attempts.failed(_Later(f"the connection ended at byte {offset + done}"), progress=done > before)

    def read_all(self) -> bytes:
        """The whole file, which must be small.

        Raises:
            ConversionError: as `read_into`; also when it is larger than `MAX_WHOLE_FILE`.
        """
        attempts = _Attempts(self.http, self.what)
        data = bytearray()
        while True:
            before = len(data)
            try:
                with self._open(before or None, None) as response:
                    total = self._begin(response, data)
                    for chunk in _body(response, MAX_WHOLE_FILE + 1 - len(data)):
                        data += chunk
            except _Later as error:
                attempts.failed(error)
                continue
            if len(data) > MAX_WHOLE_FILE:
                raise ConversionError(f"{self.what}: more than {MAX_WHOLE_FILE} bytes, far beyond any such file")
            if total is None or len(data) == total:
                return bytes(data)
            attempts.failed(_Later(f"the connection ended at byte {len(data)}"), progress=len(data) > before)

    @contextmanager
    def _open(self, begin: int | None, end: int | None) -> Iterator[requests.Response]:
        """An answer that may hold the bytes."""
        known = self._target
        try:
            response, url, linked = self.http.follow(known or self.url, begin, end)
        except _Later:
            self._target = None  # it may have led to a server that is down
            raise
        try:
            self._check_status(response, url)
            self._check_identity(response, url, linked)
            self._target = url
            yield response
        finally:
            response.close()

    def _check_status(self, response: requests.Response, url: str) -> None:
        status, where = response.status_code, place(url)
        if status in (200, 206):
            coding = response.headers.get("Content-Encoding", "identity")
            if coding != "identity":
                raise ConversionError(f"{self.what}: {where} sends it encoded as {coding}, which was not asked for")
            return
        if status in _LATER:
            raise _Later(f"{where} answers {status}", _asked_wait(response))
        if status in (*_REFUSED, *_GONE, 400) and not self.http.is_endpoint(url):
            self._target = None  # signed links end after a while: ask for a new one
            raise _Later(f"{where} answers {status}")
        if status in _REFUSED:
            hint = "the model is gated or private; a token with access goes into HF_TOKEN"
            raise ConversionError(f"{self.what}: {where} answers {status}: {hint}")
        if status in _GONE:
            raise ConversionError(f"{self.what}: {where} has no such file, model or revision (it answers {status})")
        if status == 416:
            raise ConversionError(f"{self.what} was changed: it is shorter than it was listed ({where} answers 416)")
        raise ConversionError(f"{self.what}: {where} answers {status}, expected 200 or 206")

    def _check_identity(self, response: requests.Response, url: str, linked: str | None) -> None:
        """Two answers about one file must name the same version of it.

        The endpoint's name for it counts, if it gives one; a server that it redirects to is compared with itself.
        """
        found = response.headers.get("ETag") or response.headers.get("Last-Modified")
        with self._lock:
            if linked is not None:
                self._linked = self._same(self._linked, linked)
            if found is not None:
                host = place(url)
                self._identities[host] = self._same(self._identities.get(host), found)

    def _same(self, before: str | None, found: str) -> str:
        found = found.removeprefix("W/")
        if before is not None and before != found:
            raise ConversionError(f"{self.what} was changed while it was read: version {before} before, {found} now")
        return found

    def _range(self, response: requests.Response, begin: int, end: int) -> int:
        """Where the range of an answer ends, at most `end`; servers may send less than was asked for."""
        if response.status_code == 200:
            raise ConversionError(
                f"{self.what}: the server ignores byte ranges (it answers 200, expected 206), so the model cannot be "
                "read in parts"
            )
        header = response.headers.get("Content-Range", "")
        match = _CONTENT_RANGE.fullmatch(header)
        if match is None or int(match[1]) != begin or not begin < int(match[2]) + 1 <= end:
            expected = f"bytes {begin}-{end - 1} or their beginning"
            raise ConversionError(f"{self.what}: the server sends the range {header!r}, expected {expected}")
        if match[3] != "*":
            self._check_size(int(match[3]))
        return int(match[2]) + 1

    def _begin(self, response: requests.Response, data: bytearray) -> int | None:
        """Prepare `data` for what an answer about the whole file or its rest brings; the file's size, if it says so."""
        if response.status_code == 206:
            match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if match is None or int(match[1]) != len(data) or match[3] == "*":
                raise ConversionError(f"{self.what}: the server sends another range than the rest from {len(data)}")
            return int(match[3])
        data.clear()  # it sends everything once more
        length = response.headers.get("Content-Length", "")
        return int(length) if length.isdecimal() else None

    def _check_size(self, size: int) -> None:
        if self._size is None:
            self._size = size
        if size != self._size:
            raise ConversionError(f"{self.what} was changed or listed wrongly: {size} bytes, expected {self._size}")


def _body(response: requests.Response, limit: int) -> Iterator[bytes]:
    """Up to `limit` bytes in chunks; ends early where the connection does. Within a job that is not wanted any more it
    raises `pipeline.Stopped`."""
    raw = response.raw
    raw.enforce_content_length = False  # else the last bytes before an end would be thrown away with an error
    while limit > 0:
        try:
            chunk = raw.read(min(_CHUNK, limit), decode_content=False)
        except (urllib3.exceptions.HTTPError, OSError):
            return
        if not chunk:
            return
        limit -= len(chunk)
        yield chunk
        pipeline.wait(0)


def _drain(response: requests.Response) -> None:
    """Finish with an answer that is not needed, so that a short one leaves its connection open for the next."""
    for _ in _body(response, _CHUNK):
        pass
    response.close()


def _asked_wait(response: requests.Response) -> float | None:
    """Seconds that the server asks to wait: `Retry-After`, in seconds or as a date, or the hub's `RateLimit`."""
    text = response.headers.get("Retry-After", "").strip()
    if text.isdecimal():
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError):
        pass
    match = _RATE_LIMIT_SECONDS.search(response.headers.get("RateLimit", ""))
    return float(match[1]) if match else None


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def place(url: str) -> str:
    """Scheme and host of a URL, for messages: the rest may hold a signature."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _reason(error: Exception) -> str:
    """The innermost cause in words; the outer ones repeat the URL."""
    inner: BaseException = error
    while inner.__cause__ or inner.__context__:
        inner = inner.__cause__ or inner.__context__ or inner
    return str(inner) or type(inner).__name__
