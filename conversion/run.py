"""Convert a model folder: the one function behind the command line and the library."""

from __future__ import annotations

import logging
from pathlib import Path

from gguf_ext import Plan
from gguf_ext import constants as c
from gguf_ext.constants import GGMLQuantizationType, GGUFValueType, LlamaFileType
from gguf_ext.metadata import Metadata, fill_template
from gguf_ext.writer import Progress, check_target

from .base import OUTTYPES, Converter, get_converter
from .checkpoint import Checkpoint
from .config import Config
from .errors import ConversionError
from .types import Types
from .vocab import read_vocabulary

AUTO = "auto"

log = logging.getLogger("conversion")


def convert(
    model_dir: str | Path,
    outfile: str | Path | None = None,
    outtype: str = AUTO,
    force: bool = False,
    *,
    dry_run: bool = False,
    vocab_only: bool = False,
    model_name: str | None = None,
    metadata: str | Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Convert a Hugging Face model folder to a GGUF file and return its path.

    Args:
        model_dir: folder with `config.json`, `tiktoken.model`, `tokenizer_config.json` and safetensors shards.
        outfile: a file, a file name with `{ftype}` or `{outtype}` in it, or a folder; by default the model folder.
        outtype: "f32", "f16", "bf16", "q8_0", or "auto": the checkpoint's own 16-bit type. Packed experts stay MXFP4.
        force: replace an existing output.
        dry_run: check and plan everything, write nothing.
        vocab_only: keys and vocabulary without tensors.
        model_name: `general.name`; metadata: JSON file of `general.*` keys.
        progress: called with tensor name, bytes written and bytes in all.

    Raises:
        ConversionError, GGUFError: the checkpoint, an argument or the output is wrong; nothing is left under the
            output's name.
    """
    folder = Path(model_dir)
    if not folder.is_dir():
        raise ConversionError(f"{folder} is not a folder")
    if outtype != AUTO and outtype not in OUTTYPES:
        raise ConversionError(f"output type {outtype!r}, expected one of {', '.join((*OUTTYPES, AUTO))}")
    config = Config(folder / "config.json")
    converter = get_converter(config.architecture)(config)
    log.info("%s: %s with %d layers", folder, config.architecture, converter.n_layers)
    vocabulary = read_vocabulary(folder, config, converter.chat_template)
    log.info("vocabulary: %d tokens, %d merges", len(vocabulary.tokens), len(vocabulary.merges))
    overrides = Path(metadata) if metadata is not None else None
    if vocab_only:
        file_type = OUTTYPES.get(outtype, OUTTYPES["f16"])[1]
        described = Metadata(folder, converter.architecture, (), overrides, model_name)
        plan = _plan(converter, described, file_type)
        vocabulary.add_fields(plan)
        path = _target(folder, outfile, described.file_name(None), file_type)
        return _finish(plan, path, folder, force, dry_run, progress)
    with Checkpoint(folder) as checkpoint:
        wanted, file_type = OUTTYPES[converter.auto_outtype(checkpoint) if outtype == AUTO else outtype]
        types = Types(wanted)
        tensors = converter.plan_tensors(checkpoint, types)
        for warning in types.warnings:
            log.warning("%s", warning)
        if any(tensor.type == GGMLQuantizationType.MXFP4 for tensor in tensors):
            file_type = LlamaFileType.MOSTLY_MXFP4_MOE
        described = Metadata(folder, converter.architecture, tensors, overrides, model_name)
        plan = _plan(converter, described, file_type)
        vocabulary.add_fields(plan)
        for tensor in tensors:
            plan.add_tensor(tensor)
            log.debug("%s: %s, ne %s", tensor.name, tensor.type.name, tensor.ne)
        name = described.file_name(_type_name(file_type))
        return _finish(plan, _target(folder, outfile, name, file_type), folder, force, dry_run, progress)


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


def _finish(plan: Plan, path: Path, folder: Path, force: bool, dry_run: bool, progress: Progress | None) -> Path:
    size = len(plan.header()) + plan.data_bytes
    log.info("%s: %d keys, %d tensors, %d bytes", path, len(plan.fields), len(plan.tensors), size)
    check_target(path, force)
    if path.exists() and any(path.samefile(file) for file in folder.iterdir() if file.suffix != ".gguf"):
        raise ConversionError(f"{path} is part of the model that is being converted")
    if not dry_run:
        plan.write(path, force=force, progress=progress)
    return path


def _type_name(file_type: LlamaFileType) -> str:
    """`MOSTLY_Q8_0` -> `Q8_0`, as file names have it."""
    return file_type.name.partition("_")[2]
