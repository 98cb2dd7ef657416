"""The lines of a log, of every text file in a folder, or of standard input, within bounds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from headrace.errors import UserError

MAX_BYTES = 64 * 2**20
"""Of a file, from its end: what failed is there."""
MAX_FILES = 1000


def read(path: str) -> Iterator[tuple[Path | None, list[str]]]:
    """Each file with its lines; no file for standard input. Raises UserError where nothing can be read."""
    if path == "-":
        yield None, sys.stdin.read(MAX_BYTES).splitlines()
        return
    root = Path(path)
    files = sorted(file for file in root.rglob("*") if file.is_file()) if root.is_dir() else [root]
    num_read = 0
    for file in files[:MAX_FILES]:
        try:
            lines = _lines(file)
        except OSError as error:
            if file == root:
                raise UserError(f"PATH {path}: cannot be read: {error.strerror or error}") from None
            continue
        if lines is not None:
            num_read += 1
            yield file, lines
    if not num_read:
        raise UserError(f"PATH {path}: holds no text")


def _lines(file: Path) -> list[str] | None:
    """The lines of a text file; None where it is none. The first number is that of the file only where all was read."""
    with file.open("rb") as stream:
        size = file.stat().st_size
        skipped = max(0, size - MAX_BYTES)
        before = 0
        while stream.tell() < skipped:
            # Numbers of lines stay those of the file.
            before += stream.read(min(1 << 20, skipped - stream.tell())).count(b"\n")
        data = stream.read()
    if b"\0" in data[:4096]:
        return None
    return [""] * before + data.decode("utf-8", "replace").split("\n")
