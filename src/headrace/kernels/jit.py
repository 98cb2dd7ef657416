"""Triton where it is installed; elsewhere a stand-in, so that every kernel file imports and only a launch fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl

    jit: Callable[..., Any] = triton.jit
except ImportError:  # no build of it for this system: the references run

    class _Missing:
        """Accepts every mention, refuses every use."""

        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("Triton is not installed: its kernels cannot run here")

        def __getitem__(self, key: Any) -> Any:
            raise RuntimeError("Triton is not installed: its kernels cannot run here")

    triton = tl = _Missing()

    def jit(kernel: Any) -> Any:
        """A kernel that cannot be launched."""
        return _Missing()


__all__ = ["jit", "tl", "triton"]
