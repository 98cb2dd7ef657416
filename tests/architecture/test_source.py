"""Rules that hold for every file of the package."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "headrace"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 400
MAX_FUNCTION = 70
FORBIDDEN_NAMES = {"utils", "util", "common", "base", "helper", "helpers", "manager", "misc"}
TORCH_FREE = (
    "api", "bench", "channel", "cli", "config", "doctor", "engine", "errors", "mesh", "plan", "schedule", "service",
    "spec", "step", "supervise", "telemetry", "text", "wait", "weights.headers", "weights.source",
)  # fmt: skip


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def test_there_are_files_to_look_at() -> None:
    assert len(FILES) > 40


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_a_module_says_what_it_is_and_stays_small(path: Path) -> None:
    text = path.read_text()
    assert path.stem not in FORBIDDEN_NAMES
    assert len(text.splitlines()) <= MAX_LINES
    tree = ast.parse(text)
    doc = ast.get_docstring(tree)
    assert doc
    assert doc.splitlines()[0].strip()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < MAX_FUNCTION, node.name


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_nothing_is_pickled_or_evaluated(path: Path) -> None:
    found = {
        name
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [node.func.id]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            else []
        )
    }
    assert not found & {"pickle", "cloudpickle", "dill", "shelve", "marshal", "multiprocessing", "eval", "exec"}


def test_words_and_decisions_import_without_torch() -> None:
    wanted = [
        name
        for name in map(module_of, FILES)
        if name.removeprefix("headrace.").startswith(TORCH_FREE) and not name.endswith("__main__")
    ]
    assert len(wanted) > 30
    code = f"""
import importlib, sys
for name in {wanted!r}:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"{{name}} imports torch")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_package_itself_is_lazy() -> None:
    code = "import sys, headrace; print(sorted(name for name in sys.modules if name.startswith('headrace')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['headrace']\n"


def test_the_version_is_the_same_wherever_it_is_written() -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version
    assert f'__version__ = "{version[1]}"' in (PACKAGE / "__init__.py").read_text()
