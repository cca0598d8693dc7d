"""The native library for tests: public and test-only C interface through one cffi handle.

    ffi, lib = native.load()
    native.check(lib.delta_model_open(path, params, model))

The library is the file named by the environment variable DELTALLAMA_LIBRARY; without it, the `libdeltallama_test` of
the package build (`make test` makes it); without that, the library inside the installed package, which has no test
interface.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from cffi import FFI

ROOT = Path(__file__).resolve().parent.parent
INCLUDE = ROOT / "csrc" / "include"
TEST_BUILD = ROOT / "build" / "test"
SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


class NativeError(RuntimeError):
    """A call returned a status other than OK. `status` is its number, `name` its name, `message` delta_last_error()."""

    def __init__(self, status: int, name: str, message: str) -> None:
        super().__init__(f"{name}: {message}")
        self.status, self.name, self.message = status, name, message


def cdef_region(header: Path) -> str:
    """The plain C between the cdef marks of a header."""
    text = header.read_text(encoding="utf-8")
    return text[text.index("/* cdef-begin */") : text.index("/* cdef-end */")]


def library_path() -> Path:
    """The library that `load` opens.

    Raises:
        FileNotFoundError: there is none; the message lists the places looked at.
    """
    named = os.environ.get("DELTALLAMA_LIBRARY")
    if named:
        if not Path(named).is_file():
            raise FileNotFoundError(f"DELTALLAMA_LIBRARY names no file: {named}")
        return Path(named)
    places = [TEST_BUILD / f"libdeltallama_test{SUFFIX}"]
    package = importlib.util.find_spec("deltallama")
    if package is not None:
        places += [Path(folder) / f"libdeltallama{SUFFIX}" for folder in package.submodule_search_locations or []]
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError("no native library; looked for " + ", ".join(map(str, places)) + " (run `make test`)")


@functools.cache
def load() -> tuple[FFI, Any]:
    """Opens the library once per process: (ffi, lib)."""
    ffi = FFI()
    ffi.cdef(cdef_region(INCLUDE / "deltallama.h"))
    path = library_path()
    if "_test" in path.name:
        ffi.cdef(cdef_region(INCLUDE / "deltallama_test.h"))
    return ffi, ffi.dlopen(str(path))


def has_test_api() -> bool:
    """Whether the loaded library carries the functions of deltallama_test.h."""
    return "_test" in library_path().name


def last_error() -> str:
    """The calling thread's last error message."""
    ffi, lib = load()
    return bytes(ffi.string(lib.delta_last_error())).decode("utf-8", "replace")


def check(status: int) -> None:
    """Raises NativeError unless `status` is OK."""
    ffi, lib = load()
    if status != lib.DELTA_OK:
        raise NativeError(status, ffi.string(lib.delta_status_name(status)).decode(), last_error())
