"""The command line of the conversion."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gguf_ext import GGUFError

from .base import OUTTYPES, supported_architectures
from .errors import ConversionError
from .run import AUTO, convert

_REDRAW_SECONDS = 0.2


def parser(prog: str | None = None) -> argparse.ArgumentParser:
    """The arguments of `convert_hf_to_gguf.py` and `deltallama convert`."""
    p = argparse.ArgumentParser(
        prog=prog, description="Convert a Hugging Face checkpoint of a Kimi model to a GGUF file.", allow_abbrev=False
    )
    p.add_argument(
        "model", metavar="MODEL_DIR", nargs="?", type=Path, help="folder with config.json and safetensors shards"
    )
    p.add_argument(
        "--outfile",
        type=Path,
        help="output file, or a folder for a name made from the model's; {ftype} in the name stands for the type "
        "(default: a name made from the model's, in MODEL_DIR)",
    )
    p.add_argument(
        "--outtype",
        choices=(*OUTTYPES, AUTO),
        default=AUTO,
        help="type of the matrices; auto keeps the checkpoint's 16-bit type; packed experts stay MXFP4 (default: auto)",
    )
    p.add_argument("--force", action="store_true", help="replace an existing output")
    p.add_argument(
        "--dry-run", action="store_true", help="check and plan everything, print the output's name, write nothing"
    )
    p.add_argument("--vocab-only", action="store_true", help="write keys and vocabulary without tensors")
    p.add_argument("--model-name", metavar="NAME", help="general.name (default: from the model card or the folder)")
    p.add_argument(
        "--metadata", metavar="FILE", type=Path, help="JSON file of general.* keys that override what is found"
    )
    p.add_argument("--print-supported-models", action="store_true", help="list the supported architectures and exit")
    p.add_argument("--verbose", action="store_true", help="print a line per tensor")
    return p


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
    if arguments.model is None:
        p.error("the following arguments are required: MODEL_DIR")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    log = logging.getLogger("conversion")
    log.addHandler(handler)
    log.setLevel(logging.DEBUG if arguments.verbose else logging.INFO)
    bar = _Progress() if sys.stderr.isatty() else None
    try:
        path = convert(
            arguments.model,
            arguments.outfile,
            arguments.outtype,
            arguments.force,
            dry_run=arguments.dry_run,
            vocab_only=arguments.vocab_only,
            model_name=arguments.model_name,
            metadata=arguments.metadata,
            progress=bar,
        )
    except (ConversionError, GGUFError, OSError) as error:
        return _fail(bar, f"error: {error}", 1)
    except KeyboardInterrupt:
        return _fail(bar, "interrupted; nothing was written", 130)
    finally:
        log.removeHandler(handler)
    if bar is not None:
        bar.clear()
    if arguments.dry_run:
        print(path)
    else:
        print(f"written: {path}", file=sys.stderr)
    return 0


def _fail(bar: _Progress | None, message: str, status: int) -> int:
    if bar is not None:
        bar.clear()
    print(message, file=sys.stderr)
    return status


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        level = "warning: " if record.levelno >= logging.WARNING else ""
        return level + record.getMessage()


class _Progress:
    """One line on a terminal: how much is written, how fast, how long still."""

    def __init__(self) -> None:
        self.start = self.drawn = time.monotonic()
        self.width = 0

    def __call__(self, name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.drawn < _REDRAW_SECONDS:
            return
        self.drawn = now
        rate = done / max(now - self.start, 1e-9)
        left = (total - done) / max(rate, 1.0)
        share = f"{100 * done / total:3.0f} %  {done / 1e9:.2f} of {total / 1e9:.2f} GB"
        text = f"{share}  {rate / 1e6:.0f} MB/s  {left:.0f} s left  {name}"
        sys.stderr.write(f"\r{text:{self.width}}")
        sys.stderr.flush()
        self.width = len(text)

    def clear(self) -> None:
        if self.width:
            sys.stderr.write("\r" + " " * self.width + "\r")
            sys.stderr.flush()
