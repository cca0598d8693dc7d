"""Where the shards of a checkpoint may lie: index, sub-folders, links, several threads, and the released model's
headers."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import conversion
import tiny
from conversion import ConversionError
from conversion.checkpoint import Checkpoint
from conversion.shards import LocalShard

sys.path.append(str(Path(__file__).resolve().parent.parent / "bench"))

import released_k3  # noqa: E402

INDEX = "model.safetensors.index.json"


def move_shards(folder: Path, sub: str) -> None:
    """Move all shards into a sub-folder and say so in the index, if there is one."""
    (folder / sub).mkdir(parents=True)
    for shard in list(folder.glob("*.safetensors")):
        shard.rename(folder / sub / shard.name)
    if (folder / INDEX).exists():
        edit_index(folder, lambda file: f"{sub}/{file}")


def edit_index(folder: Path, change: Any) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {name: change(file) for name, file in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))


def refusal(folder: Path) -> str:
    with pytest.raises(ConversionError) as caught:
        Checkpoint(folder)
    return str(caught.value)


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("sub", ["weights", "weights/of/the model"])
def test_shards_in_a_sub_folder(tmp_path: Path, sub: str, index: bool) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model", index=index)
    expected = conversion.convert(folder, tmp_path / "flat.gguf").read_bytes()
    move_shards(folder, sub)
    assert conversion.convert(folder, tmp_path / "deep.gguf").read_bytes() == expected


def test_shards_in_several_sub_folders(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model")
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    places = {name: f"part{number}/{name}" for number, name in enumerate(names)}
    for name, place in places.items():
        (folder / place).parent.mkdir()
        (folder / name).rename(folder / place)
    edit_index(folder, places.__getitem__)
    with Checkpoint(folder) as checkpoint:
        assert [shard.name for shard in checkpoint.shards] == list(places.values())


def test_sub_folders_count_only_without_shards_beside_the_config(tmp_path: Path) -> None:
    """A copy in another format, as many repositories have below `original/`, is not another model."""
    folder = tiny.write_checkpoint(tmp_path / "model", index=False)
    tiny.write_checkpoint(folder / "original", index=False, seed=5)
    with Checkpoint(folder) as checkpoint:
        assert all("/" not in shard.name for shard in checkpoint.shards)
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    with Checkpoint(folder) as checkpoint:
        assert all(shard.name.startswith("original/") for shard in checkpoint.shards)
    tiny.write_checkpoint(folder / "more", index=False, seed=6)
    assert "several sets of shards (more/model-…-of-000003, original/model-…-of-000003)" in refusal(folder)


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("other", ["consolidated.safetensors", "original/model.safetensors"])
def test_the_same_weights_in_another_layout_are_left_out_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, index: bool, other: str
) -> None:
    """Several publishers ship such copies; nobody should have to guess which file was converted."""
    folder = tiny.write_checkpoint(tmp_path / "model", index=index)
    (folder / other).parent.mkdir(exist_ok=True)
    (folder / other).write_bytes(b"not even read")
    with Checkpoint(folder) as checkpoint:
        assert len(checkpoint.shards) == 3
    why = f"not listed in {INDEX}" if index else "no part of model-00001-of-000003.safetensors, …"
    assert caplog.messages == [f"left out, {why}: {other}"]


def test_unlisted_shard_in_a_sub_folder_is_named(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model")
    move_shards(folder, "weights")
    (folder / "weights" / "model-extra.safetensors").write_bytes(b"")
    assert "in the folder but not listed: weights/model-extra.safetensors" in refusal(folder)


@pytest.mark.parametrize("place", ["../", "weights/../../", "./", "weights//", "weights\\", "weights/./", "a\nb/"])
def test_index_entries_outside_or_spelled_oddly_are_refused(tmp_path: Path, place: str) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model")
    (folder / "weights").mkdir()
    for shard in folder.glob("*.safetensors"):
        os.link(shard, tmp_path / shard.name)
        os.link(shard, folder / "weights" / shard.name)
    edit_index(folder, lambda file: place + file)
    assert "is not the name of a file in this folder" in refusal(folder)
    edit_index(folder, lambda file: str(tmp_path / Path(file).name))
    assert "is not the name of a file in this folder" in refusal(folder)


def test_linked_folder_is_no_part_of_the_model(tmp_path: Path) -> None:
    """A link in a downloaded folder may lead anywhere."""
    folder = tiny.write_checkpoint(tmp_path / "model")
    move_shards(folder, "weights")
    (folder / "weights").rename(tmp_path / "elsewhere")
    (folder / "weights").symlink_to(tmp_path / "elsewhere")
    assert "listed but not in the folder: weights/model-00001-of-000003.safetensors" in refusal(folder)


def test_linked_files_are_followed(tmp_path: Path) -> None:
    """A download cache holds the contents elsewhere and a folder of links."""
    folder = tiny.write_checkpoint(tmp_path / "model")
    expected = conversion.convert(folder, tmp_path / "a.gguf").read_bytes()
    (tmp_path / "blobs").mkdir()
    for path in list(folder.iterdir()):
        path.rename(tmp_path / "blobs" / path.name)
        path.symlink_to(Path("..") / "blobs" / path.name)
    assert conversion.convert(folder, tmp_path / "b.gguf").read_bytes() == expected


@pytest.mark.parametrize("name", ["model.safetensors.index.bf16.json", "consolidated.safetensors.index.json"])
def test_index_of_another_name(tmp_path: Path, name: str) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model")
    (folder / INDEX).rename(folder / name)
    edited = json.loads((folder / name).read_text())
    edited["weight_map"]["model.extra.weight"] = "model-00001-of-000003.safetensors"
    (folder / name).write_text(json.dumps(edited))
    assert f"{name} and the shards disagree: listed but in no shard: model.extra.weight" in refusal(folder)
    (folder / "other.safetensors.index.json").write_text("{}")
    assert "several indices and none is model.safetensors.index.json" in refusal(folder)
    (folder / INDEX).write_text('{"weight_map": {}}')
    assert "weight_map is missing or empty" in refusal(folder)


def test_index_with_weight_map_alone(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model")
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({"weight_map": index["weight_map"]}))
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.tensors.keys() == index["weight_map"].keys()


def test_fingerprint_tells_a_changed_shard(tmp_path: Path) -> None:
    folder = tiny.write_checkpoint(tmp_path / "model")
    path = folder / "model-00002-of-000003.safetensors"

    def fingerprint() -> str:
        with Checkpoint(folder) as checkpoint:
            return checkpoint.shards[1].fingerprint()

    first = fingerprint()
    assert fingerprint() == first
    with Checkpoint(folder) as checkpoint:
        before = checkpoint.shards[1].fingerprint()
        status = path.stat()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        assert checkpoint.shards[1].fingerprint() != before  # also of a file that is open
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert fingerprint() == first
    content = path.read_bytes()
    path.write_bytes(content.replace(b'{"format":"pt"}', b'{"format":"np"}', 1))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert fingerprint() != first


def test_reads_from_several_threads(tmp_path: Path) -> None:
    path = tmp_path / "x"
    content = os.urandom(1 << 16)
    path.write_bytes(content)
    shard = LocalShard("x", path)
    wrong = []

    def read(start: int) -> None:
        for offset in range(start, len(content) - 100, 997):
            if shard.read(offset, 100).tobytes() != content[offset : offset + 100]:
                wrong.append(offset)

    threads = [threading.Thread(target=read, args=(start,)) for start in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shard.close()
    assert not wrong


def test_structure_of_the_released_model(tmp_path: Path) -> None:
    """Its names, shapes and types with fewer layers and experts: the plan closes and has the size of the sum."""
    n_layers, n_experts = 6, 3
    n = released_k3.write(tmp_path / "K3", n_layers, n_experts)
    n_kda = len(released_k3.config(n_layers)["text_config"]["linear_attn_config"]["kda_layers"])
    # Outside the layers, in each of them, KDA, MLA, the dense layer, the others and their experts, vision.
    assert n == 5 + 6 * n_layers + 14 * n_kda + 8 * (n_layers - n_kda) + 3 + (n_layers - 1) * (8 + 6 * n_experts) + 168
    planned = conversion.convert(tmp_path / "K3", tmp_path / "{ftype}.gguf", dry_run=True)
    assert planned.name == "mxfp4_moe.gguf" and not planned.exists()


def test_counts_of_the_released_model() -> None:
    """93 layers of 896 experts: 497,220 tensors and 1,560,860,324,864 bytes, as its index says."""
    shards = [released_k3.layer_tensors(0, True, 896), *released_k3.outer_tensors()]
    kda, mla = (released_k3.layer_tensors(1, is_kda, 896) for is_kda in (True, False))
    assert sum(map(len, shards)) + 68 * len(kda) + 24 * len(mla) == 497_220

    def n_bytes(tensors: released_k3.Tensors) -> int:
        sizes = released_k3.ITEM_BYTES
        return sum(sizes[dtype] * released_k3.prod(shape) for dtype, shape in tensors.values())

    assert sum(map(n_bytes, shards)) + 68 * n_bytes(kda) + 24 * n_bytes(mla) == 1_560_860_324_864
