"""`headrace doctor`: read, find, say."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace

from headrace.doctor.causes import Finding, diagnose, in_order, load_causes
from headrace.doctor.config import DoctorConfig
from headrace.doctor.read import read

WIDTH = 110
SHOWN_LINE = 300


def doctor(config: DoctorConfig) -> int:
    """Name what is known; the exit code is 0 where a cause is named, else 1. Raises UserError."""
    findings = find(config.path)
    if not findings:
        sys.stdout.write(f"{config.path}: no known cause ({len(load_causes())} were looked for)\n")
        return 1
    for finding in findings:
        sys.stdout.write("\n".join(describe(finding)) + "\n")
    return 0


def find(path: str) -> list[Finding]:
    """The known causes in a log or a folder, each once."""
    found: dict[str, Finding] = {}
    for file, lines in read(path):
        for finding in diagnose(lines, load_causes()):
            found.setdefault(finding.cause.name, replace(finding, file=file))
    return in_order(found.values())


def describe(finding: Finding) -> Iterator[str]:
    """A finding in lines: what, where, what to do, and who reported it."""
    cause = finding.cause
    where = f"{finding.file or 'line'}:{finding.number}" if finding.file else f"line {finding.number}"
    shown = finding.line if len(finding.line) <= SHOWN_LINE else finding.line[: SHOWN_LINE - 3] + "..."
    yield f"{cause.name}: {cause.title}{' (often what others see of a failure elsewhere)' if cause.echo else ''}"
    yield f"  {where}: {shown}"
    yield textwrap.fill(
        cause.advice, WIDTH, initial_indent="  do: ", subsequent_indent="      ", break_on_hyphens=False
    )
    yield f"  see: {', '.join(cause.sources)}"
