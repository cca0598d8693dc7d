"""Fixtures every test file may use: golden data, tiny checkpoints, fresh random numbers with a printed seed."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The matrices here are small: threads of the linear algebra library cost more than they give, most of all on a busy
# machine. It reads these once, when numpy is imported.
for _variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

import numpy as np  # noqa: E402
import pytest  # noqa: E402

import conversion  # noqa: E402
import tiny  # noqa: E402
from engine import Engine  # noqa: E402
from timelines import Fresh  # noqa: E402

if TYPE_CHECKING:
    from deltallama import Llama

SEED_VARIABLE = "DELTALLAMA_TEST_SEED"


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of golden data (see its README.md)."""
    return Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_checkpoint(preset, **options)`` writes a tiny checkpoint once per session and returns its folder.

    The folder is shared: tests only read it. For a folder of one's own call ``tiny.write_checkpoint(tmp_path, ...)``.
    """
    root = tmp_path_factory.mktemp("tiny")
    written: dict[str, Path] = {}

    def factory(preset: str = "k3", **options: Any) -> Path:
        key = repr((preset, sorted(options.items())))
        if key not in written:
            written[key] = tiny.write_checkpoint(root / f"{len(written)}-{preset}", preset=preset, **options)
        return written[key]

    return factory


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``gguf(model_dir, outtype)`` converts once per session and returns the file. Shared: tests only read it."""
    folder = tmp_path_factory.mktemp("gguf")
    done: dict[tuple[Path, str], Path] = {}

    def convert(model_dir: Path, outtype: str = "f32") -> Path:
        key = (model_dir, outtype)
        if key not in done:
            done[key] = conversion.convert(model_dir, outfile=folder / f"{len(done)}.gguf", outtype=outtype)
        return done[key]

    return convert


MINIS = ["k3-mini", "kl-mini"]


@pytest.fixture(params=MINIS)
def mini(request: pytest.FixtureRequest, golden: Path, gguf: Callable[..., Path]) -> Path:
    """The F32 file of each golden checkpoint in turn."""
    return gguf(golden / request.param)


@pytest.fixture
def k3_mini(golden: Path, gguf: Callable[..., Path]) -> Path:
    return gguf(golden / "k3-mini")


@pytest.fixture(scope="session")
def k3_path(tiny_checkpoint: Callable[..., Path], gguf: Callable[..., Path]) -> Path:
    """The F32 file of the tiny Kimi-K3 checkpoint."""
    return gguf(tiny_checkpoint("k3"))


@pytest.fixture(scope="module")
def opened_llm(k3_path: Path) -> Iterator[Llama]:
    """One opened model per file of tests; use it through ``llm``."""
    from deltallama import Llama  # not above: most tests do without the binding

    with Llama(k3_path, n_ctx=1024) as model:
        yield model


@pytest.fixture
def llm(opened_llm: Llama) -> Llama:
    """The tiny Kimi-K3 model, with an empty timeline of 1024 positions."""
    opened_llm.reset()
    return opened_llm


@pytest.fixture
def fresh(mini: Path) -> Iterator[Fresh]:
    """``fresh.check(session, tokens)`` compares with a fresh run on the file of ``mini``."""
    with Fresh(mini) as runs:
        yield runs


@pytest.fixture
def k3_fresh(k3_mini: Path) -> Iterator[Fresh]:
    with Fresh(k3_mini) as runs:
        yield runs


@pytest.fixture
def engine(mini: Path) -> Iterator[Engine]:
    """``mini`` with four sessions of 128 positions."""
    with Engine(mini, n_ctx=128, n_sessions=4) as opened:
        yield opened


def session_seed() -> int:
    """The seed of this run: ``DELTALLAMA_TEST_SEED`` when set, else fresh."""
    text = os.environ.get(SEED_VARIABLE)
    return int(text) if text else int.from_bytes(os.urandom(4), "little")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SEED_KEY] = session_seed()


def pytest_report_header(config: pytest.Config) -> str:
    return f"random inputs: {SEED_VARIABLE}={config.stash[SEED_KEY]}"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Repeat the seed beside each failure, where it is looked for."""
    if report.failed:
        for name, value in report.user_properties:
            if name == SEED_VARIABLE:
                report.sections.append(("random inputs", f"repeat with {SEED_VARIABLE}={value}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What tests counted (see ``summary``), whether they passed or not."""
    lines = [
        f"{report.nodeid}: {value}" if report.failed else str(value)
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        if report.when == "call"
        for name, value in report.user_properties
        if name == SUMMARY
    ]
    if lines:
        terminalreporter.section("counted by the tests")
        for line in lines:
            terminalreporter.write_line(line)


SEED_KEY = pytest.StashKey[int]()
SUMMARY = "summary"


@pytest.fixture
def summary(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """``summary(line)``: a line at the end of the output of the whole run, for what a test counts but may not hide."""
    return lambda line: request.node.user_properties.append((SUMMARY, line))


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed for this test: fresh in every run, repeatable with ``DELTALLAMA_TEST_SEED``, named on failure."""
    value = request.config.stash[SEED_KEY]
    request.node.user_properties.append((SEED_VARIABLE, value))
    # Two tests of one run get different numbers.
    return zlib.crc32(request.node.nodeid.encode(), value)


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """Random numbers for this test's inputs (see ``seed``)."""
    return np.random.default_rng(seed)
