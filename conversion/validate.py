"""The contract check of a model from its headers and small files, local or remote: everything that would be wrong, not
only the first thing, before a terabyte is moved.

What is checked is what a conversion checks, by the same code; problems are gathered instead of raised. Payloads are
not read (but for `A_log`, a few bytes per layer): values that are not finite, and scale bytes that are no numbers, are
found by the conversion only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gguf_ext import Plan

from .base import Converter, get_converter
from .checkpoint import Checkpoint
from .config import Config
from .errors import Checks
from .run import CONFIG, Request, local_request, plan_file
from .shards import Store
from .vocab import RANKS_NAME, Vocabulary, read_chat_templates, read_ranks, read_vocabulary


@dataclass
class Findings:
    """`problems` in words; without any, the planned file: its name, size in bytes, and for each type how many tensors
    have it and their bytes."""

    problems: list[str]
    path: Path | None = None
    size: int = 0
    types: dict[str, tuple[int, int]] = field(default_factory=dict)


def validate(request: Request) -> Findings:
    """Check a model against everything that a conversion would refuse it for, as far as headers tell.

    Raises:
        ConversionError: there is no such model, or it cannot be reached.
    """
    with local_request(request) as (local, store):
        checks = Checks(gather=True)
        planned = _check(local, store, checks)
        # The small files of a remote model lie in a folder that nobody knows.
        problems = [problem.replace(str(local.model_dir), str(request.model_dir)) for problem in checks.problems]
        if problems or planned is None:
            return Findings(problems)
        plan, path = planned
        findings = Findings([], path, len(plan.header()) + plan.data_bytes)
        for tensor in plan.tensors.values():
            count, n_bytes = findings.types.get(tensor.type.name, (0, 0))
            findings.types[tensor.type.name] = (count + 1, n_bytes + tensor.n_bytes)
        return findings


def _check(request: Request, store: Store, checks: Checks) -> tuple[Plan, Path] | None:
    """The plan, unless something is wrong."""
    folder = Path(request.model_dir)
    config: Config | None = None
    converter: Converter | None = None
    vocabulary: Vocabulary | None = None
    with checks:
        config = Config(folder / CONFIG, checks)
        converter = get_converter(config.architecture, request.kind)(config)
    if request.mmproj:
        pass  # it has no vocabulary
    elif config is not None:
        with checks:
            vocabulary = read_vocabulary(folder, config, None if converter is None else converter.chat_template)
    else:
        checks.passes(read_ranks, folder / RANKS_NAME)
        checks.passes(read_chat_templates, folder)
    only = ("",) if converter is None else converter.wanted
    with checks, Checkpoint(folder, store, checks, only) as checkpoint:
        is_known = config is not None and not config.has_stand_ins and checkpoint.is_complete
        if converter is not None and (vocabulary is not None or request.mmproj) and is_known:
            return plan_file(request, converter, vocabulary, checkpoint)
    return None
