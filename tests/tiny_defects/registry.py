"""The table of defects and the decorators that fill it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_files import ABSENT, Checkpoint

Edit = Callable[[Checkpoint], None]
FileEdit = Callable[[Checkpoint, Path], None]


@dataclass
class Defect:
    arch: str | None  # the only architecture that can have it, or None
    edit: Edit | None = None
    file_edit: FileEdit | None = None


DEFECTS: dict[str, str] = {}
_DEFECTS: dict[str, Defect] = {}
K3 = "kimi-k3"
KL = "kimi-linear"


def defect(line: str, arch: str | None = None) -> Callable[[Edit], Edit]:
    """Register a function that edits the checkpoint in memory, under its own name."""

    def register(edit: Edit) -> Edit:
        DEFECTS[edit.__name__] = line
        _DEFECTS[edit.__name__] = Defect(arch, edit=edit)
        return edit

    return register


def file_defect(line: str, arch: str | None = None) -> Callable[[FileEdit], FileEdit]:
    """Register a function that edits the written folder, under its own name."""

    def register(edit: FileEdit) -> FileEdit:
        DEFECTS[edit.__name__] = line
        _DEFECTS[edit.__name__] = Defect(arch, file_edit=edit)
        return edit

    return register


def config_defect(name: str, line: str, key: str, value: Any, arch: str | None = None) -> None:
    """Register a wrong value of one config key, the tensors staying as they were.

    ``key`` may be dotted, as in ``linear_attn_config.head_dim``; a value of ``ABSENT`` takes the key out.
    """

    def edit(checkpoint: Checkpoint) -> None:
        *parents, last = key.split(".")
        config = checkpoint.text
        for parent in parents:
            config = config[parent]
        if value is ABSENT:
            del config[last]
        else:
            config[last] = value

    DEFECTS[name] = line
    _DEFECTS[name] = Defect(arch, edit=edit)


def find(name: str) -> Defect:
    if name not in _DEFECTS:
        raise ValueError(f"unknown defect {name!r}, expected one of {', '.join(sorted(_DEFECTS))}")
    return _DEFECTS[name]


def defect_arch(name: str) -> str | None:
    """The only architecture that can have this defect, or None when either can."""
    return find(name).arch


def apply_to_checkpoint(name: str, checkpoint: Checkpoint) -> None:
    entry = find(name)
    if entry.arch is not None and entry.arch != checkpoint.arch:
        raise ValueError(f"defect {name!r} exists for {entry.arch} only, not for {checkpoint.arch}")
    if entry.edit is not None:
        entry.edit(checkpoint)


def apply_to_files(name: str, checkpoint: Checkpoint, folder: Path) -> None:
    entry = find(name)
    if entry.file_edit is not None:
        entry.file_edit(checkpoint, folder)
