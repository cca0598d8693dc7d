"""MoonViT-3d and its projector in PyTorch, float32 on the CPU, random weights: what `vision_bench.py` compares with.

    python bench/vision_torch.py --layers 27 --threads 2 --repeats 3 16x16 32x32     # patches: rows x columns

Prints one JSON line per grid: {"grid": [16, 16], "seconds": best}. Run by an interpreter that has torch. Written
as one would write it for speed: fused attention and norms of the library, no gradient, weights as `linear` wants them.
With `--packed` they are laid out for oneDNN before, by the operators that compiled models call: on processors not made
by Intel, the default's library has no kernels for AVX-512.
"""

from __future__ import annotations

import argparse
import json
import time

HIDDEN, HEADS, HEAD, FF, TEXT, PATCH, MERGE = 1024, 12, 128, 4096, 7168, 14, 2


def main() -> None:
    import torch
    from torch.nn import functional as F

    parser = argparse.ArgumentParser()
    parser.add_argument("grids", nargs="+")
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--packed", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        weights = torch.randn(rows, columns) / columns**0.5
        return torch.ops.mkldnn._reorder_linear_weight(weights) if options.packed else weights

    def linear(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if options.packed:
            return torch.ops.mkldnn._linear_pointwise(x, weights, None, "none", [], "")
        return F.linear(x, weights)

    inner, merged, ones = HEADS * HEAD, HIDDEN * MERGE**2, torch.ones(HIDDEN)
    blocks = [
        (matrix(3 * inner, HIDDEN), matrix(HIDDEN, inner), matrix(FF, HIDDEN), matrix(HIDDEN, FF))
        for _ in range(options.layers)
    ]
    patch, table = matrix(HIDDEN, 3 * PATCH**2), torch.randn(1, HIDDEN, 64, 64)
    first, second, last = matrix(merged, merged), matrix(TEXT, merged), torch.ones(TEXT)

    def tower(pixels: torch.Tensor, h: int, w: int) -> torch.Tensor:
        place = F.interpolate(table, size=(h, w), mode="bilinear")[0]
        x = linear(pixels, patch) + place.permute(1, 2, 0).reshape(h * w, HIDDEN)
        theta = 10000.0 ** (-torch.arange(HEAD // 4) / (HEAD // 4))
        row, column = torch.arange(h).repeat_interleave(w), torch.arange(w).repeat(h)
        angle = torch.cat([column[:, None] * theta, row[:, None] * theta], dim=1)
        cos, sin = angle.cos(), angle.sin()

        def turned(y: torch.Tensor) -> torch.Tensor:  # [n, heads, head]
            a, b = y[..., 0::2], y[..., 1::2]
            c, s = cos[:, None], sin[:, None]
            return torch.stack([a * c - b * s, a * s + b * c], dim=-1).flatten(-2)

        for qkv, out, up, down in blocks:
            q, k, v = linear(F.rms_norm(x, (HIDDEN,), ones), qkv).view(-1, 3, HEADS, HEAD).unbind(1)
            q, k, v = (y.transpose(0, 1)[None] for y in (turned(q), turned(k), v))
            o = F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).reshape(-1, inner)
            x = x + linear(o, out)
            x = x + linear(F.gelu(linear(F.rms_norm(x, (HIDDEN,), ones), up), approximate="tanh"), down)
        x = F.rms_norm(x, (HIDDEN,), ones).view(h // 2, 2, w // 2, 2, HIDDEN).transpose(1, 2).reshape(-1, merged)
        return F.rms_norm(linear(F.gelu(linear(x, first)), second), (TEXT,), last)

    with torch.inference_mode():
        for grid in options.grids:
            h, w = map(int, grid.split("x"))
            pixels = torch.rand(h * w, 3 * PATCH**2) * 2 - 1
            times = []
            for _ in range(options.repeats + 1):  # the first warms up
                start = time.perf_counter()
                tower(pixels, h, w)
                times.append(time.perf_counter() - start)
            print(json.dumps({"grid": [h, w], "seconds": min(times[1:])}), flush=True)


if __name__ == "__main__":
    main()
