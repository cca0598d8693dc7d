"""`Llama`: a GGUF file opened for generation."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, overload

import numpy as np

from gguf_ext import GGUFError, GGUFReader

from ._ffi import call, ffi, lib, new_struct, struct_values
from .chat import get_format
from .chat.messages import Channel, Message, check_complete, refuse_images
from .chat.pictures import Fetch
from .checks import choice, flag, function, path_bytes, token_ids, whole
from .errors import ArgumentError, CancelledError, FormatError, StateError, UnsupportedError
from .files import OpenFiles
from .generation import Run
from .handles import Features, Handles, Params, Progress, ProgressCallback, native_ids, native_pieces
from .results import Completion, Delta, FinishReason, Reply, Stream, drain
from .sampling import Sampler, SamplingOptions, check_seed
from .streaming import TextStream
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .images import Preprocessed
    from .vision import Tower

__all__ = ["Llama", "SyncResult", "TopToken"]

Stop = str | Sequence[str] | None
"""Texts that end a generation where they begin."""

_LOGITS = {"none": lib.DELTA_LOGITS_NONE, "last": lib.DELTA_LOGITS_LAST, "all": lib.DELTA_LOGITS_ALL}
_VOCABULARY_KEYS = frozenset(f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "merges", "scores"))


class SyncResult(NamedTuple):
    """What `Llama.sync` did, in tokens."""

    n_reused: int
    n_computed: int
    n_replayed: int


class TopToken(NamedTuple):
    """A candidate for the next token; `logprob` is the natural logarithm of its probability before sampling."""

    token: int
    logit: float
    logprob: float


class Llama:
    """A model with one timeline of tokens.

        llm = Llama("model.gguf")
        print(llm.generate("The capital of France is", max_tokens=8))
        print(llm.chat([{"role": "user", "content": "Hi"}]))

    Calls from several threads run one after the other. After `close`, and in a child process made by `fork`, every
    use is a StateError. A model cannot be pickled or copied.

    With `mmproj`, the file of a vision tower, messages of the user may have images (see `chat`).

    Attributes:
        tokenizer: text to ids and back.
        metadata: what the file says, without the vocabulary's arrays.
        info: sizes and special ids: the fields of `delta_model_info`.
        memory: bytes in use: the fields of `delta_memory`.
        vision: the vision tower, whose `info` has the fields of `delta_vision_info`; None without one.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        n_ctx: int = 0,
        n_threads: int = 0,
        n_threads_batch: int = 0,
        pin_threads: bool = False,
        interleave_memory: bool = False,
        n_batch: int = 0,
        n_outputs: int = 0,
        activations: str = "auto",
        cache_type: str = "f16",
        seed: int | None = None,
        device: str = "cpu",
        checkpoint_bytes: int | None = None,
        checkpoint_every: int = 0,
        progress: Progress | None = None,
        mmproj: str | os.PathLike[str] | None = None,
        image_min_tokens: int | None = None,
        image_max_tokens: int | None = None,
        image_exif: bool = False,
        allow_local_images: bool = False,
        fetch_image: Fetch | None = None,
        image_cache_bytes: int | None = None,
    ) -> None:
        """Opens a model; of a split file, name the first part.

        Args:
            n_ctx: positions; 0: the smaller of the file's context length and 4096.
            n_threads: 0: physical cores.
            n_threads_batch: threads while a prompt is computed; 0: n_threads. Results do not depend on either.
            pin_threads: each thread stays on a processor of its own.
            interleave_memory: memory is spread over all nodes of a machine that has several.
            n_batch: rows computed together in a prompt; 0: 512.
            n_outputs: rows per step that may keep logits; 0: 16.
            activations: "exact" computes in float64; the others in float32, with inputs of products with quantized
                weights rounded to integers, each block by its largest value: "fine" to 16 bits, "fast" to 8, "auto" to
                8 for weights of type Q2_K to Q6_K, to 16 for all others.
            cache_type: type of the latent cache: "f32", "f16", "bf16" or "q8_0", about half of f16, for models whose
                latents are whole blocks of 32 values.
            seed: seed of calls that name none; None: a new one for each call.
            device: kind of device: "cpu", or "ref" (scalar and slow, the definition).
            checkpoint_bytes: memory for checkpoints of recurrent state; None: 8 checkpoints, at most 1 GiB.
            checkpoint_every: prompt rows between checkpoints; 0: 512.
            progress: called while the file is checked, with bytes done and in all.
            mmproj: file of the vision tower that belongs to the model; of a split file, the first part.
            image_min_tokens: smaller images are enlarged to have as many; None: they stay as they are.
            image_max_tokens: images are made small enough to have no more; None: the file's limits alone.
            image_exif: turn images as their camera noted.
            allow_local_images: whether paths and file URLs in messages are read.
            fetch_image: called with each http or https URL in messages, returns the bytes; None: these are refused.
            image_cache_bytes: rows of earlier images that are kept, beside those of the latest prompt; None: 256 MiB.

        Raises:
            FileNotFoundError, FileError: the file cannot be read.
            FormatError: it is damaged or contradicts itself.
            UnsupportedError: it needs what this build does not have.
            ArgumentError: an option is out of range, or the tower belongs to another model.
            OutOfMemoryError: the planned memory cannot be had.
        """
        params = Params(
            n_ctx=n_ctx, n_threads=n_threads, n_threads_batch=n_threads_batch, pin_threads=pin_threads,
            interleave_memory=interleave_memory, n_batch=n_batch, n_outputs=n_outputs, activations=activations,
            cache_type=cache_type, device=device, checkpoint_bytes=checkpoint_bytes, checkpoint_every=checkpoint_every,
            progress=progress,
        )  # fmt: skip
        self.seed = check_seed(seed)
        if mmproj is None:  # these do nothing then, and wrong ones are wrong all the same
            flag("image_exif", image_exif)
            flag("allow_local_images", allow_local_images)
            function("fetch_image", fetch_image)
            if image_cache_bytes is not None:
                whole("image_cache_bytes", image_cache_bytes, 0)
        self.vision: Tower | None = None
        path = os.fsdecode(path_bytes(model_path))
        tower_path = None if mmproj is None else os.fsdecode(path_bytes(mmproj))
        fields, self._files = _read_fields(path)
        if fields.get("general.architecture") == "clip":
            raise UnsupportedError(f"{path} is a vision tower, no text model: give it as mmproj beside one")
        if tower_path is not None:
            self._files.add(_read_paths(tower_path))
        self.tokenizer = Tokenizer(fields)
        self.metadata: dict[str, Any] = {key: value for key, value in fields.items() if key not in _VOCABULARY_KEYS}
        self._handles = Handles(path, params)
        self._turn = threading.Lock()  # who may move the timeline; held by a stream over its whole life
        self._turn_thread: int | None = None
        self._cancelled, self._n_cancels = False, 0
        weakref.finalize(self, self._handles.close)
        info, memory = new_struct("delta_model_info"), new_struct("delta_memory")
        call(lib.delta_model_info_get(self._handles.model, info))
        call(lib.delta_model_memory(self._handles.model, memory))
        self.info: dict[str, Any] = struct_values(info)
        self.memory: dict[str, int] = struct_values(memory)
        if self.tokenizer.n_vocab != self.n_vocab:
            self.close()
            raise FormatError(
                f"tokenizer.ggml.tokens has {self.tokenizer.n_vocab} entries, the model {self.n_vocab} outputs"
            )
        if tower_path is not None:
            from .vision import ImageOptions, Tower  # and with it Pillow

            try:
                options = ImageOptions(
                    min_tokens=image_min_tokens, max_tokens=image_max_tokens, exif=image_exif,
                    allow_local=allow_local_images, fetch=fetch_image, cache_bytes=image_cache_bytes,
                )  # fmt: skip
                self.vision = Tower(self._handles, self._files, tower_path, options)
            except BaseException:
                self.close()
                raise
        elif image_min_tokens is not None or image_max_tokens is not None:
            self.close()
            raise ArgumentError("image_min_tokens and image_max_tokens are of no use without mmproj")

    # -- text -----------------------------------------------------------------------------------------------

    @overload
    def generate(
        self, prompt: str | bytes | Sequence[int], *, max_tokens: int | None = ..., stop: Stop = ...,
        stream: Literal[False] = ..., progress: Progress | None = ..., **sampling: Unpack[SamplingOptions],
    ) -> Completion: ...  # fmt: skip

    @overload
    def generate(
        self, prompt: str | bytes | Sequence[int], *, max_tokens: int | None = ..., stop: Stop = ...,
        stream: Literal[True], progress: Progress | None = ..., **sampling: Unpack[SamplingOptions],
    ) -> Stream[str, Completion]: ...  # fmt: skip

    def generate(
        self,
        prompt: str | bytes | Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Stop = None,
        stream: bool = False,
        progress: Progress | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Completion | Stream[str, Completion]:
        """Continues a prompt: plain text, in which control tokens are text, or token ids.

        Args:
            max_tokens: None: until the model ends the text or the context is full.
            stop: the text ends before the first of these; None: no such text.
            stream: return a `Stream` of pieces of text.
            progress: see `Progress`; called while the prompt is computed.
            sampling: see `SamplingOptions`.

        Raises:
            ArgumentError: the prompt is empty, an id or option is out of range.
            ContextFullError: the prompt alone does not fit.
            CancelledError: `cancel` was called, or `progress` asked to stop.
        """
        tokens = self._prompt(prompt)
        run = Run(self, tokens, max_tokens, Sampler(sampling, self.seed), progress)
        pieces = self._complete(run, TextStream(stop))
        return Stream(pieces) if stream else drain(pieces)

    @overload
    def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = ..., thinking: bool = ...,
        thinking_effort: str | None = ..., max_tokens: int | None = ..., stop: Stop = ...,
        stream: Literal[False] = ..., progress: Progress | None = ..., **sampling: Unpack[SamplingOptions],
    ) -> Reply: ...  # fmt: skip

    @overload
    def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = ..., thinking: bool = ...,
        thinking_effort: str | None = ..., max_tokens: int | None = ..., stop: Stop = ...,
        stream: Literal[True], progress: Progress | None = ..., **sampling: Unpack[SamplingOptions],
    ) -> Stream[Delta, Reply]: ...  # fmt: skip

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        thinking: bool = True,
        thinking_effort: str | None = "max",
        max_tokens: int | None = None,
        stop: Stop = None,
        stream: bool = False,
        progress: Progress | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Reply | Stream[Delta, Reply]:
        """Answers a conversation of OpenAI-style messages in the chat format of the model.

        With a vision tower, the content of a user's message may be a list of parts, texts and images:

            {"type": "text", "text": "What is this?"}
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}
            {"type": "image", "image": picture}     # a Pillow image, the bytes of a file, or a path if allowed

        Args:
            tools: descriptions of functions the model may call.
            thinking: reason before answering, if the model does.
            thinking_effort: "low", "high", "max", or None to say nothing about it.
            max_tokens: reasoning included; None: until the model ends its turn or the context is full.
            stop: the content ends before the first of these; reasoning is not searched.
            stream: return a `Stream` of `Delta`.
            progress, sampling: as in `generate`.

        Raises:
            ArgumentError, ContextFullError, CancelledError: as `generate`.
            UnsupportedError: the model has no chat format, or a message has an image and the model no vision tower.
        """
        chat_format = self._chat_format()
        check_complete(messages)
        if self.vision is None:
            refuse_images(messages, "and the model was opened without mmproj, so that it sees none")
        flag("thinking", thinking)
        n_cancels = self._n_cancels
        images: list[Preprocessed] = []
        if self.vision is not None:
            images = self.vision.images(messages, self.n_ctx, lambda: self._n_cancels != n_cancels)
        if self._n_cancels != n_cancels:
            raise CancelledError("cancelled")
        options = {"image_prompts": [chat_format.image_prompt(*image.original_size) for image in images]}
        segments = chat_format.segments(
            messages, tools=tools, thinking=thinking, thinking_effort=thinking_effort, **(options if images else {})
        )
        prompt: Sequence[int | Preprocessed] = self.tokenizer.encode_segments(segments)
        if images:
            prompt = chat_format.with_images(prompt, images, self.tokenizer)
        run = Run(self, prompt, max_tokens, Sampler(sampling, self.seed), progress)
        parser = chat_format.ReplyParser(self.tokenizer, thinking)
        pieces = self._reply(run, parser, TextStream(stop))
        return Stream(pieces) if stream else drain(pieces)

    def chat_tokens(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """The prompt of a conversation as token ids; options of the chat format, such as `tools` and `thinking`.

        Raises:
            ArgumentError: as `chat`.
            UnsupportedError: a message has an image, which is no token.
        """
        segments = self._chat_format().segments(messages, **options)
        refuse_images(messages, "which is no token; use chat")
        return self.tokenizer.encode_segments(segments)

    def tokenize(self, text: str | bytes, special: bool = False) -> list[int]:
        """Token ids of a text, without a BOS; text that spells a control token stays text unless `special` is set."""
        return self.tokenizer.encode(text, special)

    def detokenize(self, tokens: Sequence[int], special: bool = False) -> str:
        """Text of token ids; control tokens are left out unless `special` is set (see `Tokenizer.decode`)."""
        return self.tokenizer.decode(tokens, special)

    # -- tokens ---------------------------------------------------------------------------------------------

    def sync(self, tokens: Sequence[int | Features], progress: Progress | None = None) -> SyncResult:
        """Makes the timeline equal to `tokens`, reusing what is valid; logits of the last are then available.

        Among token ids there may be `Features`, whose rows stand in place of embeddings.
        """
        with self._take_turn():
            return self._sync(tokens, progress)

    def eval(self, tokens: Sequence[int], logits: str = "last") -> None:
        """Appends tokens to the timeline; `logits` says which rows to keep: "none", "last", "all"."""
        with self._take_turn():
            self._eval(tokens, logits)

    def logits(self, row: int = -1) -> np.ndarray:
        """Logits of a kept row of the last evaluation: float32 `[n_vocab]`, a copy.

        Raises:
            StateError: that row was not kept.
        """
        row = whole("row", row, -(2**63), 2**63 - 1)
        with self._handles.use():
            pointer, n_vocab = ffi.new("float **"), ffi.new("uint32_t *")
            call(lib.delta_session_logits(self._handles.session, row, pointer, n_vocab))
            return np.array(np.frombuffer(ffi.buffer(pointer[0], n_vocab[0] * 4), dtype=np.float32))

    @property
    def n_logits(self) -> int:
        """Number of rows kept by the last evaluation."""
        with self._handles.use():
            return int(lib.delta_session_logits_count(self._handles.session))

    def top(self, n: int = 10, row: int = -1) -> list[TopToken]:
        """The `n` best next tokens after a kept row, best first."""
        n, row = whole("n", n, 1, self.n_vocab), whole("row", row, -(2**63), 2**63 - 1)
        with self._handles.use():
            best = ffi.new("delta_top_token[]", n)
            call(lib.delta_session_top(self._handles.session, row, best, n))
            return [TopToken(item.token, item.logit, item.logprob) for item in best]

    def sample(self, **sampling: Unpack[SamplingOptions]) -> int:
        """Chooses a next token from the last logits; does not append it."""
        with self._take_turn():
            return self._sample(Sampler(sampling, self.seed))

    def is_stop(self, token: int) -> bool:
        """Whether generation ends at this token."""
        token = whole("token", token)
        with self._handles.use():
            return 0 <= token < self.n_vocab and bool(lib.delta_model_is_stop(self._handles.model, token))

    @property
    def tokens(self) -> list[int]:
        """The timeline: token ids, and -1 for each row of an image."""
        with self._handles.use():
            n = lib.delta_session_length(self._handles.session)
            ids, length = ffi.new("int32_t[]", max(n, 1)), ffi.new("size_t *")
            call(lib.delta_session_tokens(self._handles.session, ids, n, length))
            return list(ffi.unpack(ids, n)) if n else []

    @property
    def n_tokens(self) -> int:
        """Length of the timeline."""
        with self._handles.use():
            return int(lib.delta_session_length(self._handles.session))

    @property
    def n_ctx(self) -> int:
        """Positions of the timeline."""
        return int(self.info["n_ctx"])

    @property
    def n_vocab(self) -> int:
        """Number of token ids."""
        return int(self.info["n_vocab"])

    @property
    def architecture(self) -> str:
        return str(self.info["architecture"])

    @property
    def stats(self) -> dict[str, int]:
        """Counters since opening: the fields of `delta_stats`."""
        with self._handles.use():
            stats = new_struct("delta_stats")
            call(lib.delta_model_stats(self._handles.model, stats))
            return struct_values(stats)

    # -- state ----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Empties the timeline."""
        self.truncate(0)

    def truncate(self, length: int) -> None:
        """Shortens the timeline to its first `length` tokens."""
        length = whole("length", length, 0, 2**64 - 1)
        with self._take_turn():
            self._files.check()
            self._handles.compute(lambda: lib.delta_session_truncate(self._handles.session, length))

    def save_state(self, path: str | os.PathLike[str]) -> None:
        """Writes the timeline and its state to a file, complete or not at all; never over the model."""
        target = path_bytes(path)
        self._files.refuse(target)
        with self._take_turn(), self._handles.use():
            call(lib.delta_session_save(self._handles.session, target))

    def load_state(self, path: str | os.PathLike[str]) -> None:
        """Restores what `save_state` wrote with the same model; anything else is refused and changes nothing."""
        with self._take_turn(), self._handles.use():
            call(lib.delta_session_load(self._handles.session, path_bytes(path)))

    def cancel(self) -> None:
        """Makes the running call raise CancelledError at its next step; from any thread. Does nothing without one."""
        self._cancelled = True  # taking a turn clears it
        self._n_cancels += 1  # for what comes before the turn
        self._handles.cancel()

    def close(self) -> None:
        """Frees the model; a running call is cancelled first. May be called again."""
        if not self.closed:
            self._cancelled = True
            with suppress(StateError):  # closed meanwhile, or forked
                self._handles.cancel()
            self._handles.close()

    @property
    def closed(self) -> bool:
        return self._handles.closed

    def __enter__(self) -> Llama:
        self._handles.check()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.info['n_layer']} layers, n_ctx={self.n_ctx}"
        return f"<Llama {self.architecture}, {state}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Llama cannot be pickled or copied: it owns native memory; open the file again instead")

    # -- inside ---------------------------------------------------------------------------------------------

    def _chat_format(self) -> Any:
        return get_format(self.architecture)

    def _prompt(self, prompt: str | bytes | Sequence[int]) -> list[int]:
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str | bytes) else token_ids(prompt)
        if not tokens:
            raise ArgumentError("the prompt is empty: give at least one token")
        return tokens

    @contextmanager
    def _take_turn(self) -> Iterator[None]:
        self._handles.check()
        if self._turn_thread == threading.get_ident():
            raise StateError("a stream on this model is still open in this thread: exhaust or close it first")
        with self._turn:
            try:
                self._turn_thread, self._cancelled = threading.get_ident(), False
                yield
            finally:
                self._turn_thread = None

    def _sync(self, tokens: Sequence[int | Features], progress: Progress | None) -> SyncResult:
        result = new_struct("delta_sync_result")
        report = ProgressCallback(progress, lambda: self._cancelled)
        self._files.check()
        if isinstance(tokens, Sequence) and any(isinstance(token, Features) for token in tokens):
            pieces, keep = native_pieces(tokens, int(self.info["n_embd"]))
            with self._handles.use():
                status = lib.delta_session_sync_pieces(
                    self._handles.session, pieces, len(pieces), report.function, ffi.NULL, result
                )
            keep.clear()
        else:
            ids = native_ids(tokens)  # type: ignore[arg-type]
            with self._handles.use():
                status = lib.delta_session_sync(self._handles.session, ids, len(ids), report.function, ffi.NULL, result)
        report.reraise()
        call(status)
        return SyncResult(result.n_reused, result.n_computed, result.n_replayed)

    def _eval(self, tokens: Sequence[int], logits: str) -> None:
        mode = choice("logits", logits, _LOGITS)
        ids = native_ids(tokens)
        self._files.check()
        if len(ids) > 1:
            self._handles.compute(lambda: lib.delta_session_eval(self._handles.session, ids, len(ids), mode))
            return
        with self._handles.use():  # one step, which has no border to stop at: no need for a thread
            call(lib.delta_session_eval(self._handles.session, ids, len(ids), mode))

    def _sample(self, sampler: Sampler) -> int:
        token = ffi.new("int32_t *")
        with self._handles.use():
            call(lib.delta_session_sample(self._handles.session, sampler.params, token))
        return int(token[0])

    def _complete(self, run: Run, text: TextStream) -> Generator[str, None, Completion]:
        pieces: list[str] = []
        with closing(run.start()) as tokens:
            for token in tokens:
                if piece := text.push(self.tokenizer.piece(token)):
                    pieces.append(piece)
                    yield piece
                if text.stopped is not None:
                    run.stop()
        if piece := text.finish():
            pieces.append(piece)
            yield piece
        return Completion("".join(pieces), run.tokens, run.finish_reason, run.sampler.seed, run.usage)

    def _reply(self, run: Run, parser: Any, content: TextStream) -> Generator[Delta, None, Reply]:
        streams = {"reasoning": TextStream(), "content": content}
        texts: dict[Channel, list[str]] = {"reasoning": [], "content": []}

        def show(channel: Channel, piece: str) -> Iterator[Delta]:
            if piece:
                texts[channel].append(piece)
                yield Delta(**{channel: piece})

        with closing(run.start()) as tokens:
            for token in tokens:
                for channel, data in parser.push(token):
                    yield from show(channel, streams[channel].push(data))
                if streams["content"].stopped is not None:
                    run.stop()
        for channel in texts:
            yield from show(channel, streams[channel].finish())
        if parser.reasoning_was_content:
            texts["reasoning"].clear()
        calls = [
            {"id": f"call_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(parser.tool_calls, start=1)
        ]
        reason: FinishReason = "tool_calls" if calls and run.finish_reason == "stop" else run.finish_reason
        answer, reasoning = "".join(texts["content"]), "".join(texts["reasoning"])
        return Reply(answer, reasoning, calls, run.tokens, reason, run.sampler.seed, run.usage)


def _read_paths(path: str) -> list[Path]:
    """The files of a GGUF file that may be split."""
    try:
        with GGUFReader(path) as reader:
            return list(reader.paths)
    except GGUFError as error:
        raise FormatError(str(error)) from None


def _read_fields(path: str) -> tuple[dict[str, Any], OpenFiles]:
    """The metadata, and the files it comes from."""
    try:
        with GGUFReader(path) as reader:
            return reader.fields, OpenFiles(reader.paths)
    except GGUFError as error:
        raise FormatError(str(error)) from None
