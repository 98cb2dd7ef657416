"""CUDA C++ sources compiled for the CPU, each by its emulator; a library is kept until what it is made of changes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

COMPILER = shutil.which("g++")

needs_compiler = pytest.mark.skipif(COMPILER is None and not os.environ.get("CI"), reason="no C++ compiler")
"""CI has one, or fails."""


def emulated(emulator: str, source: Path, macros: Iterable[tuple[str, int]]) -> ctypes.CDLL:
    """`source` with these macros, inside the emulator of this name beside this file."""
    assert COMPILER is not None, "no C++ compiler"
    program = Path(__file__).with_name(emulator)
    flags = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread", f'-DSOURCE="{source}"']
    flags += [f"-D{name}={value}" for name, value in macros]
    made_of = [program.read_bytes(), source.read_bytes(), *(text.encode() for text in (_version(), *flags))]
    key = hashlib.sha256(b"\0".join(made_of)).hexdigest()[:32]
    library = _folder() / f"{program.stem}-{key}.so"
    if not library.exists():
        # Tests that run at once may build the same: each writes its own file and renames it.
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / library.name
            subprocess.run([COMPILER, *flags, "-x", "c++", str(program), "-o", str(built)], check=True, timeout=120)
            built.replace(library)
    return ctypes.CDLL(str(library))


@cache
def _version() -> str:
    assert COMPILER is not None
    return subprocess.run([COMPILER, "--version"], check=True, capture_output=True, text=True).stdout


@cache
def _folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"headrace-tests-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    # What lies there is run: only what this user wrote.
    return folder if folder.stat().st_uid == os.getuid() else Path(tempfile.mkdtemp(prefix="headrace-tests-"))
