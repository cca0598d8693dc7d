"""The console command: `deltallama convert | quantize | imatrix | perplexity | kl | run | info | bench`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from gguf_ext import console

from . import __version__, bench, build_info, cli_quality, default_options
from .errors import ArgumentError, DeltaError
from .handles import devices, plan
from .model import Llama
from .results import Completion, Reply


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 0, 1 after an error, 2 for wrong usage, 130 when interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)

    def command() -> int:
        if arguments[:1] == ["convert"]:  # has a parser of its own, shared with convert_hf_to_gguf.py
            from conversion import cli_main

            return int(cli_main(arguments[1:], prog="deltallama convert"))
        if arguments[:1] == ["quantize"]:
            from conversion import requantize_cli

            return requantize_cli.cli_main(arguments[1:], prog="deltallama quantize")
        options = _parser().parse_args(arguments)
        options.command(options)
        return console.OK

    return console.run(command, (DeltaError, MemoryError), "deltallama: ")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="deltallama", description="Convert and run Kimi-Linear and Kimi-K3 models.")
    parser.add_argument("--version", action="version", version=f"deltallama {__version__}; {build_info()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("convert", help="convert a Hugging Face checkpoint to GGUF (see: deltallama convert --help)")
    commands.add_parser("quantize", help="write a GGUF file again with other types (see: deltallama quantize --help)")
    cli_quality.add_commands(commands)

    run = commands.add_parser(
        "run", help="answer a prompt", description="Answer a prompt in the chat format of the model."
    )
    run.add_argument("model", metavar="MODEL", help="GGUF file (of a split file, the first part)")
    run.add_argument("prompt", metavar="PROMPT", help="text; - reads standard input")
    run.add_argument("--raw", action="store_true", help="continue the prompt as plain text instead")
    run.add_argument("--mmproj", metavar="FILE", help="vision tower that belongs to the model")
    run.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="picture before the prompt; repeatable"
    )
    run.add_argument("--image-min-tokens", type=int, metavar="N", help="enlarge pictures of fewer tokens")
    run.add_argument("--image-max-tokens", type=int, metavar="N", help="shrink pictures of more tokens")
    run.add_argument("--system", metavar="TEXT", help="system message before the prompt")
    run.add_argument("--no-thinking", dest="thinking", action="store_false", help="answer without reasoning first")
    run.add_argument("--effort", default="max", help="how much to think: low, high, max (default: %(default)s)")
    run.add_argument("--hide-reasoning", action="store_true", help="show the answer only")
    run.add_argument("--stats", action="store_true", help="print token counts and speed to standard error")
    _add_sampling_options(run)
    _add_model_options(run)
    run.set_defaults(command=_run)

    info = commands.add_parser("info", help="describe a model file and the memory it needs; allocates nothing")
    info.add_argument("model", metavar="MODEL")
    info.add_argument("--json", action="store_true", help="print JSON")
    _add_model_options(info)
    info.set_defaults(command=_info)

    measure = commands.add_parser(
        "bench",
        help="measure prompt and generation speed",
        description="Measure prompt and generation speed, beside the speed at which the same threads read the weights.",
    )
    measure.add_argument("model", metavar="MODEL")
    measure.add_argument("-p", "--n-prompt", type=int, default=512, help="tokens of the prompt (default: %(default)s)")
    measure.add_argument("-n", "--n-gen", type=int, default=128, help="tokens generated (default: %(default)s)")
    measure.add_argument(
        "-d", "--depth", type=_numbers, default=[0], metavar="N[,...]", help="tokens before them (default: 0)"
    )
    measure.add_argument(
        "-t", "--n-threads", type=_numbers, default=[0], metavar="N[,...]", help="0: physical cores (default)"
    )
    measure.add_argument(
        "-r", "--repeats", type=int, default=3, help="runs of each, of which the median counts (default: %(default)s)"
    )
    measure.add_argument("--profile", action="store_true", help="show what each kind of op takes instead")
    measure.add_argument("--output", choices=("table", "json", "csv"), default="table", help="default: %(default)s")
    measure.add_argument("--json", action="store_const", const="json", dest="output", help="print JSON")
    _add_model_options(measure, sizes=False)
    measure.set_defaults(command=_bench)
    return parser


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


# Options of a model but its sizes, which `bench` takes from its workload.
_KINDS = (
    "n_threads_batch", "pin_threads", "interleave_memory", "n_batch", "activations", "cache_type", "device",
)  # fmt: skip


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("-n", "--max-tokens", type=int, metavar="N", help="default: until the model ends its turn")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    group.add_argument("-s", "--seed", type=int, metavar="N", help="default: a new one")
    for name, default in default_options().items():
        flags = [f"--{name.replace('_', '-')}"] + (["--temp"] if name == "temperature" else [])
        shown = f"default: {default:.6g}"
        group.add_argument(*flags, dest=name, type=type(default), default=default, metavar="X", help=shown)


def _add_model_options(parser: argparse.ArgumentParser, sizes: bool = True) -> None:
    group = parser.add_argument_group("model")
    if sizes:
        group.add_argument("-c", "--n-ctx", type=int, default=0, metavar="N", help="positions; 0: at most 4096")
        group.add_argument("-t", "--n-threads", type=int, default=0, metavar="N", help="0: physical cores")
    group.add_argument(
        "--n-threads-batch", type=int, default=0, metavar="N", help="while a prompt is computed; 0: as --n-threads"
    )
    group.add_argument("--pin-threads", action="store_true", help="each thread stays on a processor of its own")
    group.add_argument(
        "--interleave-memory", action="store_true", help="spread memory over the nodes of a machine that has several"
    )
    group.add_argument("-b", "--n-batch", type=int, default=0, metavar="N", help="prompt rows per step; 0: 512")
    group.add_argument("--activations", default="auto", help="exact, fine, fast or auto (default: %(default)s)")
    group.add_argument("--cache-type", default="f16", help="f32, f16, bf16 or q8_0 (default: %(default)s)")
    group.add_argument("--device", default="cpu", help="cpu or ref (default: %(default)s)")


def _model_options(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("n_ctx", "n_threads", *_KINDS)}


# -- run -------------------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> None:
    prompt = _read_prompt() if options.prompt == "-" else options.prompt
    sampling = {name: getattr(options, name) for name in default_options()}
    sampling.update(seed=options.seed, stop=options.stop, max_tokens=options.max_tokens)
    if options.image and (options.raw or options.mmproj is None):
        raise ArgumentError("--image needs --mmproj, and no --raw")
    sees = {
        "mmproj": options.mmproj,
        "image_min_tokens": options.image_min_tokens,
        "image_max_tokens": options.image_max_tokens,
        "allow_local_images": True,  # those of the command line
    }
    with Llama(options.model, **_model_options(options), **sees) as llm:
        before = llm.stats["compute_ns"]
        result: Completion | Reply
        if options.raw:
            text = llm.generate(prompt, stream=True, **sampling)
            for piece in text:
                _say(piece)
            result = text.result
        else:
            messages = [{"role": "system", "content": options.system}] if options.system else []
            messages.append({"role": "user", "content": _content(options.image, prompt)})
            reply = llm.chat(
                messages, thinking=options.thinking, thinking_effort=options.effort, stream=True, **sampling
            )
            with _dim() as dim:
                for delta in reply:
                    dim(bool(delta.reasoning))
                    if not (options.hide_reasoning and delta.reasoning):
                        _say(delta.reasoning or delta.content)
            result = reply.result
            for call in result.tool_calls:
                _say(f"\n[call {call['function']['name']} {call['function']['arguments']}]")
        _show("\n")
        if result.finish_reason == "length":
            print("(cut: no tokens left)", file=sys.stderr)
        if options.stats:
            usage, seconds = result.usage, (llm.stats["compute_ns"] - before) / 1e9
            speed = (usage.total_tokens - usage.cached_tokens) / seconds if seconds else 0.0
            counts = f"{usage.prompt_tokens} prompt + {usage.completion_tokens} generated tokens"
            print(f"{counts}, {seconds:.2f} s, {speed:.1f} tokens/s, seed {result.seed}", file=sys.stderr)


def _content(images: Sequence[str], prompt: str) -> Any:
    """The user's message: the prompt, after the pictures if there are any."""
    parts = [{"type": "image", "image": image} for image in images]
    return [*parts, {"type": "text", "text": prompt}] if parts else prompt


def _read_prompt() -> str:
    if sys.stdin is None:
        raise ArgumentError("standard input is closed: there is no prompt to read")
    return sys.stdin.read()


# Control characters, C0 and C1, but tab, line feed and carriage return.
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n\r"}


def _say(text: str) -> None:
    """Shows text of the model. A terminal obeys control sequences, and a model is not to give it orders."""
    _show(text.translate(_ESCAPES) if sys.stdout.isatty() else text)


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def _dim() -> Iterator[Callable[[bool], None]]:
    """A switch between dim and normal text; on a terminal by its escape codes, elsewhere by a line break."""
    terminal = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    state = False

    def switch(on: bool) -> None:
        nonlocal state
        if on != state:
            state = on
            _show(("\x1b[2m" if on else "\x1b[0m\n\n") if terminal else ("" if on else "\n\n"))

    try:
        yield switch
    finally:
        if terminal and state:
            _show("\x1b[0m")


# -- info ------------------------------------------------------------------------------------------------------------


def _info(options: argparse.Namespace) -> None:
    info, memory = plan(options.model, **_model_options(options))
    device = next((d for d in devices() if d["kind"] == options.device), {})
    if options.json:
        print(json.dumps({"info": info, "memory": memory, "device": device, "build": build_info()}, indent=2))
        return
    experts = f"{info['n_expert']}, {info['n_expert_used']} used per token" if info["n_expert"] else "none"
    print(f"architecture       {info['architecture']}")
    print(f"layers             {info['n_layer']} ({info['n_layer_kda']} KDA, {info['n_layer_mla']} MLA)")
    print(f"width              {info['n_embd']}, {info['n_head']} heads")
    print(f"experts            {experts}")
    print(f"vocabulary         {info['n_vocab']}")
    print(f"parameters         {_count(info['n_params'])}, {_count(info['n_params_active'])} active per token")
    print(f"weights            {_size(info['weight_bytes'])}, {_size(info['weight_bytes_active'])} read per token")
    print(f"context            {info['n_ctx']} of {info['n_ctx_train']} positions, batch {info['n_batch']}")
    print("memory plan")
    print(f"  file, mapped     {_size(memory['weights_mapped'])}")
    for name in ("weights_private", "state", "checkpoints", "arena", "workspace", "logits"):
        print(f"  {name.replace('_', ', '):<16} {_size(memory[name])}")
    print(f"  allocated        {_size(memory['total_private'])}")
    print(f"device             {options.device}: {device.get('name', 'unknown')} ({device.get('isa', 'unknown')})")
    print(f"threads            {info['n_threads']}")
    print(f"library            {build_info()}")


def _size(n_bytes: int) -> str:
    value, unit = float(n_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{n_bytes} B" if unit == "B" else f"{value:.2f} {unit}"


def _count(n: int) -> str:
    for scale, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if n >= scale:
            return f"{n / scale:.2f} {unit}"
    return str(n)


# -- bench -----------------------------------------------------------------------------------------------------------


def _bench(options: argparse.Namespace) -> None:
    work = bench.Workload(options.n_prompt, options.n_gen, options.depth, options.n_threads, options.repeats)
    kinds = {name: getattr(options, name) for name in _KINDS}
    run = bench.profile if options.profile else bench.measure
    with _status() as say:
        rows = run(options.model, work, say, **kinds)
    if options.output == "json":
        print(json.dumps({"build": build_info(), "rows": rows}, indent=2))
    else:
        print(bench.to_csv(rows) if options.output == "csv" else bench.to_table(rows))


@contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    """Shows a line of what is going on where somebody looks, and takes it away at the end."""
    terminal = sys.stderr is not None and sys.stderr.isatty()

    def say(text: str) -> None:
        if terminal:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()

    try:
        yield say
    finally:
        say("")
