"""Runs llama.cpp's converter on a checkpoint whose vocabulary was generated; for `convert_bench.py`.

    python bench/upstream_convert.py PATH/convert_hf_to_gguf.py CHECKPOINT --outfile OUT ...

That converter takes its tokenizer from Python code in the checkpoint, which generated checkpoints do not have, and
knows a pre-tokenizer by what a text of its own becomes in a known vocabulary. Here it gets both: the ranks of
tiktoken.model and the special tokens of tokenizer_config.json, as the released code hands them out, and the name
"kimi-k2", which it has for Kimi's vocabulary. Nothing else is changed; reading a file of ranks is not what takes its
time.
"""

from __future__ import annotations

import base64
import json
import runpy
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PRE_TOKENIZER = "kimi-k2"


def tokenizer(folder: Path) -> Any:
    """What upstream uses of the released tokenizer: `model._mergeable_ranks`, `special_tokens`, `eos_id`."""
    lines = (folder / "tiktoken.model").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    n_vocab = config.get("text_config", config)["vocab_size"]
    added = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["added_tokens_decoder"]
    names = {int(number): entry["content"] for number, entry in added.items()}
    special = {names.get(number, f"<|reserved_token_{number}|>"): number for number in range(len(ranks), n_vocab)}
    return SimpleNamespace(
        model=SimpleNamespace(_mergeable_ranks=ranks), special_tokens=special, eos_id=special["[EOS]"]
    )


def main() -> None:
    script = Path(sys.argv[1]).resolve()
    sys.argv = sys.argv[1:]
    sys.path[:1] = [str(script.parent), str(script.parent / "gguf-py")]  # instead of this script's own folder
    # An editable installation of this project answers for `conversion` before any path is looked at.
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter, PathFinder]
    import transformers

    from conversion.base import TextModel  # upstream's package of that name

    TextModel.get_vocab_base_pre = lambda self, tokenizer: PRE_TOKENIZER
    transformers.AutoTokenizer.from_pretrained = lambda folder, *_, **__: tokenizer(Path(folder))
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
