"""A supervisor over fake children, run as a program by the tests: `serve_fakes [--quiet] WHO BODY WHO BODY ...`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from headrace.mesh import Mesh
from headrace.supervise.life import Life
from headrace.supervise.notify import Notifier
from headrace.supervise.screen import Screen, ready_json
from headrace.supervise.vitals import Limits
from headrace.supervise.watch import StopSignals, Watch
from tests.supervise.fakes import fake


def main(arguments: list[str]) -> int:
    quiet = arguments[0] == "--quiet"
    arguments = arguments[1:] if quiet else arguments
    commands = [fake(who, body) for who, body in zip(arguments[::2], arguments[1::2], strict=True)]

    def on_ready(engine: Mapping[str, Any], http: Mapping[str, Any], ready_s: float) -> None:
        mesh = Mesh(pp=1, tp=1, ep=1, split=(1,))
        if not quiet:
            print(json.dumps({"engine": engine["pid"], "http": http["pid"]}), file=sys.stderr, flush=True)
        print(ready_json(url="http://x", pid=0, mesh=mesh, fields=engine, ready_s=ready_s), flush=True)

    def on_end(engine: Mapping[str, Any]) -> None:
        if engine:
            print(json.dumps(engine), file=sys.stderr, flush=True)

    with StopSignals() as signals:
        life = Life(Notifier.take(os.environ))
        return Watch(
            commands=commands,
            signals=signals,
            screen=Screen(sys.stderr),
            life=life,
            on_ready=on_ready,
            on_end=on_end,
            drain_s=5.0,
            limits=Limits(stall_s=float(os.environ.get("STALL_S", "60"))),
        ).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
