"""Images among the parts of messages: where they come from, and which of them are refused.

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}
    {"type": "image", "image": picture}     # a Pillow image, the bytes of a file, or a path

Messages may come from anywhere, so a path in one reads no file, and a URL opens no connection, unless the program says
so.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from ..checks import brief
from ..errors import ArgumentError
from .messages import Message, content_parts, is_image

Fetch = Callable[[str], bytes]
"""Gets the bytes of an http or https URL; called for each one in the messages."""

_DATA = re.compile(r"data:[^,;]*(?:;[^,;]*)*?(;base64)?,", re.IGNORECASE)
_OTHER = re.compile(r"[a-z][a-z0-9+.-]+:", re.IGNORECASE)  # schemes; one letter would be a drive


def image_sources(messages: Sequence[Message], allow_local: bool, fetch: Fetch | None) -> list[tuple[int, Any]]:
    """The images of checked messages in order, each with the message's number: a Pillow image, the bytes of a file or a
    path.

    Raises:
        ArgumentError: an image in a message that is not the user's, or one that cannot be had; names the message.
    """
    sources = []
    for number, message in enumerate(messages):
        for part in content_parts(message.get("content"), number):
            if not is_image(part):
                continue
            if message["role"] != "user":
                raise ArgumentError(
                    f"message {number}: an image in a message of role {brief(message['role'])}, expected user"
                )
            try:
                sources.append((number, _source(part, allow_local, fetch)))
            except ArgumentError as error:
                raise ArgumentError(f"message {number}: {error}") from None
    return sources


def _source(part: Mapping[str, Any], allow_local: bool, fetch: Fetch | None) -> Any:
    image: Any = part.get(part["type"])
    if part["type"] == "image_url":
        url = image.get("url") if isinstance(image, Mapping) else image
        if not isinstance(url, str):
            raise ArgumentError(f"image_url must be text, or a dict with a url, got {brief(image)}")
        return _from_url(url, allow_local, fetch)
    if isinstance(image, bytes | bytearray | memoryview) or hasattr(image, "getbands"):  # a Pillow image
        return image
    if isinstance(image, str | os.PathLike):
        return _local(os.fspath(image), allow_local)
    raise ArgumentError(f"an image must be a Pillow image, the bytes of a file or a path, got {brief(image)}")


def _from_url(url: str, allow_local: bool, fetch: Fetch | None) -> Any:
    scheme = url.partition(":")[0].lower()
    if scheme == "data":
        return _data(url)
    if scheme in ("http", "https"):
        if fetch is None:
            raise ArgumentError(f"{brief(url)}: images are not fetched from the network; see fetch_image")
        data = fetch(url)
        if not isinstance(data, bytes | bytearray | memoryview):
            raise ArgumentError(f"fetch_image gave {brief(data)} for {brief(url)}, expected bytes")
        return data
    if scheme == "file":
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise ArgumentError(f"{brief(url)}: {error}") from None
        if parts.netloc not in ("", "localhost"):
            raise ArgumentError(f"{brief(url)} names a file of another machine")
        return _local(unquote(parts.path), allow_local)
    if _OTHER.match(url):
        raise ArgumentError(f"{brief(url)}: expected a URL of data, http, https or file, or a path")
    return _local(url, allow_local)


def _local(path: str | bytes, allow_local: bool) -> str | bytes:
    if not path:
        raise ArgumentError("the path of an image is empty")
    if not allow_local:
        raise ArgumentError(f"{brief(path)}: local files are read only with allow_local_images=True")
    return os.fsdecode(path)


def _data(url: str) -> bytes:
    head = _DATA.match(url)
    if head is None:
        raise ArgumentError(f"{brief(url)}: expected data:TYPE;base64,DATA")
    body = url[head.end() :]
    try:
        if head[1] is None:
            return unquote_to_bytes(body)
        return base64.b64decode(unquote(body), validate=True)
    except ValueError as error:  # binascii.Error and UnicodeEncodeError among them
        raise ArgumentError(f"{brief(url)}: {error}") from None
