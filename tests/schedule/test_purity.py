from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import headrace.schedule

FORBIDDEN = {
    "asyncio", "datetime", "multiprocessing", "os", "pathlib", "random", "secrets", "socket", "subprocess",
    "threading", "time", "torch", "uuid", "zmq",
}  # fmt: skip


def test_no_module_imports_a_clock_chance_or_the_world() -> None:
    files = sorted(Path(headrace.schedule.__file__).parent.glob("*.py"))
    assert len(files) >= 5
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.module is not None
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            roots = {name.split(".")[0] for name in names} | {name for name in names if name.startswith("numpy.random")}
            assert not roots & {*FORBIDDEN, "numpy.random"}, f"{file.name}: {roots}"
            assert not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open")


def test_import_loads_no_torch() -> None:
    code = "import sys, headrace.schedule; print(sorted({'torch', 'zmq', 'transformers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
