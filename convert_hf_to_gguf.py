#!/usr/bin/env python3
"""Convert a Hugging Face checkpoint of a Kimi model to a GGUF file; `--help` lists the arguments."""

import sys
from pathlib import Path

# Works from a plain checkout: the two packages lie beside this script and need not be installed.
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent / "gguf-py")]

try:
    from conversion import cli_main
    from gguf_ext import console
except KeyboardInterrupt:  # it takes half a second, in which nothing has begun
    sys.exit(130)

if __name__ == "__main__":
    sys.exit(console.run(cli_main, ()))
