"""`headrace serve`: refuse what can be refused, start every process, watch them all, stop them all."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.config import ServeConfig
from headrace.errors import Fault, UserError
from headrace.supervise.diagnostics import Evidence, diagnostics_root, save
from headrace.supervise.forecast import compare, remember
from headrace.supervise.group import ProcessGroup
from headrace.supervise.launch import engine_commands
from headrace.supervise.life import Life
from headrace.supervise.listen import check_address
from headrace.supervise.notify import Notifier
from headrace.supervise.prepare import Prepared, devices_of, prepare
from headrace.supervise.private import PrivateDir, trace_folder, write_config
from headrace.supervise.screen import Screen, ready_json, ready_text, stop_text
from headrace.supervise.vitals import limits_of
from headrace.supervise.watch import OnEnd, OnFailure, OnReady, Stopped, StopSignals, Watch
from headrace.telemetry.log import setup
from headrace.telemetry.trace import save_trace


def serve(config: ServeConfig) -> int:
    """Run the service until it is stopped or fails; returns the exit code: 0, 1 for a fault, 2 for a user's error.

    Raises UserError for what is refused before any process starts, Fault where the system refuses what a start needs.
    """
    start = time.monotonic()
    setup("serve")
    screen, life = Screen(sys.stderr), Life(Notifier.take(os.environ))

    def say(text: str) -> None:
        screen.line(text)
        life.starting(text)

    try:
        with StopSignals() as signals:
            check_address(config.http.host, config.http.port)
            prepared = prepare(config, say=say)
            with PrivateDir() as private:
                write_config(private.path, prepared.config)
                transport = prepared.config.engine.run.transport
                commands = engine_commands(
                    private.path,
                    prepared.mesh,
                    http=True,
                    transport=transport,
                    devices=devices_of(prepared),
                    on_terminal=sys.stderr.isatty(),
                )
                return Watch(
                    commands=commands,
                    signals=signals,
                    screen=screen,
                    life=life,
                    on_ready=_announce(prepared, screen),
                    on_end=_conclude(prepared, screen, private.path),
                    on_failure=_keep(prepared, screen, private.path),
                    limits=limits_of(prepared.config.engine.run),
                    drain_s=prepared.config.http.drain_timeout_s,
                    start_s=start,
                ).run()
    except Stopped:
        return 0
    except UserError as error:
        life.failed(str(error))
        raise
    except OSError as error:
        # Of the private directory: all that runs later sees to its own.
        where = f"{error.filename}: " if error.filename else ""
        life.failed(str(error))
        raise Fault(f"cannot be started: {where}{error.strerror or error}") from error


def _announce(prepared: Prepared, screen: Screen) -> OnReady:
    config = prepared.config

    def announce(engine: Mapping[str, Any], http: Mapping[str, Any], ready_s: float) -> None:
        url = http["url"]
        lines = ready_text(
            name=prepared.name,
            device=config.engine.model.device,
            dtype=config.engine.model.dtype,
            url=url,
            mesh=prepared.mesh,
            fields=engine,
            ready_s=ready_s,
            has_key=config.http.api_key is not None,
        )
        for line in lines:
            screen.line(line)
        if prepared.forecast is not None:
            start, line = compare(prepared.forecast, prepared.name, engine)
            screen.line(line)
            remember(start)
        if config.json_ready:
            text = ready_json(url=url, pid=os.getpid(), mesh=prepared.mesh, fields=engine, ready_s=ready_s)
            # Whoever asked may have gone; the service goes on.
            with contextlib.suppress(BrokenPipeError):
                print(text, flush=True)

    return announce


def _keep(prepared: Prepared, screen: Screen, directory: Path) -> OnFailure:
    root = diagnostics_root(prepared.config.diagnostics)

    def keep(evidence: Evidence, group: ProcessGroup) -> None:
        folder = save(root, evidence, prepared.config, directory, group)
        if folder is not None:
            screen.line(f"diagnostics in {folder}")

    return keep


def _conclude(prepared: Prepared, screen: Screen, directory: Path) -> OnEnd:
    trace = prepared.config.engine.run.trace

    def conclude(engine: Mapping[str, Any]) -> None:
        for line in stop_text(engine):
            screen.line(line)
        if trace is not None:
            screen.line(save_trace(trace_folder(directory), Path(trace)))

    return conclude
