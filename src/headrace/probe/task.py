"""A measurement as it is asked for, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

Subject = Literal["device", "memory", "product", "host", "peer", "sums", "disk"]
"""Each is a module here with a function `measure` that takes the arguments of a task and returns fields."""


class Task(msgspec.Struct, frozen=True):
    """One measurement."""

    name: str
    """In all that is said: "memory of GPU 0"."""
    subject: Subject
    arguments: dict[str, Any]
    deadline_s: float
    """From the end of the one before."""
    about: str = ""
    """What is measured: nothing else of it is tried once a vital task has failed."""
    vital: bool = False


@dataclass(frozen=True)
class Outcome:
    """Fields, or a problem in words."""

    task: Task
    fields: Mapping[str, Any] | None
    problem: str = ""
    tried: bool = True
    """Whether it was begun at all."""
