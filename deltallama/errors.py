"""Exceptions: all are a `DeltaError`, most are also the built-in kind one would expect."""

from __future__ import annotations


class DeltaError(Exception):
    """Base of all. The message says what, where, expected and found."""


class ArgumentError(DeltaError, ValueError):
    """An argument is out of range."""


class InterfaceError(DeltaError, ImportError):
    """The native library is missing, or its interface is not the one this package was built for."""


class FileError(DeltaError, OSError):
    """The operating system refused a file operation."""


class FormatError(DeltaError, ValueError):
    """A file is damaged or contradicts itself."""


class UnsupportedError(DeltaError):
    """Valid, but not something this build can run."""


class OutOfMemoryError(DeltaError, MemoryError):
    """An allocation failed."""


class ContextFullError(DeltaError):
    """The tokens do not fit into the context of `n_ctx` positions."""


class DeviceError(DeltaError, RuntimeError):
    """The device failed."""


class NumericError(DeltaError, ArithmeticError):
    """NaN or infinity where a number belongs."""


class StateError(DeltaError, RuntimeError):
    """Not allowed in the present state: closed, forked, a stream still open, no logits kept."""


class BusyError(DeltaError, RuntimeError):
    """Another computation runs on this model."""


class CancelledError(DeltaError):
    """The computation was cancelled; the timeline is a prefix of what was asked for."""
