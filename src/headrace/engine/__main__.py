"""`python -m headrace.engine --dir DIR --report-fd N`: the engine's process."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from headrace.engine.loop import Engine
from headrace.step import EngineStatus
from headrace.supervise.beat import Pulse, start_beating
from headrace.supervise.child import Ended, Progress, Ready, attach, run_child, stop_on_sigterm
from headrace.supervise.private import read_config, stacks_file
from headrace.telemetry.log import setup
from headrace.weights.source import read_spec, resolve


def main() -> None:
    """Serve the configuration in DIR until SIGTERM."""
    parser = argparse.ArgumentParser(prog="headrace.engine", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="private directory of this engine")
    parser.add_argument("--report-fd", type=int, default=None, help="pipe on which to report")
    args = parser.parse_args()
    setup("engine")
    reporter = attach(args.report_fd, stacks=stacks_file(args.dir, "engine"))
    pulse = Pulse()
    start_beating("engine", reporter, pulse)

    def serve() -> None:
        config = read_config(args.dir).engine
        assert config.model.model is not None
        engine = Engine(config, read_spec(resolve(config.model.model, say=lambda _: None)), args.dir)
        stop_on_sigterm(engine.stop)
        pulse.follow(engine.work)

        def progress(done: int, total: int) -> None:
            reporter.report(Progress("engine", "loading weights", done, total))

        def ready(status: EngineStatus) -> None:
            fields = {
                "kv_tokens": status.kv_tokens,
                "max_len": status.max_len,
                "load_s": status.load_s,
                "stages": stages(status),
                "warm": msgspec.to_builtins(status.warm),
            }
            reporter.report(Ready("engine", fields))

        engine.run(progress, ready)
        reporter.report(Ended("engine", {"stages": stages(engine.status())}))

    run_child("engine", serve, reporter)


def stages(status: EngineStatus) -> list[dict[str, Any]]:
    """Each stage's counters as a report has them."""
    return [msgspec.to_builtins(stage) for stage in status.stages]


if __name__ == "__main__":
    main()
