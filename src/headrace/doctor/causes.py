"""Known causes of failures, and finding them in the lines of a log. The causes themselves lie in causes.toml."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

_TABLE = Path(__file__).with_name("causes.toml")
_STAGE = re.compile(r"\bPP(\d+)\b|\(stage (\d+)\)")
"""How engines name a pipeline stage in a line: `[2026-01-01 00:00:00 PP3 TP1]`, `(stage 3)`, and the next."""
_WORKER_STAGE = re.compile(r"_PP(\d+)")
"""`(Worker_PP3_TP1 pid=1)`"""
MAX_LINE = 4000
"""Characters of a line that are looked at."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One entry of the table. A line belongs to the first entry that it matches."""

    name: str
    title: str
    """What is wrong, in a few words."""
    advice: str
    """What to do about it."""
    sources: tuple[str, ...]
    """Where it was reported."""
    match: tuple[str, ...]
    """Regular expressions: a line that matches one of them shows it."""
    near: str | None = None
    """Another that a line close by must match."""
    within: int = 8
    """How many lines off that one may be, before or behind."""
    last_stage: bool = False
    """Whether the line, or the nearest one before it that names a stage, must be of the last stage of several."""
    echo: bool = False
    """Whether it is often what others see of a failure elsewhere: it is named last."""


@dataclass(frozen=True)
class Finding:
    """A cause, and where it shows first."""

    cause: Cause
    number: int
    """Of the line, from 1."""
    line: str
    file: Path | None = None


class _Table(msgspec.Struct, forbid_unknown_fields=True):
    cause: list[Cause]


@functools.cache
def load_causes() -> tuple[Cause, ...]:
    """The table, in its order."""
    return tuple(msgspec.convert(tomllib.loads(_TABLE.read_text(encoding="utf-8")), _Table).cause)


def diagnose(lines: Iterable[str], causes: Sequence[Cause]) -> list[Finding]:
    """The causes that the lines of one log show, each once: what comes first before what follows, echoes last."""
    held = [line[:MAX_LINE] for line in lines]
    patterns = [(cause, re.compile("|".join(cause.match))) for cause in causes]
    any_of = re.compile("|".join(pattern.pattern for _, pattern in patterns))
    found: dict[str, Finding] = {}
    for index, line in enumerate(held):
        # One pass over most lines, which show nothing.
        if not any_of.search(line):
            continue
        for cause, pattern in patterns:
            if pattern.search(line) and _fits(cause, held, index):
                found.setdefault(cause.name, Finding(cause, index + 1, line.strip()))
                break
    return in_order(found.values())


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Causes before echoes; within those as they are."""
    return sorted(findings, key=lambda finding: finding.cause.echo)


def _fits(cause: Cause, lines: Sequence[str], index: int) -> bool:
    """Whether what surrounds a line is as the cause has it."""
    if cause.near is not None:
        around = lines[max(0, index - cause.within) : index + cause.within + 1]
        if not any(re.search(cause.near, line) for line in around):
            return False
    return not cause.last_stage or _is_of_last_stage(lines, index)


def _is_of_last_stage(lines: Sequence[str], index: int) -> bool:
    last = max((stage for line in lines for stage in _stages(line)), default=0)
    for line in reversed(lines[: index + 1]):
        stages = _stages(line)
        if stages:
            return 0 < last == max(stages)
    return False


def _stages(line: str) -> list[int]:
    """The stages that a line names."""
    named = [int(first or second) for first, second in _STAGE.findall(line)]
    return named + [int(stage) for stage in _WORKER_STAGE.findall(line)]
