"""What a disk gives by the size of a read: several readers at scattered places of one file, past the page cache."""

from __future__ import annotations

import mmap
import os
import random
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from headrace.errors import Fault

SIZES = (64 << 10, 256 << 10, 1 << 20, 8 << 20)
"""Bytes of a read; the last is what weights are read by."""
READERS = 4
ALIGN = 4096
IN_MEMORY = ("tmpfs", "ramfs")


def measure(path: str, scratch: str, num_bytes: int, budget_s: float) -> dict[str, Any]:
    """`scratch` is the name of the file that is written where none is large enough.

    `reads`: pairs of bytes of a read and bytes a second; `direct`: whether past the cache; `filesystem`.

    Raises Fault where there is no disk, or no file and no room for one.
    """
    kind = filesystem(Path(path))
    if kind in IN_MEMORY:
        raise Fault(f"{path} is memory ({kind}), not a disk")
    with _file(Path(path), scratch, num_bytes) as file:
        descriptor, direct = _open(file)
        try:
            size = os.fstat(descriptor).st_size
            reads = [(each, _rate(descriptor, size, each, direct, budget_s / len(SIZES))) for each in SIZES]
        finally:
            os.close(descriptor)
    return {"reads": reads, "direct": direct, "filesystem": kind}


def filesystem(path: Path) -> str:
    """The kind of file system that a folder is on."""
    whole = path.resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if whole.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else ""


@contextmanager
def _file(folder: Path, scratch: str, num_bytes: int) -> Iterator[Path]:
    """The largest file there if it is large enough, else one that is written now and is gone afterwards."""
    try:
        found = [(entry.stat().st_size, entry) for entry in folder.iterdir() if entry.is_file()]
    except OSError as error:
        raise Fault(f"{folder}: cannot be listed: {error.strerror}") from None
    size, largest = max(found, default=(0, folder), key=lambda pair: pair[0])
    if size >= num_bytes and os.access(largest, os.R_OK):
        yield largest
        return
    written = folder / scratch
    try:
        _write(written, num_bytes)
        yield written
    except OSError as error:
        raise Fault(f"{folder}: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            written.unlink()


def _write(path: Path, num_bytes: int) -> None:
    # Chance, not zeros: file systems keep no zeros.
    block = secrets.token_bytes(1 << 20)
    with path.open("xb") as file:
        for _ in range(num_bytes >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())


def _open(path: Path) -> tuple[int, bool]:
    """For reading past the page cache where the file system lets one."""
    buffer = mmap.mmap(-1, ALIGN)
    if hasattr(os, "O_DIRECT"):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                os.preadv(descriptor, [buffer], 0)
                return descriptor, True
            except OSError:
                os.close(descriptor)
    return os.open(path, os.O_RDONLY), False


@dataclass
class _Tally:
    """What the readers have read together, and what went wrong."""

    num_bytes: int = 0
    problems: list[OSError] = field(default_factory=list)


def _rate(descriptor: int, size: int, each: int, direct: bool, budget_s: float) -> float:
    """Bytes a second; every place is read once at most where the cache cannot be passed by."""
    if not direct and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    places = list(range(0, size - each + 1, each))
    random.Random(each).shuffle(places)  # noqa: S311  # no secret
    tally, lock = _Tally(), threading.Lock()
    started = time.perf_counter()
    readers = [
        threading.Thread(
            target=_read,
            args=(descriptor, places[i::READERS], each, started + budget_s, direct, tally, lock),
            daemon=True,
        )
        for i in range(READERS)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    if tally.problems:
        raise Fault(f"a read failed: {tally.problems[0].strerror}")
    return tally.num_bytes / (time.perf_counter() - started)


def _read(
    descriptor: int,
    places: list[int],
    each: int,
    ends: float,
    again: bool,
    tally: _Tally,
    lock: threading.Lock,
) -> None:
    buffer = mmap.mmap(-1, each)
    try:
        while places:
            for place in places:
                num_read = os.preadv(descriptor, [buffer], place)
                with lock:
                    tally.num_bytes += num_read
                if time.perf_counter() >= ends:
                    return
            if not again:
                return
    except OSError as error:
        tally.problems.append(error)
