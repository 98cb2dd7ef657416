"""`python -m headrace.service.keep`: what a unit runs when its engine has ended; keeps the journal of a failed run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

KEPT = 10
"""Failures of which something is kept."""
LINES = 2000
TIMEOUT_S = 20.0
GOOD = ("", "success")


def keep(environ: Mapping[str, str]) -> Path | None:
    """Write a folder about the run that has just failed; None where it has not failed or there is no place for it.

    systemd tells by the environment: SERVICE_RESULT, EXIT_CODE, EXIT_STATUS, INVOCATION_ID, STATE_DIRECTORY.
    """
    result, place = environ.get("SERVICE_RESULT", ""), environ.get("STATE_DIRECTORY", "")
    if result in GOOD or not place:
        return None
    folder = Path(place) / f"{time.strftime('%Y%m%dT%H%M%S')}-{result}"
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = {name: environ.get(name, "") for name in ("SERVICE_RESULT", "EXIT_CODE", "EXIT_STATUS", "INVOCATION_ID")}
    (folder / "result.txt").write_text("".join(f"{name}={value}\n" for name, value in facts.items()))
    (folder / "journal.log").write_text(_journal(environ.get("INVOCATION_ID", ""), os.getuid() != 0))
    for old in sorted(path for path in Path(place).iterdir() if path.is_dir())[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def _journal(run: str, user: bool) -> str:
    command = ["journalctl", "--no-pager", "--output=short-iso", f"--lines={LINES}", f"_SYSTEMD_INVOCATION_ID={run}"]
    if user:
        command.insert(1, "--user")
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no journal: {error}\n"
    return done.stdout or f"no journal: {done.stderr}\n"


if __name__ == "__main__":
    kept = keep(os.environ)
    if kept is not None:
        sys.stderr.write(f"kept {kept}; `headrace doctor {kept}` looks for known causes\n")
