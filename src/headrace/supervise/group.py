"""A group of child processes: started together, watched through their report pipes, stopped without a trace."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec
import psutil

from headrace.errors import Fault
from headrace.step import Failed
from headrace.supervise.child import Report, decode_report
from headrace.supervise.launch import Command
from headrace.supervise.logs import Logs
from headrace.supervise.vitals import Sign

log = logging.getLogger(__name__)

POLL_S = 0.25
"""A death is seen at once by the end of its report pipe; this often where something else still holds the pipe."""
REAP_S = 0.01
KILLED_S = 10.0
"""What SIGKILL does not end by then hangs in the system, a driver say, and cannot be waited for."""
LOGS_S = 1.0
_VMSTAT = Path("/proc/vmstat")


@dataclass(frozen=True)
class Exited:
    """A child ended: `returncode` as in subprocess, -N for signal N."""

    who: str
    returncode: int
    at_s: float = field(default=0.0, compare=False)
    """When it was seen, on the host's monotonic clock."""
    for_memory: bool = field(default=False, compare=False)
    """Whether the system has killed processes for lack of memory meanwhile."""


Event = Report | Exited


@dataclass(kw_only=True)
class _Child:
    command: Command
    process: subprocess.Popen[bytes]
    report_fd: int
    """Read end of the report pipe; -1 once it is closed."""
    buffer: bytearray = field(default_factory=bytearray)
    told: bool = False
    """Whether its end has been handed out as an event."""

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


class ProcessGroup:
    """The processes of one engine. `wait` and `stop` belong to one thread; `wake` and `kill` may be called from any,
    also from a signal handler. Leaving the context stops whatever still runs.
    """

    def __init__(self, commands: Sequence[Command]) -> None:
        self._commands = tuple(commands)
        self._children: list[_Child] = []
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self.logs = Logs()
        self._memory_kills = memory_kills()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def start(self) -> None:
        """Start every process. Raises Fault, with nothing left running, where one cannot be started."""
        assert not self._children, "a group starts once"
        for command in self._commands:
            try:
                self._children.append(self._spawn(command))
            except OSError as error:
                self.close()
                raise Fault(f"{command.who}: cannot be started: {error}") from None
            log.debug("started %s, pid %d", command.who, self._children[-1].process.pid)
        self.logs.start()

    def _spawn(self, command: Command) -> _Child:
        read, write = os.pipe()
        said = self.logs.pipe(command.who)
        try:
            process = subprocess.Popen(
                (*command.argv, "--report-fd", str(write)),
                env={**os.environ, **command.env},
                stdin=subprocess.PIPE,
                # Standard output is the parent's own: what a library prints in a child goes to standard error.
                stdout=said,
                stderr=said,
                pass_fds=(write,),
                start_new_session=True,
            )
        except BaseException:
            os.close(read)
            raise
        finally:
            os.close(write)
            os.close(said)
        child = _Child(command=command, process=process, report_fd=read)
        self._selector.register(read, selectors.EVENT_READ, child)
        return child

    @property
    def names(self) -> list[str]:
        """Of all children, in the order of their start."""
        return [child.command.who for child in self._children]

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children that still run, by name."""
        return {child.command.who: child.process.pid for child in self._children if child.alive}

    def signs(self) -> dict[str, Sign]:
        """What the system says of the children that still run."""
        found = {}
        for who, pid in self.pids.items():
            with contextlib.suppress(psutil.Error, OSError):
                found[who] = sign_of(psutil.Process(pid))
        return found

    def tell(self, text: str, *names: str) -> None:
        """Write one line to these children, or to all; who has gone does not hear it."""
        for child in self._children:
            if child.alive and child.process.stdin is not None and (not names or child.command.who in names):
                # Past the buffer, which would keep what could not be written and fail when it is closed.
                with contextlib.suppress(OSError):
                    os.write(child.process.stdin.fileno(), text.encode() + b"\n")

    def signal(self, number: signal.Signals, *names: str) -> None:
        """Send a signal to these children, or to all that still run."""
        for child in self._children:
            if child.alive and (not names or child.command.who in names):
                _signal(child, number)

    def wait(self, timeout_s: float) -> list[Event]:
        """What happened, in order: returns at the first events, at `wake`, or empty after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            closing = any(child.report_fd < 0 and not child.told for child in self._children)
            left = deadline - time.monotonic()
            ready = self._selector.select(max(0.0, min(left, REAP_S if closing else POLL_S)))
            events: list[Event] = []
            woken = False
            for key, _ in ready:
                if key.data is None:
                    self._drain_wake()
                    woken = True
                else:
                    events += self._read(key.data)
            events += self._deaths()
            if events or woken or time.monotonic() >= deadline:
                return events

    def wake(self) -> None:
        """Make a `wait` in progress, or the next one, return at once."""
        # A full pipe is as good as one byte in it; a closed one means that nobody waits.
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"w")

    def stop(self, grace_s: float, *, ordered: bool = True) -> list[Event]:
        """Ask every process to end (SIGTERM), kill those that are left after `grace_s` seconds, and reap all.

        Returns what happened meanwhile.

        Ordered: the processes of one `stop_order` end before those of the next are asked, each within an even share of
        the grace. Otherwise all are asked at once.
        """
        orders = sorted({child.command.stop_order for child in self._children}) if ordered else [None]
        now, events = time.monotonic(), list[Event]()
        for i, order in enumerate(orders):
            asked = [c for c in self._children if order is None or c.command.stop_order == order]
            for child in asked:
                if child.alive:
                    _signal(child, signal.SIGTERM)
            events += self._await_end(asked, now + grace_s * (i + 1) / len(orders))
        if self.pids:
            # After a failure this is expected of those that wait for who is gone.
            level = logging.WARNING if ordered else logging.DEBUG
            log.log(level, "killed after %.1f s without an end: %s", grace_s, ", ".join(self.pids))
        self.kill()
        events += self._await_end(self._children, time.monotonic() + KILLED_S)
        # Who ended between two looks may have said something last.
        events += self.wait(0.0)
        if self.pids:
            log.error("do not end though killed: %s", ", ".join(f"{who} (pid {pid})" for who, pid in self.pids.items()))
        self.logs.finish(LOGS_S)
        return events

    def kill(self) -> None:
        """SIGKILL whatever still runs, with all that it started, at once."""
        for child in self._children:
            if child.alive:
                # Each child leads a process group of its own.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill and reap whatever still runs and release every pipe. Idempotent."""
        self.kill()
        deadline = time.monotonic() + KILLED_S
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
            if child.process.stdin is not None:
                child.process.stdin.close()
            self._close_report(child)
        if self._wake_read >= 0:
            self._selector.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_read = self._wake_write = -1
        self.logs.finish(LOGS_S)

    def _await_end(self, children: Sequence[_Child], deadline: float) -> list[Event]:
        # Reports are read on, or a child that writes many of them could not end.
        events: list[Event] = []
        while any(child.alive for child in children) and (left := deadline - time.monotonic()) > 0:
            events += self.wait(min(left, POLL_S))
        return events

    def _read(self, child: _Child) -> list[Event]:
        data = os.read(child.report_fd, 1 << 16)
        if not data:
            self._close_report(child)
            return []
        child.buffer += data
        *lines, rest = bytes(child.buffer).split(b"\n")
        child.buffer[:] = rest
        events: list[Event] = []
        for line in lines:
            try:
                events.append(_timed(decode_report(line)))
            except msgspec.MsgspecError as error:
                log.warning("%s: report not understood: %s", child.command.who, error)
        return events

    def _deaths(self) -> list[Event]:
        events: list[Event] = []
        for child in self._children:
            if child.told or child.alive:
                continue
            while child.report_fd >= 0 and self._pending(child):
                events += self._read(child)
            child.told = True
            code = child.process.returncode
            for_memory = code == -signal.SIGKILL and memory_kills() > self._memory_kills
            events.append(Exited(child.command.who, code, time.monotonic(), for_memory))
        return events

    def _pending(self, child: _Child) -> bool:
        return any(key.data is child for key, _ in self._selector.select(0))

    def _close_report(self, child: _Child) -> None:
        if child.report_fd >= 0:
            self._selector.unregister(child.report_fd)
            os.close(child.report_fd)
            child.report_fd = -1

    def _drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake_read, 4096):
                pass


def _signal(child: _Child, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.process.send_signal(number)


def _timed(report: Report) -> Report:
    if isinstance(report, Failed) and not report.at_s:
        return msgspec.structs.replace(report, at_s=time.monotonic())
    return report


def sign_of(process: psutil.Process) -> Sign:
    """What the system says of one process."""
    with process.oneshot():
        stopped = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        times = process.cpu_times()
        # Not there on every system, nor for every process.
        counters: Mapping[str, int] = {}
        if hasattr(process, "io_counters"):
            with contextlib.suppress(psutil.AccessDenied, OSError):
                counters = process.io_counters()._asdict()
        return Sign(stopped, times.user + times.system, counters.get("read_bytes", 0))


def memory_kills(vmstat: Path = _VMSTAT) -> int:
    """How many processes the system has killed for lack of memory since it started; 0 where it does not say."""
    try:
        lines = vmstat.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
