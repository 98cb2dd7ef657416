"""`python -m tests.faults [--only TEXT] [--jobs N] [--out docs/faults.md]`: exit code 0 where all is as expected."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.faults.cells import CELLS, FAULTS, LEFT_OUT, NUM_STAGES, STALL_S, WITHIN_S, Cell, place
from tests.faults.service import STOPPED_S, Outcome, run_cell
from tests.tiny import write_tiny

HEAD = ("fault", "when", "where", "named", "client told", "all gone", "exit", "last line", "a client saw", "left")
ORDER = ("load", "warm-up", "idle", "prefill", "decode", "always")


def main() -> int:
    """Put every fault in, print a row each, write the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", default="", help="cells whose name has this in it")
    parser.add_argument("--jobs", type=int, default=1, help="services at once; what is measured suffers")
    parser.add_argument("--out", type=Path, help="file for the table, in Markdown")
    args = parser.parse_args()
    cells = [cell for cell in CELLS if args.only in cell.name]
    with tempfile.TemporaryDirectory(prefix="headrace-faults-") as scratch:
        model = write_tiny(Path(scratch) / "model", "llama")

        def one(cell: Cell) -> Outcome:
            outcome = run_cell(cell, model)
            print(row(outcome), flush=True)
            for problem in outcome.problems:
                print(f"  {cell.name}: {problem}", flush=True)
            return outcome

        with ThreadPoolExecutor(args.jobs) as pool:
            outcomes = list(pool.map(one, cells))
    if args.out is not None:
        args.out.write_text(page(outcomes, args.jobs))
    wrong = [outcome.cell.name for outcome in outcomes if outcome.problems]
    print(f"{len(outcomes)} faults, not as expected: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


def row(outcome: Outcome) -> str:
    """One line of the table."""
    cell = outcome.cell
    cells = (
        FAULTS[cell.do],
        cell.when,
        place(cell.who),
        *(_seconds(value) for value in (outcome.named_s, outcome.told_s, outcome.gone_s)),
        "-" if outcome.code is None else str(outcome.code),
        _code(outcome.line.removeprefix("headrace serve: ")),
        outcome.client,
        ", ".join(outcome.left) or "nothing",
    )
    return "| " + " | ".join(cells) + " |"


def _code(line: str) -> str:
    return f"`{line.replace('|', '/')}`" if line else ""


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def page(outcomes: Sequence[Outcome], jobs: int) -> str:
    """The whole document."""
    ordered = sorted(
        outcomes, key=lambda outcome: (list(FAULTS).index(outcome.cell.do), ORDER.index(outcome.cell.when))
    )
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    wrong = sum(1 for outcome in outcomes if outcome.problems)
    left_out = "\n".join(f"- **{what}**: {why}." for what, why in LEFT_OUT)
    return f"""# Faults, and what becomes of them

Written by `make faults`, {time.strftime("%Y-%m-%d")}, on {machine}, {jobs} at a time: {len(outcomes)} faults, \
{len(outcomes) - wrong} as expected.
Each row is a service of its own: `headrace serve`, a tiny random model, {NUM_STAGES} stages,
`--stall-timeout {STALL_S:g}` (60 s by default). The fault happens inside the process, at a function that it
calls at that time; the package has no hook for that (`tests/faults/inject` replaces the function from outside).

Expected: the service names the process, tells its clients, and its last process is gone within {WITHIN_S:g} s
(a hang: {STALL_S:g} s more, since that is when it is one); no process, socket, folder or shared memory is left.
Times are seconds after the fault; *named* is when the supervisor knew, *client told* when the answer, an error or
the end of the connection came. At load and in the warm-up clients are told 503, and that is not asked here.

| {" | ".join(HEAD)} |
|{"---|" * len(HEAD)}
{chr(10).join(row(outcome) for outcome in ordered)}

Where the service goes on, it answered another client afterwards and ended with exit code 0 when it was asked to. A
supervisor is stopped for {STOPPED_S:g} s. One that is killed cannot remove its folder of sockets: the next start does,
and did here.

Left out:

{left_out}
"""


if __name__ == "__main__":
    sys.exit(main())
