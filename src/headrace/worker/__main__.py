"""`python -m headrace.worker --join URL --rank N --dir DIR --report-fd N [--on-terminal]`: one rank's process."""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path

import zmq

from headrace.channel import join
from headrace.supervise.beat import Pulse, start_beating
from headrace.supervise.child import attach, run_child, stop_on_sigterm
from headrace.supervise.private import read_config, stacks_file, trace_folder
from headrace.telemetry.log import setup


def main() -> None:
    """Obey the engine in DIR until it says stop."""
    parser = argparse.ArgumentParser(prog="headrace.worker", description=__doc__)
    parser.add_argument("--join", required=True, help="where the engine listens for workers")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--dir", type=Path, required=True, help="private directory of the engine")
    parser.add_argument("--report-fd", type=int, default=None, help="pipe on which to report")
    parser.add_argument("--on-terminal", action="store_true", help="what is written in the end goes to a terminal")
    args = parser.parse_args()
    layout = read_config(args.dir).engine.layout
    who = f"worker rank {args.rank} (stage {args.rank // layout.tp})"
    setup(who)
    reporter = attach(args.report_fd, stacks=stacks_file(args.dir, who))
    pulse = Pulse()
    pulse.say("starting")
    start_beating(who, reporter, pulse)

    def work() -> None:
        # Here, not above: whatever goes wrong in importing torch is reported like everything else. Nothing that an
        # import makes is garbage: looking for it takes a tenth of the start or more.
        gc.disable()
        import torch

        from headrace.worker.faults import in_words
        from headrace.worker.loop import Worker

        gc.freeze()
        gc.enable()
        torch.set_grad_enabled(False)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        socket = join(zmq.Context(), args.join, identity=f"rank-{args.rank}".encode())
        worker = Worker(socket, args.rank, os.getpid(), trace_folder(args.dir), pulse, on_terminal=args.on_terminal)
        stop_on_sigterm(worker.stop)
        with in_words():
            worker.run()

    # NCCL's groups, with graphs that hold their sums, do not come down by themselves.
    run_child(who, work, reporter, at_once=True)


if __name__ == "__main__":
    main()
