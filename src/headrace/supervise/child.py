"""A child's side of the supervisor: reports, the lifeline that ends an orphan, and one way to fail.

A child is started with `--report-fd N`, the write end of a pipe on which it writes one JSON line an event, and with a
pipe as standard input that its parent keeps open: end of file there means that the parent is gone.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

import msgspec

from headrace.errors import Fault, PeerLost, UserError
from headrace.step import Failed

log = logging.getLogger(__name__)

MAX_MESSAGE = 2000
"""Longest message of a report in characters, so that a line stays within what a pipe takes at once."""
PROGRESS_PERIOD_S = 0.1


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Child to supervisor: how far a long piece of work is, in bytes."""

    who: str
    text: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """Child to supervisor: what it does is up. The engine says `kv_tokens`, `load_s`, `max_len` and `stages`
    (`StageStats` as mappings), the HTTP process `url`.
    """

    who: str
    fields: dict[str, Any] = {}


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """Child to supervisor: what it has done, as its last word. The engine says `stages` as in `Ready`."""

    who: str
    fields: dict[str, Any] = {}


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """Child to `headrace probe`: a value, as soon as it is known; `fields` as the measurement's module says."""

    who: str
    fields: dict[str, Any] = {}


class Beat(msgspec.Struct, frozen=True, tag="beat", omit_defaults=True):
    """Child to supervisor, once a second: I run."""

    who: str
    doing: str = ""
    """Work in hand, in words; empty where there is none."""
    done: int = 0
    """Changes with whatever gets done."""
    turns: int = -1
    """Turns of a main loop that never pauses for long; -1 where it may."""
    waits: bool = False
    """Whether the main thread waits for another rank."""
    at_work: bool = False
    """Whether the main thread is to get the work done, and the process was seen to compute or read since the last."""
    where: str = ""
    """Our own function that the main thread is in."""


Report = Progress | Ready | Ended | Measured | Failed | Beat

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


def decode_report(line: bytes) -> Report:
    """Decode one line of a report pipe. Raises msgspec.ValidationError or msgspec.DecodeError."""
    return _decoder.decode(line)


class Reporter:
    """Writes reports, from any thread; without a pipe it drops them. A parent that is gone is not an error here."""

    def __init__(self, fd: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._fd = fd
        self._clock = clock
        # A signal handler may report while its own thread does.
        self._lock = threading.RLock()
        self._last_progress_s = float("-inf")

    @property
    def attached(self) -> bool:
        """Whether there is a supervisor that listens."""
        return self._fd is not None

    def detach(self) -> None:
        """Report nothing from here on."""
        with self._lock:
            self._fd = None

    def report(self, event: Report) -> None:
        """Write one event. Progress is thinned to one in `PROGRESS_PERIOD_S`, the last (done == total) always goes."""
        with self._lock:
            if self._fd is None:
                return
            if isinstance(event, Progress) and event.done < event.total:
                now = self._clock()
                if now - self._last_progress_s < PROGRESS_PERIOD_S:
                    return
                self._last_progress_s = now
            # A supervisor that does not read, because it is stopped itself, must not hold up who beats.
            if isinstance(event, Beat) and not select.select([], [self._fd], [], 0)[1]:
                return
            data = memoryview(_encoder.encode(event) + b"\n")
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
            except BrokenPipeError:
                self._fd = None


def attach(
    report_fd: int | None,
    on_stop: Callable[[], None] | None = None,
    *,
    on_failure: Callable[[str], None] | None = None,
    stacks: Path | None = None,
) -> Reporter:
    """Tie this process to its supervisor; call it first thing, in the main thread.

    Ends the process when standard input reaches its end (only with a report_fd: by hand, standard input is a
    terminal), ignores SIGINT (a terminal sends it to everyone; stopping is the supervisor's business) and calls
    `on_stop` on SIGTERM (`stop_on_sigterm` sets it later; until then SIGTERM just ends the process).
    `on_failure` is called, in another thread, with the one line that says why the service fails, before it is stopped.
    stacks: a file into which SIGUSR1 writes the stacks of all threads, whatever they are at; a crash does too.
    """
    if on_stop is not None:
        stop_on_sigterm(on_stop)
    if stacks is not None:
        _write_stacks(stacks)
    if report_fd is None:
        return Reporter()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(report_fd, False)
    threading.Thread(target=_end_with_parent, args=(on_failure,), name="lifeline", daemon=True).start()
    return Reporter(report_fd)


_stacks_file: TextIO | None = None
"""Open for as long as the process lives: what writes to it has only its descriptor."""


def _write_stacks(path: Path) -> None:
    # In C, at the signal: a thread that never comes back to the interpreter does not keep it from being done.
    global _stacks_file  # one a process, as the signal's handler is
    path.parent.mkdir(exist_ok=True)
    _stacks_file = path.open("a", encoding="utf-8")
    faulthandler.enable(_stacks_file)
    faulthandler.register(signal.SIGUSR1, _stacks_file)


def stop_on_sigterm(on_stop: Callable[[], None]) -> None:
    """Call `on_stop` in the main thread on SIGTERM: it should wake the main loop, which then returns.

    A signal may be taken in just before the main thread begins to wait, so no wait may lack a deadline (or a file that
    `on_stop` writes to).
    """

    def handle(_signal: int, _frame: FrameType | None) -> None:
        on_stop()

    signal.signal(signal.SIGTERM, handle)


def _end_with_parent(on_failure: Callable[[str], None] | None) -> None:
    """Hear the supervisor, which only ever says why the service fails, in one line; end when it is gone."""
    # The raw descriptor: sys.stdin's lock would be held for ever, and interpreter exit waits for it.
    said = b""
    try:
        while data := os.read(0, 4096):
            *lines, said = (said + data).split(b"\n")
            for line in lines:
                if on_failure is not None:
                    on_failure(line.decode("utf-8", "replace"))
    except OSError:
        pass
    os._exit(1)


def one_line(text: str) -> str:
    """`text` as one line of at most `MAX_MESSAGE` characters."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_MESSAGE else line[: MAX_MESSAGE - 3] + "..."


def failure_of(who: str, error: BaseException) -> Failed:
    """What to report of an exception."""
    if isinstance(error, UserError):
        return Failed(who=who, message=one_line(str(error)), user_error=True)
    if isinstance(error, Fault):
        return Failed(who=who, message=one_line(str(error)), secondary=isinstance(error, PeerLost))
    kind, said = type(error).__name__, str(error)
    return Failed(who=who, message=one_line(f"{kind}: {said}" if said else kind))


def run_child(who: str, main: Callable[[], None], reporter: Reporter, *, at_once: bool = False) -> NoReturn:
    """Run a child's `main` to its end and exit: 0 when it returns, 2 on a UserError, 1 on anything else.

    at_once: when it returns nothing is left to do, and taking down what libraries have set up may wait for peers that
    have gone already.
    `who` names the child in the supervisor's one line ("worker rank 1 (stage 1)"). Without a supervisor the line goes
    to standard error. The traceback is logged at debug level only.
    """
    try:
        main()
    except Exception as error:
        log.debug("%s failed", who, exc_info=True)
        failed = msgspec.structs.replace(failure_of(who, error), at_s=time.monotonic())
        reporter.report(failed)
        if reporter.attached:
            # Not sys.exit: communication threads of a broken run would keep the process alive.
            _flush()
            os._exit(2 if failed.user_error else 1)
        print(f"{who}: {failed.message}", file=sys.stderr)
        sys.exit(2 if failed.user_error else 1)
    if at_once and reporter.attached:
        _flush()
        os._exit(0)
    sys.exit(0)


def _flush() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
