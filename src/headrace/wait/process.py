"""The process side of an engine: a process of this machine, and the tail of the file that its errors go to."""

from __future__ import annotations

from pathlib import Path

import psutil

from headrace.wait.watch import Sight

TAIL_BYTES = 256 * 1024


class PidSide:
    """Lost when the process ends."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._log = _log_of(pid)
        try:
            # Remembers when it started: a number that is used again is another process.
            self._process: psutil.Process | None = psutil.Process(pid)
        except psutil.NoSuchProcess:
            self._process = None

    def look(self) -> Sight:
        """Whether it runs."""
        name = f"process {self._pid}"
        if self._process is None:
            return Sight(f"{name}: there is none", failed=True)
        try:
            state = self._process.status() if self._process.is_running() else psutil.STATUS_DEAD
        except psutil.NoSuchProcess:
            state = psutil.STATUS_DEAD
        if state in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return Sight(f"{name} has ended", failed=True)
        if state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return Sight(f"{name} is suspended")
        return Sight(f"{name} runs", ready=True)

    def last_lines(self) -> list[str]:
        """The end of the file behind its standard error."""
        return [] if self._log is None else tail(self._log)


def _log_of(pid: int) -> Path | None:
    """The file behind a process's standard error, looked up while it lives; None where it is none or is not ours."""
    try:
        target = Path(f"/proc/{pid}/fd/2").readlink()
        return target if target.is_file() else None
    except OSError:
        return None


def tail(path: Path) -> list[str]:
    """The last lines of a file, of however many bytes."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read(TAIL_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
