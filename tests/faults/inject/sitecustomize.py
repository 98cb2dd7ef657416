"""Puts one fault into one process of a service that a test starts with this folder in front of its PYTHONPATH.

The package has no hook for it: a function of the process is replaced here, when its module has been imported. What is
to happen is JSON in HEADRACE_TEST_FAULT: `who`, the `module` and `function` at whose call it happens, what to `do`,
and two files: nothing happens before `armed` exists, and `fired` gets the time (monotonic) just before it does.
"""

from __future__ import annotations

import errno
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


def this_process(command: Sequence[str]) -> str:
    """`parent`, `engine`, `http`, `rank 0`, ...; empty for a process that is none of a service."""
    module = command[command.index("-m") + 1] if "-m" in command else ""
    if module == "headrace.worker":
        return f"rank {command[command.index('--rank') + 1]}"
    return {"headrace": "parent", "headrace.engine": "engine", "headrace.api": "http"}.get(module, "")


def kill() -> None:
    """As the system kills for memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """As a debugger or a terminal stops."""
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    """A mistake of ours."""
    raise IndexError("put in by a test")


def hang() -> None:
    """A lock that nobody gives back."""
    while True:
        time.sleep(1000)


def hold() -> None:
    """A library that keeps the interpreter for itself."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def memory() -> None:
    """More than there is."""
    if "torch" in sys.modules:
        sys.modules["torch"].empty(1 << 56)
    bytearray(1 << 60)


def full() -> None:
    """What a write on a full disk gives."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def cut() -> None:
    """Shut every TCP socket, those that listen too, as a network that fails would."""
    for path in list(Path("/proc/self/fd").iterdir()):
        try:
            if not stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    one.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


ACTIONS = {each.__name__: each for each in (kill, stop, fail, hang, hold, memory, full, cut)}


class Wrapping(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module as it is, then has `change` change it."""

    def __init__(self, module: str, change: Callable[[ModuleType], None]) -> None:
        self._module, self._change = module, change
        self._loader: Any = None

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Only for the one module, and once."""
        if name != self._module or self._loader is not None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As always."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """As always, and then the change."""
        self._loader.exec_module(module)
        self._change(module)


def install(fault: dict[str, str]) -> None:
    """Have it happen at the first call of the function after it is armed."""
    armed, fired, happen = Path(fault["armed"]), Path(fault["fired"]), ACTIONS[fault["do"]]

    def perhaps() -> None:
        if armed.exists() and not fired.exists():
            new = fired.with_suffix(".new")
            new.write_text(str(time.monotonic()))
            new.rename(fired)
            happen()

    def change(module: ModuleType) -> None:
        *path, name = fault["function"].split(".")
        owner: Any = functools.reduce(getattr, path, module)
        original = vars(owner)[name]
        call: Any = original.fget if isinstance(original, property) else original

        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            perhaps()
            return call(*args, **kwargs)

        setattr(owner, name, property(wrapped) if isinstance(original, property) else wrapped)

    sys.meta_path.insert(0, Wrapping(fault["module"], change))


if "HEADRACE_TEST_FAULT" in os.environ:
    _fault = json.loads(os.environ["HEADRACE_TEST_FAULT"])
    if this_process(sys.orig_argv) == _fault["who"]:
        install(_fault)
