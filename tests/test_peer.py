"""The same files in an independent engine (bench/peer.py), and the comparison itself (bench/peer_agreement.py).

Two things are told apart. On a file of float32 weights both engines compute the same mathematics, so they must agree to
the token. On any other file the peer rounds the inputs of its products, which decides between close tokens only.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "bench"))

import peer_agreement as bench  # noqa: E402
from peer import Peer, PeerError  # noqa: E402

import deltallama  # noqa: E402

MINIS = ("kl-mini", "k3-mini")
OUTTYPES = ("f32", "f16", "bf16", "q8_0")
N_PROMPTS = 12
MAX_TOKENS = 24

needs_peer = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="the independent engine is not installed (extra `peer`)"
)


@pytest.fixture(scope="session")
def mini_file(golden: Path, gguf: Callable[..., Path]) -> Callable[[str, str], Path]:
    """``mini_file(name, outtype)``: a golden checkpoint, converted once per session."""
    return lambda name, outtype: gguf(golden / name, outtype)


def agreement(model: Path, seed: int, *, n: int = N_PROMPTS, **options: Any) -> bench.Report:
    prompts = bench.random_prompts(512, n, seed)
    report = bench.run(model, prompts, max_tokens=MAX_TOKENS, n_threads=1, ends=False, **options)
    print(bench.describe(report))
    return report


def assert_same(report: bench.Report) -> None:
    """Equal texts but for one: a tie in a router, broken the other way by a last bit, moves logits by any amount."""
    assert len(report.differences) <= 1, bench.describe(report)


@needs_peer
@pytest.mark.parametrize("outtype", OUTTYPES)
@pytest.mark.parametrize("name", MINIS)
def test_peer_loads_and_runs_our_file(name: str, outtype: str, mini_file: Callable[[str, str], Path]) -> None:
    with Peer(mini_file(name, outtype), n_ctx=256, n_threads=1) as peer:
        tokens = peer.greedy([130, 379, 183, 407, 353, 430, 378], 4)
        assert peer.greedy([130, 379, 183, 407, 353, 430, 378], 4) == tokens
    assert 1 <= len(tokens) <= 4
    assert all(0 <= token < 512 for token in tokens)


@needs_peer
def test_kimi_linear_f32_gives_the_same_text(mini_file: Callable[[str, str], Path], seed: int) -> None:
    assert_same(agreement(mini_file("kl-mini", "f32"), seed))


@needs_peer
@pytest.mark.parametrize(("name", "outtype"), [("kl-mini", "q8_0"), ("k3-mini", "f32"), ("k3-mini", "q8_0")])
def test_without_rounding_the_text_is_the_same(
    name: str, outtype: str, mini_file: Callable[[str, str], Path], seed: int
) -> None:
    assert_same(agreement(mini_file(name, outtype), seed, f32_peer=True))


@needs_peer
def test_kimi_k3_differs_by_the_peers_rounding_only(mini_file: Callable[[str, str], Path], seed: int) -> None:
    """The peer rounds inputs of MXFP4 products to 8 bits. Random weights make close tokens and every text ends up
    different, but where they first part the tokens are close; tokens unrelated to each other are about 3 apart."""
    differences = agreement(mini_file("k3-mini", "f32"), seed, n=30).differences
    assert differences, "the peer is expected to round"
    assert median(d.lead for d in differences) < bench.MAX_LEAD


# -- failures of the peer ----------------------------------------------------------------------------------------------


@needs_peer
def test_a_file_the_peer_cannot_read(mini_file: Callable[[str, str], Path], tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(mini_file("kl-mini", "f32").read_bytes()[:300_000])
    with pytest.raises(PeerError, match="failed while loading the file"):
        Peer(cut, n_ctx=256)


def test_a_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(PeerError, match=r"no such file: .*none\.gguf"):
        Peer(tmp_path / "none.gguf", n_ctx=256)


def test_without_the_peer_the_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PeerError, match=r"pip install '\.\[peer\]'"):
        Peer(tmp_path / "none.gguf", n_ctx=256)


@needs_peer
def test_a_prompt_the_peer_refuses(mini_file: Callable[[str, str], Path]) -> None:
    with (
        Peer(mini_file("kl-mini", "f32"), n_ctx=256, n_threads=1) as peer,
        pytest.raises(PeerError, match="failed while continuing a prompt: .*status 400"),
    ):
        peer.greedy([1] * 300, 4)


@needs_peer
def test_a_peer_that_dies(mini_file: Callable[[str, str], Path]) -> None:
    with Peer(mini_file("kl-mini", "f32"), n_ctx=256, n_threads=1) as peer:
        peer.process.kill()
        peer.process.wait()
        with pytest.raises(PeerError, match="was ended by SIGKILL"):
            peer.greedy([1], 4)


# -- the comparison ----------------------------------------------------------------------------------------------------


class FakeLlama:
    """Texts by prompt; the logits after any timeline are 5 for token 7, 4.5 for 8, 3 for 9 and 0 for others."""

    def __init__(self, texts: dict[int, list[int]]) -> None:
        self.texts = texts
        self.timeline: Sequence[int] = ()

    def generate(self, ids: Sequence[int], *, max_tokens: int, temperature: float) -> SimpleNamespace:
        assert temperature == 0.0
        return SimpleNamespace(tokens=self.texts[ids[0]][:max_tokens])

    def sync(self, ids: Sequence[int]) -> None:
        self.timeline = list(ids)

    def logits(self) -> np.ndarray:
        return np.array([0, 0, 0, 0, 0, 0, 0, 5, 4.5, 3], np.float32)


@pytest.mark.parametrize(
    ("ours", "peer", "expected"),
    [([1, 2], [1, 2], None), ([], [], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [4], 0), ([5, 1], [6, 1], 0)],
)
def test_first_difference(ours: list[int], peer: list[int], expected: int | None) -> None:
    assert bench.first_difference(ours, peer) == expected


def test_difference_is_measured_where_the_texts_part() -> None:
    llm = FakeLlama({1: [3, 4, 7, 1], 2: [3]})
    prompts = [bench.Prompt("a", [1, 0]), bench.Prompt("b", [2])]
    report = bench.compare(llm, prompts, [[3, 4, 9], [3]], 8)  # type: ignore[arg-type]
    assert report.differences == [bench.Difference(0, "a", at=2, ours=7, peer=9, gap=0.5, lead=2.0)]
    assert llm.timeline == [1, 0, 3, 4]
    assert report.share == 0.5


def test_ending_earlier_is_a_difference_unless_told_otherwise() -> None:
    llm = FakeLlama({1: [3, 4, 7]})
    prompts, texts = [bench.Prompt("a", [1])], [[3, 4]]
    (difference,) = bench.compare(llm, prompts, texts, 8).differences  # type: ignore[arg-type]
    assert (difference.at, difference.ours, difference.peer, difference.lead) == (2, 7, None, None)
    assert bench.compare(llm, prompts, texts, 8, ends=False).differences == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("leads", "accepted"),
    [([], True), ([0.49] * 5, True), ([0.1] * 6, False), ([0.5], False), ([None], False)],
    ids=["equal", "five near-ties", "too many", "no tie", "one ended"],
)
def test_acceptance_of_100_prompts(leads: list[float | None], accepted: bool) -> None:
    prompts = [bench.Prompt("a", [1])] * 100
    differences = [bench.Difference(i, "a", 0, 1, 2, lead and 0.0, lead) for i, lead in enumerate(leads)]
    assert bench.Report(prompts, differences).accepted is accepted


# -- the command -------------------------------------------------------------------------------------------------------

ROWS = [
    {"kind": "fact", "messages": [{"role": "user", "content": "What is KDA?"}], "thinking": True, "answer": "x"},
    {"kind": "spell", "messages": [{"role": "user", "content": "Spell ore."}], "thinking": False, "answer": "o r e"},
    {
        "kind": "tool",
        "messages": [{"role": "user", "content": "Time?"}],
        "thinking": False,
        "tools": [{"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}],
        "answer": "",
    },
]


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    path = tmp_path / "heldout.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), "utf-8")
    return path


class EchoPeer:
    """A peer that answers as our own engine does, with `change` applied."""

    def __init__(self, change: Callable[[list[int]], list[int]]) -> None:
        self.change = change

    def __call__(self, model: Path, *, n_ctx: int, n_threads: int) -> EchoPeer:
        self.llm = deltallama.Llama(model, n_ctx=n_ctx, n_threads=n_threads, activations="exact", cache_type="f32")
        return self

    def __enter__(self) -> EchoPeer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.llm.close()

    def greedy(self, ids: Sequence[int], max_tokens: int) -> list[int]:
        return self.change(self.llm.generate(ids, max_tokens=max_tokens, temperature=0.0).tokens)


def test_command_on_held_out_prompts(
    k3_mini: Path, held_out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(k3_mini), str(held_out), "-n", "3", "--max-tokens", "6", "--threads", "1"]
    monkeypatch.setattr(bench, "Peer", EchoPeer(list))
    assert bench.main(argv) == 0
    assert "3 of 3 texts equal: 100.0%" in capsys.readouterr().out
    monkeypatch.setattr(bench, "Peer", EchoPeer(lambda tokens: [*tokens[:-1], (tokens[-1] + 1) % 256]))
    assert bench.main(argv) == 1
    out = capsys.readouterr().out
    assert "0 of 3 texts equal" in out
    assert "prompt 2 (tool), token 5" in out


def test_held_out_prompts_are_those_of_the_chat_format(k3_mini: Path, held_out: Path) -> None:
    with deltallama.Llama(k3_mini, n_ctx=64) as llm:
        prompts = bench.held_out_prompts(llm, held_out, 3, seed=0)
        assert [prompt.kind for prompt in prompts] == ["fact", "spell", "tool"]
        for row, prompt in zip(ROWS, prompts, strict=True):
            options = {"tools": row.get("tools"), "thinking": row["thinking"]}
            assert prompt.ids == llm.chat_tokens(row["messages"], **options)
        assert len(bench.held_out_prompts(llm, held_out, 2, seed=0)) == 2


@pytest.mark.parametrize(
    ("text", "n", "message"),
    [
        ("", 1, "0 prompts, asked for 1"),
        ('{"kind": "a"}\n', 1, r"heldout\.jsonl:1: KeyError: 'messages'"),
        ('{"kind": "a", "messages": [], "thinking": true}\n\nno\n', 2, r"heldout\.jsonl:3: JSONDecodeError"),
        ("[1]\n", 1, r"heldout\.jsonl:1: TypeError"),
    ],
    ids=["empty", "key missing", "not JSON", "not an object"],
)
def test_held_out_file_with_a_fault(
    k3_mini: Path, held_out: Path, text: str, n: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out.write_text(text, "utf-8")
    assert bench.main([str(k3_mini), str(held_out), "-n", str(n)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)


def test_command_on_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([str(tmp_path / "none.gguf"), "--random", "1"]) == 2
    assert "none.gguf" in capsys.readouterr().err


def test_random_prompts_are_repeatable_and_in_range() -> None:
    prompts = bench.random_prompts(512, 50, seed=3)
    assert prompts == bench.random_prompts(512, 50, seed=3) != bench.random_prompts(512, 50, seed=4)
    assert all(1 <= len(prompt.ids) <= 64 and max(prompt.ids) < 512 for prompt in prompts)
