"""Logs of every process: one line a record on standard error, naming the process."""

from __future__ import annotations

import logging
import os

from headrace.errors import UserError

LEVELS = ("debug", "info", "warning", "error")


def setup(who: str) -> None:
    """Send this process's logs to standard error as `12:34:56 who: message`.

    The level is `HEADRACE_LOG` (debug, info, warning, error), by default warning for libraries and info for headrace.
    Raises UserError for another level.
    """
    asked = os.environ.get("HEADRACE_LOG", "").lower()
    if asked and asked not in LEVELS:
        raise UserError(f"HEADRACE_LOG {asked!r}: must be one of {', '.join(LEVELS)}")
    # A percent sign in `who` must not be read as a format.
    name = who.replace("%", "%%")
    formatter = logging.Formatter(f"%(asctime)s {name}: %(message)s", datefmt="%H:%M:%S")
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(asked.upper() or logging.WARNING)
    logging.getLogger("headrace").setLevel(asked.upper() or logging.INFO)
    logging.captureWarnings(True)
