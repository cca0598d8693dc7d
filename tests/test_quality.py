"""Perplexity and KL divergence against their definitions, what they say about models, and about quantized ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conversion
from conversion.requantize import requantize
from deltallama import ArgumentError, Llama
from deltallama.cli import main
from deltallama.quality import (
    Estimate,
    check_same_vocabulary,
    chunks_of,
    divergence,
    log_softmax,
    open_for_scoring,
    perplexity,
)
from engine import Engine
from gguf_edit import Edit

NANO = Path(__file__).resolve().parent.parent / "models" / "kimi-k3-nano"
EXACT: dict[str, Any] = {"activations": "exact", "cache_type": "f32"}


def softmax(logits: np.ndarray) -> np.ndarray:
    """By the definition, in the widest float there is."""
    e = np.exp(logits.astype(np.longdouble) - logits.max())
    return e / e.sum()


def probabilities(path: Path, chunk: list[int]) -> np.ndarray:
    """After each token of a chunk `[n, n_vocab]`, through the C interface in one piece."""
    with Engine(path, n_ctx=64, n_outputs=64) as engine:
        return np.stack([softmax(row) for row in engine.logits(chunk)])


# -- the definitions ---------------------------------------------------------------------------------------------------


def test_log_softmax_is_exact_where_float32_would_not_be() -> None:
    logits = np.array([[0.0, -40.0, 5.0], [1e4, 1e4 - 30, -1e4]], np.float32)
    with np.errstate(divide="ignore"):  # even the widest float has no exp(-20000)
        expected = np.stack([np.log(softmax(row)) for row in logits])
    np.testing.assert_allclose(log_softmax(logits)[0], expected[0].astype(float), rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(log_softmax(logits)[1, :2], expected[1, :2].astype(float), rtol=1e-14, atol=1e-15)
    assert log_softmax(logits)[1, 2] == -2e4


@pytest.mark.parametrize("all_positions", [False, True])
@pytest.mark.parametrize("n_ctx", [9, 16])
def test_perplexity_is_that_of_the_definition(
    k3_mini: Path, rng: np.random.Generator, n_ctx: int, all_positions: bool
) -> None:
    with open_for_scoring(k3_mini, n_ctx, 300, **EXACT) as llm:
        tokens = rng.integers(llm.n_vocab, size=3 * n_ctx + 5).tolist()
        found = perplexity(llm, tokens, n_ctx, all_positions=all_positions)
    nll = []
    for number in range(3):
        chunk = tokens[number * n_ctx : (number + 1) * n_ctx]
        p = probabilities(k3_mini, chunk)
        first = 0 if all_positions else n_ctx // 2
        nll += [-np.log(p[i, chunk[i + 1]]) for i in range(first, n_ctx - 1)]
    values = np.array(nll, float)
    assert (found.n_chunks, found.n_scored) == (3, len(values))
    assert found.nll.mean == pytest.approx(values.mean(), rel=1e-12)
    error = np.sqrt(((values - values.mean()) ** 2).sum() / (len(values) - 1) / len(values))
    assert found.nll.error == pytest.approx(error, rel=1e-9)
    assert found.perplexity.mean == pytest.approx(np.exp(values.mean()), rel=1e-12)
    assert found.perplexity.error == pytest.approx(np.exp(values.mean()) * error, rel=1e-9)


def test_divergence_is_that_of_the_definition(
    k3_mini: Path, golden: Path, gguf: Callable[..., Path], rng: np.random.Generator
) -> None:
    other, n_ctx = gguf(golden / "k3-mini", "q4_0"), 14
    with open_for_scoring(other, n_ctx, 300, **EXACT) as llm, open_for_scoring(k3_mini, n_ctx, 300, **EXACT) as exact:
        tokens = rng.integers(llm.n_vocab, size=2 * n_ctx).tolist()
        found = divergence(llm, exact, tokens, n_ctx)
    kl, same, dp, nll, nll_reference = [], [], [], [], []
    for number in range(2):
        chunk = tokens[number * n_ctx : (number + 1) * n_ctx]
        q, p = probabilities(other, chunk), probabilities(k3_mini, chunk)
        for i in range(n_ctx // 2, n_ctx - 1):
            kl.append(float((p[i] * np.log(p[i] / q[i])).sum()))
            same.append(p[i].argmax() == q[i].argmax())
            dp.append(float(q[i, chunk[i + 1]] - p[i, chunk[i + 1]]))
            nll.append(float(-np.log(q[i, chunk[i + 1]])))
            nll_reference.append(float(-np.log(p[i, chunk[i + 1]])))
    assert found.n_scored == len(kl) == 12 and min(kl) > 0
    assert found.kl.mean == pytest.approx(np.mean(kl), rel=1e-9)
    assert found.median == pytest.approx(np.median(kl), rel=1e-9)
    assert (found.p90, found.p99) == pytest.approx(tuple(np.percentile(kl, [90, 99])), rel=1e-9)
    assert found.maximum == pytest.approx(max(kl), rel=1e-9)
    assert found.same_top.mean == pytest.approx(np.mean(same))
    assert found.rms_dp == pytest.approx(np.sqrt(np.mean(np.square(dp))), rel=1e-9)
    assert (found.nll.mean, found.nll_reference.mean) == pytest.approx((np.mean(nll), np.mean(nll_reference)))


def test_a_model_does_not_differ_from_itself(k3_mini: Path) -> None:
    with open_for_scoring(k3_mini, 16, 300) as a, open_for_scoring(k3_mini, 16, 300) as b:
        found = divergence(a, b, list(range(32)), 16, all_positions=True)
    assert found.kl == Estimate(0.0, 0.0) and found.maximum == 0.0 and found.rms_dp == 0.0
    assert found.same_top.mean == 1.0 and found.nll == found.nll_reference


def test_pieces_of_a_chunk_change_nothing(k3_mini: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five rows per evaluation, two of them at a time in float64."""
    results = []
    for n_vocab, block in ((300, 1 << 20), ((32 << 20) // 5, 2 * 512)):
        monkeypatch.setattr("deltallama.quality._BLOCK", block)
        with open_for_scoring(k3_mini, 16, n_vocab) as llm:
            assert llm.info["n_outputs"] == min(16, (32 << 20) // n_vocab) and llm.n_vocab == 512
            results.append(perplexity(llm, list(range(64)), 16))
    assert results[0] == results[1]


def test_chunks() -> None:
    assert chunks_of(list(range(7)), 3) == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ArgumentError, match="the text has 7 tokens, less than one chunk of 8"):
        chunks_of(list(range(7)), 8)
    with pytest.raises(ArgumentError, match="chunks of 1 tokens, expected at least 2"):
        chunks_of([1, 2, 3], 1)


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return conversion.convert(NANO, tmp_path_factory.mktemp("nano") / "f32.gguf", "f32")


@pytest.fixture(scope="module")
def conversations(nano: Path) -> list[int]:
    """Held-out conversations of the trained model, prompt and answer in its chat format, 12 chunks of 128 tokens."""
    rows = [json.loads(line) for line in (NANO / "heldout.jsonl").read_text("utf-8").splitlines()]
    tokens: list[int] = []
    with Llama(nano, n_ctx=64) as llm:
        for row in rows:
            if len(tokens) >= 12 * 128:
                return tokens[: 12 * 128]
            if "tool_call" not in row:
                tokens += llm.chat_tokens(row["messages"], thinking=False) + llm.tokenize(row["answer"])
                tokens += llm.tokenize("<|close|>", special=True)
    raise AssertionError("the held-out set is too small")


def test_a_model_predicts_its_own_text_better_than_noise(nano: Path, rng: np.random.Generator, seed: int) -> None:
    with open_for_scoring(nano, 128, 2048) as llm:
        prompt = llm.chat_tokens(
            [{"role": "user", "content": "How many routed experts does Kimi-K3 have?"}], thinking=False
        )
        own: list[int] = []
        while len(own) < 128:
            own += [*prompt, *llm.generate(prompt, max_tokens=64, temperature=1, seed=seed + len(own)).tokens]
        noise = rng.integers(1536, size=128).tolist()
        of_own, of_noise = (perplexity(llm, tokens[:128], 128, all_positions=True).nll.mean for tokens in (own, noise))
    # Knowing nothing would give ln 2048; a trained model is surer, so noise surprises it more than that.
    assert of_noise > np.log(2048) and of_own < of_noise - 3


# Mean KL to the F32 file over `conversations` may be at most so much; measured values are about half of it. Packed
# experts are the same in all files. What differs is quantized weights only: each file is written once more as F32 and
# evaluated exactly, so rounded activations have no part in it.
BOUNDS = {"q8_0": 5e-3, "q6_k": 0.02, "q5_k_m": 0.05, "q4_k_m": 0.12, "q3_k_m": 0.35, "q2_k": 1.0}


def test_fewer_bits_are_further_from_the_source(nano: Path, conversations: list[int], tmp_path: Path) -> None:
    found = {}
    with open_for_scoring(nano, 128, 2048, cache_type="f32") as reference:
        for outtype in BOUNDS:
            (quantized,) = requantize(nano, tmp_path / f"{outtype}.gguf", outtype)
            (wide,) = requantize(quantized, tmp_path / f"{outtype}-f32.gguf", "f32")
            with open_for_scoring(wide, 128, 2048, cache_type="f32") as llm:
                found[outtype] = divergence(llm, reference, conversations, 128).kl.mean
    values = list(found.values())
    assert values == sorted(values), found
    assert all(found[outtype] <= bound for outtype, bound in BOUNDS.items()), found


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Kimi-K3 has 896 routed experts. <|open|>It is large.\n" * 40, "utf-8")
    return path


def test_json_is_the_result(k3_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(text), "-c", "32", "--chunks", "2", "--json"]
    assert main(["perplexity", str(k3_path), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    with open_for_scoring(k3_path, 32, 300) as llm:
        tokens = llm.tokenize(text.read_text("utf-8"))
        expected = perplexity(llm, tokens[:64], 32)
    assert found["perplexity"] == {"mean": expected.perplexity.mean, "error": expected.perplexity.error}
    assert (found["n_chunks"], found["n_scored"]) == (2, 30)
    assert main(["perplexity", str(k3_path), *arguments, "--special", "--all-positions"]) == 0
    assert json.loads(capsys.readouterr().out)["n_scored"] == 62
    assert main(["kl", str(k3_path), str(k3_path), *arguments, "--reference-activations", "exact"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["kl"]["mean"] < 1e-3 and found["maximum"] >= found["p99"] >= found["p90"] >= found["median"]


def test_tables(k3_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["perplexity", str(k3_path), str(text), "-c", "32", "--chunks", "2"]) == 0
    out = capsys.readouterr().out
    assert "scored                   30 tokens of 2 chunks of 32, second halves" in out and "perplexity" in out
    assert main(["kl", str(k3_path), str(k3_path), str(text), "-c", "32", "--chunks", "2", "--all-positions"]) == 0
    out = capsys.readouterr().out
    for line in ("62 tokens of 2 chunks of 32, all positions", "KL divergence            0 +- 0", "maximum", "99 %"):
        assert line in out


def test_vocabularies_must_agree(k3_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit = Edit(k3_path)
    tokens, types = edit.fields["tokenizer.ggml.tokens"]
    edit.fields["tokenizer.ggml.tokens"] = ([*tokens[:7], "other", *tokens[8:]], types)
    renamed = edit.write(tmp_path / "renamed.gguf")
    with pytest.raises(ArgumentError, match=r"tokenizer.ggml.tokens\[7\] is 'other' in .*renamed.gguf, .* in "):
        check_same_vocabulary(renamed, k3_path)
    edit.fields["tokenizer.ggml.tokens"] = (tokens[:-1], types)
    shorter = edit.write(tmp_path / "shorter.gguf")
    with pytest.raises(ArgumentError, match=rf"has {len(tokens) - 1} entries in .*, {len(tokens)} in"):
        check_same_vocabulary(shorter, k3_path)
    assert check_same_vocabulary(k3_path, k3_path) == len(tokens)
    assert main(["kl", str(renamed), str(k3_path), str(renamed)]) == 1
    assert "tokenizer.ggml.tokens[7]" in capsys.readouterr().err


def test_mistakes_end_in_one_sentence(k3_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(k3_path)
    for arguments, message in [
        (["perplexity", model, str(text), "-c", "100000"], "less than one chunk of 100000"),
        (["perplexity", model, str(text), "-c", "1"], "chunks of 1 tokens"),
        (["perplexity", model, str(text), "-c", "-5"], "n_ctx"),
        (["perplexity", model, "nothing.txt"], "nothing.txt"),
        (["perplexity", "nothing.gguf", str(text)], "nothing.gguf"),
        (["kl", model, str(text), str(text)], "not a GGUF file"),
        (["kl", model, model, str(text), "--reference-activations", "rough"], "exact, fine, fast"),
    ]:
        assert main(arguments) == 1
        err = capsys.readouterr().err
        assert message in err and err.startswith("deltallama: error: ") and err.count("\n") == 1, err
