"""The commands `perplexity`, `kl` and `imatrix`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from math import exp
from pathlib import Path
from typing import Any

from gguf_ext.errors import GGUFError
from gguf_ext.writer import check_target

from . import imatrix, quality
from .errors import DeltaError, FileError, FormatError
from .model import Llama

_CTX = 512
_RUN = ("n_threads", "activations", "cache_type", "device")


def add_commands(commands: Any) -> None:
    """Add the commands to the subparsers."""
    perplexity = commands.add_parser(
        "perplexity", help="how well a model predicts a text", description="Perplexity of a text file under a model."
    )
    _add_text(perplexity, ["model"])
    _add_positions(perplexity)
    perplexity.set_defaults(command=_perplexity)

    kl = commands.add_parser(
        "kl",
        help="how far a model's predictions are from another's",
        description="KL divergence of MODEL from REFERENCE, two files with the same vocabulary, over a text file.",
    )
    _add_text(kl, ["model", "reference"])
    _add_positions(kl)
    kl.add_argument("--reference-activations", metavar="MODE", help="of the reference (default: as --activations)")
    kl.add_argument("--reference-cache-type", metavar="TYPE", help="of the reference (default: as --cache-type)")
    kl.set_defaults(command=_kl)

    measure = commands.add_parser(
        "imatrix",
        help="measure the importance of columns for quantize",
        description="Measure on a text file how much each input column of every tensor matters.",
    )
    _add_text(measure, ["model"])
    measure.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="file to write (GGUF)")
    measure.add_argument("--force", action="store_true", help="replace an existing file")
    measure.add_argument("--process-output", action="store_true", help="measure output.weight too; slower")
    measure.set_defaults(command=_imatrix)
    for parser in (perplexity, kl, measure):
        _add_run_options(parser)


def _add_text(parser: argparse.ArgumentParser, models: list[str]) -> None:
    for name in models:
        parser.add_argument(name, metavar=name.upper(), help="GGUF file (of a split file, the first part)")
    parser.add_argument("text", metavar="TEXT", help="text file, UTF-8")
    parser.add_argument(
        "--special", action="store_true", help="control tokens spelled in the text are tokens, not text"
    )
    parser.add_argument(
        "-c", "--ctx", type=int, default=_CTX, metavar="N", help="tokens per chunk (default: %(default)s)"
    )
    parser.add_argument("--chunks", type=int, metavar="N", help="only the first chunks of the text (default: all)")


def _add_positions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--all-positions", action="store_true", help="score every position, not only the second half of each chunk"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("-t", "--n-threads", type=int, default=0, metavar="N", help="0: physical cores")
    group.add_argument("--activations", default="fine", help="exact, fine, fast or auto (default: %(default)s)")
    group.add_argument("--cache-type", default="f16", help="f32, f16, bf16 or q8_0 (default: %(default)s)")
    group.add_argument("--device", default="cpu", help="cpu or ref (default: %(default)s)")


def _perplexity(options: argparse.Namespace) -> None:
    n_vocab = quality.vocabulary_size(options.model)
    with quality.open_for_scoring(options.model, options.ctx, n_vocab, **_run_options(options)) as llm:
        found = quality.perplexity(
            llm,
            _tokens(llm, options),
            options.ctx,
            all_positions=options.all_positions,
            on_chunk=_progress("perplexity"),
        )
    if options.json:
        print(json.dumps(asdict(found), indent=2))
        return
    _say_size(found, options)
    print(f"negative log-likelihood  {_shown(found.nll)}")
    print(f"perplexity               {_shown(found.perplexity)}")


def _kl(options: argparse.Namespace) -> None:
    n_vocab = quality.check_same_vocabulary(options.model, options.reference)
    run = _run_options(options)
    of_reference = dict(run)
    for name in ("activations", "cache_type"):
        of_reference[name] = getattr(options, f"reference_{name}") or run[name]
    with (
        quality.open_for_scoring(options.model, options.ctx, n_vocab, **run) as llm,
        quality.open_for_scoring(options.reference, options.ctx, n_vocab, **of_reference) as reference,
    ):
        tokens = _tokens(llm, options)
        found = quality.divergence(
            llm, reference, tokens, options.ctx, all_positions=options.all_positions, on_chunk=_progress("KL")
        )
    if options.json:
        print(json.dumps(asdict(found), indent=2))
        return
    _say_size(found, options)
    print(f"KL divergence            {_shown(found.kl)}")
    for name, value in (("median", found.median), ("90 %", found.p90), ("99 %", found.p99), ("maximum", found.maximum)):
        print(f"  {name:<23}{value:.6g}")
    print(f"same likeliest token     {_shown(found.same_top)}")
    print(f"RMS difference of p      {found.rms_dp:.6g}")
    print(f"perplexity               {exp(found.nll.mean):.6g}")
    print(f"  of the reference       {exp(found.nll_reference.mean):.6g}")


def _imatrix(options: argparse.Namespace) -> None:
    try:
        check_target(options.output, options.force)  # before the work
        with Llama(options.model, n_ctx=options.ctx, checkpoint_bytes=0, **_run_options(options)) as llm:
            tokens = _tokens(llm, options)
            found = imatrix.collect(
                llm,
                tokens,
                options.ctx,
                dataset=Path(options.text).name,
                with_output=options.process_output,
                on_chunk=_progress(None),
            )
        found.write(options.output, options.force)
    except GGUFError as error:
        raise DeltaError(str(error)) from None
    for sentence in found.rare_experts():
        print(f"warning: {sentence}", file=sys.stderr)
    n_tokens = found.n_chunks * found.chunk_size
    print(f"written: {options.output}: {len(found.entries)} tensors, {n_tokens} tokens", file=sys.stderr)


def _run_options(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in _RUN}


def _tokens(llm: Llama, options: argparse.Namespace) -> list[int]:
    try:
        text = Path(options.text).read_bytes().decode()
    except OSError as error:
        raise FileError(error.errno, error.strerror, options.text) from None
    except UnicodeDecodeError as error:
        raise FormatError(f"{options.text} is not UTF-8: {error.reason} at byte {error.start}") from None
    tokens = llm.tokenize(text, options.special)
    return tokens if options.chunks is None else tokens[: max(options.chunks, 0) * options.ctx]


def _progress(what: str | None) -> Callable[..., None] | None:
    """Chunks done, and the estimate so far, on one line of a terminal; None where there is no terminal."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int, mean: float = 0.0) -> None:
        value = "" if what is None else f", {what} {exp(mean) if what == 'perplexity' else mean:.5g}"
        sys.stderr.write(f"\r\x1b[Kchunk {done} of {total}{value}" + ("\r\x1b[K" if done == total else ""))
        sys.stderr.flush()

    return show


def _say_size(found: quality.Perplexity | quality.Divergence, options: argparse.Namespace) -> None:
    where = "all positions" if options.all_positions else "second halves"
    print(f"scored                   {found.n_scored} tokens of {found.n_chunks} chunks of {options.ctx}, {where}")


def _shown(estimate: quality.Estimate) -> str:
    return f"{estimate.mean:.6g} +- {estimate.error:.2g}"
