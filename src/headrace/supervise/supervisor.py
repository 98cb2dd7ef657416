"""`headrace serve`: refuse what can be refused, start every process, watch them all, stop them all."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

from headrace.config import ServeConfig
from headrace.errors import UserError
from headrace.supervise.child import Ended, Progress, Ready
from headrace.supervise.failure import failures_in, settle
from headrace.supervise.group import Event, ProcessGroup
from headrace.supervise.launch import Command, engine_commands
from headrace.supervise.life import Life
from headrace.supervise.listen import check_address
from headrace.supervise.notify import Notifier
from headrace.supervise.prepare import Prepared, prepare
from headrace.supervise.private import PrivateDir, trace_folder, write_config
from headrace.supervise.screen import Screen, ready_json, ready_text, stop_text
from headrace.telemetry.log import setup
from headrace.telemetry.trace import save_trace

STOP_GRACE_S = 8.0
"""A clean stop: requests drain, then the engine and the workers end."""
FAULT_GRACE_S = 3.0
"""After a failure: time to end for those that still can."""
WAIT_S = 1.0

OnReady = Callable[[Mapping[str, Any], Mapping[str, Any], float], None]
"""Called once with the fields of the engine's and of the HTTP process's `Ready` and the seconds since the start."""


OnEnd = Callable[[Mapping[str, Any]], None]
"""Called once when every process has ended, with the fields of the engine's `Ended`; empty after a failure."""


class Stopped(BaseException):
    """A stop was asked for while nothing was running yet."""


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP as a request to stop. A second one kills what is still there at once.

    The previous handlers come back when the context is left. Main thread only.
    """

    def __init__(self) -> None:
        self.requested = False
        self._group: ProcessGroup | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # nohup asks to outlive the terminal.
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def stop_group(self, group: ProcessGroup) -> None:
        """From now on a signal wakes `group`'s wait instead of raising `Stopped`."""
        self._group = group

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        if self._group is None:
            raise Stopped
        if self.requested:
            self._group.kill()
        self.requested = True
        self._group.wake()


def serve(config: ServeConfig) -> int:
    """Run the service until it is stopped or fails; returns the exit code: 0, 1 for a fault, 2 for a user's error.

    Raises UserError for what is refused before any process starts.
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
                commands = engine_commands(private.path, prepared.mesh, http=True, transport=transport)
                announce, conclude = _announce(prepared, screen), _conclude(prepared, screen, private.path)
                return watch(commands, signals, screen, announce, conclude, life, start=start)
    except Stopped:
        return 0
    except UserError as error:
        life.failed(str(error))
        raise


def watch(
    commands: Sequence[Command],
    signals: StopSignals,
    screen: Screen,
    on_ready: OnReady,
    on_end: OnEnd,
    life: Life,
    *,
    start: float,
) -> int:
    """Start the processes, stay until a signal or a failure, leave none behind; returns the exit code."""
    ready: dict[str, Mapping[str, Any]] = {}
    with ProcessGroup(commands) as group:
        signals.stop_group(group)
        group.start()
        while True:
            events = [] if signals.requested else group.wait(WAIT_S)
            if signals.requested:
                life.draining()
                on_end(_last_words(group.stop(STOP_GRACE_S)))
                return 0
            if failures_in(events):
                failure = settle(group, events)
                life.failed(failure.line)
                group.stop(FAULT_GRACE_S, ordered=False)
                on_end({})
                # Last: it is what matters, and what others look for.
                screen.line(f"headrace serve: {failure.line}")
                return failure.exit_code
            for event in events:
                if isinstance(event, Progress):
                    screen.progress(event)
                    life.progress(event)
                elif isinstance(event, Ready) and event.who not in ready:
                    ready[event.who] = event.fields
                    if event.who in ("engine", "http") and ready.keys() >= {"engine", "http"}:
                        on_ready(ready["engine"], ready["http"], time.monotonic() - start)
                        life.ready(f"ready at {ready['http'].get('url', '')}")
            life.tick(lambda: group.suspended)


def _last_words(events: Sequence[Event]) -> Mapping[str, Any]:
    return next((event.fields for event in events if isinstance(event, Ended) and event.who == "engine"), {})


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
        if config.json_ready:
            text = ready_json(url=url, pid=os.getpid(), mesh=prepared.mesh, fields=engine, ready_s=ready_s)
            # Whoever asked may have gone; the service goes on.
            with contextlib.suppress(BrokenPipeError):
                print(text, flush=True)

    return announce


def _conclude(prepared: Prepared, screen: Screen, directory: Path) -> OnEnd:
    trace = prepared.config.engine.run.trace

    def conclude(engine: Mapping[str, Any]) -> None:
        for line in stop_text(engine):
            screen.line(line)
        if trace is not None:
            screen.line(save_trace(trace_folder(directory), Path(trace)))

    return conclude
