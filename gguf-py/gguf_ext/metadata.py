"""The `general.*` keys that describe a model, and the file name made from them: thin over `gguf.Metadata`.

Sources, later ones win: the folder's name, `config.json` `_name_or_path`, the model card's front matter, sampling
values of `generation_config.json`, a JSON file of overrides, an explicit name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path
from typing import Any

import gguf
import yaml

from .constants import TYPE_MMPROJ, TYPE_MODEL, GGUFValueType
from .errors import GGUFError
from .plan import Plan, PlannedTensor

GENERATION_CONFIG = "generation_config.json"
MODEL_CARD = "README.md"

_LISTS_OF_MODELS = ("general.base_models", "general.datasets")  # spread over several keys each


class Metadata:
    """What a folder and the arguments say about a model; `kind` is its `general.type`.

    Raises:
        GGUFError: one of the files is malformed, or an override names a key that cannot be set.
    """

    def __init__(
        self,
        folder: Path,
        architecture: str,
        tensors: Iterable[PlannedTensor] = (),
        overrides: Path | None = None,
        model_name: str | None = None,
        kind: str = TYPE_MODEL,
    ) -> None:
        self.kind = kind
        folder = folder.resolve()  # its name matters, also when given as "."
        given = _read_object(overrides) if overrides is not None else {}
        counts = _parameter_counts(tensors)
        with _named(folder / MODEL_CARD, overrides):
            self.values = gguf.Metadata.load(overrides, folder, model_name, counts[0])
        self._add_repetition_penalty(folder, given)
        if not self.values.name:
            self.values.name = folder.name
        if self.values.size_label is None and counts[0] > 0:
            self.values.size_label = gguf.size_label(*counts)
        with _named(folder / MODEL_CARD, overrides):
            self.fields = self._collect(architecture)
        for key, value in given.items():
            if key in _LISTS_OF_MODELS or (key == "general.name" and model_name is not None):
                continue
            if key not in self.fields or self.fields[key].value != value:
                raise GGUFError(f"{overrides}: {key!r} is not a key that can be set")

    def add_fields(self, plan: Plan) -> None:
        """Add the keys in file order, `general.architecture` and `general.type` first."""
        for key, field in self.fields.items():
            element = GGUFValueType.STRING if field.type == GGUFValueType.ARRAY else None
            value = _text(field.value) if isinstance(field.value, str) else field.value
            plan.add_field(key, value, field.type, element)

    def file_name(self, file_type: str | None) -> str:
        """`NAME-SIZE-FINETUNE-VERSION-TYPE.gguf`; without a file type the name of a vocabulary. A vision part is named
        after its model, whose size is not its own: `mmproj-NAME-FINETUNE-VERSION-TYPE.gguf`."""
        values = self.values
        vocabulary = file_type is None
        is_part = self.kind == TYPE_MMPROJ
        name = gguf.naming_convention(
            values.name,
            values.basename,
            values.finetune,
            values.version,
            None if vocabulary or is_part else values.size_label,
            file_type,
            "vocab" if vocabulary else None,
        )
        name = "".join(character if _can_be_in_a_name(character) else "-" for character in name)
        return f"{TYPE_MMPROJ}-{name}.gguf" if is_part else f"{name}.gguf"

    def _add_repetition_penalty(self, folder: Path, given: dict[str, Any]) -> None:
        path = folder / GENERATION_CONFIG
        generation = _read_object(path) if path.is_file() else {}
        if self.values.sampling_penalty_repeat is None:
            self.values.sampling_penalty_repeat = generation.get("repetition_penalty")

    def _collect(self, architecture: str) -> dict[str, Any]:
        # The library writes metadata only through its own writer; without a path that is a dict of what it would write.
        writer = gguf.GGUFWriter(None, architecture)
        writer.add_type(self.kind)
        self.values.set_gguf_meta_model(writer)
        return writer.kv_data[0]


@contextmanager
def _named(card: Path, overrides: Path | None) -> Iterator[None]:
    """Errors of the library, which takes it for granted that values are of the kind they should be, name the files."""
    try:
        yield
    except (yaml.YAMLError, RecursionError) as error:
        raise GGUFError(f"{card}: the front matter is not valid YAML: {' '.join(str(error).split())}") from None
    except UnicodeDecodeError as error:
        raise GGUFError(f"{card} is not UTF-8: {error.reason}") from None
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        where = f"{card}" if overrides is None else f"{card} or {overrides}"
        raise GGUFError(f"{where}: a value is not of the kind expected there: {error}") from None


def _text(value: str) -> str:
    """A name of the file system, whose bytes need not be text, as text."""
    with suppress(UnicodeEncodeError):  # of what is no such name
        return os.fsencode(value).decode("utf-8", "replace") if not value.isprintable() else value
    return value


def _can_be_in_a_name(character: str) -> bool:
    """Of a file: it does nothing to a terminal, and this system can spell it."""
    try:
        os.fsencode(character)
    except UnicodeEncodeError:
        return False
    return character.isprintable()


def fill_template(name: str, file_type: str) -> str:
    """A file name with `{ftype}`, `{outtype}` (lower case), `{FTYPE}`, `{OUTTYPE}` or `{}` replaced.

    Raises:
        GGUFError: any other text in braces, or a lone brace.
    """
    try:
        return gguf.fill_templated_filename(name, file_type)
    except (ValueError, KeyError, IndexError, AttributeError):
        known = "{ftype}, {outtype}, {FTYPE}, {OUTTYPE} and {}"
        raise GGUFError(f"output name {name!r}: braces may only hold one of {known}") from None


def _parameter_counts(tensors: Iterable[PlannedTensor]) -> tuple[int, int, int, int]:
    """All parameters, those every token meets, those of one expert in every layer, and the number of experts."""
    total = shared = expert = n_experts = 0
    for tensor in tensors:
        n = prod(tensor.ne)
        total += n
        if "_exps." in tensor.name:
            n_experts = tensor.ne[2]
            expert += n // n_experts
        else:
            shared += n
    return total, shared, expert, n_experts


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise GGUFError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise GGUFError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise GGUFError(f"{path} holds a JSON {type(value).__name__}, expected an object")
    return value
