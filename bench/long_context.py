"""A long context on a small model: memory against the plan, and what a token costs at several depths.

    python bench/long_context.py FOLDER                       # to 131,072 tokens
    python bench/long_context.py FOLDER -n 16384 --arch kimi-k3 --cache-type q8_0

Writes a random model of four layers, with heads of the released sizes, to FOLDER and fills its context with random
tokens. At each depth it prints the milliseconds per token of a prompt of 512 tokens and of a token by itself, from the
profile: of the KDA layers, of the MLA layers, of their attention alone and of everything. KDA must cost the same at
every depth, MLA grows in a straight line. The table ends with the ratio of the last depth to the first.

Memory is what the process has added since it began, without mapped files, beside the sum that the model planned. The
exit status is 1 if it grew past the plan by more than --slack: memory is planned before the first token.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
for folder in ("", "gguf-py", "tests", "bench"):
    sys.path.append(str(ROOT / folder))

import machine  # noqa: E402
import make_models  # noqa: E402

import conversion  # noqa: E402
from deltallama import Llama  # noqa: E402
from deltallama.bench import op_costs, profiled  # noqa: E402

# Changes to the shapes of make_models.py: what does not depend on the context is made small.
SMALL: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 2,
    "num_experts": 16,
    "moe_intermediate_size": 128,
    "intermediate_size": 512,
    "vocab_size": 4096,
}
SHAPES = {
    "kimi-linear": ("kl-bench", SMALL),
    "kimi-k3": ("k3-bench", {**SMALL, "q_lora_rank": 128, "routed_expert_hidden_size": 128, "attn_res_block_size": 2}),
}
PROMPT = 512  # tokens of a measured prompt
SINGLE = 16  # measured tokens by themselves, of which the profile gives the mean

Costs = dict[str, float]


def model_file(folder: Path, arch: str) -> Path:
    """The model as a Q8_0 file; written once."""
    name, overrides = SHAPES[arch]
    target = folder / f"long-{name}-q8_0.gguf"
    if not target.exists():
        make_models.write(folder / f"long-{name}", name, **overrides)
        conversion.convert(folder / f"long-{name}", outfile=target, outtype="q8_0")
    return target


def private_bytes() -> int:
    """Of this process, now in memory and not of a file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


def random_tokens(llm: Llama, n: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(llm.n_tokens).integers(llm.n_vocab, size=n)]


def costs(llm: Llama, pieces: Sequence[int]) -> Costs:
    """Milliseconds per token of the parts of the model, over inputs of these lengths."""
    with profiled(llm):
        for n in pieces:
            llm.eval(random_tokens(llm, n))
    sums = dict.fromkeys(("kda", "mla", "attention", "all"), 0)
    for op in op_costs(llm):
        sums["all"] += op["ns"]
        if op["part"] in ("kda", "mla"):
            sums[op["part"]] += op["ns"]
        if op["kind"] == "mla_attention":
            sums["attention"] += op["ns"]
    return {name: ns / 1e6 / sum(pieces) for name, ns in sums.items()}


def measure(llm: Llama, depths: Sequence[int], began: int) -> list[tuple[int, Costs, Costs, int]]:
    """(depth, costs of a prompt's token, costs of a token by itself, bytes added since the beginning) of each depth."""
    rows = []
    for depth in depths:
        llm.eval(random_tokens(llm, depth - llm.n_tokens), logits="none")
        prompt, single = costs(llm, [PROMPT]), costs(llm, [1] * SINGLE)
        rows.append((depth, prompt, single, private_bytes() - began))
        show(*rows[-1])
    return rows


def show(depth: int, prompt: Costs, single: Costs, n_bytes: int) -> None:
    cells = [*prompt.values(), *single.values()]
    print(f"{depth:9,}" + "".join(f"{ms:11.4f}" for ms in cells) + f"{n_bytes / 2**20:12.1f}", flush=True)


def default_depths(n: int) -> list[int]:
    """1024, then times four up to n; room is left for what is measured there."""
    depths = [1024]
    while depths[-1] * 4 < n:
        depths.append(depths[-1] * 4)
    return [*depths, n - PROMPT - SINGLE]


def main(arguments: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder", type=Path, help="where the model is written")
    p.add_argument("-n", type=int, default=131072, help="tokens of the context (default: %(default)s)")
    p.add_argument("--arch", choices=SHAPES, default="kimi-linear", help="(default: %(default)s)")
    p.add_argument("-t", "--threads", type=int, default=0, help="0: physical cores")
    p.add_argument("--cache-type", default="f16", help="(default: %(default)s)")
    p.add_argument("--slack", type=int, default=32, metavar="MIB", help="over the plan (default: %(default)s)")
    options = p.parse_args(arguments)
    if options.n < 2048:
        p.error("-n: at least 2048 tokens")
    path = model_file(options.folder, options.arch)
    print(machine.describe())
    began = private_bytes()
    with Llama(path, n_ctx=options.n, n_threads=options.threads, cache_type=options.cache_type) as llm:
        planned = llm.memory["total_private"]
        print(f"{path.name}: context {options.n:,}, {llm.info['n_threads']} threads, cache {options.cache_type}")
        print(f"planned {planned / 2**20:.1f} MiB, of this state {llm.memory['state'] / 2**20:.1f} MiB")
        print(f"{'':9}{'prompt, ms per token':>44}{'by itself, ms per token':>44}{'memory':>12}")
        print(f"{'depth':>9}" + f"{'KDA':>11}{'MLA':>11}{'attention':>11}{'all':>11}" * 2 + f"{'MiB':>12}")
        rows = measure(llm, default_depths(options.n), began)
    ratios = [rows[-1][i][name] / rows[0][i][name] for i in (1, 2) for name in ("kda", "mla", "attention", "all")]
    print(f"{'ratio':>9}" + "".join(f"{ratio:11.2f}" for ratio in ratios))
    print(f"depth of the last row is {rows[-1][0] / rows[0][0]:.1f} times that of the first")
    most = max(n_bytes for *_, n_bytes in rows)
    if most > planned + options.slack * 2**20:
        print(f"memory: {most / 2**20:.1f} MiB, planned were {planned / 2**20:.1f} MiB", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
