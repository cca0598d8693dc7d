"""Print the keys and tensors of a GGUF file: `python -m gguf_ext.dump FILE`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np

from . import console
from .errors import GGUFError
from .reader import GGUFReader

_SHOWN_ITEMS = 8
_SHOWN_CHARACTERS = 100


def dump(reader: GGUFReader, full: bool = False) -> str:
    """The listing as text. `full` shows arrays and long strings whole."""
    lines = [f"files: {', '.join(str(path) for path in reader.paths)}", f"keys: {len(reader.fields)}"]
    for key, value in reader.fields.items():
        kind = " of ".join(type_.name.lower() for type_ in reader.types[key])
        lines.append(f"  {key} ({kind}) = {_shown(value, full)}")
    lines.append(f"tensors: {len(reader.tensors)}, {sum(info.n_bytes for info in reader.tensors.values())} bytes")
    width = max((len(name) for name in reader.tensors), default=0)
    for info in reader.tensors.values():
        ne = "{" + ", ".join(map(str, info.ne)) + "}"
        lines.append(f"  {info.name:{width}}  {info.type.name:7} {ne:24} {info.n_bytes} bytes")
    return "\n".join(lines)


def _shown(value: Any, full: bool) -> str:
    if isinstance(value, str):
        return repr(value if full or len(value) <= _SHOWN_CHARACTERS else value[:_SHOWN_CHARACTERS] + "…")
    if isinstance(value, list | np.ndarray):
        items = list(value) if full else list(value[:_SHOWN_ITEMS])
        text = ", ".join(repr(item) if isinstance(item, str) else str(item) for item in items)
        return f"[{text}]" if len(items) == len(value) else f"[{text}, … {len(value)} in all]"
    return str(value)


def main(argv: list[str] | None = None) -> int:
    """Prints the listing; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m gguf_ext.dump", description="Print the keys and tensors of a GGUF file."
    )
    parser.add_argument("file", help="a GGUF file, or the first of a split")
    parser.add_argument("--full", action="store_true", help="print arrays and long strings whole")

    def command() -> int:
        arguments = parser.parse_args(argv)
        with GGUFReader(arguments.file) as reader:
            print(dump(reader, arguments.full))
        return console.OK

    return console.run(command, (GGUFError,), unread=console.OK)  # who pages through a listing stops when satisfied


if __name__ == "__main__":
    sys.exit(main())
