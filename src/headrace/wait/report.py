"""What a person, or a script, reads of the wait: heartbeats, and how it ended."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TextIO

from headrace.doctor.causes import Finding
from headrace.wait.watch import Outcome

QUIET_S = 30.0
"""Where there is no terminal, what is seen is said again after so long although it has not changed."""
ERROR_LINES = 8
CAUSE = re.compile(r"(?i)\b\w*(?:Error|Exception)[:(]|\b(?:fatal|panic|segmentation fault|out of memory)\b")
"""A line that names an error, not one that leads to it (`raise ValueError(` does that too, with the text behind)."""
TROUBLE = re.compile(r"(?i)error|exception|fatal|fail|traceback|killed|abort|panic|cannot|unable|out of memory")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Heartbeat:
    """Says what is seen: on a terminal in one line that is written over, elsewhere at each change and now and then."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._tty = stream.isatty()
        self._said = ""
        self._said_s = float("-inf")

    def say(self, elapsed_s: float, text: str) -> None:
        """One look."""
        line = f"{stamp(elapsed_s)} {text}"
        if self._tty:
            self._stream.write(f"\r\x1b[K{line}")
        elif text != self._said or elapsed_s - self._said_s >= QUIET_S:
            self._said, self._said_s = text, elapsed_s
            self._stream.write(line + "\n")
        self._stream.flush()

    def clear(self) -> None:
        """Leave the terminal's line for what comes last."""
        if self._tty:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def stamp(elapsed_s: float) -> str:
    """Seconds since the start, as every line begins."""
    return f"[{elapsed_s:.0f}s]"


def error_lines(log: Sequence[str], count: int = ERROR_LINES) -> list[str]:
    """The last lines of a log that tell of an error: what names one rather than what surrounds it; else its end."""
    lines = [line for line in (_ANSI.sub("", raw).rstrip() for raw in log) if line.strip()]
    named = [line for line in lines if CAUSE.search(line)]
    troubled = [line for line in lines if TROUBLE.search(line)]
    shown = (named or troubled or lines)[-count:]
    # An engine's last word is worth a line, however it is put.
    if troubled and troubled[-1] not in shown:
        shown = [*shown[-(count - 1) :], troubled[-1]]
    return shown


def outcome_text(outcome: Outcome, findings: Sequence[Finding]) -> list[str]:
    """How it ended, in lines."""
    lines = [f"{stamp(outcome.elapsed_s)} {outcome.verdict}: {outcome.text}"]
    if outcome.verdict == "ready":
        return lines
    lines += [f"  {line}" for line in error_lines(outcome.log)]
    if outcome.verdict == "failed":
        lines += [f"known cause: {finding.cause.title}: {finding.cause.advice}" for finding in findings[:1]]
    return lines


def outcome_json(
    outcome: Outcome, findings: Sequence[Finding], *, url: str, model: str | None, probe_s: float | None
) -> str:
    """How it ended, as one JSON object in one line."""
    return json.dumps(
        {
            "outcome": outcome.verdict.replace(" ", "_"),
            "elapsed_s": round(outcome.elapsed_s, 3),
            "text": outcome.text,
            "url": url,
            "model": model,
            "probe_s": None if probe_s is None else round(probe_s, 3),
            "errors": error_lines(outcome.log),
            "causes": [finding.cause.name for finding in findings],
        }
    )
