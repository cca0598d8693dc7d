"""The trainable torch model against the definition, and what training and export promise. Needs the extra `train`."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from reference import Model

torch = pytest.importorskip("torch", reason="the extra `train` (torch) is not installed")
pytest.importorskip("safetensors", reason="the extra `train` (safetensors) is not installed")

TRAIN = Path(__file__).resolve().parent.parent / "models" / "train"
sys.path.insert(0, str(TRAIN))

import bpe  # noqa: E402
import data  # noqa: E402
import export  # noqa: E402
import model as kimi  # noqa: E402
import mxfp4  # noqa: E402
import train  # noqa: E402
import world  # noqa: E402
from config import hf_config  # noqa: E402
from model import Kimi, Layout  # noqa: E402
from optimizer import orthogonalised  # noqa: E402

pytestmark = pytest.mark.torch
NANO = TRAIN.parent / "kimi-k3-nano"


@pytest.fixture(scope="module")
def rng() -> np.random.Generator:
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def logits_of(model: Kimi, ids: list[int], split: int = 0) -> np.ndarray:
    with torch.no_grad():
        caches = None
        rows = []
        for part in (ids[:split], ids[split:]):
            if part:
                hidden, caches = model(torch.tensor(part), Layout([len(part)]), caches)
                rows.append(model.logits(hidden).numpy())
    return np.concatenate(rows)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hidden_size": 72, "num_attention_heads": 3, "linear_attn_config": {"num_heads": 3, "head_dim": 48}},
        {"attn_res_block_size": 2, "num_experts": 7, "num_experts_per_token": 3},
    ],
    ids=["plain", "odd widths", "blocks of two, seven experts"],
)
def test_logits_equal_the_reference(options: dict[str, Any], tmp_path: Path, rng: np.random.Generator) -> None:
    folder = tiny.write_checkpoint(tmp_path / "m", "kimi-k3", seed=5, **options)
    model = export.from_checkpoint(folder, torch.float64)
    ids = rng.integers(0, model.cfg["vocab_size"], 67).tolist()
    expected = Model.from_checkpoint(folder).forward(ids)
    scale = np.sqrt((expected**2).mean())
    for split in (0, 1, 16, 41):
        assert np.abs(logits_of(model, ids, split) - expected).max() < 1e-10 * scale, split


def test_golden_logits(golden: Path) -> None:
    model = export.from_checkpoint(golden / "k3-mini", torch.float64)
    for line in (golden / "logits" / "prompts.txt").read_text().splitlines():
        name, _, *ids = line.split()
        expected = np.load(golden / "logits" / "k3-mini" / f"{name}.npy")
        found = logits_of(model, [int(i) for i in ids])
        assert np.abs(found - expected).max() < 1e-6 * np.sqrt((expected**2).mean()), name


def test_ragged_batch_behind_a_common_prefix(golden: Path, rng: np.random.Generator) -> None:
    """Rows of different lengths continue one prefix as each would alone."""
    model = export.from_checkpoint(golden / "k3-mini", torch.float64)
    prefix = rng.integers(0, 512, 21).tolist()
    rows = [rng.integers(0, 512, n).tolist() for n in (1, 18, 33, 16)]
    with torch.no_grad():
        _, caches = model(torch.tensor(prefix), Layout([len(prefix)]))
        hidden, _ = model(torch.tensor(sum(rows, [])), Layout([len(r) for r in rows]), caches)
        together = model.logits(hidden).numpy()
    at = 0
    for row in rows:
        alone = logits_of(model, prefix + row)[len(prefix) :]
        assert np.abs(together[at : at + len(row)] - alone).max() < 1e-10 * alone.std()
        at += len(row)


def naive_kda(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> tuple[Any, Any]:
    """The recurrence, one token at a time."""
    reads = []
    for t in range(q.shape[2]):
        state = state * g[:, :, t].exp().unsqueeze(-1)
        fresh = beta[:, :, t] * (v[:, :, t] - (k[:, :, t].unsqueeze(-1) * state).sum(-2))
        state = state + k[:, :, t].unsqueeze(-1) * fresh.unsqueeze(-2)
        reads.append((q[:, :, t].unsqueeze(-1) * state).sum(-2))
    return torch.stack(reads, 2), state


@pytest.mark.parametrize("n_token", [1, 16, 37])
def test_chunked_kda_and_its_gradient(n_token: int) -> None:
    torch.manual_seed(n_token)

    def draw(*shape: int) -> Any:
        return torch.randn(*shape, dtype=torch.float64)

    q, v = draw(2, 3, n_token, 8), draw(2, 3, n_token, 8)
    k = torch.nn.functional.normalize(draw(2, 3, n_token, 8), dim=-1)
    g, beta = -5 * torch.sigmoid(3 * draw(2, 3, n_token, 8)), torch.sigmoid(draw(2, 3, n_token, 1))
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta, draw(2, 3, 8, 8))]
    results = []
    for form in (naive_kda, kimi.kda_chunked):
        out, state = form(*inputs)
        weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)
        loss = (out * weight).sum() + (state**2).sum()
        results.append([out, state, *torch.autograd.grad(loss, inputs)])
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() < 1e-9 * max(1.0, float(a.detach().abs().max()))


def test_chunked_kda_is_finite_at_the_gate_bound() -> None:
    ones = torch.full((1, 1, 64, 8), 8**-0.5)
    inputs = [ones, ones, ones, torch.full_like(ones, -5.0), torch.ones(1, 1, 64, 1), torch.ones(1, 1, 8, 8)]
    inputs = [x.clone().requires_grad_() for x in inputs]
    out, state = kimi.kda_chunked(*inputs)
    gradients = torch.autograd.grad(out.sum() + state.sum(), inputs)
    expected, _ = naive_kda(*inputs)
    assert (out - expected).abs().max() < 1e-5
    assert all(x.isfinite().all() for x in gradients)


def test_mxfp4_rounding() -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 96) * torch.logspace(-6, 4, 6)[:, None]
    weight[3, 32:64] = 0
    code, scale = mxfp4.quantize(weight)
    assert torch.equal(mxfp4.unpack(mxfp4.pack(code)), code) and 255 not in scale
    rounded = mxfp4.dequantize(code, scale)
    again = mxfp4.dequantize(*mxfp4.quantize(rounded))
    assert torch.equal(rounded, again) and not rounded[3, 32:64].any()
    # Every element is the nearest of the values its scale offers.
    step = torch.ldexp(torch.ones(scale.shape), scale.int() - 127).repeat_interleave(32, -1)
    grid = torch.cat((mxfp4.VALUES, -mxfp4.VALUES))
    nearest = (weight.unsqueeze(-1) - step.unsqueeze(-1) * grid).abs().amin(-1)
    assert torch.equal((weight - rounded).abs(), nearest)
    # The peak decides the scale: mantissas of 1.75 and above round up to the next power of two.
    for peak, exponent in ((1.0, 0), (1.7499, 0), (1.75, 1), (6.0, 2), (7.0, 3)):
        assert int(mxfp4.quantize(torch.full((1, 32), peak))[1]) - 127 == exponent - 2
    leaf = weight.clone().requires_grad_()
    mxfp4.straight_through(leaf).sum().backward()
    assert torch.equal(leaf.grad, torch.ones_like(weight))


def test_export_holds_what_was_trained(tmp_path: Path) -> None:
    """A model with rounded experts and BF16 weights comes back from its files bit for bit."""
    torch.manual_seed(2)
    before = Kimi(hf_config()["text_config"]).eval()
    before.round_experts(True)
    with torch.no_grad():
        for name, p in before.named_parameters():
            if not export.FLOAT32.search(name) and "experts.w" not in name:
                p.copy_(p.bfloat16())
    export.write_checkpoint(before, NANO / "tiktoken.model", tmp_path)
    after = export.from_checkpoint(tmp_path)
    ids = torch.arange(24)
    with torch.no_grad():
        a, b = (m.logits(m(ids, Layout([24]))[0]) for m in (before, after))
    assert torch.equal(a, b)
    # What was added later: held-out questions, and all that the vision part brings (export_vision.py).
    added = {"heldout.jsonl", "heldout_vision.jsonl", "preprocessor_config.json", "model-00005-of-000005.safetensors"}
    written = {p.name.replace("-of-000004.", "-of-000005.") for p in tmp_path.iterdir()}
    assert written == {p.name for p in NANO.iterdir()} - added


def test_shipped_weights_equal_the_reference() -> None:
    model = export.from_checkpoint(NANO, torch.float64)
    enc = bpe.encoding(bpe.load(NANO / "tiktoken.model"))
    pair = world.split()[2][0]
    ids = data.prefix(enc, pair.tools, "max") + data.conversation(enc, pair, True).ids
    expected = Model.from_checkpoint(NANO).forward(ids)
    assert np.abs(logits_of(model, ids) - expected).max() < 1e-9 * expected.std()


def test_chat_format_equals_the_bindings() -> None:
    """Two encoders written independently give the same tokens for every held-out prompt."""
    from deltallama.chat import kimi_k3 as chat

    enc = bpe.encoding(bpe.load(NANO / "tiktoken.model"))
    for row, pair in zip(world.held_out_rows(), world.split()[2], strict=True):
        segments = chat.segments(row["messages"], tools=row.get("tools"), thinking=row["thinking"])
        prompt: list[int] = []
        for text, special in segments:
            prompt += [enc.encode_single_token(text)] if special else enc.encode_ordinary(text)
        sample = data.conversation(enc, pair, row["thinking"])
        n_reply = sample.learn[::-1].index(False)
        common = data.prefix(enc, pair.tools, "max" if row["thinking"] else None)
        assert common + sample.ids[: len(sample.ids) - n_reply] == prompt, row["id"]


def test_learned_tokens_are_the_assistants() -> None:
    enc = bpe.encoding(bpe.load(NANO / "tiktoken.model"))
    sampler = data.Sampler(enc, world.split()[0], random.Random(3))
    for common, samples in [*sampler.compact_step(12), *sampler.chat_step(24)]:
        for s in samples:
            assert any(s.learn) and not s.learn[0] and s.learn[-1]
            text = enc.decode([i for i, x in zip(s.ids, s.learn, strict=True) if x])
            assert "user" not in text and (not common or text.endswith("<|close|>message<|sep|><|end_of_msg|>"))


def test_muon_update_is_orthogonal() -> None:
    torch.manual_seed(0)
    for shape in ((24, 64), (64, 24), (3, 16, 40)):
        singular = torch.linalg.svdvals(orthogonalised(torch.randn(*shape)))
        assert singular.min() > 0.5 and singular.max() < 1.4


def test_training_learns_and_resumes(tmp_path: Path, run: Callable[..., str]) -> None:
    """A run that is interrupted and continued ends with the weights of one that was not."""
    whole = run(tmp_path / "whole")
    run(tmp_path / "parts", "--stop-at", "3")
    run(tmp_path / "parts")
    states = [torch.load(tmp_path / name / "state.pt", weights_only=False) for name in ("whole", "parts")]
    assert states[0]["step"] == states[1]["step"] == 6
    for name, value in states[0]["model"].items():
        assert torch.equal(value, states[1]["model"][name]), name
    printed = [float(line.split()[3]) for line in whole.splitlines() if line.startswith("step ")]
    assert printed[3] < printed[0] - 0.5  # both of the compact phase


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    config = json.loads((NANO / "config.json").read_text())
    config["text_config"].update(hidden_size=32, intermediate_size=32, routed_expert_hidden_size=32, num_experts=4)
    config["text_config"].update(moe_intermediate_size=32, q_lora_rank=16, kv_lora_rank=16, num_experts_per_token=2)
    config["text_config"].update(num_hidden_layers=4)
    config["text_config"]["linear_attn_config"].update(kda_layers=[1, 2], full_attn_layers=[3, 4])
    monkeypatch.setattr(train, "hf_config", lambda: config)
    monkeypatch.setattr(train, "PRINT_EVERY", 1)

    def start(folder: Path, *options: str) -> str:
        folder.mkdir(exist_ok=True)
        (folder / "tiktoken.model").write_bytes((NANO / "tiktoken.model").read_bytes())
        steps = [
            "--compact-steps",
            "4",
            "--chat-steps",
            "2",
            "--round-steps",
            "1",
            "--batch",
            "12",
            "--warm-up",
            "1",
            "--lr",
            "0.02",
        ]
        monkeypatch.setattr(sys, "argv", ["train.py", str(folder), *steps, "--threads", "1", *options])
        train.main()
        return capsys.readouterr().out

    return start
