"""`python -m headrace.probe --tasks JSON [--rank N --ranks N --store FILE] --report-fd N`: a process that measures."""

from __future__ import annotations

import argparse
from importlib import import_module

import msgspec

from headrace.probe.task import Task
from headrace.supervise.child import Measured, Ready, attach, run_child
from headrace.telemetry.log import setup


def main() -> None:
    """Run the tasks in order; the first rank reports each one's fields."""
    parser = argparse.ArgumentParser(prog="headrace.probe", description=__doc__)
    parser.add_argument("--tasks", required=True, help="list of tasks as JSON")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--store", default="", help="file by which ranks find each other")
    parser.add_argument("--report-fd", type=int, default=None, help="pipe on which to report")
    args = parser.parse_args()
    tasks = msgspec.json.decode(args.tasks, type=list[Task])
    who = f"probe rank {args.rank}" if args.ranks > 1 else "probe"
    setup(who)
    reporter = attach(args.report_fd)

    def work() -> None:
        # Here, not above: whatever goes wrong in importing torch is reported like everything else.
        modules = [import_module(f"headrace.probe.{task.subject}") for task in tasks]
        reporter.report(Ready(who))
        place = {"rank": args.rank, "ranks": args.ranks, "store": args.store} if args.ranks > 1 else {}
        for task, module in zip(tasks, modules, strict=True):
            fields = module.measure(**task.arguments, **place)
            if args.rank == 0:
                reporter.report(Measured(who, fields))

    # What a communicator or a GPU has set up does not come down by itself.
    run_child(who, work, reporter, at_once=True)


if __name__ == "__main__":
    main()
