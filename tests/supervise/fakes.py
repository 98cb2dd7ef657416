"""Children that stand in for engine, workers and HTTP: a line of Python each, started like the real ones."""

from __future__ import annotations

import sys

from headrace.supervise.launch import Command

_PRELUDE = """
import json, os, signal, sys
fd = int(sys.argv[-1])
def say(**event): os.write(fd, json.dumps(event).encode() + b"\\n")
def ready(who, **fields): say(type="ready", who=who, fields={"pid": os.getpid(), **fields})
def failed(who, message, **kinds): say(type="failed", who=who, message=message, **kinds)
def until_stopped():
    while os.read(0, 1): pass
    os._exit(9)
def deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""
"""`until_stopped` ends on SIGTERM (by its default: a handler could run just before the read), or when the supervisor is
gone; `deaf` no longer listens to SIGTERM."""


def fake(who: str, body: str, stop_order: int = 0) -> Command:
    """A child that runs `body` after the prelude."""
    # -I -S: no site packages, so that it starts in milliseconds.
    return Command(who=who, argv=(sys.executable, "-I", "-S", "-c", _PRELUDE + body), stop_order=stop_order)


def healthy(who: str, stop_order: int = 0) -> Command:
    """A child that is ready at once and ends when asked."""
    return fake(
        who, f"signal.signal(signal.SIGTERM, lambda *_: os._exit(0)); ready({who!r}); until_stopped()", stop_order
    )
