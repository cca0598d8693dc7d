"""Random damage to a good GGUF file: every variant must give a status, never a crash.

`python fuzz_gguf.py SEED COUNT [FILE]` prints how often each status came. FILE gets each variant before it is tried, so
that a crash leaves its cause behind. The environment variable DELTALLAMA_LIBRARY names the library, as for all tests.
"""

from __future__ import annotations

import collections
import random
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import native  # noqa: E402
from hostile import make_hostile  # noqa: E402

ALLOWED = {"OK", "FORMAT", "UNSUPPORTED"}
_EXTREMES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**61, 2**63 - 1, 2**63, 2**64 - 1]


def damaged(good: bytes, header_bytes: int, rng: random.Random) -> bytes:
    """One variant: flipped bits, overwritten numbers, cut, repeated or removed stretches; mostly in the header."""
    data = bytearray(good)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        end = header_bytes if rng.random() < 0.9 else len(data)
        at = rng.randrange(max(1, min(end, len(data))))
        match rng.randrange(6):
            case 0:
                data[at : at + 1] = bytes([data[at] ^ 1 << rng.randrange(8)]) if data else b""
            case 1:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 2:
                data[at : at + 8] = struct.pack("<Q", rng.choice(_EXTREMES))
            case 3:
                data[at : at + 4] = struct.pack("<I", rng.choice(_EXTREMES) & 0xFFFFFFFF)
            case 4:
                del data[at : at + rng.choice([1, 4, 8, 100])]
            case 5:
                data = data[:at] if rng.random() < 0.5 else data[:at] + data[max(0, at - 24) :]
        if not data:
            break
    return bytes(data)


def main(seed: int, count: int, keep: str | None = None) -> None:
    ffi, lib = native.load()
    rng = random.Random(seed)
    file = make_hostile.good()
    good, header_bytes = file.bytes(), len(file.header())
    info = ffi.new("delta_test_gguf_info *")
    statuses: collections.Counter[str] = collections.Counter()
    for _ in range(count):
        data = damaged(good, header_bytes, rng)
        if keep is not None:
            Path(keep).write_bytes(data)
        status = lib.delta_test_gguf_bytes(data, len(data), info)
        name = ffi.string(lib.delta_status_name(status)).decode()
        if name not in ALLOWED or (status and not native.last_error()):
            raise SystemExit(f"seed {seed}: status {name}: {native.last_error()!r}")
        statuses[name] += 1
    print(dict(sorted(statuses.items())))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:4])
