"""Who may depend on whom (docs/architecture.md), read from the include and import lines of the sources."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# -- C++ ---------------------------------------------------------------------------------------------------------------

CSRC = ROOT / "csrc"
# Direct dependencies; what those may use, their users may too. `include` is the public header, which needs nothing.
LAYERS: dict[str, tuple[str, ...]] = {
    "include": (),
    "base": ("include",),
    "quant": ("base",),
    "gguf": ("quant", "base"),
    "graph": ("quant", "base"),
    "backend": ("graph",),
    "ref": ("backend",),
    "cpu": ("ref",),  # what exact activations mean
    "models": ("graph", "gguf"),
    "runtime": ("models", "graph", "gguf", "backend"),
    "api": ("runtime", "include"),
    "tools": ("include",),
}


def allowed(layer: str) -> set[str]:
    found = {layer}
    for below in LAYERS[layer]:
        found |= allowed(below)
    return found


def is_test(path: Path) -> bool:
    """Files that only the test library contains may look everywhere."""
    return path.parent.name == "tests" or path.name.startswith("test_") or path.stem.endswith("_test")


def native_sources() -> list[Path]:
    kinds = {".h", ".c", ".cpp", ".inc", ".def"}
    return sorted(path for path in CSRC.rglob("*") if path.suffix in kinds and not is_test(path))


def includes(path: Path) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if match := re.match(r'\s*#\s*include\s+"([^"]+)"', line):
            yield number, match[1]


def test_every_native_folder_is_a_layer() -> None:
    folders = {path.relative_to(CSRC).parts[0] for path in native_sources()}
    assert folders == set(LAYERS)


def test_native_includes_follow_the_layers() -> None:
    wrong = []
    for path in native_sources():
        layer = path.relative_to(CSRC).parts[0]
        for number, name in includes(path):
            target = name.split("/")[0] if "/" in name else "include" if name == "deltallama.h" else layer
            if target not in allowed(layer):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {layer} includes {name}")
            if re.search(r"_test\.h$|/tests/", name):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: includes the test header {name}")
    assert not wrong, "\n".join(wrong)


def test_programs_outside_the_library_see_the_public_header_only() -> None:
    for path in (CSRC / "tools").iterdir():
        assert {name for _, name in includes(path)} <= {"deltallama.h", "include/deltallama.h"}, path


def strip_comments_and_strings(text: str) -> str:
    text = re.sub(r'"(\\.|[^"\\\n])*"', '""', text)
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def test_the_library_neither_prints_nor_ends_the_process() -> None:
    words = re.compile(
        r"(?<![\w.>])(?:std::)?(abort|exit|_exit|quick_exit|terminate|printf|fprintf|puts|putchar|assert)\s*\("
    )
    streams = re.compile(r"\bstd::(cout|cerr|clog)\b")
    wrong = []
    for path in native_sources():
        if path.parent.name == "tools":
            continue
        for number, line in enumerate(strip_comments_and_strings(path.read_text()).splitlines(), start=1):
            if words.search(line) or streams.search(line):
                wrong.append(f"{path.relative_to(ROOT)}: line about {number}: {line.strip()}")
    assert not wrong, "\n".join(wrong)


# -- Python ------------------------------------------------------------------------------------------------------------

# Package -> what it may import beside the standard library and itself.
PACKAGES: dict[str, set[str]] = {
    "gguf-py/gguf_ext": {"numpy", "gguf", "yaml"},
    "conversion": {"numpy", "gguf_ext", "gguf", "requests", "urllib3"},
    "deltallama": {"numpy", "cffi", "tiktoken", "PIL", "gguf_ext", "conversion"},
    "tests/reference": {"numpy"},
}
TORCH_FOLDERS = ("models/train",)
TORCH = {"torch", "safetensors", "transformers", "compressed_tensors"}
# File -> what it may import inside of functions, where an extra brings it.
WITH_AN_EXTRA = {
    "conversion/compressed.py": {"torch", "compressed_tensors"},
    "bench/upstream_convert.py": {"transformers"},  # run by an interpreter that another program needs
    "bench/vision_torch.py": {"torch"},  # likewise
}


def imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, top-level module, inside a function) of absolute imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    inside = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    typing_only = {
        node
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0], node in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.split(".")[0], node in inside


def files(suffixes: set[str] | None = None) -> list[Path]:
    """The project's own files: not what was built, installed or cached."""
    skipped = {"build", "dist", "__pycache__", "node_modules"}
    found = []
    folders = [ROOT]
    while folders:
        for path in folders.pop().iterdir():
            if path.is_dir():
                if path.name not in skipped and (not path.name.startswith(".") or path.name == ".ci"):
                    folders.append(path)
            elif path.name != ".git" and (suffixes is None or path.suffix in suffixes):  # a file in a second work tree
                found.append(path)
    return sorted(found)


@pytest.mark.parametrize("package", PACKAGES)
def test_python_packages_import_what_they_may(package: str) -> None:
    own = package.split("/")[-1]
    wrong = []
    for path in sorted((ROOT / package).rglob("*.py")):
        if path.name == "_cdef.py":
            continue
        name = path.relative_to(ROOT).as_posix()
        for number, module, inside in imports(path):
            optional = WITH_AN_EXTRA.get(name, set()) if inside else set()
            if module not in sys.stdlib_module_names | PACKAGES[package] | {own} | optional:
                wrong.append(f"{name}:{number}: imports {module}")
    assert not wrong, "\n".join(wrong)


def test_only_the_command_line_knows_the_converter() -> None:
    users = {
        path.relative_to(ROOT / "deltallama").as_posix()
        for path in (ROOT / "deltallama").rglob("*.py")
        if any(module == "conversion" for _, module, _ in imports(path))
    }
    assert users == {"cli.py"}


def test_torch_is_imported_where_models_are_trained_only() -> None:
    wrong = []
    for path in files({".py"}):
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        skips = name.startswith("tests/") and re.search(r'importorskip\(\s*"torch"', text) is not None
        if name.startswith(TORCH_FOLDERS) or skips:
            continue
        optional = WITH_AN_EXTRA.get(name, set())
        wrong += [
            f"{name}:{number}: imports {module}"
            for number, module, inside in imports(path)
            if module in TORCH and not (inside and module in optional)
        ]
    assert not wrong, "\n".join(wrong)


def test_what_packages_import_is_declared() -> None:
    declared = re.search(r"^dependencies = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert declared is not None
    names = {re.split(r"[<>=!~;\[ ]", item)[0] for item in re.findall(r'"([^"]+)"', declared[1])}
    distributions = {"yaml": "pyyaml", "PIL": "pillow"}
    ours = {"gguf_ext", "conversion", "deltallama", "reference"}
    needed = {
        distributions.get(m, m) for p, modules in PACKAGES.items() if not p.startswith("tests") for m in modules - ours
    }
    assert needed == names


# -- the tree ----------------------------------------------------------------------------------------------------------


def test_no_file_names_a_path_of_some_machine() -> None:
    roots = "|".join(["work", "root", "tmp", "home", "Users", "farm"])
    pattern = re.compile(rf"(?<![\w.$}}~-])/(?:{roots})/")
    wrong = []
    for path in files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # weights and other binary data
        for number, line in enumerate(text.splitlines(), start=1):
            if pattern.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not wrong, "\n".join(wrong)
