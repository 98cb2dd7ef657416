"""A process that measures nothing: tasks say what it does instead."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

import msgspec

from headrace.errors import Fault, PeerLost
from headrace.probe.task import Task
from headrace.supervise.child import Measured, Ready, attach, run_child

parser = argparse.ArgumentParser()
parser.add_argument("--tasks")
parser.add_argument("--rank", type=int, default=0)
parser.add_argument("--report-fd", type=int)
args = parser.parse_args()
tasks = msgspec.json.decode(args.tasks, type=list[Task])
reporter = attach(args.report_fd)


def act(what: str) -> None:
    if what == "hang":
        time.sleep(1000)
    if what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "fail":
        raise Fault("it broke\nhere")
    if what == "leave":
        os._exit(0)
    if what == "peer fails":
        raise Fault("root cause") if args.rank else PeerLost("rank 1 is gone")


def main() -> None:
    if tasks[0].arguments.get("start"):
        act(tasks[0].arguments["start"])
    reporter.report(Ready("fake"))
    for task in tasks:
        act(task.arguments.get("do", ""))
        if args.rank == 0:
            reporter.report(Measured("fake", {"pid": os.getpid(), "name": task.name}))


run_child("fake", main, reporter)
sys.exit(0)
