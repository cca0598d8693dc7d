"""Writes `_cdef.py`, the binding's view of the C interface, from the marked region of `deltallama.h`.

CMake runs this file as a script while it builds, so it must not import the package. The output is cffi's out-of-line
ABI
form: importing it needs neither a compiler nor a parser.

    python _build_ffi.py csrc/include/deltallama.h _cdef.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

BEGIN = "/* cdef-begin */"
END = "/* cdef-end */"
MODULE = "deltallama._cdef"


def cdef_region(header: str) -> str:
    """The text between the cdef marks of a header.

    Raises:
        ValueError: a mark is missing, occurs twice, or they are in the wrong order.
    """
    if header.count(BEGIN) != 1 or header.count(END) != 1:
        raise ValueError(f"a header needs exactly one {BEGIN} and one {END}")
    begin, end = header.index(BEGIN) + len(BEGIN), header.index(END)
    if end < begin:
        raise ValueError(f"{END} stands before {BEGIN}")
    return header[begin:end]


def write_module(header: Path, output: Path) -> None:
    """Writes the generated module for `header` to `output`; the file appears complete or not at all."""
    from cffi import FFI

    ffi = FFI()
    ffi.set_source(MODULE, None)
    ffi.cdef(cdef_region(header.read_text(encoding="utf-8")))
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(output.name + ".partial")
    ffi.emit_python_code(str(partial))
    os.replace(partial, output)


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        print("usage: _build_ffi.py HEADER OUTPUT", file=sys.stderr)
        return 2
    try:
        write_module(Path(argv[0]), Path(argv[1]))
    except (OSError, ValueError, ImportError) as error:
        print(f"_build_ffi.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
