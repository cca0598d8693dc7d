"""The C interface itself: struct sizes, null arguments, who may call what when, and what a second thread gets."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import native
from engine import Engine, Session
from timelines import Fails, Fresh, prompt, status_of

ffi, lib = native.load()
HEADER = native.cdef_region(native.INCLUDE / "deltallama.h")
FUNCTIONS = sorted(set(re.findall(r"\b(delta_\w+)\(", HEADER)))
SIZED = [
    "delta_device_info",
    "delta_model_info",
    "delta_memory",
    "delta_stats",
    "delta_model_params",
    "delta_sync_result",
    "delta_op_profile",
]


def sized(name: str) -> Any:
    struct = ffi.new(f"{name} *")
    struct.size = ffi.sizeof(name)
    return struct


@pytest.fixture(scope="module")
def path(golden: Path, gguf: Callable[..., Path]) -> Path:
    return gguf(golden / "kl-mini")


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    with Engine(path, n_ctx=64, n_sessions=3, n_batch=4) as opened:
        yield opened


# -- library ---------------------------------------------------------------------------------------------------------


def test_version_and_names() -> None:
    assert lib.delta_abi_version() == lib.DELTA_ABI_VERSION
    assert re.fullmatch(rb"\d+\.\d+\.\d+\w*", ffi.string(lib.delta_version()))
    info = ffi.string(lib.delta_build_info()).decode()
    assert "compiler" in info and "generic" in info and "sanitizers" in info
    statuses = {name: value for name, value in ffi.typeof("delta_status").relements.items()}
    assert len(statuses) == 13
    for name, value in statuses.items():
        assert ffi.string(lib.delta_status_name(value)).decode() == name.removeprefix("DELTA_")
    for unknown in (13, -1):
        assert ffi.string(lib.delta_status_name(ffi.cast("delta_status", unknown))) == b"UNKNOWN"


def test_struct_layout_is_the_one_of_a_c_compiler(tmp_path: Path) -> None:
    """cffi in ABI mode computes sizes and offsets itself; no compiler checks them at run time."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to ask")
    structs = [t for t in ffi.list_types()[0] if ffi.typeof(t).kind == "struct" and ffi.typeof(t).fields]
    assert {*SIZED, "delta_sampling_params", "delta_token_bias", "delta_top_token", "delta_batch_item"} <= set(structs)
    lines, expected = [], []
    for name in structs:
        if name.startswith("delta_test"):
            continue
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ffi.sizeof(name)}")
        for field, what in ffi.typeof(name).fields:
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
            expected.append(f"{name}.{field} {what.offset}")
    source = tmp_path / "layout.c"
    source.write_text(
        '#include <stdio.h>\n#include "deltallama.h"\nint main(void) {\n' + "\n".join(lines) + "\nreturn 0;\n}\n"
    )
    command = [compiler, "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-I", native.INCLUDE, source]
    subprocess.run([*command, "-o", tmp_path / "layout"], check=True)
    printed = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True).stdout
    assert printed.splitlines() == expected


def test_defaults() -> None:
    params = ffi.new("delta_model_params *")
    lib.delta_model_params_init(params)
    assert params.size == ffi.sizeof("delta_model_params")
    assert (params.activations, params.cache_type, params.checkpoint_bytes) == (lib.DELTA_AUTO, 1, 2**64 - 1)
    assert (params.n_ctx, params.n_batch, params.n_outputs, params.n_sessions, params.n_threads, params.poison) == (
        0,
    ) * 6
    assert params.device == params.progress == params.progress_user == ffi.NULL
    sampling = ffi.new("delta_sampling_params *")
    lib.delta_sampling_params_init(sampling)
    assert sampling.size == ffi.sizeof("delta_sampling_params")
    found = [sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p]
    assert np.allclose(found, [0.8, 40, 0.95, 0.05])
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty, sampling.seed) == (
        1,
        0,
        0,
        0,
    )
    lib.delta_model_params_init(ffi.NULL)  # nothing to fill in
    lib.delta_sampling_params_init(ffi.NULL)


def test_devices() -> None:
    kinds = []
    for index in range(lib.delta_device_count()):
        info = sized("delta_device_info")
        native.check(lib.delta_device_info_get(index, info))
        kinds.append(ffi.string(info.kind))
        assert ffi.string(info.name) and 0 < info.bytes_free <= info.bytes_total
        assert info.size == ffi.sizeof("delta_device_info")
    assert kinds == [b"cpu", b"ref"]
    with Fails("ARG", "device 2", "0..1"):
        native.check(lib.delta_device_info_get(2, sized("delta_device_info")))


def test_last_error_belongs_to_the_thread(engine: Engine) -> None:
    session = engine.session()
    with Fails("ARG", "token 600"):
        session.eval([600])
    seen = []

    def other() -> None:
        seen.append(native.last_error())
        lib.delta_session_truncate(session.handle, 9)
        seen.append(native.last_error())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen[0] == "" and "to 9" in seen[1]
    assert "token 600" in native.last_error()


# -- arguments -------------------------------------------------------------------------------------------------------


class Calls:
    """Valid arguments for every function that returns a status."""

    # Pointers that may be null: they are optional, or null is a valid value.
    OPTIONAL = {
        ("delta_model_close", 0),
        ("delta_session_free", 0),
        ("delta_model_meta", 2),
        ("delta_session_sync", 3),
        ("delta_session_sync", 4),
        ("delta_session_sync", 5),
        ("delta_session_sync_pieces", 3),
        ("delta_session_sync_pieces", 4),
        ("delta_session_sync_pieces", 5),
        ("delta_quantize_rows", 6),
        ("delta_quantize_rows", 8),
        ("delta_repack_mxfp4", 6),
    }

    def __init__(self, engine: Engine, path: Path, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.session = engine.session()
        self.session.sync([1, 2, 3])
        self.saved = str(folder / "saved").encode()
        self.session.save(folder / "saved")
        native.check(lib.delta_model_collect_inputs(engine.model))
        self.path = str(path).encode()
        self.params = ffi.new("delta_model_params *")
        lib.delta_model_params_init(self.params)
        self.sampling = ffi.new("delta_sampling_params *")
        lib.delta_sampling_params_init(self.sampling)
        self.tokens = ffi.new("int32_t[]", [4, 5])
        self.item = ffi.new("delta_batch_item *", [self.session.handle, self.tokens, 2, lib.DELTA_LOGITS_LAST])
        self.piece = ffi.new("delta_piece *", {"tokens": self.tokens, "n": 2})
        self.floats = ffi.new("float[]", 64)
        self.bytes = ffi.new("char[]", 256)
        self.octets = ffi.new("uint8_t[]", 64)

    def arguments(self, name: str) -> list[Any]:
        model, session = self.engine.model, self.session.handle
        tokens, size = self.tokens, ffi.new("size_t *")
        table: dict[str, list[Any]] = {
            "delta_device_info_get": [0, sized("delta_device_info")],
            "delta_model_open": [self.path, self.params, ffi.new("delta_model **")],
            "delta_model_plan": [self.path, self.params, sized("delta_model_info"), sized("delta_memory")],
            "delta_model_close": [model],
            "delta_model_info_get": [model, sized("delta_model_info")],
            "delta_model_memory": [model, sized("delta_memory")],
            "delta_model_meta": [model, b"general.architecture", self.bytes, 256, size],
            "delta_model_stats": [model, sized("delta_stats")],
            "delta_model_profile": [model, 1],
            "delta_model_profile_get": [model, 0, sized("delta_op_profile")],
            "delta_model_read_bandwidth": [model, 1, ffi.new("double *")],
            "delta_model_collect_inputs": [model],
            "delta_model_input_stats": [model, 0, sized("delta_input_stats")],
            "delta_session_create": [model, ffi.new("delta_session **")],
            "delta_session_free": [session],
            "delta_session_sync": [session, tokens, 2, ffi.NULL, ffi.NULL, sized("delta_sync_result")],
            "delta_session_sync_pieces": [session, self.piece, 1, ffi.NULL, ffi.NULL, sized("delta_sync_result")],
            "delta_session_eval": [session, tokens, 2, lib.DELTA_LOGITS_LAST],
            "delta_eval_batch": [model, self.item, 1],
            "delta_session_tokens": [session, tokens, 2, size],
            "delta_session_truncate": [session, 1],
            "delta_session_checkpoint": [session],
            "delta_session_fork": [session, ffi.new("delta_session **")],
            "delta_session_logits": [session, -1, ffi.new("const float **"), ffi.new("uint32_t *")],
            "delta_session_top": [session, -1, ffi.new("delta_top_token[]", 3), 3],
            "delta_session_sample": [session, self.sampling, ffi.new("int32_t *")],
            "delta_session_save": [session, self.saved],
            "delta_session_load": [session, self.saved],
            "delta_session_stats": [session, sized("delta_stats")],
            "delta_quantize_rows": [8, self.bytes, 0, self.floats, 2, 32, ffi.NULL, 1, ffi.NULL],
            "delta_dequantize_rows": [8, self.bytes, self.floats, 2, 32, 1],
            "delta_repack_mxfp4": [self.octets, self.octets, self.bytes, 2, 32, 1, ffi.NULL],
        }
        return table[name]


CREATES_OR_FREES = {
    "delta_model_open",
    "delta_model_close",
    "delta_session_create",
    "delta_session_fork",
    "delta_session_free",
}
# Those of vision towers need a model that has one: test_vision_engine.py.
STATUS_FUNCTIONS = [
    name
    for name in FUNCTIONS
    if ffi.typeof(getattr(lib, name)).result is ffi.typeof("delta_status") and not name.startswith("delta_vision_")
]


@pytest.mark.parametrize("name", STATUS_FUNCTIONS)
def test_null_is_an_error_wherever_a_pointer_is_needed(engine: Engine, path: Path, tmp_path: Path, name: str) -> None:
    calls = Calls(engine, path, tmp_path)
    function = getattr(lib, name)
    types = ffi.typeof(function).args
    before = calls.session.tokens
    checked = 0
    for index, kind in enumerate(types):
        if kind.kind != "pointer" or (name, index) in Calls.OPTIONAL:
            continue
        arguments = calls.arguments(name)
        arguments[index] = ffi.NULL
        with Fails("ARG", "null"):
            native.check(function(*arguments))
        checked += 1
    assert checked > 0 or name in ("delta_model_close", "delta_session_free")
    assert calls.session.tokens == before
    if name not in (
        "delta_model_close",
        "delta_model_open",
        "delta_session_free",
        "delta_session_create",
        "delta_session_fork",
    ):
        arguments = calls.arguments(name)  # and they were valid but for the null
        if name.startswith("delta_session_fork"):
            return
        native.check(function(*arguments))


def test_null_handles_of_functions_without_a_status() -> None:
    assert lib.delta_model_op_count(ffi.NULL) == 0
    assert lib.delta_session_length(ffi.NULL) == 0
    assert lib.delta_session_logits_count(ffi.NULL) == 0
    assert lib.delta_model_is_stop(ffi.NULL, 0) == 0
    lib.delta_model_cancel(ffi.NULL)
    native.check(lib.delta_model_close(ffi.NULL))
    native.check(lib.delta_session_free(ffi.NULL))
    native.check(lib.delta_vision_close(ffi.NULL))


@pytest.mark.parametrize("change", [-4, 4, None])
@pytest.mark.parametrize(
    "name,index,struct",
    [
        ("delta_device_info_get", 1, "delta_device_info"),
        ("delta_model_open", 1, "delta_model_params"),
        ("delta_model_plan", 1, "delta_model_params"),
        ("delta_model_plan", 2, "delta_model_info"),
        ("delta_model_plan", 3, "delta_memory"),
        ("delta_model_info_get", 1, "delta_model_info"),
        ("delta_model_memory", 1, "delta_memory"),
        ("delta_model_stats", 1, "delta_stats"),
        ("delta_model_profile_get", 2, "delta_op_profile"),
        ("delta_session_stats", 1, "delta_stats"),
        ("delta_session_sync", 5, "delta_sync_result"),
        ("delta_session_sync_pieces", 5, "delta_sync_result"),
        ("delta_session_sample", 1, "delta_sampling_params"),
    ],
)
def test_a_struct_of_another_size_is_refused(
    engine: Engine, path: Path, tmp_path: Path, name: str, index: int, struct: str, change: int | None
) -> None:
    calls = Calls(engine, path, tmp_path)
    arguments = calls.arguments(name)
    right = ffi.sizeof(struct)
    arguments[index].size = 0 if change is None else right + change
    given = bytes(ffi.buffer(arguments[index]))
    with Fails("ABI", struct, str(arguments[index].size), str(right)):
        native.check(getattr(lib, name)(*arguments))
    assert bytes(ffi.buffer(arguments[index])) == given
    assert calls.session.tokens == [1, 2, 3]


def test_metadata(engine: Engine) -> None:
    needed, buffer = ffi.new("size_t *"), ffi.new("char[]", 64)
    key = b"general.architecture"
    native.check(lib.delta_model_meta(engine.model, key, ffi.NULL, 0, needed))
    assert needed[0] == len("kimi-linear") + 1
    needed[0] = 77
    with Fails("ARG", "general.architecture", "12", "11"):
        native.check(lib.delta_model_meta(engine.model, key, buffer, 11, needed))
    assert needed[0] == 77 and bytes(ffi.buffer(buffer)) == bytes(64)  # untouched
    native.check(lib.delta_model_meta(engine.model, key, buffer, 12, needed))
    assert ffi.string(buffer) == b"kimi-linear"
    with Fails("ARG", "no key", "general.absent"):
        native.check(lib.delta_model_meta(engine.model, b"general.absent", buffer, 64, needed))


def test_tokens_into_a_small_buffer(engine: Engine) -> None:
    session = engine.session()
    session.eval([5, 6, 7])
    out, n = ffi.new("int32_t[]", [-1] * 4), ffi.new("size_t *")
    native.check(lib.delta_session_tokens(session.handle, out, 2, n))
    assert (list(out), n[0]) == ([5, 6, -1, -1], 3)
    native.check(lib.delta_session_tokens(session.handle, ffi.NULL, 0, n))
    assert n[0] == 3


def test_info_and_stop_tokens(engine: Engine, path: Path) -> None:
    info, memory = sized("delta_model_info"), sized("delta_memory")
    native.check(lib.delta_model_info_get(engine.model, info))
    assert ffi.string(info.architecture) == b"kimi-linear"
    assert info.n_layer == info.n_layer_kda + info.n_layer_mla
    assert (info.n_ctx, info.n_sessions, info.n_batch) == (64, 3, 4)
    assert 0 < info.n_params_active < info.n_params
    assert info.size == ffi.sizeof("delta_model_info")
    stops = [t for t in range(-2, info.n_vocab + 2) if lib.delta_model_is_stop(engine.model, t)]
    assert info.token_eos in stops and len(stops) >= 2
    native.check(lib.delta_model_memory(engine.model, memory))
    parts = [
        getattr(memory, f)
        for f, _ in ffi.typeof("delta_memory").fields
        if f not in ("size", "weights_mapped", "total_private")
    ]
    assert memory.total_private == sum(parts)


def test_plan_is_what_open_does(engine: Engine, path: Path) -> None:
    params = ffi.new("delta_model_params *")
    lib.delta_model_params_init(params)
    params.n_ctx, params.n_sessions, params.n_batch = 64, 3, 4
    params.activations, params.cache_type = lib.DELTA_EXACT, 0
    planned, found = (
        (sized("delta_model_info"), sized("delta_memory")),
        (sized("delta_model_info"), sized("delta_memory")),
    )
    native.check(lib.delta_model_plan(str(path).encode(), params, *planned))
    native.check(lib.delta_model_info_get(engine.model, found[0]))
    native.check(lib.delta_model_memory(engine.model, found[1]))
    for a, b in zip(planned, found, strict=True):
        assert bytes(ffi.buffer(a)) == bytes(ffi.buffer(b))


@pytest.mark.parametrize(
    "field,value,words",
    [
        ("activations", 4, ["activations", "4"]),
        ("cache_type", 2, ["cache_type", "2", "Q8_0"]),
        ("n_batch", 2**31, ["n_batch"]),
        ("n_sessions", 2**31, ["n_sessions"]),
        ("n_threads", 2**31 - 1, ["thread", str(2**31 - 1)]),
        ("n_threads", 2**31, ["thread"]),
        ("n_threads_batch", 2000, ["2000 threads"]),
        ("n_ctx", 2**31, ["n_ctx", str(2**31)]),
    ],
)
def test_parameters_out_of_range(path: Path, field: str, value: int, words: list[str]) -> None:
    params = ffi.new("delta_model_params *")
    lib.delta_model_params_init(params)
    setattr(params, field, value)
    model = ffi.new("delta_model **")
    with Fails("ARG", *words):
        native.check(lib.delta_model_open(str(path).encode(), params, model))
    assert model[0] == ffi.NULL


def test_an_unknown_device(path: Path) -> None:
    with Fails("ARG", "'tpu'", "cpu", "ref"):
        Engine(path, device="tpu")


def test_opening_can_be_stopped(path: Path) -> None:
    calls: list[tuple[int, int]] = []

    def progress(done: int, total: int, user: Any) -> int:
        calls.append((done, total))
        return int(len(calls) == 3)

    callback = ffi.callback("delta_progress_fn", progress)
    with Fails("CANCELLED", str(path)):
        Engine(path, progress=callback)
    assert len(calls) == 3 and all(0 < done <= total for done, total in calls)


def test_log(path: Path) -> None:
    lines: list[tuple[int, str]] = []
    callback = ffi.callback("delta_log_fn", lambda level, text, user: lines.append((level, ffi.string(text).decode())))
    lib.delta_set_log(callback, ffi.NULL)
    try:
        with Engine(path, n_ctx=16):
            pass
    finally:
        lib.delta_set_log(ffi.NULL, ffi.NULL)
    assert any(level == 1 and "kimi-linear" in text and "cpu" in text for level, text in lines), lines
    n = len(lines)
    with Engine(path, n_ctx=16):
        pass
    assert len(lines) == n


# -- rows ------------------------------------------------------------------------------------------------------------


def test_row_bytes() -> None:
    assert [lib.delta_row_bytes(t, 64) for t in (0, 1, 30, 8, 39)] == [256, 128, 128, 68, 34]
    assert lib.delta_row_bytes(8, 63) == lib.delta_row_bytes(999, 64) == lib.delta_row_bytes(0, -1) == 0


def test_rows_round_trip(rng: np.random.Generator) -> None:
    x = rng.standard_normal((5, 64)).astype(np.float32)
    for kind, error in ((0, 0.0), (1, 2e-3), (30, 2e-2), (8, 2e-2)):
        encoded = ffi.new("char[]", 5 * lib.delta_row_bytes(kind, 64))
        back = np.empty_like(x)
        source = ffi.from_buffer("float[]", x)
        native.check(lib.delta_quantize_rows(kind, encoded, 0, source, 5, 64, ffi.NULL, 2, ffi.NULL))
        native.check(lib.delta_dequantize_rows(kind, encoded, ffi.from_buffer("float[]", back), 5, 64, 2))
        assert np.abs(back - x).max() <= error
    with Fails("UNSUPPORTED", "999"):
        native.check(lib.delta_quantize_rows(999, encoded, 0, source, 5, 64, ffi.NULL, 1, ffi.NULL))
    # No rows, nothing to point at.
    native.check(lib.delta_quantize_rows(0, ffi.NULL, 0, ffi.NULL, 0, 64, ffi.NULL, 1, ffi.NULL))


# -- order of use and other threads ----------------------------------------------------------------------------------


def test_a_model_outlives_its_sessions(path: Path) -> None:
    engine = Engine(path, n_ctx=16, n_sessions=2)
    a, b = engine.session(), engine.session()
    a.eval([1, 2])
    for n in (2, 1):
        with Fails("STATE", "sessions", str(n)):
            native.check(lib.delta_model_close(engine.model))
        b.eval([3])  # still there
        (a if n == 2 else b).free()
        b = b if n == 2 else engine.session()
        if n == 1:
            b.free()
    engine.close()


def test_two_models_do_not_know_each_other(path: Path) -> None:
    with Engine(path, n_ctx=16) as one, Engine(path, n_ctx=16) as two:
        a, b = one.session(), two.session()
        a.eval([1, 2])
        assert b.eval([1, 2]).tobytes() == a.kept().tobytes()
        assert one.stats()["n_computed"] == two.stats()["n_computed"] == 2


def in_thread(fn: Callable[[], Any]) -> Any:
    """The result of `fn` on another thread."""
    out: list[Any] = []
    thread = threading.Thread(target=lambda: out.append(fn()))
    thread.start()
    thread.join()
    return out[0]


def test_busy_and_queries_from_a_second_thread(
    engine: Engine, path: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    """In the middle of a prompt: computations are refused and change nothing, queries answer."""
    tokens = prompt(rng, 20)
    running, idle = engine.session(), engine.session()
    idle.sync([7, 8])
    idle.save(tmp_path / "saved")
    saved = str(tmp_path / "saved").encode()
    refused: dict[str, int] = {}
    lengths: list[int] = []
    wrong: list[str] = []

    def second(session: Session) -> None:
        handle, array = session.handle, ffi.new("int32_t[]", [1, 2])
        null = ffi.NULL
        item = ffi.new("delta_batch_item *", [handle, array, 2, lib.DELTA_LOGITS_LAST])
        refused.update(
            sync=lib.delta_session_sync(handle, array, 2, null, null, null),
            eval=lib.delta_session_eval(handle, array, 2, lib.DELTA_LOGITS_LAST),
            batch=lib.delta_eval_batch(engine.model, item, 1),
            truncate=lib.delta_session_truncate(handle, 0),
            checkpoint=lib.delta_session_checkpoint(handle),
            fork=lib.delta_session_fork(handle, ffi.new("delta_session **")),
            save=lib.delta_session_save(handle, saved + b"2"),
            load=lib.delta_session_load(handle, saved),
            collect=lib.delta_model_collect_inputs(engine.model),
            input_stats=lib.delta_model_input_stats(engine.model, 0, sized("delta_input_stats")),
        )

    def queries() -> None:
        lengths.append(running.length)
        if running.tokens != tokens[: running.length]:
            wrong.append("tokens")
        if lib.delta_session_logits_count(running.handle) != 0:
            wrong.append("logits of a running computation")
        idle.sample(seed=1)
        if idle.tokens != [7, 8] or len(idle.top(3)) != 3:
            wrong.append("the idle session")
        new = engine.session()  # slots may be taken and given back
        new.free()
        if running.stats()["n_computed"] != running.length or engine.stats()["n_computed"] != running.length + 2:
            wrong.append("stats")
        if lib.delta_session_free(running.handle) != status_of("BUSY"):
            wrong.append("a running session was freed")

    def progress(done: int, total: int, user: Any) -> int:
        for session in (running, idle):
            in_thread(lambda session=session: second(session))
            if set(refused.values()) != {status_of("BUSY")}:
                wrong.append(str(refused))
        in_thread(queries)
        return 0

    callback = ffi.callback("delta_progress_fn", progress)
    native.check(lib.delta_session_sync(running.handle, tokens, len(tokens), callback, ffi.NULL, ffi.NULL))
    assert wrong == []
    assert lengths == [4, 8, 12, 16, 20]
    assert not (tmp_path / "saved2").exists()
    assert len(refused) == 10
    with Fresh(path) as fresh:
        fresh.check(running, tokens)
        fresh.check(idle, [7, 8])


def test_e16_many_threads_with_shared_prefixes(golden: Path, gguf: Callable[..., Path]) -> None:
    """16 workers, queries and cancels on one model: every answer is the one of a serial run."""
    program = native.library_path().with_name("delta-stress")
    if not program.is_file():
        pytest.skip(f"no {program.name} beside the library under test")
    command = [program, gguf(golden / "k3-mini"), "1000"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert re.fullmatch(r"requests 1000 busy \d+ cancelled \d+ wrong 0\n", found.stdout)


def test_a_session_is_freed_while_another_computes(engine: Engine, path: Path) -> None:
    running, idle = engine.session(), engine.session()
    freed: list[int] = []

    def progress(done: int, total: int, user: Any) -> int:
        if not freed:
            freed.append(in_thread(lambda: lib.delta_session_free(idle.handle)))
        return 0

    tokens = list(range(3, 15))
    callback = ffi.callback("delta_progress_fn", progress)
    native.check(lib.delta_session_sync(running.handle, tokens, len(tokens), callback, ffi.NULL, ffi.NULL))
    assert freed == [0]
    engine.sessions.remove(idle)
    with Fresh(path) as fresh:
        fresh.check(running, tokens)
