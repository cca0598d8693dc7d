"""Convert a model folder: the one function behind the command line and the library."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from gguf_ext import GGUFError, Plan, PlannedTensor
from gguf_ext import constants as c
from gguf_ext.constants import GGMLQuantizationType, GGUFValueType, LlamaFileType
from gguf_ext.metadata import GENERATION_CONFIG, MODEL_CARD, Metadata, fill_template
from gguf_ext.split import Limits, OutputSet
from gguf_ext.verify import OnDigest, verify_file
from gguf_ext.writer import Output, Progress

from .base import Converter, get_converter
from .checkpoint import Checkpoint
from .config import PREPROCESSOR, Config
from .errors import ConversionError
from .shards import LocalStore, Store
from .types import OUTTYPES, parse_override
from .vocab import CONFIG_NAME as TOKENIZER_CONFIG
from .vocab import RANKS_NAME, Vocabulary, read_vocabulary

AUTO = "auto"
CONFIG = "config.json"
REMOTE_THREADS = 16  # most of which wait for the network
CHAT_TEMPLATES = ("chat_template.jinja", "chat_template.json")

log = logging.getLogger("conversion")


@dataclass(frozen=True)
class Request:
    """What to convert, and how.

    Attributes:
        model_dir: folder with `config.json`, `tiktoken.model`, `tokenizer_config.json` and safetensors shards.
        remote: `model_dir` is ORG/NAME on the hub, at `revision` (default "main"); nothing is kept but the output.
        outfile: a file, a file name with `{ftype}` or `{outtype}` in it, or a folder; by default the model folder, or
            `ORG-NAME-{ftype}.gguf` of a remote model.
        outtype: one of `types.OUTTYPES`, or "auto": the checkpoint's own 16-bit type. Packed experts stay MXFP4.
        tensor_types: "PATTERN=TYPE" for matrices whose names the regular expression is found in; the first decides.
        force: replace an existing output.
        restart: throw away what an unfinished run has left, instead of continuing it.
        dry_run: check and plan everything, write nothing.
        vocab_only: keys and vocabulary without tensors.
        mmproj: the vision part instead of the text model.
        model_name: `general.name`; metadata: JSON file of `general.*` keys.
        limits: of one file of a split; only: the numbers of the files to write, from 1, by default all.
        verify: compare what was written with the source; verify_only: compare what is there, write nothing.
        threads: that make and write tensors; by default one more than processors, 16 for a remote model.
        progress: called with tensor name, bytes done and bytes in all.
        on_digest: called with the name and SHA-256 of each tensor and file that was verified.
    """

    model_dir: str | Path
    outfile: str | Path | None = None
    outtype: str = AUTO
    force: bool = False
    tensor_types: Sequence[str] = ()
    remote: bool = False
    revision: str | None = None
    restart: bool = False
    dry_run: bool = False
    vocab_only: bool = False
    mmproj: bool = False
    model_name: str | None = None
    metadata: str | Path | None = None
    limits: Limits = Limits()
    only: Sequence[int] | None = None
    verify: bool = False
    verify_only: bool = False
    threads: int | None = None
    progress: Progress | None = None
    on_digest: OnDigest | None = None

    @property
    def kind(self) -> str:
        """`general.type` of what is asked for."""
        return c.TYPE_MMPROJ if self.mmproj else c.TYPE_MODEL


def convert(
    model_dir: str | Path, outfile: str | Path | None = None, outtype: str = AUTO, force: bool = False, **options: Any
) -> Path:
    """Convert a Hugging Face model folder to a GGUF file and return its path, that of the first file of a split.

    `options` are the attributes of `Request`.

    Raises:
        ConversionError, GGUFError: the checkpoint, an argument or the output is wrong; nothing unfinished is under the
            output's name. An interrupted conversion is continued when the same is asked for again.
    """
    return run(Request(model_dir, outfile, outtype, force, **options))[0]


def run(request: Request) -> list[Path]:
    """Do what is asked for; the files of the output, or those of them that were asked for.

    Raises:
        ConversionError, GGUFError: as `convert`.
    """
    if request.outtype != AUTO and request.outtype not in OUTTYPES:
        raise ConversionError(f"output type {request.outtype!r}, expected one of {', '.join((*OUTTYPES, AUTO))}")
    if request.mmproj and request.vocab_only:
        raise ConversionError("a vision part has no vocabulary: mmproj and vocab_only exclude each other")
    with local_request(request) as (local, store):
        config = Config(Path(local.model_dir) / CONFIG)
        converter = get_converter(config.architecture, request.kind)(config)
        log.info("%s: %s with %d layers", request.model_dir, config.architecture, converter.n_layers)
        vocabulary = None
        if not request.mmproj:
            vocabulary = read_vocabulary(Path(local.model_dir), config, converter.chat_template)
            log.info("vocabulary: %d tokens, %d merges", len(vocabulary.tokens), len(vocabulary.merges))
            if request.vocab_only:
                return _finish(local, *plan_vocabulary(local, converter, vocabulary), None)
        with Checkpoint(Path(local.model_dir), store, only=converter.wanted) as checkpoint:
            return _finish(local, *plan_file(local, converter, vocabulary, checkpoint), checkpoint)


@contextmanager
def local_request(request: Request) -> Iterator[tuple[Request, Store]]:
    """The request for a folder on this machine, and where its shards are; of a remote model the folder has the small
    files.

    Raises:
        ConversionError: the folder does not exist; see `remote.open_remote`.
    """
    if not request.remote:
        folder = Path(request.model_dir)
        if request.revision is not None:
            raise ConversionError("a revision is given for a folder, expected one only with --remote")
        if not folder.is_dir():
            raise ConversionError(f"{folder} is not a folder")
        yield request, LocalStore(folder)
        return
    from .remote import open_remote  # the network library takes longer to import than a small conversion

    with open_remote(str(request.model_dir), request.revision) as model:
        start = f"{c.TYPE_MMPROJ}-" if request.mmproj else ""
        outfile = request.outfile or start + model.model_id.replace("/", "-") + "-{ftype}.gguf"
        local = replace(request, model_dir=model.folder, outfile=outfile, remote=False, revision=None)
        yield replace(local, threads=request.threads or REMOTE_THREADS), model


def plan_vocabulary(request: Request, converter: Converter, vocabulary: Vocabulary) -> tuple[Plan, Path]:
    """Keys and vocabulary without tensors, and the name of their file."""
    file_type = OUTTYPES.get(request.outtype, OUTTYPES["f16"]).file_type
    described = _describe(request, converter, ())
    plan = _plan(converter, described, file_type)
    vocabulary.add_fields(plan)
    return plan, _target(Path(request.model_dir), request.outfile, described.file_name(None), file_type)


def plan_file(
    request: Request, converter: Converter, vocabulary: Vocabulary | None, checkpoint: Checkpoint
) -> tuple[Plan, Path]:
    """Everything the output will hold, and its name.

    Raises:
        ConversionError: see `Converter.plan_tensors`; the output type or a tensor type is none of this kind of file.
    """
    outtype = converter.auto_outtype(checkpoint) if request.outtype == AUTO else request.outtype
    if outtype not in converter.outtypes:
        expected = ", ".join((*converter.outtypes, AUTO))
        raise ConversionError(f"output type {outtype!r} of a vision part, expected one of {expected}")
    file_type = OUTTYPES[outtype].file_type
    overrides = [parse_override(text) for text in request.tensor_types]
    types = converter.types(outtype, overrides)
    tensors = converter.plan_tensors(checkpoint, types)
    types.check_overrides(tensor.name for tensor in tensors)
    for warning in types.warnings:
        log.warning("%s", warning)
    if any(tensor.type == GGMLQuantizationType.MXFP4 for tensor in tensors):
        file_type = LlamaFileType.MOSTLY_MXFP4_MOE
    described = _describe(request, converter, tensors)
    plan = _plan(converter, described, file_type)
    if vocabulary is not None:
        vocabulary.add_fields(plan)
    for tensor in tensors:
        plan.add_tensor(tensor)
    name = described.file_name(_type_name(file_type))
    return plan, _target(Path(request.model_dir), request.outfile, name, file_type)


def _describe(request: Request, converter: Converter, tensors: Sequence[PlannedTensor]) -> Metadata:
    overrides = Path(request.metadata) if request.metadata is not None else None
    return Metadata(
        Path(request.model_dir), converter.architecture, tensors, overrides, request.model_name, converter.kind
    )


def _plan(converter: Converter, described: Metadata, file_type: LlamaFileType) -> Plan:
    plan = Plan()
    described.add_fields(plan)
    converter.add_fields(plan, file_type)
    plan.add_field(c.KEY_QUANTIZATION_VERSION, c.QUANTIZATION_VERSION, GGUFValueType.UINT32)
    return plan


def _target(folder: Path, outfile: str | Path | None, default_name: str, file_type: LlamaFileType) -> Path:
    if outfile is None:
        return folder / default_name
    path = Path(outfile)
    if path.is_dir():
        return path / default_name
    return path.with_name(fill_template(path.name, _type_name(file_type)))


def _finish(request: Request, plan: Plan, path: Path, checkpoint: Checkpoint | None) -> list[Path]:
    facts = {
        "outtype": request.outtype,
        "tensor_types": " ".join(request.tensor_types),
        "vocab_only": str(request.vocab_only),
        "mmproj": str(request.mmproj),
        c.KEY_NAME: str(plan.fields[c.KEY_NAME][-1]) if c.KEY_NAME in plan.fields else "",
        **_file_facts(request),
    }
    facts |= _shard_facts(checkpoint)
    outputs = OutputSet(plan, path, facts, request.limits)
    selected = outputs.select(request.only)
    for output in selected:
        n_fields, n_tensors = len(output.plan.fields), len(output.plan.tensors)
        log.info("%s: %d keys, %d tensors, %d bytes", output.path, n_fields, n_tensors, output.size)
        _refuse_sources(output.path, request)
    if request.dry_run:
        unfinished = outputs.check(selected, force=request.force, restart=request.restart)
        missing, free = outputs.room(unfinished, restart=request.restart)
        if missing > free:
            log.warning("%d bytes are needed, but only %d are free on that disk", missing, free)
    elif not request.verify_only:
        started = time.monotonic()
        is_complete = outputs.write(
            selected,
            force=request.force,
            restart=request.restart,
            progress=request.progress,
            threads=request.threads,
            confirm=partial(_confirm, checkpoint, _shard_facts(checkpoint)),
        )
        for line in summary(selected, time.monotonic() - started):
            log.info("%s", line)
        if is_complete and len(outputs.outputs) > 1:
            log.info("the set of %d files is complete", len(outputs.outputs))
    if request.verify or request.verify_only:
        _verify(request, selected)
    return [output.path for output in selected]


def _refuse_sources(path: Path, request: Request) -> None:
    """Refuse to replace what is read, under whatever name, and anything else of the model but GGUF files."""
    if not path.exists():
        return
    inside = (Path(folder, name) for folder, _, names in os.walk(request.model_dir) for name in names)
    if any(is_same_file(path, file) for file in inside if file.suffix != ".gguf"):
        raise ConversionError(f"{path} is part of the model that is being converted")
    if request.metadata is not None and is_same_file(path, Path(request.metadata)):
        raise ConversionError(f"{path} is the file that --metadata names; give the output another name")


def is_same_file(path: Path, other: Path) -> bool:
    """Whether two names lead to one file; a name that leads nowhere does not."""
    with suppress(OSError):
        return path.samefile(other)
    return False


def summary(outputs: Sequence[Output], seconds: float) -> list[str]:
    """A table of what was written: tensors and bytes of each type, and of all files."""
    types: dict[str, tuple[int, int]] = {}
    for output in outputs:
        for tensor in output.plan.tensors.values():
            count, n_bytes = types.get(tensor.type.name, (0, 0))
            types[tensor.type.name] = (count + 1, n_bytes + tensor.n_bytes)
    size = sum(output.size for output in outputs)
    lines = [f"{'type':8} {'tensors':>8} {'bytes':>18}"]
    lines += [f"{name:8} {count:8} {n_bytes:18,}" for name, (count, n_bytes) in sorted(types.items())]
    lines.append(f"{'all':8} {sum(count for count, _ in types.values()):8} {size:18,}  in {seconds:.1f} s")
    return lines


def _verify(request: Request, outputs: Sequence[Output]) -> None:
    problems = []
    for output in outputs:
        try:
            verify_file(output, on_digest=request.on_digest, progress=request.progress, threads=request.threads)
        except GGUFError as error:
            problems.append(str(error))
        else:
            log.info("%s: every byte is what its source gives", output.path)
    if problems:
        raise GGUFError("\n".join(problems))


def _file_facts(request: Request) -> dict[str, str]:
    """Digests of the small files that keys and vocabulary follow from."""
    names = (CONFIG, PREPROCESSOR, RANKS_NAME, TOKENIZER_CONFIG, *CHAT_TEMPLATES, GENERATION_CONFIG, MODEL_CARD)
    files = {name: Path(request.model_dir) / name for name in names}
    if request.metadata is not None:
        files["--metadata"] = Path(request.metadata)
    return {name: sha256(file.read_bytes()).hexdigest()[:16] for name, file in files.items() if file.is_file()}


def _shard_facts(checkpoint: Checkpoint | None) -> dict[str, str]:
    shards = checkpoint.shards if checkpoint is not None else []
    return {f"shard {shard.name}": shard.fingerprint() for shard in shards}


def _confirm(checkpoint: Checkpoint | None, before: dict[str, str]) -> None:
    """Refuse a result whose source was written to while it was read."""
    for name, fingerprint in _shard_facts(checkpoint).items():
        if before[name] != fingerprint:
            raise ConversionError(f"{name} was changed while it was converted: {before[name]}, now {fingerprint}")


def _type_name(file_type: LlamaFileType) -> str:
    """`MOSTLY_Q8_0` -> `Q8_0`, as file names have it."""
    return file_type.name.partition("_")[2]
