"""Triton kernels without a device: what a test file needs for Triton's interpreter, and a process that has it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from headrace.kernels.jit import triton

ROOT = Path(__file__).parents[2]


def interpreting() -> bool:
    """Whether kernels made from here on are interpreted: said before Triton was imported, or never."""
    if os.environ.get("TRITON_INTERPRET") != "1" or not hasattr(triton, "runtime"):
        return False
    from triton.runtime.interpreter import InterpretedFunction

    if not isinstance(triton.language.zeros, InterpretedFunction):
        return False
    _accept_one_element_bounds()
    return True


def rerun(file: str) -> None:
    """The tests of `file` in a process where kernels are interpreted."""
    command = [sys.executable, "-m", "pytest", file, "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def _accept_one_element_bounds() -> None:
    """Loop bounds read from memory are arrays of one element, which numpy 2.4 no longer takes for an index."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if getattr(patch, "accepts_one_element", False):
        return

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patched.accepts_one_element = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patched
