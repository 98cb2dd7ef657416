"""What the processes write on standard error: passed on line by line, and the last of it kept by process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import threading
from collections import deque
from dataclasses import dataclass, field

KEPT_LINES = 200
MAX_LINE = 16384
"""Bytes after which a line is passed on unfinished."""
PIPE_BYTES = 1 << 20
"""Room for what is written while nobody reads: a terminal may be held, or the supervisor suspended."""
STANDARD_ERROR = 2


@dataclass
class _Source:
    who: str
    rest: bytearray = field(default_factory=bytearray)
    """A line's begin."""


class Logs:
    """A thread that reads the pipes given to it. What cannot be written, because a disk is full, is dropped."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._kept: dict[str, deque[bytes]] = {}
        self._thread: threading.Thread | None = None
        self._stop_read, self._stop_write = os.pipe()
        self._selector.register(self._stop_read, selectors.EVENT_READ, None)

    def pipe(self, who: str) -> int:
        """The write end of a new pipe, for `who` to write on; to be closed here once it has it. Before `start`."""
        read, write = os.pipe()
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            # The system grants so much only to so many.
            with contextlib.suppress(OSError):
                fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._kept[who] = deque(maxlen=KEPT_LINES)
        self._selector.register(read, selectors.EVENT_READ, _Source(who))
        return write

    def start(self) -> None:
        """Begin to read."""
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
        self._thread.start()

    def last(self) -> dict[str, bytes]:
        """The last lines of each process."""
        return {who: b"".join(list(lines)) for who, lines in self._kept.items()}

    def finish(self, timeout_s: float) -> None:
        """Wait until all that was written by processes that have ended is passed on, and stop reading. Idempotent."""
        if self._stop_write < 0:
            return
        os.close(self._stop_write)
        self._stop_write = -1
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self._thread is None or not self._thread.is_alive():
            for key in list(self._selector.get_map().values()):
                os.close(key.fd)
            self._selector.close()

    def _run(self) -> None:
        stopping = False
        while len(self._selector.get_map()) > 1:
            # Once told to stop: what is there by now, and no more. A process's own children may hold its pipe.
            ready = [key for key, _ in self._selector.select(0 if stopping else None)]
            read = [key for key in ready if isinstance(key.data, _Source)]
            if stopping and not read:
                break
            stopping = stopping or len(ready) > len(read)
            for key in read:
                self._take(key.fd, key.data)

    def _take(self, fd: int, source: _Source) -> None:
        data = os.read(fd, 1 << 16)
        source.rest += data
        if not data:
            self._selector.unregister(fd)
            os.close(fd)
        end = source.rest.rfind(b"\n") + 1
        if not end and (not data or len(source.rest) >= MAX_LINE):
            end = len(source.rest)
        whole = bytes(source.rest[:end])
        del source.rest[:end]
        if whole:
            self._kept[source.who].extend(line[:MAX_LINE] for line in whole.splitlines(keepends=True))
            _write(whole)


def _write(data: bytes) -> None:
    left = memoryview(data)
    with contextlib.suppress(OSError):
        while left:
            left = left[os.write(STANDARD_ERROR, left) :]
