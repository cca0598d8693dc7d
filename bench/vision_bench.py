"""How long the vision tower takes, per image size, beside PyTorch and beside what the processor's multipliers could do.

    python bench/vision_bench.py --work FOLDER --threads 2 --torch-python VENV/bin/python

Makes a tower of the released shape (or of fewer layers) with random weights, once, in FOLDER: time does not depend on
their values. Each size is encoded `--repeats` times after a first one, and the best counts; PyTorch's float32 likewise,
in turns with ours, by the interpreter that `--torch-python` names. The peak is that of `fma_peak.c`, built by `cc`.

    products     share of the peak that the matrix products of blocks and projector reach
    attention    the same of the attention, whose exponentials do not count as work
    all          the same of the whole encoding
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
for folder in ("", "gguf-py", "tests"):
    sys.path.append(str(ROOT / folder))

from vision_torch import FF, HEAD, HEADS, HIDDEN, MERGE, PATCH, TEXT  # noqa: E402

import conversion  # noqa: E402
import tiny_vision  # noqa: E402
from deltallama import Llama  # noqa: E402
from deltallama._ffi import call, lib, new_struct, struct_values  # noqa: E402
from deltallama.images import Preprocessed  # noqa: E402

GRIDS = ["16x16", "32x32", "64x64", "78x138", "128x128"]
SHAPE = {
    "vt_hidden_size": HIDDEN,
    "mm_hidden_size": HIDDEN,
    "vt_intermediate_size": FF,
    "vt_num_attention_heads": HEADS,
    "qkv_hidden_size": HEADS * HEAD,
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
}


def make_files(work: Path, layers: int, outtype: str) -> tuple[Path, Path]:
    """A small text model of the released width, and the tower."""
    text, tower = work / "text.gguf", work / f"mmproj-{layers}-{outtype}.gguf"
    if not (text.exists() and tower.exists()):
        checkpoint = work / f"checkpoint-{layers}"
        if not checkpoint.exists():
            shape = SHAPE | {"vt_num_hidden_layers": layers}
            tiny_vision.tiny_vision_checkpoint(checkpoint, vision=shape, hidden_size=TEXT, num_hidden_layers=4)
        conversion.convert(checkpoint, outfile=text, outtype="bf16", force=True)
        conversion.convert(checkpoint, outfile=tower, outtype=outtype, mmproj=True, force=True)
    return text, tower


def picture(h: int, w: int, digest: int) -> Preprocessed:
    """Random pixels; another digest each time, so that nothing is found among the kept."""
    pixels = np.random.default_rng(digest).uniform(-1, 1, (h * w, 3, PATCH, PATCH)).astype(np.float32)
    return Preprocessed(pixels, (h, w), h * w // MERGE**2, (w * PATCH, h * PATCH), digest)


def operations(h: int, w: int, layers: int) -> dict[str, float]:
    """Of one encoding, two for each multiply-add."""
    n, inner, merged = h * w, HEADS * HEAD, HIDDEN * MERGE**2
    block = n * HIDDEN * (4 * inner + 2 * FF)
    projector = n / MERGE**2 * merged * (merged + TEXT)
    products = 2 * (n * 3 * PATCH**2 * HIDDEN + layers * block + projector)
    attention = 2.0 * layers * 2 * n * n * inner
    return {"products": products, "attention": attention, "all": products + attention}


def profile(llm: Llama) -> Iterator[dict[str, Any]]:
    """The ops of the latest encoding: the fields of `delta_op_profile`."""
    for index in range(lib.delta_vision_op_count(llm._handles.vision)):
        struct = new_struct("delta_op_profile")
        call(lib.delta_vision_profile_get(llm._handles.vision, index, struct))
        yield struct_values(struct)


def ours(llm: Llama, h: int, w: int, repeats: int) -> dict[str, float]:
    """Seconds of the best of several encodings: of the products, of the attention, and of all."""
    assert llm.vision is not None
    best: dict[str, float] = {}
    for repeat in range(repeats + 1):
        llm.vision.features([picture(h, w, repeat * 2**32 + h * 2**16 + w)])
        seconds = {"products": 0.0, "attention": 0.0, "all": 0.0}
        for op in profile(llm):
            kind = {"linear": "products", "image_attention": "attention"}.get(op["kind"])
            for name in filter(None, (kind, "all")):
                seconds[name] += op["ns"] / 1e9
        if repeat > 0 and (not best or seconds["all"] < best["all"]):
            best = seconds
    return best


def torch_seconds(python: str, grid: str, options: argparse.Namespace) -> float:
    arguments = ["--layers", options.layers, "--threads", options.threads, "--repeats", options.repeats, grid]
    arguments += ["--packed"] if options.torch_packed else []
    script = Path(__file__).with_name("vision_torch.py")
    result = subprocess.run([python, str(script), *map(str, arguments)], check=True, capture_output=True, text=True)
    return float(json.loads(result.stdout)["seconds"])


def peak(work: Path, threads: int) -> float:
    """Operations per second of `fma_peak.c`."""
    program = work / "fma_peak"
    source = Path(__file__).with_name("fma_peak.c")
    subprocess.run(["cc", "-O3", "-march=native", "-pthread", str(source), "-o", str(program)], check=True)
    result = subprocess.run([str(program), str(threads)], check=True, capture_output=True, text=True)
    return float(result.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grids", nargs="*", default=GRIDS, help="patches, rows x columns (default: %(default)s)")
    parser.add_argument("--work", type=Path, required=True, help="folder for the model files, some GB")
    parser.add_argument("--layers", type=int, default=27, help="of the tower (default: %(default)s)")
    parser.add_argument("--outtype", default="f32", help="of the tower's file (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--torch-python", metavar="PYTHON", help="interpreter with torch; none: no comparison")
    parser.add_argument(
        "--torch-packed", action="store_true", help="its weights laid out for oneDNN, see vision_torch.py"
    )
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    text, tower = make_files(options.work, options.layers, options.outtype)
    with Llama(text, mmproj=tower, n_ctx=64, n_threads=options.threads, image_cache_bytes=0) as llm:
        most = peak(options.work, options.threads)
        print(f"{options.layers} layers, {options.outtype}, {options.threads} threads, peak {most / 1e9:.1f} G/s")
        print("| image | tokens | seconds | tokens/s | products | attention | all | PyTorch | ratio |")
        print("|---|---|---|---|---|---|---|---|---|")
        for grid in options.grids:
            h, w = map(int, grid.split("x"))
            seconds, work = ours(llm, h, w, options.repeats), operations(h, w, options.layers)
            shares = [f"{work[name] / seconds[name] / most:.0%}" for name in ("products", "attention", "all")]
            compared = ["", ""]
            if options.torch_python:
                theirs = torch_seconds(options.torch_python, grid, options)
                compared = [f"{theirs:.3f}", f"{theirs / seconds['all']:.2f}"]
            tokens = h * w // MERGE**2
            cells = [f"{w * PATCH} × {h * PATCH}", tokens, f"{seconds['all']:.3f}", f"{tokens / seconds['all']:.0f}"]
            print("|", " | ".join(map(str, [*cells, *shares, *compared])), "|", flush=True)


if __name__ == "__main__":
    main()
