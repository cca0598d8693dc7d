"""Teach Kimi-K3-nano to see: ``train_vision.py words|look|joint|polish RUN_DIR``. The text model stays as it is.

Run again with the same folder to resume a stage. ``words`` and ``look`` need nothing of each other and may run side by
side; ``joint`` begins when both are there, with one process or under ``torchrun --nproc-per-node 2``.

- words: without pictures. Finds one row for every colour, shape, number … for which the frozen text model answers.
- look: without text. The tower learns to tell colour, shape, number … at every row.
- joint: first the tower's rows are drawn to those that ``words`` found, then all follows the loss of the answers.
- polish: the tower of ``joint`` follows the loss of the answers further, with learning rates that rise and fall again.

Every step draws its pictures from a generator seeded by (seed, stage, step), so a resumed run sees what an
uninterrupted one would.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bpe
import model as kimi
import parallel
import pictures
import vision
import vision_data
from export import from_checkpoint
from model import Kimi, LayerCache, Layout
from optimizer import Muon
from train import save, say
from vision import Vision
from vision_data import CODES, MERGE, Sample

NANO = Path(__file__).resolve().parent.parent / "kimi-k3-nano"
STEPS = {"words": 400, "look": 1000, "joint": 2000, "polish": 1400}
BATCH = {"words": 32, "look": 32, "joint": 48, "polish": 48}
PEAK = {"words": 0.02, "look": 1.5e-3, "joint": 1e-3, "polish": 1e-3}  # learning rates of Adam
PEAK_MUON = {"words": 0.0, "look": 6e-3, "joint": 4e-3, "polish": 3e-3}  # words has no matrix of a layer
PRINT_EVERY = 10  # steps
EASED = 0.5  # share of the stage look over which the pictures grow from easy ones to those of the world
DEV_SEED, N_DEV = 7, 160
UNLEARNED_END = 6  # tokens after the first of the end of a turn, which the text model writes by itself


class Words(nn.Module):
    """A row ``[D]`` for every code, in the projector's form: a norm of one and a common weight."""

    def __init__(self, text: Kimi, enc: Any) -> None:
        super().__init__()
        table = text.embed_tokens.detach()
        known = [table[enc.encode_ordinary(" " + name.split()[-1])].mean(0) for names in CODES for name in names]
        self.raw = nn.Parameter(torch.stack(known))
        self.weight = nn.Parameter(torch.full_like(known[0], float(table.square().mean().sqrt())))
        self.first = torch.tensor([sum(len(names) for names in CODES[:i]) for i in range(len(CODES))])

    def chosen(self, samples: Sequence[Sample]) -> Tensor:
        """The code of every row ``[R]`` of the samples' pictures."""
        parts = []
        for s in samples:
            code = self.first + torch.tensor(vision_data.codes(s.scene))
            parts.append(code[torch.from_numpy(vision_data.quarters(vision_data.grid_of(s.scene)))])
        return torch.cat(parts)

    def rows(self) -> Tensor:
        return F.rms_norm(self.raw, self.weight.shape, self.weight, vision.config(0)["projector_ln_eps"])

    def forward(self, samples: Sequence[Sample]) -> Tensor:
        return self.rows()[self.chosen(samples)]


def losses(text: Kimi, caches: list[LayerCache], samples: Sequence[Sample], rows: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy and correctness of every learned token but the last few, in sample order."""
    ids = torch.tensor([i for s in samples for i in s.ids[:-UNLEARNED_END]])
    learn = torch.tensor([x for s in samples for x in s.learn[:-UNLEARNED_END]]).nonzero().flatten()
    x = F.embedding(ids.clamp_min(0), text.embed_tokens).index_put(((ids < 0).nonzero().flatten(),), rows)
    hidden, _ = text.run(x, Layout([len(s.ids) - UNLEARNED_END for s in samples]), caches)
    logits = text.logits(hidden[learn - 1])
    return F.cross_entropy(logits, ids[learn], reduction="none"), logits.argmax(-1) == ids[learn]


def exact(right: Tensor, samples: Sequence[Sample]) -> dict[str, tuple[int, int]]:
    """Exact answers and questions per kind."""
    out = {kind: (0, 0) for kind in pictures.ASKS}
    counts = [sum(s.learn) - UNLEARNED_END for s in samples]
    for s, part in zip(samples, right.split(counts), strict=True):
        out[s.kind] = (out[s.kind][0] + bool(part.all()), out[s.kind][1] + 1)
    return out


def show(result: dict[str, tuple[int, int]]) -> str:
    right, n = sum(r for r, _ in result.values()), sum(n for _, n in result.values())
    return f"{right}/{n} exact: " + " ".join(f"{kind} {r}/{n}" for kind, (r, n) in result.items())


def optimizers(module: nn.Module, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the tower and of the projector, Adam for the rest."""
    matrices, others = [], []
    for name, p in module.named_parameters():
        (matrices if p.ndim == 2 and name.startswith("vision.") else others).append(p)
    adam = torch.optim.AdamW(others, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    return [adam, Muon(matrices, lr=args.lr_muon, weight_decay=0.05)] if matrices else [adam]


def rate(step: int, total: int, warm_up: int) -> float:
    """Learning rate factor: warm-up, plateau, linear decay over the last half."""
    return min(1.0, (step + 1) / warm_up) * max(0.02, min(1.0, 2 * (total - step) / total))


class Look(nn.Module):
    """Tower and projector, and in the stage ``look`` what its rows are compared with."""

    def __init__(self, text: Kimi) -> None:
        super().__init__()
        width = text.cfg["hidden_size"]
        self.vision = Vision(vision.config(width))
        self.heads = nn.Parameter(torch.randn(sum(map(len, CODES)), width) / width**0.5)

    def seen(self, samples: Sequence[Sample]) -> tuple[Tensor, list[vision_data.Grid]]:
        """The rows ``[R, D]`` of the samples' pictures, and the grids."""
        patches, grids = vision_data.pixels_of(samples)
        return self.vision(torch.from_numpy(patches), grids), grids

    def losses(self, samples: Sequence[Sample]) -> tuple[Tensor, list[float]]:
        """Cross entropy of all four codes of the picture at each of its rows, and the share of right rows per code."""
        rows, grids = self.seen(samples)
        n_row = torch.tensor([h * w // MERGE**2 for h, w in grids])
        code = torch.tensor([vision_data.codes(s.scene) for s in samples]).repeat_interleave(n_row, 0)
        total, right = rows.new_zeros(()), []
        heads = self.heads.split([len(names) for names in CODES])
        for head, wanted in zip(heads, code.T, strict=True):
            logits = rows @ head.T
            total = total + F.cross_entropy(logits, wanted)
            right.append(float((logits.argmax(-1) == wanted).float().mean()))
        return total, right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=tuple(STEPS))
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--stop-at", type=int, help="end after this step as if killed, for probes")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--lr-muon", type=float)
    parser.add_argument("--fit-steps", type=int, default=1500, help="steps of joint in which rows are fitted to words")
    parser.add_argument("--warm-up", type=int, default=20, help="steps")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--compile", action="store_true", help="fuse elementwise parts; needs a C++ compiler")
    args = parser.parse_args()
    args.steps, args.batch = args.steps or STEPS[args.stage], args.batch or BATCH[args.stage]
    args.lr, args.lr_muon = args.lr or PEAK[args.stage], args.lr_muon or PEAK_MUON[args.stage]
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    parallel.start()
    args.run.mkdir(parents=True, exist_ok=True)
    if args.compile:
        for name in ("situ", "mix", "convolved", "gated_norm"):
            setattr(kimi, name, torch.compile(getattr(kimi, name), dynamic=True))
    Stage(args).train()
    parallel.finish()


class Stage:
    """One stage of a run: what is trained, by which loss, and where it is kept."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.file = args, args.run / f"{args.stage}.pt"
        self.text = from_checkpoint(NANO).requires_grad_(False)
        self.enc = bpe.encoding(bpe.load(NANO / "tiktoken.model"))
        prefix = vision_data.before_size(self.enc)
        with torch.no_grad():
            _, self.caches = self.text(torch.tensor(prefix), Layout([len(prefix)]))
        self.words, self.look = Words(self.text, self.enc), Look(self.text)
        self.module: nn.Module = self.words if args.stage == "words" else self.look
        rng = random.Random(f"dev/{DEV_SEED}")
        self.dev = [vision_data.sample(self.enc, pictures.scene(rng, kind), kind)
                    for kind in list(pictures.ASKS) * N_DEV][:N_DEV]  # fmt: skip
        self.step, self.spent, self.n_seen = 0, 0.0, 0
        if args.stage == "joint":
            self._begin_joint()
        elif args.stage == "polish":
            self._begin_polish()
        self.optims = optimizers(self.module, args)
        self.peaks = [[group["lr"] for group in optim.param_groups] for optim in self.optims]
        if self.file.exists():
            state = torch.load(self.file, weights_only=False)
            self.module.load_state_dict(state["model"])
            for optim, saved in zip(self.optims, state["optims"], strict=True):
                optim.load_state_dict(saved)
            self.step, self.spent, self.n_seen = state["step"], state["spent"], state["seen"]

    def _ended(self, stage: str) -> dict[str, Tensor]:
        """What an earlier stage left."""
        file = self.args.run / f"{stage}.pt"
        if not file.exists():
            raise SystemExit(f"the stage {stage} comes before {self.args.stage}: {file} is not there")
        model: dict[str, Tensor] = torch.load(file, weights_only=False)["model"]
        return model

    def _begin_polish(self) -> None:
        prefix = "vision."  # the heads belong to the stage look
        found = {name: value for name, value in self._ended("joint").items() if name.startswith(prefix)}
        self.look.vision.load_state_dict({name[len(prefix) :]: value for name, value in found.items()})

    def _begin_joint(self) -> None:
        self.words.load_state_dict(self._ended("words"))
        self.look.load_state_dict(self._ended("look"))
        with torch.no_grad():
            self.look.vision.mm_projector.post_norm.weight.copy_(self.words.weight)

    def keep(self) -> None:
        if parallel.rank() == 0:
            optims = [optim.state_dict() for optim in self.optims]
            state = {"model": self.module.state_dict(), "optims": optims}
            state["config"] = self.look.vision.cfg
            save(self.file, {**state, "step": self.step, "spent": self.spent, "seen": self.n_seen})

    def loss(self, samples: Sequence[Sample]) -> tuple[Tensor, str]:
        """The mean loss of the samples, and what to say of it."""
        if self.args.stage == "look":
            loss, right = self.look.losses(samples)
            return loss, "rows right " + " ".join(f"{r:.2f}" for r in right)
        if self.args.stage == "words":
            rows = self.words(samples)
        else:
            rows, _ = self.look.seen(samples)
            if self.args.stage == "joint" and self.step < self.args.fit_steps:
                wanted = self.words(samples).detach()
                return (rows - wanted).square().mean() / wanted.square().mean(), "fit"
        each, right = losses(self.text, self.caches, samples, rows)
        return each.mean(), show(exact(right, samples))

    @torch.no_grad()
    def score(self) -> dict[str, tuple[int, int]]:
        """Exact answers about the development pictures, over all processes."""
        samples = list(parallel.mine(self.dev))
        rows = self.words(samples) if self.args.stage == "words" else self.look.seen(samples)[0]
        parts = parallel.gathered(exact(losses(self.text, self.caches, samples, rows)[1], samples))
        return {kind: (sum(p[kind][0] for p in parts), sum(p[kind][1] for p in parts)) for kind in parts[0]}

    def train(self) -> None:
        args = self.args
        say(f"{sum(p.numel() for p in self.module.parameters()):,} parameters, step {self.step} of {args.steps}")
        while self.step < min(args.steps, args.stop_at or args.steps):
            began = time.monotonic()
            rng = random.Random(f"{args.seed}/{args.stage}/{self.step}")
            ease = max(0.0, 1 - self.step / (EASED * args.steps)) if args.stage == "look" else 0.0
            samples = vision_data.drawn(self.enc, rng, args.batch, ease)
            self.n_seen += len(samples)
            own = list(parallel.mine(samples))
            part, told = self.loss(own)
            (part * len(own) / len(samples)).backward()
            total = part.detach() * len(own) / len(samples)
            parallel.add_up([total, *(p.grad for p in self.module.parameters() if p.grad is not None)])
            if not float(total) < 1e3:
                raise SystemExit(f"step {self.step}: loss {float(total)}")
            norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
            factor = rate(self.step, args.steps, args.warm_up)
            for optim, peaks in zip(self.optims, self.peaks, strict=True):
                for group, peak in zip(optim.param_groups, peaks, strict=True):
                    group["lr"] = peak * factor
                optim.step()
                optim.zero_grad(set_to_none=True)
            self.step += 1
            self.spent += time.monotonic() - began
            if self.step % PRINT_EVERY == 0:
                what = f"loss {float(total):.4f} norm {norm:.2f} rate {factor:.2f} pictures {self.n_seen}"
                say(f"step {self.step} {what} seconds {self.spent:.0f} {told}")
            if self.step % args.eval_every == 0 or self.step == args.steps:
                if args.stage != "look":
                    say(f"dev {show(self.score())}")
                self.keep()
        self.keep()


if __name__ == "__main__":
    main()
