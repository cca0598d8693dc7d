"""Remote conversions against a hub on this machine that drops connections, sends less than asked, says "later" and
lies: the output equals the local conversion byte for byte, or there is a named error and no output."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import conversion
import tiny
from conversion import ConversionError
from conversion.checkpoint import Checkpoint
from conversion.http_ranges import Patience
from conversion.remote import endpoint, open_remote, token
from hub_server import COMMIT, Fault, Hub, Request

NAME = "org-tiny-mxfp4_moe.gguf"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of the model's name, since `general.name` may come from it."""
    return tiny.write_checkpoint(tmp_path / "tiny")


@pytest.fixture
def hub(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub of the environment; the test runs in an empty folder and in the eyes of an unknown user."""
    for name in [name for name in os.environ if name.startswith("HF_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    (tmp_path / "temporary").mkdir()
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "nobody"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr("conversion.remote.Patience", lambda: Patience(attempts=4, first_wait=0.001))
    with Hub(model) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.fixture
def expected(model: Path, tmp_path: Path) -> bytes:
    return conversion.convert(model, tmp_path / "expected.gguf").read_bytes()


def remote(**options: Any) -> Path:
    return conversion.convert("org/tiny", remote=True, **options)


def refusal(**options: Any) -> str:
    """The message of the error; nothing is left, neither under the output's name nor of the small files."""
    with pytest.raises(ConversionError) as caught:
        remote(**options)
    assert not Path(NAME).exists()
    return str(caught.value)


def payloads(change: Callable[[Request], Fault | None]) -> Callable[[Request], Fault | None]:
    """A fault of the answers that hold bytes of shards."""
    return lambda request: (
        change(request) if request.path.endswith(".safetensors") and request.server == "cdn" else None
    )


def many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows as small as these shards."""
    for name, size in (("HEADER", 4096), ("WINDOW", 20_000), ("SMALL", 0)):
        monkeypatch.setattr(f"conversion.windows.{name}", size)


def at_first(fault: Fault, times: int = 1) -> Callable[[Request], Fault | None]:
    """A fault of each range when it is asked for the first time."""
    return lambda request: fault if request.number < times else None


# ---- what works ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cdn", [True, False])
def test_remote_equals_local(hub: Hub, expected: bytes, cdn: bool) -> None:
    hub.cdn = cdn
    path = remote()
    assert path == Path(NAME) and path.read_bytes() == expected
    assert [entry.name for entry in Path().iterdir()] == [NAME]  # nothing else is kept
    assert all("/resolve/" not in request.path or COMMIT in request.path for request in hub.requests)


@pytest.mark.parametrize("preset", ["kl", "k3-odd"])
def test_other_models_and_many_threads(tmp_path: Path, hub: Hub, preset: str) -> None:
    folder = tiny.write_checkpoint(tmp_path / preset / "tiny", preset=preset)
    hub.folder = folder
    local = conversion.convert(folder, tmp_path / "local.gguf", outtype="q8_0")
    assert remote(outfile="x.gguf", outtype="q8_0", threads=6).read_bytes() == local.read_bytes()


FAULTS: dict[str, Callable[[Request], Fault | None]] = {
    "dropped in the body": at_first(Fault(drop_after=15_000)),
    "dropped at once": at_first(Fault(drop_after=0)),
    "dropped before the status": at_first(Fault(drop_after=-1)),
    "dropped again and again": lambda request: Fault(drop_after=1000),
    "short ranges": lambda request: Fault(at_most=20_000),
    "short and dropped": lambda request: Fault(at_most=20_000, drop_after=9_999 if request.n_before % 2 else None),
    "429": at_first(Fault(status=429, headers={"Retry-After": "0"})),
    "503 with a date": at_first(Fault(status=503, headers={"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"})),
    "500 twice": at_first(Fault(status=500), times=2),
    "the link has ended": lambda request: Fault(status=403) if request.n_before % 9 == 8 else None,
    "weak identity": lambda request: Fault(headers={"ETag": 'W/"a"' if request.n_before % 2 else '"a"'}),
    "no identity": lambda request: Fault(headers={"ETag": ""}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_output_is_the_same_after_faults(hub: Hub, expected: bytes, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    many_requests(monkeypatch)
    hub.faults = payloads(FAULTS[name])
    assert remote(outfile="x.gguf", threads=3).read_bytes() == expected


def test_reads_resume_at_the_byte(hub: Hub) -> None:
    hub.faults = payloads(lambda request: Fault(drop_after=1000))
    with open_remote("org/tiny") as model:
        shard = model.open("model-00001-of-000003.safetensors")
        content = (hub.folder / shard.name).read_bytes()
        hub.requests.clear()
        assert shard.read(10, 3500).tobytes() == content[10:3510]
    begins = [
        request.range[0] if request.range else None for request in hub.payload_requests() if request.server == "cdn"
    ]
    assert begins[:4] == [10, 1010, 2010, 3010]


@pytest.mark.parametrize("name", ["config.json", "tiktoken.model", "model.safetensors.index.json"])
@pytest.mark.parametrize("fault", [Fault(drop_after=100), Fault(status=502), Fault(drop_after=100, ignore_range=True)])
def test_small_files_survive_faults(hub: Hub, expected: bytes, name: str, fault: Fault) -> None:
    def faults(request: Request) -> Fault | None:
        return fault if request.path.endswith(name) and request.n_before < 3 else None

    hub.faults = faults
    assert remote().read_bytes() == expected


def test_shards_without_index_and_in_sub_folders(hub: Hub, expected: bytes) -> None:
    (hub.folder / "model.safetensors.index.json").unlink()
    (hub.folder / "weights").mkdir()
    for shard in list(hub.folder.glob("*.safetensors")):
        shard.rename(hub.folder / "weights" / shard.name)
    assert remote().read_bytes() == expected


def test_dry_run_reads_headers_and_small_files_only(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("conversion.windows.HEADER", 4096)
    monkeypatch.setattr("conversion.windows.SMALL", 0)
    assert conversion.cli_main(["--remote", "org/tiny", "--dry-run"]) == 0
    assert capsys.readouterr().out == f"{NAME}\n"
    assert list(Path().iterdir()) == []
    for shard in hub.folder.glob("*.safetensors"):
        header = 8 + int.from_bytes(shard.read_bytes()[:8], "little")
        read = sum(request.sent for request in hub.payload_requests() if request.path.endswith(shard.name))
        # Beside the header: what the first request took beyond it, and A_log of each KDA layer.
        assert read <= header + 4096 + 8 * 128 < shard.stat().st_size


def test_no_byte_is_fetched_twice(hub: Hub, expected: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed expert and its scales, which are small and lie behind it, are one request."""
    for name, size in (("HEADER", 4096), ("WINDOW", 10_000), ("SMALL", 200)):
        monkeypatch.setattr(f"conversion.windows.{name}", size)
    assert remote(threads=1).read_bytes() == expected
    for shard in hub.folder.glob("*.safetensors"):
        asked = [request for request in hub.requests if request.path.endswith(shard.name) and request.server == "cdn"]
        # What the first request took beyond the header is fetched again, and A_log of each KDA layer.
        assert sum(request.sent for request in asked) <= shard.stat().st_size + 4096 + 8 * 400
    with Checkpoint(hub.folder) as checkpoint:
        scales = {(s.shard.name, s.offset) for s in checkpoint.tensors.values() if s.name.endswith("weight_scale")}
    begins = {(r.path.rpartition("/")[2], r.range[0]) for r in hub.requests if r.range is not None}
    assert len(scales) > 100 and not scales & begins


def test_an_interrupted_remote_conversion_is_continued(
    hub: Hub, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.faults = payloads(
        lambda request: Fault(status=404) if "model-00003" in request.path and request.n_before > 30 else None
    )
    many_requests(monkeypatch)
    monkeypatch.setattr("gguf_ext.writer._SYNC_BYTES", 1)
    refusal()
    assert list(Path().iterdir()) != []  # the journal and what is done
    hub.faults = lambda request: None
    assert remote().read_bytes() == expected
    assert [entry.name for entry in Path().iterdir()] == [NAME]


@pytest.mark.parametrize("phase", ["headers", "payloads"])
@pytest.mark.parametrize("fault", [Fault(status=429, headers={"Retry-After": "40"}), Fault(drop_after=0)])
def test_an_interruption_does_not_wait_for_the_server(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, phase: str, fault: Fault
) -> None:
    """Ctrl-C while all threads wait for another try: none of them makes it."""
    monkeypatch.setattr("conversion.remote.Patience", lambda: Patience(attempts=4, first_wait=40))
    many_requests(monkeypatch)
    seen: list[Request] = []

    def faults(request: Request) -> Fault | None:
        is_late = phase == "headers" or request.n_before > 20
        if not request.path.endswith(".safetensors") or not is_late:
            return None
        seen.append(request)
        if len(seen) == 1:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        return fault

    hub.faults = faults
    with pytest.raises(KeyboardInterrupt):
        remote()
    assert seen and all(request.number == 0 for request in seen)


def test_connections_are_kept_open(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each thread and server, not one for each request."""
    many_requests(monkeypatch)
    with open_remote("org/tiny") as model:
        hub.requests.clear()
        before, shard = hub.n_connections, model.open("model-00001-of-000003.safetensors")
        for offset in range(0, shard.size(), 4096):
            shard.read(offset, min(4096, shard.size() - offset))
        assert len(hub.requests) > 50 and hub.n_connections - before == 1
        assert sum(request.server == "hub" for request in hub.requests) == 1  # its redirect is remembered


# ---- what is refused -------------------------------------------------------------------------------------------------


LIES = [
    (Fault(ignore_range=True), r"tiny/model-0000\d.*\.safetensors: the server ignores byte ranges \(it answers 200"),
    (Fault(shift_range=1), r"tiny/model-.*: the server sends the range 'bytes 1-\d+/\d+', expected bytes 0-"),
    (Fault(headers={"Content-Range": "bytes 0-9"}), r"the server sends the range 'bytes 0-9', expected bytes 0-"),
    (Fault(headers={"Content-Range": "bytes 0-9/10"}), r"was changed or listed wrongly: 10 bytes, expected \d+"),
    (Fault(headers={"Content-Encoding": "gzip"}), r"sends it encoded as gzip, which was not asked for"),
    (Fault(status=404), r"model-.*: given up after 4 attempts: http://127\.0\.0\.1:\d+ answers 404"),
    (
        Fault(status=418),
        r"model-0000\d-of-000003\.safetensors: http://127\.0\.0\.1:\d+ answers 418, expected 200 or 206",
    ),
    (Fault(status=503), r"model-.*: given up after 4 attempts: http://127\.0\.0\.1:\d+ answers 503"),
    (Fault(drop_after=-1), r"model-.*: given up after 4 attempts: http://127\.0\.0\.1:\d+: .+"),
    (Fault(drop_after=0), r"model-.*: given up after 4 attempts: the connection ended at byte 0"),
    (Fault(status=429, headers={"Retry-After": "86400"}), r"answers 429, and asks to wait for 86400 s"),
    (Fault(status=301, headers={"Location": "/again"}), r"more than 10 redirects"),
    (Fault(status=302, headers={"Location": "http://[x:y/"}), r"redirects to something that is no address"),
    (Fault(status=302, headers={"Location": "http://host:port/"}), r"redirects to something that is no address"),
    (Fault(status=302, headers={"Location": "file:///etc/passwd"}), r"redirects to file://, which is not encrypted"),
]


@pytest.mark.parametrize(("fault", "message"), LIES)
def test_lies_are_refused_by_name(hub: Hub, fault: Fault, message: str) -> None:
    hub.faults = lambda request: fault if request.server == "cdn" else None
    text = refusal()
    assert re.search(message, text), text
    assert "signature" not in text  # links are secrets


@pytest.mark.parametrize("where", ["hub", "cdn"])
def test_a_file_that_changes_meanwhile_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    many_requests(monkeypatch)
    hub.cdn = where == "cdn"
    right = hub.etag

    def etag(name: str) -> str:
        is_late = sum(request.path.endswith(name) for request in hub.requests) > 30
        return '"other"' if is_late and name == "model-00002-of-000003.safetensors" else right(name)

    hub.etag = etag
    pattern = r"^org/tiny/model-00002-of-000003\.safetensors was changed while it was read: version .*, \"other\" now"
    assert re.search(pattern, refusal())


def test_a_file_that_grows_meanwhile_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conversion.windows.HEADER", 4096)
    hub.etag = lambda name: ""
    shard = hub.folder / "model-00002-of-000003.safetensors"
    with open_remote("org/tiny") as model, Checkpoint(model.folder, model) as checkpoint:
        with shard.open("ab") as file:
            file.write(b"more")
        source = max((s for s in checkpoint.tensors.values() if s.shard.name == shard.name), key=lambda s: s.n_bytes)
        with pytest.raises(ConversionError, match=r"model-00002-of-000003\.safetensors was changed"):
            source.raw()


def test_shard_shorter_than_its_header_says(hub: Hub) -> None:
    shard = hub.folder / "model-00003-of-000003.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    assert "org/tiny/model-00003-of-000003.safetensors is truncated" in refusal()


def test_messages_name_the_model_not_the_temporary_folder(hub: Hub, tmp_path: Path) -> None:
    (hub.folder / "config.json").write_text("{")
    message = refusal()
    assert message.startswith("org/tiny/config.json is not valid JSON") and str(tmp_path) not in message
    (hub.folder / "config.json").unlink()
    assert refusal().startswith("org/tiny/config.json cannot be read: No such file")


@pytest.mark.parametrize(
    ("listing", "message"),
    [
        ({"sha": None}, "gives no listing of a model"),
        ({"sha": "../x"}, "gives no listing of a model"),
        ({"siblings": {}}, "gives no listing of a model"),
        ({"siblings": [{"size": 1}]}, "an entry without a file name"),
        ({"siblings": []}, "org/tiny/config.json cannot be read"),
    ],
)
def test_odd_listings(hub: Hub, listing: dict[str, Any], message: str) -> None:
    hub.listing_extra = listing
    assert message in refusal()


def test_listed_names_that_lead_elsewhere_are_left_alone(hub: Hub, expected: bytes, tmp_path: Path) -> None:
    names = ["../config.json", "/tmp-x/config.json", "../../model.safetensors.index.json", "../model-x.safetensors"]
    hub.listing_extra = {"siblings": hub.listing()["siblings"] + [{"rfilename": name, "size": 2} for name in names]}
    assert remote().read_bytes() == expected
    assert not any(".." in request.path for request in hub.requests)


@pytest.mark.parametrize(
    "name", ["tiny", "a/b/c", "../x", "org/..", "org/", "/tiny", "org/ti ny", "org/tiny?x", "-/a/b"]
)
def test_names_that_are_no_models(hub: Hub, name: str) -> None:
    with pytest.raises(ConversionError, match="is not the name of a model on the hub, expected ORG/NAME"):
        conversion.convert(name, remote=True)
    assert hub.requests == []


def test_unknown_model(hub: Hub) -> None:
    with pytest.raises(ConversionError, match=r"org/other at revision main: .* has no such file, model or revision"):
        conversion.convert("org/other", remote=True)


def test_revision(hub: Hub, expected: bytes) -> None:
    assert remote(revision="refs/pr/1").read_bytes() == expected
    assert hub.requests[0].path == "/api/models/org/tiny/revision/refs/pr/1"
    with pytest.raises(ConversionError, match="expected one only with --remote"):
        conversion.convert(hub.folder, "x.gguf", revision="main")
    with pytest.raises(SystemExit) as caught:
        conversion.cli_main([str(hub.folder), "--revision", "main"])
    assert caught.value.code == 2


# ---- token and endpoint ----------------------------------------------------------------------------------------------


def test_token_goes_to_the_hub_only(hub: Hub, expected: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub.token = "sesame"
    assert "the model is gated or private; a token with access goes into HF_TOKEN" in refusal()
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login a password b\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))  # must not take the token's place, nor go to anybody else
    monkeypatch.setenv("HF_TOKEN", "sesame")
    hub.requests.clear()
    assert remote().read_bytes() == expected
    sent = {
        server: {r.headers.get("authorization") for r in hub.requests if r.server == server}
        for server in ("hub", "cdn")
    }
    assert sent == {"hub": {"Bearer sesame"}, "cdn": {None}}


def test_where_token_and_endpoint_come_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING_FACE_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert token() is None and endpoint() == "https://huggingface.co"
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "token").write_text("cached\n")
    assert token() == "cached"
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    assert token() is None
    monkeypatch.delenv("HF_HUB_DISABLE_IMPLICIT_TOKEN")
    (tmp_path / "token").write_text("of home")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert token() == "of home"
    (tmp_path / "other").write_text("of path")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "other"))
    assert token() == "of path"
    monkeypatch.setenv("HF_TOKEN", "given")
    assert token() == "given"
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example/")
    assert endpoint() == "http://mirror.example"
    for wrong in ("mirror.example", "ftp://mirror.example", "http://"):
        monkeypatch.setenv("HF_ENDPOINT", wrong)
        with pytest.raises(ConversionError, match="expected an http or https address"):
            endpoint()


def test_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in refusal()
    assert hub.requests == []
