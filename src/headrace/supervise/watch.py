"""The life of one group of processes: started, watched, drained or brought down, and the exit code that says which."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Self

from headrace.errors import Fault, UserError
from headrace.step import Failed
from headrace.supervise.child import Ended, Progress, Ready, one_line
from headrace.supervise.diagnostics import Evidence
from headrace.supervise.failure import failures_in, settle
from headrace.supervise.group import Event, Exited, ProcessGroup
from headrace.supervise.launch import Command
from headrace.supervise.life import Life
from headrace.supervise.screen import Screen
from headrace.supervise.vitals import Limits, Vitals

log = logging.getLogger(__name__)

STOP_GRACE_S = 8.0
"""A clean stop, once requests have drained: the engine and the workers end."""
DRAIN_MARGIN_S = 2.6
"""After the time to drain: requests that are left are told, connections close."""
FAULT_GRACE_S = 3.0
"""After a failure: time to end for those that still can, and to tell clients."""
WAIT_S = 1.0
CHECK_S = 1.0
DRAIN_TOLD_S = 1.0
"""A drain that takes longer is explained to who waits for it."""

OnReady = Callable[[Mapping[str, Any], Mapping[str, Any], float], None]
"""Called once with the fields of the engine's and of the HTTP process's `Ready` and the seconds since the start."""
OnEnd = Callable[[Mapping[str, Any]], None]
"""Called once when every process has ended, with the fields of the engine's `Ended`; empty after a failure."""
OnFailure = Callable[[Evidence, ProcessGroup], None]
"""Called when a failure has been looked into and every process has ended, before `OnEnd`."""


class Stopped(BaseException):
    """A stop was asked for while nothing was running yet."""


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP as a request to stop. A second one kills what is still there at once.

    The previous handlers come back when the context is left. Main thread only.
    """

    def __init__(self) -> None:
        self.requested = False
        self.at_once = False
        """Whether a second signal came: everything is killed."""
        self.group: ProcessGroup | None = None
        """What a signal stops."""
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
        self.group = group

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        if self.group is None:
            raise Stopped
        if self.requested:
            self.at_once = True
            self.group.kill()
        self.requested = True
        self.group.wake()


@dataclass(kw_only=True)
class Watch:
    """What is watched and who is told."""

    commands: Sequence[Command]
    signals: StopSignals
    screen: Screen
    life: Life
    on_ready: OnReady
    on_end: OnEnd
    on_failure: OnFailure = lambda _evidence, _group: None
    limits: Limits = field(default_factory=Limits)
    drain_s: float = 30.0
    """Requests in flight have so long after a stop."""
    start_s: float = field(default_factory=time.monotonic)
    """When the start began."""

    def run(self) -> int:
        """Start the processes, stay until a signal or a failure, leave none behind; returns the exit code."""
        with ProcessGroup(self.commands) as group:
            self.signals.stop_group(group)
            group.start()
            try:
                return self._watch(_Attention(self, group))
            except (Fault, UserError):
                raise
            except Exception as error:
                log.debug("the supervisor failed", exc_info=True)
                raise self._own_fault(group, error) from error

    def _watch(self, attention: _Attention) -> int:
        while not self.signals.requested:
            failures = attention.wait(WAIT_S)
            if failures:
                return self._fail(attention, failures)
        return self._drain(attention)

    def _own_fault(self, group: ProcessGroup, error: Exception) -> Fault:
        """End everything after a mistake of ours: clients hear of it, as of any other."""
        fault = Fault(f"supervisor: {one_line(f'{type(error).__name__}: {error}')}")
        self._enter("failed", lambda: self.life.failed(str(fault)))
        group.tell(str(fault))
        group.stop(FAULT_GRACE_S, ordered=False)
        return fault

    def _drain(self, attention: _Attention) -> int:
        """End what takes requests, in its own time, while all else is watched on; then end all else."""
        self._enter("draining", self.life.draining)
        group, began = attention.group, time.monotonic()
        first = min(command.stop_order for command in self.commands)
        taking = {command.who for command in self.commands if command.stop_order == first}
        group.signal(signal.SIGTERM, *taking)
        told = False
        while not self.signals.at_once and taking & group.pids.keys():
            passed = time.monotonic() - began
            if passed > self.drain_s + DRAIN_MARGIN_S:
                break
            if passed > DRAIN_TOLD_S and not told:
                told = True
                self.screen.line(f"requests in flight have {self.drain_s:g} s to end; another signal stops at once")
            failures = [each for each in attention.wait(CHECK_S / 4) if each.who not in taking]
            if failures:
                return self._fail(attention, failures)
        attention.note_end(group.stop(STOP_GRACE_S))
        self.on_end(attention.last_words)
        return 0

    def _fail(self, attention: _Attention, failures: Sequence[Event]) -> int:
        group, vitals = attention.group, attention.vitals
        failure, seen = settle(group, failures, vitals.suspect)
        device = next((command.device for command in self.commands if command.who == failure.who), "")
        failure = replace(failure, device=device)
        self._enter("failed", lambda: self.life.failed(failure.line))
        # Whoever waits for an answer hears the cause; all else ends with its signal.
        group.tell(failure.line)
        evidence = Evidence(failure, seen, vitals.beats(), attention.ready.get("engine", {}))
        if not failure.user_error:
            evidence.look(group)
        # If it still is there it does not run, and would not hear the signal that ends the others.
        group.signal(signal.SIGKILL, failure.who)
        group.stop(FAULT_GRACE_S, ordered=False)
        if not failure.user_error:
            self.on_failure(evidence, group)
        self.on_end({})
        # Last: it is what matters, and what others look for.
        self.screen.line(f"headrace serve: {failure.line}")
        return failure.exit_code

    def _enter(self, state: str, tell: Callable[[], None]) -> None:
        log.info("state: %s", state)
        tell()


class _Attention:
    """What is seen and heard of a group."""

    def __init__(self, watch: Watch, group: ProcessGroup) -> None:
        self.group = group
        self.vitals = Vitals(group.names, watch.limits)
        self.ready: dict[str, Mapping[str, Any]] = {}
        self.last_words: Mapping[str, Any] = {}
        """What the engine said at its end."""
        self._watch = watch
        self._next_check_s = 0.0

    def wait(self, timeout_s: float) -> list[Failed | Exited]:
        """Take in what comes, or what a look shows; the failures."""
        events = self.group.wait(timeout_s)
        self.vitals.hear(events)
        self.note_end(events)
        for event in events:
            if isinstance(event, Progress):
                self._progress(event)
            elif isinstance(event, Ready) and event.who not in self.ready:
                self._ready(event)
        failures = failures_in(events)
        now = time.monotonic()
        if now >= self._next_check_s:
            self._next_check_s = now + CHECK_S
            trouble = self.vitals.check(self.group.signs())
            if trouble is not None:
                failures.append(trouble)
        if not failures:
            self._watch.life.tick(self.vitals.silent)
        return failures

    def note_end(self, events: Sequence[Event]) -> None:
        """Keep what the engine says at its end."""
        for event in events:
            if isinstance(event, Ended) and event.who == "engine":
                self.last_words = event.fields

    def _progress(self, event: Progress) -> None:
        life = self._watch.life
        before = life.state
        self._watch.screen.progress(event)
        life.progress(event)
        if life.state != before:
            log.info("state: %s", life.state)

    def _ready(self, event: Ready) -> None:
        self.ready[event.who] = event.fields
        if event.who in ("engine", "http") and self.ready.keys() >= {"engine", "http"}:
            engine, http, watch = self.ready["engine"], self.ready["http"], self._watch
            watch.on_ready(engine, http, time.monotonic() - watch.start_s)
            watch.life.ready(f"ready at {http.get('url', '')}")
