"""`python -m headrace.api --dir DIR --report-fd N`: the HTTP process."""

from __future__ import annotations

import argparse
from pathlib import Path

import uvloop

from headrace.api.server import HttpProcess, make_service
from headrace.engine.client import EngineClient
from headrace.supervise.beat import Pulse, start_beating
from headrace.supervise.child import Ready, attach, run_child, stop_on_sigterm
from headrace.supervise.private import read_config, stacks_file
from headrace.telemetry.log import setup

WHO = "http"


def main() -> None:
    """Serve the engine of DIR until SIGTERM."""
    parser = argparse.ArgumentParser(prog="headrace.api", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="private directory of the engine")
    parser.add_argument("--report-fd", type=int, default=None, help="pipe on which to report")
    args = parser.parse_args()
    setup(WHO)
    told: list[HttpProcess] = []

    def on_failure(why: str) -> None:
        for process in told:
            process.fail(why)

    reporter = attach(
        args.report_fd,
        on_failure=on_failure,
        stacks=stacks_file(args.dir, WHO),
    )
    pulse = Pulse()
    start_beating(WHO, reporter, pulse)

    def serve() -> None:
        config = read_config(args.dir)
        process = HttpProcess(make_service(config, EngineClient(args.dir)), config.http)
        stop_on_sigterm(process.stop)
        told.append(process)
        pulse.follow(process.work)
        uvloop.run(process.run(lambda url: reporter.report(Ready(WHO, {"url": url}))))

    run_child(WHO, serve, reporter)


if __name__ == "__main__":
    main()
