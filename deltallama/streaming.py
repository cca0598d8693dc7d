"""From bytes of tokens to text that may be shown: whole UTF-8 characters only, cut at stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from .checks import texts


class TextStream:
    """Turns pieces of bytes into pieces of text.

    A character that is incomplete, and text that may be the beginning of a stop string, are held back until they are
    decided. The text ends where the first stop string that becomes complete begins; how the bytes are split into
    pieces changes nothing. Bytes that are not UTF-8 become U+FFFD.

    Attributes:
        stopped: the stop string that ended the text, or None.
    """

    def __init__(self, stop: str | Sequence[str] | None = ()) -> None:
        self._stop = texts("stop", stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped: str | None = None

    def push(self, piece: bytes) -> str:
        """Text that `piece` completes; may be empty."""
        return self._emit(self._decoder.decode(piece))

    def finish(self) -> str:
        """The rest, when no more bytes come."""
        text = self._emit(self._decoder.decode(b"", final=True))
        if self.stopped is None:
            text, self._held = text + self._held, ""
        return text

    def _emit(self, text: str) -> str:
        if self.stopped is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.stopped = min(found)
            self._held = ""
            return text[:at]
        keep = len(text) - max((_begun(text, stop) for stop in self._stop), default=0)
        self._held = text[keep:]
        return text[:keep]


def _begun(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
