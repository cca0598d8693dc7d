"""The trainable torch tower against the definition, and what training and export promise. Needs the extra `train`."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference import Checkpoint
from reference import vision as reference
from tiny_vision import tiny_vision_checkpoint

torch = pytest.importorskip("torch", reason="the extra `train` (torch) is not installed")
pytest.importorskip("safetensors", reason="the extra `train` (safetensors) is not installed")

TRAIN = Path(__file__).resolve().parent.parent / "models" / "train"
sys.path.insert(0, str(TRAIN))

import bpe  # noqa: E402
import export  # noqa: E402
import export_vision  # noqa: E402
import pictures  # noqa: E402
import train_vision  # noqa: E402
import vision  # noqa: E402
import vision_data  # noqa: E402
from model import Layout  # noqa: E402
from vision import Vision  # noqa: E402

pytestmark = pytest.mark.torch
NANO = TRAIN.parent / "kimi-k3-nano"


@pytest.fixture(scope="module")
def rng() -> np.random.Generator:
    seed = np.random.SeedSequence().entropy
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture(scope="module")
def enc() -> Any:
    return bpe.encoding(bpe.load(NANO / "tiktoken.model"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"vt_num_hidden_layers": 3, "vt_num_attention_heads": 2, "qkv_hidden_size": 56},
        {"init_pos_emb_height": 5, "init_pos_emb_width": 12, "vt_hidden_size": 24, "mm_hidden_size": 24},
    ],
    ids=["plain", "other heads", "odd grid"],
)
def test_features_equal_the_reference(options: dict[str, Any], tmp_path: Path, rng: np.random.Generator) -> None:
    """Native, shrunk, enlarged and odd grids in one batch, and each alone."""
    folder = tiny_vision_checkpoint(tmp_path / "m", vision=options)
    model = export_vision.vision_from_checkpoint(folder, torch.float64)
    grids = [(8, 8), (2, 4), (16, 10), (6, 2), (8, 8), (10, 14)]
    patches = rng.standard_normal((sum(h * w for h, w in grids), 3, 14, 14))
    config = json.loads((folder / "config.json").read_text())["vision_config"]
    weights = reference.tower_weights(Checkpoint(folder))
    expected = reference.tower(weights, config, patches, [(1, *grid) for grid in grids])
    with torch.no_grad():
        together = model(torch.from_numpy(patches), grids).numpy()
        at = row = 0
        for (h, w), wanted in zip(grids, expected, strict=True):
            alone = model(torch.from_numpy(patches[at : at + h * w]), [(h, w)]).numpy()
            assert np.abs(alone - wanted).max() < 1e-10 * wanted.std(), (h, w)
            assert np.abs(together[row : row + len(wanted)] - wanted).max() < 1e-10 * wanted.std(), (h, w)
            at, row = at + h * w, row + len(wanted)


def test_golden_features(golden: Path) -> None:
    from safetensors.torch import load_file

    folder = golden / "vision-mini"
    model = Vision(json.loads((folder / "config.json").read_text())["vision_config"])
    model.load_state_dict(load_file(folder / "model.safetensors"))
    with np.load(folder / "golden.npz") as arrays, torch.no_grad():
        at = 0
        for number, (t, h, w) in enumerate(arrays["grid_thws"].tolist()):
            item = arrays["pixel_values"][at : at + t * h * w]
            at += t * h * w
            if t == 1:
                found = model(torch.from_numpy(item), [(h, w)]).numpy()
                np.testing.assert_allclose(found, arrays[f"features_{number}"], rtol=0, atol=2e-5)


def test_rows_stand_where_tokens_would(enc: Any, rng: np.random.Generator) -> None:
    """With the embeddings of tokens as rows, the answers' losses are those of these tokens."""
    text = export.from_checkpoint(NANO, torch.float64)
    draw = random.Random(int(rng.integers(1 << 30)))
    samples = vision_data.drawn(enc, draw, 5)
    common = vision_data.before_size(enc)
    cut = train_vision.UNLEARNED_END
    with torch.no_grad():
        _, caches = text(torch.tensor(common), Layout([len(common)]))
        words = torch.from_numpy(rng.integers(0, 1792, sum(s.ids.count(-1) for s in samples)))
        found, _ = train_vision.losses(text, caches, samples, text.embed_tokens[words])
        at, expected = 0, []
        for s in samples:
            ids = s.ids[:-cut]
            for i, token in enumerate(ids):
                if token < 0:
                    ids[i], at = int(words[at]), at + 1
            hidden, _ = text(torch.tensor(common + ids), Layout([len(common) + len(ids)]))
            scores = text.logits(hidden[len(common) :]).log_softmax(-1)
            expected += [-scores[i - 1, ids[i]] for i, learn in enumerate(s.learn[:-cut]) if learn]
    assert torch.allclose(found, torch.stack(expected), rtol=0, atol=1e-9)


def test_pixels_equal_the_preprocessing_of_the_binding() -> None:
    from deltallama import images

    draw = random.Random(5)
    for kind in pictures.ASKS:
        scene = pictures.scene(draw, kind)
        picture = pictures.picture(scene)
        found = images.preprocess(picture, images.ImageLimits())
        ours = vision_data.patches(picture)
        assert tuple(found.grid) == vision_data.grid_of(scene)
        assert found.n_tokens == len(vision_data.quarters(vision_data.grid_of(scene)))
        np.testing.assert_allclose(found.pixels, ours, rtol=0, atol=1e-6)


def test_codes_name_what_is_drawn() -> None:
    draw = random.Random(6)
    for kind in list(pictures.ASKS) * 5:
        scene = pictures.scene(draw, kind)
        names = [names[code] for names, code in zip(vision_data.CODES, vision_data.codes(scene), strict=True)]
        assert names[0] == scene.truth["colour"].lower().rstrip(".")
        if "digit" in scene.truth:
            assert names[1] == "number" and names[3] == f"digit {scene.truth['digit']}"
        else:
            assert scene.truth["both"] == f"{names[0].capitalize()} {names[1]}."
        assert names[2] == (scene.truth["size"].lower().rstrip(".") if "size" in scene.truth else str(len(scene.items)))


def test_export_holds_what_was_trained(tmp_path: Path) -> None:
    """Bit for bit after the rounding to BF16; the text model's shards and tensors keep their bytes; a second export
    replaces the first."""
    folder = tmp_path / "m"
    shutil.copytree(NANO, folder)
    before = export.read_tensors(folder, lambda name: name.startswith(export.PREFIX))
    shards = sorted(path.read_bytes() for path in folder.glob("*.safetensors"))
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = Vision(vision.config(256))
        export_vision.add_vision(model, folder)
        loaded = export_vision.vision_from_checkpoint(folder).state_dict()
        for name, value in model.state_dict().items():
            assert torch.equal(loaded[name], value.bfloat16().float()), name
    after = export.read_tensors(folder, lambda name: name.startswith(export.PREFIX))
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in after)
    files = sorted(folder.glob("*.safetensors"))
    texts = {path.read_bytes() for path in files[:-1]}
    assert texts <= set(shards) and len(texts) == len(files) - 1
    assert {path.name for path in folder.iterdir()} == {path.name for path in NANO.iterdir()}
    text = export.from_checkpoint(folder)
    assert torch.equal(text.embed_tokens, export.from_checkpoint(NANO).embed_tokens)


def test_shipped_weights_equal_the_reference() -> None:
    model = export_vision.vision_from_checkpoint(NANO, torch.float64)
    weights = reference.tower_weights(Checkpoint(NANO))
    for row in pictures.held_out_rows()[::100]:
        scene = pictures.Scene.from_json(row["scene"])
        patches, grid = vision_data.patches(pictures.picture(scene)), vision_data.grid_of(scene)
        (expected,) = reference.tower(weights, model.cfg, patches, [(1, *grid)])
        with torch.no_grad():
            found = model(torch.from_numpy(patches).double(), [grid]).numpy()
        assert np.abs(found - expected).max() < 1e-9 * expected.std()


def test_training_learns_and_resumes(tmp_path: Path, run: Callable[..., str]) -> None:
    """Every stage, interrupted and continued, ends with the weights of one that was not."""
    for stage in train_vision.STEPS:
        run(stage, tmp_path / "whole")
        run(stage, tmp_path / "parts", "--stop-at", "3")
        run(stage, tmp_path / "parts")
        states = [torch.load(tmp_path / name / f"{stage}.pt", weights_only=False) for name in ("whole", "parts")]
        assert states[0]["step"] == states[1]["step"] == 4
        for name, value in states[0]["model"].items():
            assert torch.equal(value, states[1]["model"][name]), (stage, name)
    printed = run("look", tmp_path / "long", "--steps", "24", "--batch", "12").splitlines()
    values = [float(line.split()[3]) for line in printed if line.startswith("step")]
    assert sum(values[-6:]) < sum(values[:6]) - 1


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    monkeypatch.setattr(train_vision, "PRINT_EVERY", 1)
    monkeypatch.setattr(train_vision, "N_DEV", 2)

    def start(stage: str, folder: Path, *options: str) -> str:
        few = ["--steps", "4", "--batch", "4", "--warm-up", "1", "--fit-steps", "2", "--eval-every", "2"]
        monkeypatch.setattr(sys, "argv", ["train_vision.py", stage, str(folder), *few, *options])
        train_vision.main()
        return capsys.readouterr().out

    return start
