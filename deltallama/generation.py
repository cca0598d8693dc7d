"""One generation: the prompt, images included, is computed; then tokens are drawn one by one."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from .checks import function, whole
from .errors import CancelledError, ContextFullError
from .handles import Features, Progress
from .results import FinishReason, Usage
from .sampling import Sampler

if TYPE_CHECKING:
    from .images import Preprocessed
    from .model import Llama


class Run:
    """A prompt, and the tokens drawn after it. Belongs to `Llama`, whose inside it uses."""

    def __init__(
        self,
        llm: Llama,
        prompt: Sequence[int | Preprocessed],
        max_tokens: int | None,
        sampler: Sampler,
        progress: Progress | None,
    ) -> None:
        self.llm, self.prompt = llm, prompt
        self.n_prompt = sum(1 if isinstance(item, int) else item.n_tokens for item in prompt)
        self.max_tokens = None if max_tokens is None else whole("max_tokens", max_tokens, 0)
        self.sampler, self.progress = sampler, function("progress", progress)
        self.tokens: list[int] = []
        self.finish_reason: FinishReason = "length"
        self.n_cached = 0
        self._stopped = False
        llm._handles.check()

    @property
    def usage(self) -> Usage:
        return Usage(self.n_prompt, len(self.tokens), self.n_cached)

    def stop(self) -> None:
        """Ends the iteration: the caller has seen a stop string."""
        self._stopped, self.finish_reason = True, "stop"

    def _computable(self) -> list[int | Features]:
        """The prompt with the rows of its images."""
        images = [item for item in self.prompt if not isinstance(item, int)]
        if not images:
            return list(self.prompt)  # type: ignore[arg-type]
        if self.n_prompt > self.llm.n_ctx:  # found before minutes are spent on images
            raise ContextFullError(
                f"a prompt of {self.n_prompt} tokens, {sum(image.n_tokens for image in images)} of them for images, "
                f"exceeds the {self.llm.n_ctx} positions of the context (n_ctx)"
            )
        assert self.llm.vision is not None
        rows = iter(self.llm.vision.features(images, lambda: self.llm._cancelled))
        return [item if isinstance(item, int) else next(rows) for item in self.prompt]

    def start(self) -> Generator[int, None, None]:
        """Computes the prompt, then yields the tokens drawn; the one that ends the text is kept, but not yielded."""
        llm = self.llm
        with llm._take_turn():
            self.n_cached = llm._sync(self._computable(), self.progress).n_reused
            while self.max_tokens is None or len(self.tokens) < self.max_tokens:
                token = llm._sample(self.sampler)
                self.tokens.append(token)
                if llm.is_stop(token):
                    self.finish_reason = "stop"
                    return
                yield token
                if self._stopped or len(self.tokens) == self.max_tokens:
                    return
                if llm._cancelled:
                    llm._handles.check()  # closing cancels, and has more to say
                    raise CancelledError("cancelled")
                try:
                    llm._eval([token], "last")
                except ContextFullError:
                    return
