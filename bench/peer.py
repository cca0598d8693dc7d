"""An independent engine for the same files: llama.cpp as the package `xllamacpp` carries it (extra `peer`).

It runs on the CPU in a process of its own, so that whatever happens there is an exception here, and nothing of this
project is loaded in that process. Prompts are token ids, so tokenizers and chat templates play no part.

    with Peer("model.gguf", n_ctx=512) as peer:
        tokens = peer.greedy([1, 2, 3], 16)
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

ANSWER_SECONDS = 600.0  # for one prompt, or for loading; a peer that takes longer hangs


class PeerError(RuntimeError):
    """The peer is missing, refused the file or a prompt, crashed or hangs; the message says which."""


class Peer:
    """The peer with a model; the constructor and `greedy` raise PeerError, after which it is closed."""

    def __init__(self, model: str | os.PathLike[str], *, n_ctx: int, n_threads: int = 1) -> None:
        """Starts the process and waits until the file is loaded.

        Args:
            n_ctx: positions; the peer rounds up to a multiple of 256.
            n_threads: its threads spin while they wait for each other, so more than there are free cores is far slower.
        """
        if importlib.util.find_spec("xllamacpp") is None:
            raise PeerError("the peer is not installed: pip install '.[peer]'")
        if not Path(model).is_file():
            raise PeerError(f"no such file: {os.fspath(model)}")
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self.process = subprocess.Popen(
            [sys.executable, __file__, os.fspath(model), str(n_ctx), str(n_threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, bufsize=0,
        )  # fmt: skip
        self._ask(None, "loading the file")

    def greedy(self, ids: Sequence[int], max_tokens: int) -> list[int]:
        """Greedy continuation of token ids; a token that ends the text is kept as the last."""
        tokens: list[int] = self._ask([list(map(int, ids)), max_tokens], "continuing a prompt")
        return tokens

    def distribution(self, ids: Sequence[int], n_vocab: int) -> dict[int, float] | None:
        """Token -> natural logarithm of its probability after a prompt; None where the peer does not tell, which is the
        case when its best token leaves a UTF-8 character incomplete."""
        pairs = self._ask([list(map(int, ids)), 1, n_vocab], "continuing a prompt")
        return {token: logprob for token, logprob in pairs} or None

    def close(self) -> None:
        self.process.kill()  # it holds nothing that must be saved
        self.process.communicate()
        self._log.close()

    def _ask(self, request: Any, doing: str) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone: what follows says how
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([self.process.stdout], [], [], ANSWER_SECONDS)[0]:
                self._fail(doing, f"no answer within {ANSWER_SECONDS:.0f} s")
            part = self.process.stdout.read(1 << 16)
            if not part:
                code = self.process.wait()
                ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
                self._fail(doing, f"its process {ended}")
            line += part
        answer = json.loads(line)
        if "error" in answer:
            self._fail(doing, answer["error"])
        return answer["result"]

    def _fail(self, doing: str, what: str) -> None:
        self._log.seek(0)
        log = self._log.read().decode("utf-8", "replace").strip().splitlines()[-8:]
        self.close()
        raise PeerError("\n  ".join([f"the peer failed while {doing}: {what}", *log]))

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def start_server(model: str, n_ctx: int, n_threads: int) -> Any:
    """One slot on the CPU; nothing is kept from one prompt to the next, and nothing is fitted to the machine."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = n_ctx
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.fit_params = False
    params.cpuparams.n_threads = n_threads
    params.cpuparams_batch.n_threads = n_threads
    params.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds to 16 bits
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.cache_idle_slots = False
    params.n_ctx_checkpoints = 0
    params.warmup = False
    params.ui = False
    params.endpoint_slots = False
    params.use_jinja = False
    params.verbosity = 2  # errors and warnings
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    return xllamacpp.Server(params)


def complete(address: str, ids: Sequence[int], max_tokens: int, n_probs: int = 0) -> list[Any]:
    """Greedy tokens through the server's own endpoint; with `n_probs`, [token, logprob] pairs of the first of them.

    Not through `Server.handle_completions`: its answer has token ids only beside probabilities, and there each token
    that leaves a UTF-8 character incomplete is missing.
    """
    request = {
        "prompt": list(ids),
        "n_predict": max_tokens,
        "temperature": 0.0,
        "samplers": ["temperature"],
        "return_tokens": True,
        "cache_prompt": False,
        "n_probs": n_probs,
    }
    url = urlsplit(address)
    connection = http.client.HTTPConnection(url.hostname or "", url.port)
    try:
        connection.request("POST", "/completion", json.dumps(request), {"Content-Type": "application/json"})
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise RuntimeError(f"status {response.status}: {body.decode('utf-8', 'replace')[:300]}")
    answer = json.loads(body)
    read, cached = answer["tokens_evaluated"], answer["timings"]["cache_n"]
    if read != len(ids) or cached != 0 or answer["truncated"]:
        raise RuntimeError(f"read {read} tokens of {len(ids)}, {cached} from a cache, truncated: {answer['truncated']}")
    if n_probs:
        first = answer.get("completion_probabilities", [])[:1]
        return [[entry["id"], entry["logprob"]] for step in first for entry in step["top_logprobs"]]
    tokens: list[int] = answer["tokens"]
    return tokens


def serve(model: str, n_ctx: int, n_threads: int) -> None:
    """The peer's process: a line `[ids, max_tokens]` or `[ids, 1, n_probs]` is answered by a line `{"result": ...}` or
    `{"error": text}`.

    The first line, `null`, is answered when the file is loaded.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the library prints is a log
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent sees it too, and ends this process
    server = None
    for line in sys.stdin:
        try:
            if server is None:
                server = start_server(model, n_ctx, n_threads)
                result = None
            else:
                result = complete(server.listening_address, *json.loads(line))
            answers.write(json.dumps({"result": result}) + "\n")
        except Exception as error:
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
