"""The shipped trained model through conversion and engine: exact experts, the reference's text, no drift."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conversion
import reference as ref
from deltallama import Llama
from engine import Engine
from gguf_ext import GGUFReader

NANO = Path(__file__).resolve().parent.parent / "models" / "kimi-k3-nano"


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("nano")

    def convert(outtype: str) -> Path:
        path = folder / f"nano-{outtype}.gguf"
        if not path.exists():
            conversion.convert(NANO, outfile=path, outtype=outtype)
        return path

    return convert


def held_out(rng: np.random.Generator, n: int) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (NANO / "heldout.jsonl").read_text("utf-8").splitlines()]
    return [rows[i] for i in rng.choice(len(rows), n, replace=False)]


def test_every_expert_of_the_file_is_the_source_exactly(nano: Callable[[str], Path]) -> None:
    """MXFP4 blocks in the GGUF decode to the source weights with a difference of 0.0, for every expert."""
    source = ref.Checkpoint(NANO, np.float64)
    n_expert = source.config["num_experts"]
    compared = 0
    with GGUFReader(nano("q8_0")) as file:
        for layer in range(source.config["first_k_dense_replace"], source.config["num_hidden_layers"]):
            for name, part in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
                stacked = file.dequantize(f"blk.{layer}.ffn_{name}_exps.weight")
                for e in range(n_expert):
                    expected = source.matrix(f"model.layers.{layer}.block_sparse_moe.experts.{e}.{part}")
                    assert np.max(np.abs(stacked[e] - expected)) == 0.0
                    compared += 1
    assert compared == 3 * n_expert * (source.config["num_hidden_layers"] - source.config["first_k_dense_replace"])


def test_greedy_replies_are_those_of_the_reference(nano: Callable[[str], Path], rng: np.random.Generator) -> None:
    """Twelve held-out prompts through an F32 file with exact activations; `bench/score_nano.py` compares all 500."""
    model = ref.Model.from_checkpoint(NANO)
    with Llama(nano("f32"), n_ctx=512, activations="exact", cache_type="f32") as llm:
        prompts = [
            llm.chat_tokens(row["messages"], tools=row.get("tools"), thinking=row["thinking"])
            for row in held_out(rng, 12)
        ]
        stop = [t for t in range(llm.n_vocab) if llm.is_stop(t)]
        expected = model.greedy_batch(prompts, 60, stop)
        for prompt, (tokens, margins) in zip(prompts, expected, strict=True):
            found = [t for t in llm.generate(prompt, max_tokens=60, temperature=0).tokens if not llm.is_stop(t)]
            at = next((i for i, (a, b) in enumerate(zip(found, tokens, strict=False)) if a != b), len(tokens))
            assert found == tokens or margins[at] < 1e-3


def test_replies_through_q8_0_are_right(nano: Callable[[str], Path], rng: np.random.Generator) -> None:
    """The default settings on a Q8_0 file: of twenty replies at least eighteen are right to the last character."""
    with Llama(nano("q8_0"), n_ctx=512) as llm:
        right = 0
        for row in held_out(rng, 20):
            reply = llm.chat(row["messages"], tools=row.get("tools"), thinking=row["thinking"], temperature=0)
            calls = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in reply.tool_calls]
            call = row.get("tool_call")
            right += reply.content == row["answer"] and calls == ([(call["name"], call["arguments"])] if call else [])
    assert right >= 18


# As q4_k_m it has tensors of five types, for which "auto" rounds inputs in both ways.
@pytest.mark.parametrize(
    "activations,outtype", [("exact", "q8_0"), ("fine", "q8_0"), ("fast", "q8_0"), ("auto", "q4_k_m")]
)
def test_greedy_text_does_not_depend_on_where_the_prompt_is_cut(
    nano: Callable[[str], Path], rng: np.random.Generator, activations: str, outtype: str
) -> None:
    """In every mode; another token is allowed only where the two best logits of the uncut run are a near-tie."""
    near_tie = 1e-3 if activations == "exact" else 0.05
    with Llama(nano(outtype), n_ctx=512, activations=activations) as llm:
        for row in held_out(rng, 4):
            prompt = llm.chat_tokens(row["messages"], tools=row.get("tools"), thinking=row["thinking"])
            texts = []
            for cut in (0, *rng.integers(1, len(prompt), 3).tolist()):
                llm.reset()
                if cut:
                    llm.eval(prompt[:cut], logits="none")
                llm.eval(prompt[cut:])
                tokens, gaps = [], []
                while len(tokens) < 40 and not (tokens and llm.is_stop(tokens[-1])):
                    best, second = llm.top(2)
                    tokens.append(best.token)
                    gaps.append(best.logit - second.logit)
                    llm.eval(tokens[-1:])
                texts.append((tokens, gaps))
            whole, gaps = texts[0]
            for other, _ in texts[1:]:
                at = next((i for i, (a, b) in enumerate(zip(whole, other, strict=False)) if a != b), None)
                assert at is None or gaps[at] < near_tie


def test_d15_rounding_does_not_drift_over_a_long_text(nano: Callable[[str], Path], rng: np.random.Generator) -> None:
    """D15: Q8_0 with rounded inputs against exact F32 over 4,096 tokens, KL divergence per 256: the end is no worse
    than the beginning by more than the scatter of such windows."""
    text: list[int] = []
    with Llama(nano("f32"), n_ctx=512) as llm:
        while len(text) < 4096:
            row = held_out(rng, 1)[0]
            text += llm.chat_tokens(row["messages"], tools=row.get("tools"), thinking=row["thinking"])
    text = text[:4096]
    logits = []
    for outtype, activations, cache in (("f32", "exact", "f32"), ("q8_0", "fine", "f16")):
        with Engine(nano(outtype), n_ctx=4096, n_outputs=256, activations=activations, cache_type=cache) as engine:
            logits.append(log_softmax(engine.logits(text)))
    p, q = logits
    kl = np.sum(np.exp(p) * (p - q), axis=1).reshape(16, 256).mean(axis=1)
    assert np.isfinite(kl).all() and kl.max() < 0.05, kl
    assert kl[8:].mean() < 4 * kl[:8].mean() + 1e-4, kl


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.sum(np.exp(x), axis=1, keepdims=True))
