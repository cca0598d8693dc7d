"""What generation returns."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar

from .errors import StateError

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Usage:
    """Token counts of one call. `cached_tokens` of the prompt did not have to be computed again."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Completion(str):
    """Generated text: a `str` that also knows how it came about.

    Attributes:
        tokens: the ids drawn, the one that ended the text included.
        finish_reason: "stop" (end token or stop string) or "length" (`max_tokens` or a full context).
        seed: the seed in use; given again, it gives this text again.
        usage: token counts.
    """

    tokens: list[int]
    finish_reason: FinishReason
    seed: int
    usage: Usage

    def __new__(
        cls,
        text: str = "",
        tokens: list[int] | None = None,
        finish_reason: FinishReason = "stop",
        seed: int = 0,
        usage: Usage = Usage(),
    ) -> Completion:
        self = super().__new__(cls, text)
        self.tokens = [] if tokens is None else tokens
        self.finish_reason = finish_reason
        self.seed = seed
        self.usage = usage
        return self


@dataclass(frozen=True)
class Reply:
    """An assistant's turn. Printing it shows `content`.

    Attributes:
        content: the answer.
        reasoning: what was thought before it; empty without thinking.
        tool_calls: calls in the OpenAI form: `{"id", "type": "function", "function": {"name", "arguments": JSON
            text}}`.
        tokens, finish_reason, seed, usage: as in `Completion`; the reason is "tool_calls" when the turn ends in calls.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    seed: int = 0
    usage: Usage = Usage()

    def __str__(self) -> str:
        return self.content

    @property
    def message(self) -> dict[str, Any]:
        """This turn as a message to append to the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


@dataclass(frozen=True)
class Delta:
    """A piece of a reply while it streams; one of the two is not empty.

    A model that skips thinking gives its answer as reasoning first; once it ends, the answer comes again as content.
    """

    content: str = ""
    reasoning: str = ""


Piece = TypeVar("Piece")
Result = TypeVar("Result")


class Stream(Iterator[Piece], Generic[Piece, Result]):
    """Pieces of a result as they come; the whole `result` at the end.

    The stream has the model to itself until it is exhausted, closed or forgotten: other threads wait, and the thread
    that reads the stream gets a `StateError` if it starts something else on the same model before. Several threads may
    read one stream; each piece goes to one of them.
    """

    def __init__(self, pieces: Generator[Piece, None, Result]) -> None:
        self._pieces = pieces
        self._result: list[Result] = []
        self._lock = threading.RLock()  # its own thread gets in again, and is then told so
        self._running = False

    def __iter__(self) -> Stream[Piece, Result]:
        return self

    def __next__(self) -> Piece:
        with self._alone():
            try:
                return next(self._pieces)
            except StopIteration as end:
                if not self._result and end.value is not None:
                    self._result.append(end.value)
                raise StopIteration from None

    @property
    def result(self) -> Result:
        """The whole result, once the stream is exhausted; before that, StateError."""
        if not self._result:
            raise StateError("the stream has no result: it is not exhausted, or was closed before its end")
        return self._result[0]

    def close(self) -> None:
        """Ends the generation, once the piece that is being made is there; `Llama.cancel` does not wait for it."""
        with self._alone():
            self._pieces.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._lock:
            if self._running:
                raise StateError("the stream is making a piece: a progress function or signal handler cannot use it")
            try:
                self._running = True
                yield
            finally:
                self._running = False

    def __enter__(self) -> Stream[Piece, Result]:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def drain(pieces: Generator[Any, None, Result]) -> Result:
    """Runs a generator to its end and returns its value."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
