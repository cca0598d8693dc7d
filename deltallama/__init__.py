"""Run Kimi-Linear and Kimi-K3 models from GGUF files.

from deltallama import Llama

llm = Llama("model.gguf")
print(llm.chat([{"role": "user", "content": "Hi"}]))
"""

from __future__ import annotations

from ._ffi import ffi as _ffi
from ._ffi import lib as _lib
from .errors import (
    ArgumentError,
    BusyError,
    CancelledError,
    ContextFullError,
    DeltaError,
    DeviceError,
    FileError,
    FormatError,
    InterfaceError,
    NumericError,
    OutOfMemoryError,
    StateError,
    UnsupportedError,
)
from .handles import Features, devices, plan
from .model import Llama, SyncResult, TopToken
from .results import Completion, Delta, Reply, Stream, Usage
from .sampling import SamplingOptions, default_options
from .tokenizer import Tokenizer

__version__: str = _ffi.string(_lib.delta_version()).decode()

__all__ = [
    "ArgumentError",
    "BusyError",
    "CancelledError",
    "Completion",
    "ContextFullError",
    "Delta",
    "DeltaError",
    "DeviceError",
    "Features",
    "FileError",
    "FormatError",
    "InterfaceError",
    "Llama",
    "NumericError",
    "OutOfMemoryError",
    "Reply",
    "SamplingOptions",
    "StateError",
    "Stream",
    "SyncResult",
    "Tokenizer",
    "TopToken",
    "UnsupportedError",
    "Usage",
    "build_info",
    "default_options",
    "devices",
    "plan",
]


def build_info() -> str:
    """Compiler, compiled instruction sets and options of the native library."""
    return str(_ffi.string(_lib.delta_build_info()).decode())
