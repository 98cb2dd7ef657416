"""The plan of reads: every row wanted once, in file order, in blocks of a bounded size."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.weights.reads import Want, merge, plan_reads, read_into

ranges = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: range(pair[0], sum(pair))), max_size=6
)


@given(ranges, st.integers(1, 5))
def test_merge_is_the_union_in_whole_units(wanted: list[range], unit: int) -> None:
    merged = merge(wanted, unit)
    covered = {row for part in merged for row in part}
    assert covered == {
        r for part in wanted for row in part for r in range(row // unit * unit, (row // unit + 1) * unit)
    }
    assert all(part.start % unit == part.stop % unit == 0 for part in merged)
    assert all(a.stop < b.start for a, b in pairwise(merged))


@st.composite
def checkpoints(draw: st.DrawFn) -> list[Want]:
    """Tensors that follow each other in two files, some bytes apart, with some rows of each wanted."""
    wants = []
    ends = {Path("a"): 0, Path("b"): 100}
    for i in range(draw(st.integers(1, 8))):
        file = draw(st.sampled_from(sorted(ends)))
        unit, num_units, row_bytes = draw(st.integers(1, 4)), draw(st.integers(1, 20)), draw(st.integers(1, 9))
        offset = ends[file] + draw(st.integers(0, 30))
        ends[file] = offset + unit * num_units * row_bytes
        rows = [range(a, b) for a, b in draw(st.lists(st.tuples(*[st.integers(0, unit * num_units)] * 2), max_size=4))]
        wants.append(Want(f"t{i}", file, offset, row_bytes, unit, merge(rows, unit)))
    return draw(st.permutations(wants))


@given(checkpoints(), st.integers(1, 64), st.integers(0, 16))
def test_plan_holds_every_row_once_in_bounded_blocks(wants: list[Want], block_bytes: int, gap_bytes: int) -> None:
    blocks = plan_reads(wants, block_bytes, gap_bytes)
    by_name = {want.name: want for want in wants}
    seen: dict[str, list[int]] = {want.name: [] for want in wants}
    for block in blocks:
        at = block.offset
        for piece in block.pieces:
            want = by_name[piece.name]
            assert block.file == want.file
            assert piece.offset == want.offset + piece.rows.start * want.row_bytes
            assert piece.num_bytes == len(piece.rows) * want.row_bytes
            assert piece.rows.start % want.unit == piece.rows.stop % want.unit == 0
            assert 0 <= piece.offset - at <= gap_bytes
            at = piece.offset + piece.num_bytes
            seen[piece.name] += piece.rows
        assert block.offset == block.pieces[0].offset
        assert at == block.offset + block.num_bytes
        one_unit = len(block.pieces) == 1 and len(block.pieces[0].rows) == by_name[block.pieces[0].name].unit
        assert block.num_bytes <= block_bytes or one_unit
    assert seen == {want.name: [row for part in want.rows for row in part] for want in wants}
    order = [(str(block.file), block.offset) for block in blocks]
    assert order == sorted(order)


def test_neighbours_share_a_read() -> None:
    near = Want("b", Path("f"), 1010, 10, 1, (range(2),))
    wants = [Want("a", Path("f"), 0, 10, 1, (range(100),)), near, Want("c", Path("f"), 99_000, 10, 1, (range(1),))]
    assert [[piece.name for piece in block.pieces] for block in plan_reads(wants)] == [["a", "b"], ["c"]]


@pytest.mark.parametrize(("offset", "size", "count"), [(0, 4, 4), (3, 5, 5), (8, 5, 2), (10, 3, 0), (99, 1, 0)])
@pytest.mark.parametrize("cut", [0, 1, 3])
def test_read_ends_with_the_file(tmp_path: Path, offset: int, size: int, count: int, cut: int) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    buffer = bytearray(size)
    view = memoryview(buffer)
    assert read_into(tmp_path / "f", offset, [view[:cut], view[cut:]]) == count
    assert buffer[:count] == b"0123456789"[offset : offset + count]


def test_more_places_than_the_system_takes_at_once_are_filled(tmp_path: Path) -> None:
    raw = bytes(i % 251 for i in range(5000))
    (tmp_path / "f").write_bytes(raw)
    buffer = bytearray(4500)
    assert read_into(tmp_path / "f", 7, [memoryview(buffer)[i : i + 2] for i in range(0, 4500, 2)]) == 4500
    assert buffer == raw[7:4507]


def test_short_reads_are_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: whole(fd, [views[0][:3]], offset))
    buffer = bytearray(9)
    assert read_into(tmp_path / "f", 1, [memoryview(buffer)[:4], memoryview(buffer)[4:]]) == 9
    assert buffer == b"123456789"
