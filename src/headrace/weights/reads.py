"""Which bytes to read in which order: rows wanted of many tensors become large blocks in file order, each byte once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

BLOCK_BYTES = 8 << 20
"""Bytes of one read: drives reach their speed at this size, and a few such buffers are all that loading holds."""
GAP_BYTES = 4096
"""Ranges this close are read as one: the system would read the page between them anyway."""
_MOST_VIEWS = 1024
"""Places that one read may fill: the system's IOV_MAX."""


@dataclass(frozen=True)
class Want:
    """Rows of one tensor that somebody needs."""

    name: str
    file: Path
    offset: int
    """Of row 0, from the start of the file."""
    row_bytes: int
    unit: int
    """Rows that are only read together; `rows` begin and end at multiples of it."""
    rows: tuple[range, ...]
    """Ascending, disjoint, none adjacent."""


@dataclass(frozen=True)
class Piece:
    """Whole rows of one tensor inside a block."""

    name: str
    rows: range
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Block:
    """One read: bytes `offset` to `offset + num_bytes` of a file, with the pieces in it in order."""

    file: Path
    offset: int
    num_bytes: int
    pieces: tuple[Piece, ...]


def merge(ranges: Iterable[range], unit: int) -> tuple[range, ...]:
    """The union of row ranges, widened to whole units, as ascending disjoint ranges."""
    widened = sorted((r.start // unit * unit, -(-r.stop // unit) * unit) for r in ranges if len(r))
    merged: list[tuple[int, int]] = []
    for start, stop in widened:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(range(start, stop) for start, stop in merged)


def plan_reads(wants: Iterable[Want], block_bytes: int = BLOCK_BYTES, gap_bytes: int = GAP_BYTES) -> list[Block]:
    """Blocks of at most `block_bytes`, file by file and in offset order, that hold every wanted row exactly once.

    Only a single unit larger than `block_bytes` makes a larger block.
    """
    blocks: list[Block] = []
    pieces: list[Piece] = []
    file: Path | None = None

    def close() -> None:
        if pieces and file is not None:
            start = pieces[0].offset
            blocks.append(Block(file, start, pieces[-1].offset + pieces[-1].num_bytes - start, tuple(pieces)))
            pieces.clear()

    for want, rows in _in_file_order(wants):
        if want.file != file:
            close()
            file = want.file
        unit_bytes = want.unit * want.row_bytes
        start = rows.start
        while start < rows.stop:
            offset = want.offset + start * want.row_bytes
            room = 0
            if pieces and offset - (pieces[-1].offset + pieces[-1].num_bytes) <= gap_bytes:
                room = (block_bytes - (offset - pieces[0].offset)) // max(1, unit_bytes)
            if room < 1:
                close()
                room = max(1, block_bytes // max(1, unit_bytes))
            stop = min(rows.stop, start + room * want.unit)
            pieces.append(Piece(want.name, range(start, stop), offset, (stop - start) * want.row_bytes))
            start = stop
    close()
    return blocks


def _in_file_order(wants: Iterable[Want]) -> Iterator[tuple[Want, range]]:
    runs = [(want, rows) for want in wants for rows in want.rows]
    runs.sort(key=lambda run: (str(run[0].file), run[0].offset + run[1].start * run[0].row_bytes))
    yield from runs


def read_into(file: Path, offset: int, views: Sequence[memoryview]) -> int:
    """Fill `views` one after the other from `offset` on; bytes read, less than they hold only at the end of the file.

    The bytes go straight into the caller's memory. Safe on several threads at once. Raises OSError.
    """
    left = [view for view in views if len(view)]
    done = 0
    with file.open("rb", buffering=0) as handle:
        if hasattr(os, "posix_fadvise"):
            # What is asked for and no more: reading ahead would fetch what another rank, or nobody, wants.
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        while left:
            count = os.preadv(handle.fileno(), left[:_MOST_VIEWS], offset + done)
            if not count:
                break
            done += count
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]
    return done
