"""The command line of `deltallama quantize`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from gguf_ext.split import Limits
from gguf_ext.writer import Progress

from .cli import file_path, positive, reported, say_written, size, tensor_type
from .requantize import Job, run
from .types import OUTTYPES


def cli_main(argv: Sequence[str] | None = None, prog: str | None = None) -> int:
    """Run the command with these arguments; returns the exit status: 0, 1 for an error, 130 when interrupted.

    Raises:
        SystemExit: from argparse, status 2 for wrong arguments and 0 for --help.
    """
    arguments = _parser(prog).parse_args(argv)

    def work(progress: Progress | None) -> int:
        job = Job(
            arguments.source,
            arguments.target,
            arguments.type,
            arguments.imatrix,
            tensor_types=arguments.tensor_type,
            force=arguments.force,
            restart=arguments.restart,
            dry_run=arguments.dry_run,
            limits=Limits(arguments.split_max_size),
            threads=arguments.threads,
            progress=progress,
        )
        say_written(run(job), dry_run=arguments.dry_run)
        return 0

    return reported(work, arguments.verbose)


def _parser(prog: str | None) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog=prog, description="Write a GGUF file again with other types of its matrices.", allow_abbrev=False
    )
    p.add_argument("source", metavar="IN", type=file_path, help="GGUF file (of a split file, the first part)")
    p.add_argument("target", metavar="OUT", type=file_path, help="file to write")
    p.add_argument(
        "type", metavar="TYPE", type=str.lower, choices=tuple(OUTTYPES), help=f"one of {', '.join(OUTTYPES)}"
    )
    p.add_argument(
        "--imatrix", metavar="FILE", type=file_path, help="importance of columns, as `deltallama imatrix` measures it"
    )
    p.add_argument(
        "--tensor-type",
        metavar="PATTERN=TYPE",
        type=tensor_type,
        action="append",
        default=[],
        help="another type for matrices in whose name the regular expression is found; may be repeated, the first that "
        "is found decides; the only way to encode packed MXFP4 experts again",
    )
    p.add_argument("--force", action="store_true", help="replace an existing output")
    p.add_argument(
        "--restart",
        action="store_true",
        help="throw away what an interrupted run has left; without it the same command continues",
    )
    p.add_argument("--dry-run", action="store_true", help="check and plan everything, print the output's name")
    p.add_argument(
        "--threads", metavar="N", type=positive, help="threads that make and write tensors (default: processors + 1)"
    )
    p.add_argument(
        "--split-max-size",
        metavar="N[K|M|G]",
        type=size,
        default=0,
        help="begin a new file before one has more bytes of tensors (decimal units)",
    )
    p.add_argument("--verbose", action="store_true", help="print a line per tensor")
    return p
