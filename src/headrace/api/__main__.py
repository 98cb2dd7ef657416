"""`python -m headrace.api --dir DIR --report-fd N`: the HTTP process."""

from __future__ import annotations

import argparse
from pathlib import Path

import uvloop

from headrace.api.server import HttpProcess, make_service
from headrace.engine.client import EngineClient
from headrace.supervise.child import Ready, attach, run_child, stop_on_sigterm
from headrace.supervise.private import read_config
from headrace.telemetry.log import setup

WHO = "http"


def main() -> None:
    """Serve the engine of DIR until SIGTERM."""
    parser = argparse.ArgumentParser(prog="headrace.api", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="private directory of the engine")
    parser.add_argument("--report-fd", type=int, default=None, help="pipe on which to report")
    args = parser.parse_args()
    setup(WHO)
    reporter = attach(args.report_fd)

    def serve() -> None:
        config = read_config(args.dir)
        process = HttpProcess(make_service(config, EngineClient(args.dir)), config.http)
        stop_on_sigterm(process.stop)
        uvloop.run(process.run(lambda url: reporter.report(Ready(WHO, {"url": url}))))

    run_child(WHO, serve, reporter)


if __name__ == "__main__":
    main()
