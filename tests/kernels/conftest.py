"""What kernels under Triton's interpreter need."""

from __future__ import annotations

import os
from typing import Any

import pytest

from headrace.kernels.jit import triton


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of kernels that are interpreted run in a process that said so before Triton was imported."""
    if item.get_closest_marker("interpreted") is None:
        return
    assert os.environ.get("TRITON_INTERPRET") == "1", "-m interpreted needs TRITON_INTERPRET=1"
    from triton.runtime.interpreter import InterpretedFunction

    assert isinstance(triton.language.zeros, InterpretedFunction), "Triton was imported to compile"
    _accept_one_element_bounds()


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
