"""The private directory of one engine: mode 0700, its sockets and its configuration, gone when the engine is."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Self

import msgspec

from headrace.config import ServeConfig
from headrace.errors import UserError

MAX_PATH = 80
"""Longest directory in bytes: the path of a Unix socket may have 107, and a name must fit behind."""
_PREFIX = "headrace-"
_NEW = "new-headrace-"
_CONFIG = "config.msgpack"
_LOCK = "lock"


class PrivateDir:
    """A fresh directory, removed when the context is left.

    It is locked while its owner lives; one whose owner was killed is removed by whoever comes next.
    """

    def __init__(self) -> None:
        parent = _parent()
        _sweep(parent)
        # Locked under a name that no sweep looks at, then renamed: nobody can take it for an orphan in between.
        new = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
        self._lock = os.open(new / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = new.with_name(_PREFIX + new.name.removeprefix(_NEW))
        new.rename(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the directory with all in it. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def write_config(directory: Path, config: ServeConfig) -> None:
    """Write the configuration that the children of `directory` run under."""
    # It may hold an API key.
    descriptor = os.open(directory / _CONFIG, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.msgpack.encode(config))


def read_config(directory: Path) -> ServeConfig:
    """Read what `write_config` wrote."""
    return msgspec.msgpack.decode((directory / _CONFIG).read_bytes(), type=ServeConfig)


def trace_folder(directory: Path) -> Path:
    """Where the ranks of `directory` record their steps."""
    return directory / "trace"


def stacks_file(directory: Path, who: str) -> Path:
    """Where a process of `directory` writes its stacks when it is asked to, or crashes."""
    return directory / "stacks" / f"{slug(who)}.txt"


def slug(who: str) -> str:
    """A process's name for a file: `worker-rank-1-stage-1`."""
    return re.sub(r"[^A-Za-z0-9]+", "-", who).strip("-")


def _parent() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    for candidate in (runtime, tempfile.gettempdir(), "/tmp"):  # noqa: S108  # mkdtemp makes a fresh folder there
        room = MAX_PATH - len(_PREFIX) - 9
        if candidate and len(os.fsencode(candidate)) <= room and os.access(candidate, os.W_OK | os.X_OK):
            return Path(candidate).absolute()
    raise UserError(f"TMPDIR {tempfile.gettempdir()}: sockets need a writable folder with a shorter path")


def _sweep(parent: Path) -> None:
    """Remove the directories of owners that were killed."""
    for directory in parent.glob(f"{_PREFIX}*"):
        # Another user's, or one that goes away meanwhile, is not ours to touch.
        with contextlib.suppress(OSError):
            if directory.is_symlink() or directory.stat().st_uid != os.getuid():
                continue
            lock = os.open(directory / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)
