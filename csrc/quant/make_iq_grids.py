"""Write `iq_grids.inc`: the codebooks of the IQ types, from the data of the PyPI package gguf.

    python csrc/quant/make_iq_grids.py > csrc/quant/iq_grids.inc

An entry is one 16-bit number: value j of the codebook vector is `levels[entry >> (bits * j) & (2^bits - 1)]`, with 2
bits for vectors of 8 values and 3 for vectors of 4. The levels are few and stand in `iq.h`.
"""

import numpy as np
from gguf import quants

GRIDS = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S")
PER_LINE = 16


def main() -> None:
    print("// Codebooks of the IQ types, one vector per number (iq.h). Written by make_iq_grids.py.")
    for name in GRIDS:
        kind = getattr(quants, name)
        kind.init_grid()
        vectors = kind.grid.reshape(kind.grid_shape)
        bits = 2 if vectors.shape[1] == 8 else 3
        codes = np.searchsorted(np.array(kind.grid_map), vectors)
        entries = (codes << (bits * np.arange(vectors.shape[1]))).sum(axis=1)
        levels = ", ".join(str(level) for level in kind.grid_map)
        print(f"\n// {name}: {len(entries)} vectors of {vectors.shape[1]} values out of {levels}")
        print(f"static constexpr uint16_t kGrid{name}[{len(entries)}] = {{")
        for first in range(0, len(entries), PER_LINE):
            print("    " + ", ".join(f"0x{entry:04x}" for entry in entries[first : first + PER_LINE]) + ",")
        print("};")


main()
