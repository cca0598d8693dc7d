"""The native library: opened when this module is imported, statuses turned into exceptions, log lines into `logging`.

`_cdef` is written from `deltallama.h` when the package is built, so no compiler and no parser is needed here. Nothing
checks struct layouts in this mode but the interface version and the `size` fields that the library itself compares.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from pathlib import Path
from typing import Any

from . import checks, errors

try:
    import deltallama._cdef as _cdef
except ImportError:
    raise errors.InterfaceError(
        f"{Path(__file__).parent} is a source folder without the native library: install it with `pip install .` and "
        "start Python in another folder, or install it in place with `pip install --editable .`"
    ) from None

__all__ = ["call", "ffi", "fill", "lib", "new_struct", "struct_values"]

ffi = _cdef.ffi
log = logging.getLogger("deltallama")
log.addHandler(logging.NullHandler())  # quiet unless the program asks for these messages
_LOG_LEVELS = {0: logging.DEBUG, 1: logging.INFO}

_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


def _open_library() -> Any:
    named = os.environ.get("DELTALLAMA_LIBRARY")
    path = Path(named) if named else Path(_cdef.__file__).with_name(f"libdeltallama{_SUFFIX}")
    if not path.is_file():
        raise errors.InterfaceError(f"the native library is missing: {path}")
    try:
        library = ffi.dlopen(str(path))
    except OSError as error:
        raise errors.InterfaceError(f"the native library does not load: {error}") from error
    found = library.delta_abi_version()
    if found != library.DELTA_ABI_VERSION:
        raise errors.InterfaceError(
            f"{path} has interface version {found}, this package needs {library.DELTA_ABI_VERSION}"
        )
    return library


lib = _open_library()

_EXCEPTIONS: dict[int, type[errors.DeltaError]] = {
    lib.DELTA_ARG: errors.ArgumentError,
    lib.DELTA_ABI: errors.InterfaceError,
    lib.DELTA_IO: errors.FileError,
    lib.DELTA_FORMAT: errors.FormatError,
    lib.DELTA_UNSUPPORTED: errors.UnsupportedError,
    lib.DELTA_MEMORY: errors.OutOfMemoryError,
    lib.DELTA_CONTEXT_FULL: errors.ContextFullError,
    lib.DELTA_DEVICE: errors.DeviceError,
    lib.DELTA_NUMERIC: errors.NumericError,
    lib.DELTA_STATE: errors.StateError,
    lib.DELTA_BUSY: errors.BusyError,
    lib.DELTA_CANCELLED: errors.CancelledError,
}


def call(status: int) -> None:
    """Raises the exception of a status other than OK, with the library's message."""
    if status == lib.DELTA_OK:
        return
    message = ffi.string(lib.delta_last_error()).decode("utf-8", "replace")
    name = ffi.string(lib.delta_status_name(status)).decode()
    raise _EXCEPTIONS.get(status, errors.DeltaError)(message or name)


def new_struct(name: str, **values: Any) -> Any:
    """A zeroed `struct name *` whose `size` is set, and then `values`."""
    struct = ffi.new(f"{name} *")
    struct.size = ffi.sizeof(name)
    return fill(struct, **values)


def fill(struct: Any, **values: Any) -> Any:
    """Sets fields of a struct; a number of another kind, or one that does not fit, is an `ArgumentError`."""
    kinds = {name: field.type for name, field in ffi.typeof(struct).item.fields}
    for field, value in values.items():
        if kinds[field].kind == "primitive":
            value = checks.real(field, value) if kinds[field].cname == "float" else checks.whole(field, value)
        try:
            setattr(struct, field, value)
        except OverflowError as error:
            raise errors.ArgumentError(f"{field} is out of range: {checks.brief(value)}: {error}") from None
    return struct


def struct_values(struct: Any) -> dict[str, Any]:
    """The fields of a `struct *` but `size`: int, float, and str for character arrays."""
    values = {}
    for name, field in ffi.typeof(struct).item.fields:
        if name == "size":
            continue
        value = getattr(struct, name)
        values[name] = ffi.string(value).decode("utf-8", "replace") if field.type.kind == "array" else value
    return values


@ffi.callback("void(int, const char *, void *)")  # type: ignore[untyped-decorator,unused-ignore]
def _log(level: int, message: Any, user: Any) -> None:
    log.log(_LOG_LEVELS.get(level, logging.WARNING), "%s", ffi.string(message).decode("utf-8", "replace"))


lib.delta_set_log(_log, ffi.NULL)
# The callback is gone before the last objects of the interpreter are.
atexit.register(lib.delta_set_log, ffi.NULL, ffi.NULL)
