"""A covering part of the fault matrix (`make faults` runs it all), and the matrix itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

from tests.faults.cells import CELLS, NUM_STAGES, Cell, place
from tests.faults.service import run_cell
from tests.tiny import write_tiny

LAST = "rank 1"
HERE = (
    Cell("hang", "warm-up", LAST),
    Cell("fail", "decode", LAST),
    Cell("cut", "decode", "rank 0", line=r"worker rank \d .*: .*"),
    Cell("fail", "decode", "http", ends=False, code=0),
    Cell("fail", "load", "parent", line="supervisor: .*"),
)
"""With two stages; deaths and stopped processes are tests of the supervisor."""


def test_a_fault_of_every_kind_is_named_told_and_leaves_nothing(tmp_path: Path) -> None:
    model = write_tiny(tmp_path, "llama")
    # Two at once, since each waits for its own most of the time.
    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(lambda cell: run_cell(cell, model, num_stages=2), HERE))
    assert {outcome.cell.name: outcome.problems for outcome in outcomes if outcome.problems} == {}


def test_every_cell_has_its_place() -> None:
    for cell in (*CELLS, *HERE):
        assert place(cell.who)
        assert cell.pattern(NUM_STAGES)
        if cell.when != "always":
            name, function = cell.point
            owner: object = import_module(name)
            *path, last = function.split(".")
            for part in path:
                owner = getattr(owner, part)
            assert last in vars(owner), "a function of that name, which the fault is put before"


def test_no_cell_is_there_twice() -> None:
    assert len({cell.name for cell in CELLS}) == len(CELLS)
