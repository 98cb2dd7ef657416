"""The unit side of an engine: what systemd says of it, here or on another machine, and its journal."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.errors import UserError
from headrace.wait.watch import Sight

COMMAND_TIMEOUT_S = 20.0
JOURNAL_LINES = 1000
NEVER_ACTIVE_LOOKS = 3
"""A start that was asked for a moment ago may not be seen yet; so many looks at an inactive unit are enough."""
_PROPERTIES = (
    "LoadState", "ActiveState", "SubState", "Result", "ExecMainCode", "ExecMainStatus", "NRestarts", "StatusText",
    "InvocationID",
)  # fmt: skip
SSH_LOST = 255
"""What ssh itself exits with where it does not get through."""
_SIGNALLED = ("2", "3")
"""`ExecMainCode` of a main process that a signal ended (CLD_KILLED, CLD_DUMPED)."""


@dataclass(frozen=True)
class Systemd:
    """Runs systemctl and journalctl, by argument lists."""

    ssh: str | None = None
    """Machine to run them on."""
    user: bool = False
    """Whether the user's manager is meant."""

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one of them to its end. Raises UserError where it, or ssh, is not there."""
        command: list[str] = [program, *(["--user"] if self.user else []), *arguments]
        if self.ssh is not None:
            # ssh hands a line to the other machine's shell.
            command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "--", self.ssh, shlex.join(command)]
        try:
            return subprocess.run(
                command,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=COMMAND_TIMEOUT_S,
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except FileNotFoundError:
            raise UserError(f"{command[0]}: not found on this machine") from None
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, SSH_LOST, "", f"no answer within {COMMAND_TIMEOUT_S:g} s")


class UnitSide:
    """Lost when the unit fails, ends, or is started again because it failed."""

    def __init__(self, unit: str, ssh: str | None = None) -> None:
        self._unit = unit
        self._name = f"unit {unit}"
        self._managers: Sequence[Systemd] = (Systemd(ssh), Systemd(ssh, user=True))
        self._found: Systemd | None = None
        self._seen_active = False
        self._num_inactive = 0
        self._first: Mapping[str, str] = {}

    def look(self) -> Sight:
        """Ask systemd. Raises UserError where there is no such unit."""
        shown = self._show()
        if isinstance(shown, str):
            return Sight(f"{self._name}: {shown}")
        self._first = self._first or shown
        active, sub = shown.get("ActiveState", "unknown"), shown.get("SubState", "")
        status = f": {shown['StatusText']}" if shown.get("StatusText") else ""
        if active == "failed":
            return Sight(f"{self._name} has failed: {_why(shown)}{status}", failed=True)
        restarted = shown.get("NRestarts", "0") != self._first.get("NRestarts", "0")
        if sub.startswith("auto-restart") or (restarted and active in ("activating", "active")):
            return Sight(f"{self._name} has failed and is started again: {_why(shown)}{status}", failed=True)
        if active in ("inactive", "deactivating"):
            self._num_inactive += 1
            if self._seen_active:
                return Sight(f"{self._name} has ended: {_why(shown)}{status}", failed=True)
            if self._num_inactive >= NEVER_ACTIVE_LOOKS:
                return Sight(f"{self._name} is not started", failed=True)
        else:
            self._seen_active = True
        return Sight(f"{self._name} {active} ({sub}){status}", ready=active == "active")

    def last_lines(self) -> list[str]:
        """The journal of the run that was looked at."""
        if self._found is None:
            return []
        run = self._first.get("InvocationID")
        unit = f"--user-unit={self._unit}" if self._found.user else f"--unit={self._unit}"
        # Not what earlier runs left there, if that can be told.
        for which in (f"_SYSTEMD_INVOCATION_ID={run}", unit) if run else (unit,):
            done = self._found.run("journalctl", "--no-pager", "--output=cat", f"--lines={JOURNAL_LINES}", which)
            if done.stdout.strip():
                return done.stdout.splitlines()
        return []

    def _show(self) -> Mapping[str, str] | str:
        """The unit's properties, or why they are not to be had now."""
        problem, missing = "", False
        for manager in (self._found,) if self._found else self._managers:
            done = manager.run("systemctl", "show", self._unit, f"--property={','.join(_PROPERTIES)}")
            shown = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
            if shown.get("LoadState", "not-found") != "not-found" or shown.get("ActiveState") == "failed":
                self._found = manager
                return shown
            missing = missing or bool(shown)
            # What the system's manager says, before what the user's does: that one is often not there.
            problem = problem or (" ".join(done.stderr.split()) or f"systemctl: exit code {done.returncode}")
            if done.returncode == SSH_LOST:
                return f"cannot look: {problem}"
        if missing and self._found is None:
            raise UserError(f"--unit {self._unit}: there is no such unit")
        return "is gone" if missing else f"cannot look: {problem}"


def _why(shown: Mapping[str, str]) -> str:
    """A unit's end in words."""
    result, status = shown.get("Result", ""), shown.get("ExecMainStatus", "0")
    by_signal = shown.get("ExecMainCode") in _SIGNALLED
    end = f"signal {status}" if by_signal else f"exit code {status}"
    return f"{result}, {end}" if result else end
