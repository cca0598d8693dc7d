"""Runs the C++ self test of csrc/base (conversions, threads, memory, messages), built beside the test library."""

from __future__ import annotations

import subprocess

import pytest

import native

PROGRAM = native.library_path().with_name("delta-selftest")


@pytest.mark.skipif(not PROGRAM.is_file(), reason="delta-selftest is built with DELTA_TESTS only")
def test_selftest() -> None:
    run = subprocess.run([PROGRAM], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "0 checks failed" in run.stdout
