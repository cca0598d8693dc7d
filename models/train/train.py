"""Train Kimi-K3-nano: ``train.py RUN_DIR [--compact-steps …]``, or with two processes
``torchrun --nproc-per-node 2 train.py RUN_DIR --threads 1 …``. Run again with the same folder to resume.

Two phases: compact question-answer samples, then the K3 chat format. The loss counts only what the assistant writes.
The last ``--round-steps`` steps train through MXFP4 rounding of the routed experts. Every step draws its data from a
generator seeded by (seed, step), so a resumed run sees what an uninterrupted one would.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import bpe
import data
import model as kimi
import parallel
import vocabulary
import world
from config import N_BASE, hf_config
from data import Sample
from model import Kimi, Layout
from optimizer import Muon

PRINT_EVERY = 10  # steps
Batch = tuple[list[int], list[Sample]]


def losses(model: Kimi, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy and correctness of every learned token, in sample order."""
    common, samples = batch
    caches = None
    if common:
        _, caches = model(torch.tensor(common), Layout([len(common)]))
    ids = torch.tensor([i for s in samples for i in s.ids])
    learn = torch.tensor([x for s in samples for x in s.learn]).nonzero().flatten()
    hidden, _ = model(ids, Layout([len(s.ids) for s in samples]), caches)
    logits = model.logits(hidden[learn - 1])
    return F.cross_entropy(logits, ids[learn], reduction="none"), logits.argmax(-1) == ids[learn]


@torch.no_grad()
def exact(model: Kimi, batch: Batch) -> list[bool]:
    """Per sample, whether greedy decoding would write the whole reply, thought included."""
    model.eval()
    _, right = losses(model, batch)
    model.train()
    counts = [sum(s.learn) for s in batch[1]]
    return [bool(part.all()) for part in right.split(counts)]


def score(model: Kimi, enc: Any, pairs: list[world.Pair], compact: bool) -> dict[str, tuple[int, int]]:
    """Exact replies and prompts per kind, over all processes."""
    out = {kind: (0, 0) for kind in dict.fromkeys(p.kind for p in pairs)}
    groups: dict[tuple[Any, ...], list[world.Pair]] = {}
    for pair in parallel.mine(pairs):
        tool = pair.tools[0]["function"]["name"] if pair.tools else ""
        groups.setdefault((pair.kind, tool, world.thinks(pair)), []).append(pair)
    for (kind, _, thinking), members in groups.items():
        if compact:
            batch: Batch = ([], [data.compact(enc, p, thinking) for p in members])
        else:
            common = data.prefix(enc, members[0].tools, "max" if thinking else None)
            batch = (common, [data.conversation(enc, p, thinking) for p in members])
        right = exact(model, batch)
        out[kind] = (out[kind][0] + sum(right), out[kind][1] + len(right))
    parts = parallel.gathered(out)
    return {kind: (sum(p[kind][0] for p in parts), sum(p[kind][1] for p in parts)) for kind in out}


def rate(step: int, args: argparse.Namespace) -> float:
    """Learning rate factor: warm-up, plateau, linear decay over the last part."""
    total: int = args.compact_steps + args.chat_steps
    decay = min(1.0, (total - step) / (float(args.decay) * total))
    return min(1.0, (step + 1) / int(args.warm_up)) * max(decay, 0.02)


def optimizers(model: Kimi, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrices, AdamW for the rest."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, p in model.named_parameters():
        hidden = p.ndim >= 2 and "conv1d" not in name and "_res." not in name
        hidden = hidden and name not in ("embed_tokens", "lm_head")
        (matrices if hidden else others).append(p)
    return [
        Muon(matrices, lr=args.lr_muon, weight_decay=0.05),
        torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def save(path: Path, state: dict[str, Any]) -> None:
    torch.save(state, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def say(line: str) -> None:
    if parallel.rank() == 0:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--compact-steps", type=int, default=200)
    parser.add_argument("--chat-steps", type=int, default=250)
    parser.add_argument("--round-steps", type=int, default=60)
    parser.add_argument("--stop-at", type=int, help="end after this step as if killed, for probes")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--lr-muon", type=float, default=0.003)
    parser.add_argument("--warm-up", type=int, default=40, help="steps")
    parser.add_argument("--decay", type=float, default=0.5, help="part of all steps over which the rate decays")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--compile", action="store_true", help="fuse elementwise parts; needs a C++ compiler")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    parallel.start()
    args.run.mkdir(parents=True, exist_ok=True)
    vocab = args.run / "tiktoken.model"
    if not vocab.exists() and parallel.rank() == 0:
        bpe.save(bpe.train(vocabulary.corpus(), N_BASE), vocab)
    parallel.wait()
    enc = bpe.encoding(bpe.load(vocab))
    if args.compile:
        for name in ("situ", "mix", "convolved", "gated_norm"):
            setattr(kimi, name, torch.compile(getattr(kimi, name), dynamic=True))

    training, dev, _ = world.split()
    model = Kimi(hf_config()["text_config"])
    optims = optimizers(model, args)
    peaks = [[g["lr"] for g in optim.param_groups] for optim in optims]
    step, spent, n_token, total = 0, 0.0, 0, args.compact_steps + args.chat_steps
    state_file = args.run / "state.pt"
    if state_file.exists():
        state = torch.load(state_file, weights_only=False)
        model.load_state_dict(state["model"])
        for optim, saved in zip(optims, state["optims"], strict=True):
            optim.load_state_dict(saved)
        step, spent, n_token = state["step"], state["spent"], state["tokens"]
    say(f"{sum(p.numel() for p in model.parameters()):,} parameters, step {step} of {total}")

    def keep() -> None:
        if parallel.rank() > 0:
            return
        optim_states = [optim.state_dict() for optim in optims]
        values = {"model": model.state_dict(), "optims": optim_states, "step": step, "spent": spent, "tokens": n_token}
        save(state_file, values)

    while step < min(total, args.stop_at or total):
        began = time.monotonic()
        sampler = data.Sampler(enc, training, random.Random(f"{args.seed}/{step}"))
        compact = step < args.compact_steps
        model.round_experts(step >= total - args.round_steps)
        batches = sampler.compact_step(args.batch) if compact else sampler.chat_step(args.batch)
        n_learn = sum(sum(s.learn) for _, samples in batches for s in samples)
        total_loss = torch.zeros(())
        for common, samples in batches:
            n_token += len(common) + sum(len(s.ids) for s in samples)
            own = list(parallel.mine(samples))
            if own:
                part = losses(model, (common, own))[0].sum() / n_learn
                part.backward()
                total_loss += part.detach()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        parallel.add_up([total_loss, *gradients, *(moe.load for moe in model.moes())])
        loss = float(total_loss)
        if not loss < 1e3:
            raise SystemExit(f"step {step}: loss {loss}")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        factor = rate(step, args)
        for optim, lrs in zip(optims, peaks, strict=True):
            for group, lr in zip(optim.param_groups, lrs, strict=True):
                group["lr"] = lr * factor
            optim.step()
            optim.zero_grad(set_to_none=True)
        for moe in model.moes():
            moe.balance(0.003 * factor)
        step += 1
        spent += time.monotonic() - began
        if step % PRINT_EVERY == 0:
            say(
                f"step {step} loss {loss:.4f} norm {norm:.2f} rate {factor:.2f} tokens {n_token} seconds {spent:.0f} "
                f"tokens/s {n_token / spent:.0f}"
            )
        if step % args.eval_every == 0 or step == total:
            asked = [p for p in dev if not compact or p.kind not in ("name", "tool", "result")]
            result = score(model, enc, asked, compact)
            right, n = sum(r for r, _ in result.values()), sum(n for _, n in result.values())
            kinds = " ".join(f"{kind} {r}/{n}" for kind, (r, n) in result.items())
            say(f"dev {right}/{n} exact: {kinds}")
            keep()
    keep()
    parallel.finish()


if __name__ == "__main__":
    main()
