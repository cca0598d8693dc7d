"""The vision tower beside a model: pictures to feature rows, which are kept so that a later turn has them again."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ._ffi import call, ffi, lib, new_struct
from .chat.messages import Message
from .chat.pictures import image_sources
from .checks import flag, function, path_bytes, whole
from .errors import ArgumentError, CancelledError, ContextFullError
from .files import OpenFiles
from .handles import Features, Handles, ProgressCallback
from .images import ImageLimits, ImageSource, Preprocessed, image_size, preprocess, target_size

CACHE_BYTES = 1 << 28


class ImageOptions:
    """Options of `Llama` about images, checked."""

    def __init__(
        self,
        *,
        min_tokens: int | None,
        max_tokens: int | None,
        allow_local: bool,
        fetch: Any,
        exif: bool,
        cache_bytes: int | None,
    ) -> None:
        self.min_tokens = None if min_tokens is None else whole("image_min_tokens", min_tokens)
        self.max_tokens = None if max_tokens is None else whole("image_max_tokens", max_tokens)
        ImageLimits(min_tokens=self.min_tokens, max_tokens=self.max_tokens)  # checks both
        self.allow_local = flag("allow_local_images", allow_local)
        self.fetch = function("fetch_image", fetch)
        self.exif = flag("image_exif", exif)
        self.cache_bytes = CACHE_BYTES if cache_bytes is None else whole("image_cache_bytes", cache_bytes, 0)


@contextmanager
def _of_message(number: int) -> Iterator[None]:
    """Errors name the message."""
    try:
        yield
    except ArgumentError as error:
        raise ArgumentError(f"message {number}: {error}") from None


class Tower:
    """The tower of an mmproj file. Whoever calls `features` has the model's turn.

    Attributes:
        info: the fields of `delta_vision_info` at opening.
        n_encoded: images that were encoded, rather than found among those kept.
    """

    def __init__(
        self, handles: Handles, files: OpenFiles, path: str | os.PathLike[str], options: ImageOptions
    ) -> None:
        self._handles, self._files, self.options = handles, files, options
        handles.open_vision(path_bytes(path))
        struct = new_struct("delta_vision_info")
        call(lib.delta_vision_info_get(handles.vision, struct))
        self.info: dict[str, Any] = {
            name: getattr(struct, name) for name, _ in ffi.typeof(struct).item.fields if name != "size"
        }
        for name in ("image_mean", "image_std"):
            self.info[name] = tuple(self.info[name])
        self._limits = ImageLimits(
            patch_limit=self.info["patch_limit"],
            side_limit=self.info["side_limit"],
            min_tokens=options.min_tokens,
            max_tokens=options.max_tokens,
            patch=self.info["patch_size"],
            merge=self.info["merge"],
        )
        self._kept: OrderedDict[int, np.ndarray] = OrderedDict()  # by digest, last used last
        self.n_encoded = 0

    def images(self, messages: Sequence[Message], n_ctx: int, stopped: Callable[[], bool]) -> list[Preprocessed]:
        """The images of checked messages, in order. `stopped` is asked before each whether to stop.

        Raises:
            ArgumentError: see `image_sources` and `images.load_image`.
            ContextFullError: they alone have more than `n_ctx` tokens; found before any is decoded.
            CancelledError: stopped.
        """
        sources = image_sources(messages, self.options.allow_local, self.options.fetch)
        n_tokens = 0
        for number, source in sources:
            with _of_message(number):
                n_tokens += self._fewest_tokens(source)
        if n_tokens > n_ctx:
            raise ContextFullError(
                f"a prompt of more than {n_tokens} tokens, {n_tokens} of them for images, "
                f"exceeds the {n_ctx} positions of the context (n_ctx)"
            )
        images = []
        for number, source in sources:
            if stopped():
                raise CancelledError("cancelled")
            with _of_message(number):
                images.append(self.prepare(source))
        return images

    def _fewest_tokens(self, source: ImageSource) -> int:
        """Tokens of a picture by its header, which may hide that it is turned when decoded."""
        width, height = image_size(source)
        return min(target_size(*size, self._limits).tokens for size in ((width, height), (height, width)))

    def prepare(self, source: ImageSource) -> Preprocessed:
        """A picture as patches within the limits."""
        mean, std = self.info["image_mean"], self.info["image_std"]
        return preprocess(source, self._limits, exif=self.options.exif, mean=mean, std=std)

    def features(self, images: Iterable[Preprocessed], stopped: Callable[[], bool] = lambda: False) -> list[Features]:
        """The rows of each image, encoded where they are not kept. `stopped` is asked before every op whether to stop.

        Those of one call stay until the next, and others as long as all together take at most `cache_bytes`.

        Raises:
            ArgumentError: an image has more patches than the tower takes.
            CancelledError: stopped, or `cancel` was called.
            NumericError: a result is not finite.
            StateError: a file of the model was changed.
        """
        self._files.check()
        found: list[Features] = []
        try:
            for image in images:
                rows = self._kept.pop(image.digest, None)
                if rows is None:
                    rows = self._encode(image, stopped)
                self._kept[image.digest] = rows
                found.append(Features(rows, image.digest ^ int(self.info["fingerprint"])))
        finally:
            self._evict(found)
        return found

    def _evict(self, found: Sequence[Features]) -> None:
        """Forget the oldest rows, but those found, until the rest are within bounds."""
        now = {id(features.rows) for features in found}
        held = sum(rows.nbytes for rows in self._kept.values())
        for digest in list(self._kept):
            if held <= self.options.cache_bytes:
                break
            if id(self._kept[digest]) not in now:
                held -= self._kept.pop(digest).nbytes

    def _encode(self, image: Preprocessed, stopped: Callable[[], bool]) -> np.ndarray:
        pixels = np.ascontiguousarray(image.pixels, np.float32)
        n_patches = image.grid[0] * image.grid[1]
        expected = (n_patches, 3, self.info["patch_size"], self.info["patch_size"])
        if pixels.shape != expected:
            raise ArgumentError(f"pixels have the shape {pixels.shape}, expected {expected}")
        n_tokens = n_patches // self.info["merge"] ** 2
        if image.n_tokens != n_tokens:
            raise ArgumentError(f"n_tokens is {image.n_tokens}, expected {n_tokens} for a grid of {image.grid}")
        rows = np.empty((image.n_tokens, self.info["projection_dim"]), np.float32)
        source, target = ffi.from_buffer("float[]", pixels), ffi.from_buffer("float[]", rows)
        report = ProgressCallback(None, stopped)
        with self._handles.use():
            status = lib.delta_vision_encode(
                self._handles.vision, source, 1, *image.grid, target, rows.size, report.function, ffi.NULL
            )
        report.reraise()
        call(status)
        rows.flags.writeable = False
        self.n_encoded += 1
        return rows
