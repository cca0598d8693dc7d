"""Calls of single kernels (``delta_test_kernel``), here or in a program that runs elsewhere.

With DELTALLAMA_KERNELS unset the loaded library is called. Otherwise the variable is a command that starts
``delta-kernels`` of another build, under an emulator for another processor:

    DELTALLAMA_KERNELS="qemu-aarch64 -L /usr/aarch64-linux-gnu build/aarch64/delta-kernels"

and the same tests meet the kernels of that build.
"""

from __future__ import annotations

import functools
import os
import shlex
import struct
import subprocess
from collections.abc import Sequence
from typing import Any

import numpy as np

import native

VARIABLE = "DELTALLAMA_KERNELS"
N_INPUTS, N_OUTPUTS, N_SIZES, N_PARAMS = 5, 4, 5, 4
ALIGN = 64


def here() -> list[str]:
    """The kernel tables of the loaded library that can run on this processor."""
    ffi, lib = native.load()
    return str(ffi.string(lib.delta_test_isas()).decode()).split()


@functools.cache
def isas() -> list[str]:
    """The kernel tables under test."""
    if not elsewhere():
        return here()
    return subprocess.run([*elsewhere(), "--list"], check=True, capture_output=True, text=True).stdout.split()


def elsewhere() -> list[str]:
    """The command of DELTALLAMA_KERNELS; empty without one."""
    return shlex.split(os.environ.get(VARIABLE, ""))


def call(
    isa: str,
    kernel: str,
    inputs: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    sizes: Sequence[int],
    params: Sequence[float],
    type_: int,
    input_: int,
) -> None:
    """Calls one kernel, which writes into the memory of ``outputs``.

    Raises:
        native.NativeError: the kernel was refused.
    """
    for array in (*inputs, *outputs):
        assert array.flags.c_contiguous
    run = _call_elsewhere if elsewhere() else _call_here
    run(isa, kernel, inputs, outputs, sizes, params, type_, input_)


def _call_here(
    isa: str,
    kernel: str,
    inputs: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    sizes: Sequence[int],
    params: Sequence[float],
    type_: int,
    input_: int,
) -> None:
    ffi, lib = native.load()
    case = ffi.new("delta_test_kernel_call *")
    case.size = ffi.sizeof("delta_test_kernel_call")
    keep: list[Any] = [ffi.new("char[]", isa.encode()), ffi.new("char[]", kernel.encode())]
    case.isa, case.kernel = keep
    case.type, case.input = type_, input_
    for field, arrays in ((case.inputs, inputs), (case.outputs, outputs)):
        for i, array in enumerate(arrays):
            keep.append(ffi.from_buffer(array))
            field[i] = keep[-1]
    for i, size in enumerate(sizes):
        case.sizes[i] = size
    for i, number in enumerate(params):
        case.params[i] = number
    native.check(lib.delta_test_kernel(case))


@functools.cache
def _program() -> subprocess.Popen[bytes]:
    return subprocess.Popen(elsewhere(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _call_elsewhere(
    isa: str,
    kernel: str,
    inputs: Sequence[np.ndarray],
    outputs: Sequence[np.ndarray],
    sizes: Sequence[int],
    params: Sequence[float],
    type_: int,
    input_: int,
) -> None:
    """The same as messages; their layout is the struct Request of csrc/tests/kernels.cpp."""

    def padded(values: Sequence[Any], n: int) -> list[Any]:
        return [*values, *[0] * (n - len(values))]

    arrays = [*padded(inputs, N_INPUTS), *padded(outputs, N_OUTPUTS)]
    present = [array if isinstance(array, np.ndarray) else np.zeros(0, np.uint8) for array in arrays]
    names = [isa.encode(), kernel.encode()]
    request = struct.pack(
        f"<4I{N_SIZES}q{N_PARAMS}f{len(present)}Q{len(present)}I4x",
        *map(len, names),
        type_,
        input_,
        *padded(sizes, N_SIZES),
        *padded(params, N_PARAMS),
        *(array.nbytes for array in present),
        *(array.ctypes.data % ALIGN for array in present),
    )
    program = _program()
    assert program.stdin is not None and program.stdout is not None
    program.stdin.write(b"".join([request, *names, *(array.tobytes() for array in present)]))
    program.stdin.flush()
    answer = program.stdout.read(4)
    if len(answer) != 4:
        raise RuntimeError(f"{' '.join(elsewhere())} ended with {program.wait()} in {kernel} of {isa}")
    (status,) = struct.unpack("<i", answer)
    if status != 0:
        (length,) = struct.unpack("<I", program.stdout.read(4))
        ffi, lib = native.load()
        name = ffi.string(lib.delta_status_name(status)).decode()
        raise native.NativeError(status, name, program.stdout.read(length).decode())
    for array in outputs:
        flat = array.reshape(-1).view(np.uint8)
        flat[:] = np.frombuffer(program.stdout.read(array.nbytes), np.uint8)
