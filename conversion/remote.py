"""A model on the Hugging Face hub, or a mirror of it: headers first, then byte ranges, nothing kept but the output.

Endpoint and token come from the environment, as the hub's own clients take them: `HF_ENDPOINT`; `HF_TOKEN`, else the
file `HF_TOKEN_PATH`, else `token` in `HF_HOME` (by default `~/.cache/huggingface`). The revision is turned into a
commit first, and everything is read from that commit.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np

from gguf_ext import GGUFError

from .config import parse_json
from .errors import ConversionError
from .http_ranges import Http, Patience, RemoteFile
from .shards import Shard, is_plain_name
from .windows import Windows, window_end

DEFAULT_ENDPOINT = "https://huggingface.co"
DEFAULT_REVISION = "main"
# Everything that is read whole. They lie in a temporary folder while the conversion runs.
SMALL_FILES = re.compile(
    r"(config|generation_config|tokenizer_config|preprocessor_config|chat_template)\.json|tiktoken\.model|"
    r"chat_template\.jinja|README\.md|"
    r"[A-Za-z0-9._-]*\.safetensors\.index[A-Za-z0-9._-]*\.json"
)

_MODEL_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*/[A-Za-z0-9_-][A-Za-z0-9._-]*")
_TRUE = {"1", "ON", "YES", "TRUE"}


@dataclass(frozen=True)
class _Listed:
    """A file of the listing: its size in bytes and what identifies its content, where the hub says so."""

    size: int | None
    content: str | None


class RemoteShard(Shard):
    """A shard on the hub; reads go through the windows that all shards share."""

    def __init__(self, name: str, file: RemoteFile, version: str, windows: Windows) -> None:
        super().__init__(name, PurePosixPath(file.what))
        self._file, self._version, self._windows = file, version, windows
        self._ends: Sequence[int] | np.ndarray = ()

    def size(self) -> int:
        return self._file.size()

    def version(self) -> str:
        return self._version

    def read(self, offset: int, n_bytes: int) -> np.ndarray:
        size = self.size()
        if offset + n_bytes > size:
            raise ConversionError(f"{self.path}: ends at byte {size}, expected {offset + n_bytes} or more")
        if n_bytes == 0:
            return np.empty(0, dtype=np.uint8)
        end = window_end(offset, n_bytes, self._ends, size)
        return self._windows.read(self.name, offset, n_bytes, end, self._file.read_into)

    def header_was_read(self, header: bytes, ends: np.ndarray) -> None:
        super().header_was_read(header, ends)
        self._ends = ends

    def close(self) -> None:
        pass  # connections belong to the model


@dataclass
class RemoteModel:
    """A model on the hub: its small files in `folder`, its shards through `names` and `open` (a `Store`)."""

    model_id: str
    commit: str
    folder: Path
    http: Http
    listing: dict[str, _Listed]
    windows: Windows = field(default_factory=Windows)
    n_parallel: int = 8

    def names(self) -> list[str]:
        return sorted(name for name in self.listing if name.endswith(".safetensors") and is_plain_name(name))

    def open(self, name: str) -> RemoteShard:
        listed = self.listing[name]
        return RemoteShard(name, self.file(name), listed.content or self.commit, self.windows)

    def file(self, name: str) -> RemoteFile:
        url = f"{self.http.endpoint}/{self.model_id}/resolve/{quote(self.commit, safe='')}/{quote(name)}"
        return RemoteFile(self.http, url, f"{self.model_id}/{name}", self.listing[name].size)

    def download_small_files(self) -> None:
        for name in self.listing:
            if SMALL_FILES.fullmatch(name):
                (self.folder / name).write_bytes(self.file(name).read_all())


@contextmanager
def open_remote(model_id: str, revision: str | None = None, patience: Patience | None = None) -> Iterator[RemoteModel]:
    """List a model of the hub and fetch its small files; they are removed in the end.

    Errors inside that name the temporary folder come out naming the model.

    Raises:
        ConversionError: `model_id` is not ORG/NAME; the hub refuses it, does not have it or cannot be reached.
    """
    if not _MODEL_ID.fullmatch(model_id) or ".." in model_id:
        raise ConversionError(f"{model_id!r} is not the name of a model on the hub, expected ORG/NAME")
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE:
        raise ConversionError("HF_HUB_OFFLINE is set, so a remote model cannot be read")
    http = Http(endpoint(), token(), patience or Patience())
    try:
        with tempfile.TemporaryDirectory(prefix="deltallama-") as parent:
            folder = Path(parent).resolve() / model_id.partition("/")[2]  # general.name may come from the folder's name
            folder.mkdir()
            commit, listing = _list(http, model_id, revision or DEFAULT_REVISION)
            model = RemoteModel(model_id, commit, folder, http, listing)
            try:
                model.download_small_files()
                yield model
            except (ConversionError, GGUFError) as error:
                raise type(error)(str(error).replace(str(folder), model_id)) from None
    finally:
        http.close()


def _list(http: Http, model_id: str, revision: str) -> tuple[str, dict[str, _Listed]]:
    """Commit and files of a revision."""
    url = f"{http.endpoint}/api/models/{model_id}/revision/{quote(revision, safe='')}?blobs=true"
    what = f"{model_id} at revision {revision}"
    answer = parse_json(RemoteFile(http, url, what).read_all(), f"the listing of {what}")
    commit, files = answer.get("sha"), answer.get("siblings")
    if not isinstance(commit, str) or not re.fullmatch(r"[0-9a-zA-Z._-]+", commit) or not isinstance(files, list):
        raise ConversionError(f"{what}: {http.endpoint} gives no listing of a model (sha and siblings)")
    return commit, dict(_listed(what, entry) for entry in files)


def _listed(what: str, entry: Any) -> tuple[str, _Listed]:
    if not isinstance(entry, dict) or not isinstance(entry.get("rfilename"), str):
        raise ConversionError(f"{what}: the listing has an entry without a file name")
    large = entry["lfs"] if isinstance(entry.get("lfs"), dict) else {}
    size, content = large.get("size", entry.get("size")), large.get("sha256", entry.get("blobId"))
    return entry["rfilename"], _Listed(
        size if isinstance(size, int) and not isinstance(size, bool) and size >= 0 else None,
        content if isinstance(content, str) else None,
    )


def endpoint() -> str:
    """The hub's address.

    Raises:
        ConversionError: `HF_ENDPOINT` is not an address.
    """
    text = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or DEFAULT_ENDPOINT
    if urlsplit(text).scheme not in ("http", "https") or not urlsplit(text).hostname:
        raise ConversionError(f"HF_ENDPOINT is {text!r}, expected an http or https address")
    return text


def token() -> str | None:
    """The user's token for the hub, or None."""
    given = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    if given is None:
        if os.environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() in _TRUE:
            return None
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        home = Path(os.environ.get("HF_HOME") or cache / "huggingface").expanduser()
        path = Path(os.environ.get("HF_TOKEN_PATH") or home / "token").expanduser()
        try:
            given = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None
    return given.strip() or None
