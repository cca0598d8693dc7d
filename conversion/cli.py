"""The command line of the conversion."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TextIO

from gguf_ext import GGUFError
from gguf_ext.split import Limits, parse_size
from gguf_ext.writer import Progress

from .base import supported_architectures
from .errors import ConversionError
from .run import AUTO, Request, run
from .types import OUTTYPES, parse_override
from .validate import Findings, validate

_REDRAW_SECONDS = 0.2
_SHOWN_PROBLEMS = 100


def parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The arguments of `convert_hf_to_gguf.py` and `deltallama convert`."""
    p = argparse.ArgumentParser(
        prog=prog, description="Convert a Hugging Face checkpoint of a Kimi model to a GGUF file.", allow_abbrev=False
    )
    p.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="folder with config.json and safetensors shards; with --remote the ORG/NAME of a model on the hub",
    )
    _add_output(p.add_argument_group("what to write"))
    _add_checks(p.add_argument_group("checks, before and after"))
    _add_running(p.add_argument_group("running"))
    _add_split(p.add_argument_group("splitting the output"))
    _add_remote(p.add_argument_group("models on the Hugging Face hub (HF_ENDPOINT and HF_TOKEN are honoured)"))
    return p


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--outfile",
        type=file_path,
        help="output file, or a folder for a name made from the model's; {ftype} in the name stands for the type "
        "(default: a name made from the model's, in MODEL; for a remote model in the current folder)",
    )
    group.add_argument(
        "--outtype",
        metavar="TYPE",
        type=str.lower,
        choices=(*OUTTYPES, AUTO),
        default=AUTO,
        help=f"type of the matrices: {', '.join(OUTTYPES)}; or auto, the checkpoint's 16-bit type (default); packed "
        "experts stay MXFP4",
    )
    group.add_argument(
        "--tensor-type",
        metavar="PATTERN=TYPE",
        type=tensor_type,
        action="append",
        default=[],
        help="another type for matrices in whose name the regular expression is found; may be repeated, the first that "
        "is found decides",
    )
    group.add_argument("--force", action="store_true", help="replace an existing output")
    group.add_argument(
        "--mmproj",
        action="store_true",
        help="write the vision part (mmproj-NAME.gguf) instead of the text model; types: f32, f16, bf16, q8_0, auto",
    )
    group.add_argument("--vocab-only", action="store_true", help="write keys and vocabulary without tensors")
    group.add_argument("--model-name", metavar="NAME", help="general.name (default: from the model card or the folder)")
    group.add_argument(
        "--metadata", metavar="FILE", type=file_path, help="JSON file of general.* keys that override what is found"
    )


def _add_checks(all_checks: argparse._ArgumentGroup) -> None:
    group = all_checks.add_mutually_exclusive_group()
    group.add_argument(
        "--validate",
        action="store_true",
        help="say everything that headers and small files show to be wrong, or what would be written; write nothing",
    )
    group.add_argument(
        "--dry-run", action="store_true", help="check and plan everything, print the output's name, write nothing"
    )
    group.add_argument(
        "--verify", action="store_true", help="then compare every byte with the source and print digests (SHA-256)"
    )
    group.add_argument(
        "--verify-only", action="store_true", help="compare an existing output with the source, write nothing"
    )
    all_checks.add_argument(
        "--print-supported-models", action="store_true", help="list the supported architectures and exit"
    )


def _add_running(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--restart",
        action="store_true",
        help="throw away what an interrupted run has left; without it the same command continues",
    )
    group.add_argument(
        "--threads",
        metavar="N",
        type=positive,
        help="threads that make and write tensors (default: processors + 1, with --remote 16)",
    )
    group.add_argument("--verbose", action="store_true", help="print a line per tensor")


def _add_remote(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--remote", action="store_true", help="MODEL is ORG/NAME; its shards are read in parts and not kept"
    )
    group.add_argument("--revision", metavar="REV", help="branch, tag or commit (default: main)")


def _add_split(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--split-max-size",
        metavar="N[K|M|G]",
        type=size,
        default=0,
        help="begin a new file before one has more bytes of tensors (decimal units)",
    )
    group.add_argument(
        "--split-max-tensors",
        metavar="N",
        type=_natural,
        default=0,
        help="begin a new file before one holds more",
    )
    group.add_argument(
        "--no-tensor-first-split", action="store_true", help="the first file holds the keys and no tensors"
    )
    group.add_argument(
        "--only-split",
        metavar="I[,J...]",
        type=_numbers,
        help="write these files of the split only, counted from 1; others may be written meanwhile by other machines",
    )


def tensor_type(text: str) -> str:
    """The argument PATTERN=TYPE, checked."""
    try:
        return parse_override(text).text
    except ConversionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def size(text: str) -> int:
    """The argument N[K|M|G] in bytes."""
    try:
        return parse_size(text)
    except GGUFError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _natural(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tensors")
    return int(text)


def positive(text: str) -> int:
    """An argument that is a number of at least 1."""
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _numbers(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def file_path(text: str) -> Path:
    """An argument that is a path."""
    if not text:  # which Path takes for the current folder
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def cli_main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the conversion with command-line arguments; returns the exit status: 0, 1 for an error, 130 when interrupted.

    Raises:
        SystemExit: from argparse, status 2 for wrong arguments and 0 for --help.
    """
    p = parser(prog)
    arguments = p.parse_args(argv)
    if arguments.print_supported_models:
        print("\n".join(supported_architectures()))
        return 0
    if not arguments.model:
        p.error("the following arguments are required: MODEL")
    if arguments.revision is not None and not arguments.remote:
        p.error("--revision goes with --remote")
    if arguments.mmproj and arguments.vocab_only:
        p.error("--vocab-only is about the text model, --mmproj about the vision part: only one of them")

    def work(progress: Progress | None) -> int:
        request = _request(arguments, progress)
        if arguments.validate:
            return _report(validate(request))
        say_written(run(request), quiet=arguments.verify_only, dry_run=arguments.dry_run)
        return 0

    return reported(work, arguments.verbose)


def reported(work: Callable[[Progress | None], int], verbose: bool) -> int:
    """Run `work`, whose progress is shown if standard error is a terminal, with log lines on standard error; the exit
    status: that of `work`, 1 after an error, which is printed, 130 when interrupted. Interrupted twice, the process
    ends at once, as if it was killed."""
    bar = _Progress() if sys.stderr.isatty() else None
    handler = _Handler(bar)
    handler.setFormatter(_Formatter())
    logs = [logging.getLogger(name) for name in ("conversion", "gguf_ext")]
    for log in logs:
        log.addHandler(handler)
        log.setLevel(logging.DEBUG if verbose else logging.INFO)
    try:
        with _second_interrupt_kills():
            return work(bar)
    except (ConversionError, GGUFError, OSError) as error:
        return _fail(bar, f"error: {error}", 1)
    except KeyboardInterrupt:
        return _fail(bar, "interrupted", 130)
    finally:
        for log in logs:
            log.removeHandler(handler)


@contextmanager
def _second_interrupt_kills() -> Iterator[None]:
    """The first Ctrl-C ends a conversion in order: pieces that are being made are finished, and a slow disk or network
    may take its time. Whoever does not want to wait for that presses it again, which a journal survives."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield  # nobody can press it, or the caller has a way of its own
        return

    def interrupted(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def say_written(paths: Iterable[Path], *, dry_run: bool, quiet: bool = False) -> None:
    """Name the files that were written, or on standard output those that would be."""
    for path in paths:
        if dry_run:
            print(path)
        elif not quiet:
            print(f"written: {path}", file=sys.stderr)


def _request(arguments: argparse.Namespace, progress: Progress | None) -> Request:
    return Request(
        arguments.model,
        arguments.outfile,
        arguments.outtype,
        arguments.force,
        tensor_types=arguments.tensor_type,
        remote=arguments.remote,
        revision=arguments.revision,
        restart=arguments.restart,
        dry_run=arguments.dry_run,
        vocab_only=arguments.vocab_only,
        mmproj=arguments.mmproj,
        model_name=arguments.model_name,
        metadata=arguments.metadata,
        limits=Limits(arguments.split_max_size, arguments.split_max_tensors, arguments.no_tensor_first_split),
        only=arguments.only_split,
        verify=arguments.verify,
        verify_only=arguments.verify_only,
        threads=arguments.threads,
        progress=progress,
        on_digest=lambda name, digest: print(f"{digest}  {name}"),
    )


def _report(findings: Findings) -> int:
    """Print what `validate` found; the exit status."""
    for problem in findings.problems[:_SHOWN_PROBLEMS]:
        print(f"error: {problem}", file=sys.stderr)
    if findings.problems:
        rest = len(findings.problems) - _SHOWN_PROBLEMS
        count = len(findings.problems)
        what = f"{count} problem" + ("s" if count > 1 else "")
        print(what + (f", {rest} not shown" if rest > 0 else ""), file=sys.stderr)
        return 1
    n_tensors = sum(count for count, _ in findings.types.values())
    print(f"{findings.path}: {findings.size} bytes, {n_tensors} tensors")
    for name, (count, n_bytes) in sorted(findings.types.items()):
        print(f"{name:8} {count:8} tensors {n_bytes:16} bytes")
    return 0


def _fail(bar: _Progress | None, message: str, status: int) -> int:
    if bar is not None:
        bar.clear()
    print(message, file=sys.stderr)
    return status


class _Handler(logging.StreamHandler[TextIO]):
    """Log lines on standard error, which take the place of the progress line until it is drawn again."""

    def __init__(self, bar: _Progress | None) -> None:
        super().__init__(sys.stderr)
        self.bar = bar

    def emit(self, record: logging.LogRecord) -> None:
        if self.bar is not None:
            self.bar.clear()
        super().emit(record)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        level = "warning: " if record.levelno >= logging.WARNING else ""
        return level + record.getMessage()


class _Progress:
    """One line on a terminal: how much is done, how fast, how long still.

    The rate is that of this run: what an earlier one has left does not count, nor the writing when it is verified.
    """

    def __init__(self) -> None:
        self.start = self.drawn = time.monotonic()
        self.first: int | None = None
        self.last = 0
        self.width = 0

    def __call__(self, name: str, done: int, total: int) -> None:
        if done == total:
            self.clear()
            return
        now = time.monotonic()
        if self.first is None or done < self.last:
            self.first, self.start = done, now
        self.last = done
        if now - self.drawn < _REDRAW_SECONDS:
            return
        self.drawn = now
        rate = (done - self.first) / max(now - self.start, 1e-9)
        text = f"{100 * done / total:3.0f} %  {done / 1e9:.2f} of {total / 1e9:.2f} GB"
        if rate > 0:
            text += f"  {rate / 1e6:.0f} MB/s  {_duration((total - done) / rate)} left"
        text = f"{text}  {name}"[: _terminal_width() - 1]  # a line that wraps cannot be drawn over
        sys.stderr.write(f"\r{text:{self.width}}")
        sys.stderr.flush()
        self.width = len(text)

    def clear(self) -> None:
        if self.width:
            sys.stderr.write("\r" + " " * self.width + "\r")
            sys.stderr.flush()
            self.width = 0


def _terminal_width() -> int:
    """Columns of standard error."""
    with suppress(OSError, ValueError):
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80  # some terminals do not know
    return 80


def _duration(seconds: float) -> str:
    """15620 -> `4 h 20 min`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minute} min"
    return f"{minute} min {second} s" if minute else f"{second} s"
