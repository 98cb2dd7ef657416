"""The CUDA driver and its compiler through `cuda.bindings`, imported at first use, and the answers of both."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from headrace.errors import Fault, UserError


@cache
def driver() -> Any:
    """The driver's functions. Raises UserError where they are not installed."""
    return _module("cuda.bindings.driver")


@cache
def nvrtc() -> Any:
    """The compiler's functions. Raises UserError where they are not installed."""
    return _module("cuda.bindings.nvrtc")


def check(answer: tuple[Any, ...], what: str) -> Any:
    """The value of a call of either. Raises Fault naming its error."""
    status, *values = answer
    if int(status):
        raise Fault(f"{what}: {getattr(status, 'name', status)}")
    return values[0] if values else None


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(
            "--device cuda needs cuda-bindings, which torch's CUDA wheels bring: pip install cuda-bindings"
        ) from error
