"""Which faults are put in, where and when, what is expected, and what is left out and why."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

When = Literal["load", "warm-up", "idle", "prefill", "decode", "always"]
Do = Literal["kill", "stop", "fail", "hang", "hold", "memory", "full", "cut"]

STALL_S = 5.0
"""`--stall-timeout` of every service here; 60 s by default."""
WITHIN_S = 10.0
"""From a fault to the end of the last process; a hang has the stall's time besides."""
NUM_STAGES = 3

FAULTS: dict[Do, str] = {
    "kill": "SIGKILL", "stop": "SIGSTOP", "fail": "exception", "hang": "hang", "hold": "hang, interpreter held",
    "memory": "out of memory", "full": "full disk", "cut": "closed sockets",
}  # fmt: skip

_WORKER = {
    "load": ("headrace.worker.stage", "load_model"),
    "warm-up": ("headrace.worker.runner", "Runner.execute"),
    "idle": ("headrace.worker.loop", "Worker._patience_ms"),
    "prefill": ("headrace.worker.runner", "Runner.execute"),
    "decode": ("headrace.worker.runner", "Runner.execute"),
}
_POINTS: dict[str, dict[str, tuple[str, str]]] = {
    "http": {
        "load": ("headrace.api.server", "make_service"),
        "idle": ("headrace.api.server", "HttpProcess._is_ending"),
        "prefill": ("headrace.api.generation", "Generation._read"),
        "decode": ("headrace.api.generation", "Generation._read"),
    },
    "engine": {
        "load": ("headrace.engine.executor", "Executor.load"),
        "warm-up": ("headrace.engine.loop", "Engine._warm"),
        "idle": ("headrace.engine.loop", "Engine._tell_status"),
        "prefill": ("headrace.engine.loop", "Engine._commit"),
        "decode": ("headrace.engine.loop", "Engine._commit"),
    },
    "parent": {
        "load": ("headrace.supervise.vitals", "Vitals.check"),
        "warm-up": ("headrace.supervise.vitals", "Vitals.check"),
        "idle": ("headrace.supervise.vitals", "Vitals.check"),
        "decode": ("headrace.supervise.vitals", "Vitals.check"),
    },
}


@dataclass(frozen=True)
class Cell:
    """One fault in one place at one time."""

    do: Do
    when: When
    who: str
    """`parent`, `http`, `engine`, `rank N`."""
    ends: bool = True
    """Whether the service is to end; otherwise it goes on, and ends well when it is asked to."""
    code: int = 1
    line: str | None = None
    """Pattern of the last line; by default it begins with the process's name."""
    function: tuple[str, str] | None = None
    """Module and function where it happens, where that is not the usual one."""

    @property
    def name(self) -> str:
        """For people and test ids."""
        return f"{self.do}-{self.when}-{self.who.replace(' ', '')}"

    @property
    def point(self) -> tuple[str, str]:
        """Module and function at whose call it happens."""
        return self.function or _POINTS.get(self.who, _WORKER)[self.when]

    @property
    def within_s(self) -> float:
        """Seconds until all must be over."""
        return WITHIN_S + (STALL_S if self.do in ("hang", "hold") else 0.0)

    def pattern(self, num_stages: int) -> str:
        """What the last line must match."""
        rank = re.fullmatch(r"rank (\d)", self.who)
        name = f"worker rank {rank[1]} \\(stage {rank[1]}\\)" if rank else self.who
        assert not rank or int(rank[1]) < num_stages
        return f"headrace serve: {self.line or f'{name}: .*'}"


def place(who: str, num_stages: int = NUM_STAGES) -> str:
    """A process in words."""
    names = {"parent": "supervisor", "http": "HTTP", "rank 0": "first stage", f"rank {num_stages - 1}": "last stage"}
    return names.get(who, who if not who.startswith("rank") else "middle stage")


def _cells(do: Do, when: When, *names: str) -> list[Cell]:
    return [Cell(do, when, who) for who in names]


FIRST, MIDDLE, LAST = "rank 0", "rank 1", "rank 2"

CELLS: tuple[Cell, ...] = (
    *_cells("kill", "load", "http", "engine", MIDDLE),
    *_cells("kill", "warm-up", "engine", FIRST, LAST),
    *_cells("kill", "idle", "http", "engine", FIRST, LAST),
    *_cells("kill", "prefill", "engine", FIRST, MIDDLE),
    *_cells("kill", "decode", "http", "engine", FIRST, MIDDLE, LAST),
    Cell("kill", "load", "parent", code=-9, line=""),
    Cell("kill", "idle", "parent", code=-9, line=""),
    Cell("kill", "decode", "parent", code=-9, line=""),
    *_cells("stop", "load", FIRST),
    *_cells("stop", "warm-up", MIDDLE),
    *_cells("stop", "idle", "engine", LAST),
    *_cells("stop", "prefill", FIRST),
    *_cells("stop", "decode", "http", "engine", MIDDLE),
    Cell("stop", "decode", "parent", ends=False, code=0),
    *_cells("fail", "load", "http", "engine", MIDDLE),
    Cell("fail", "load", "parent", line="supervisor: .*"),
    *_cells("fail", "warm-up", "engine", LAST),
    *_cells("fail", "idle", "http", "engine", FIRST),
    *_cells("fail", "prefill", FIRST),
    *_cells("fail", "decode", "engine", MIDDLE, LAST),
    Cell("fail", "decode", "parent", line="supervisor: .*"),
    Cell("fail", "decode", "http", ends=False, code=0),
    *_cells("hang", "load", "engine", MIDDLE),
    *_cells("hang", "warm-up", "engine", LAST),
    *_cells("hang", "idle", "http", "engine", FIRST),
    *_cells("hang", "prefill", MIDDLE),
    *_cells("hang", "decode", "http", "engine", FIRST, LAST),
    *_cells("hold", "decode", MIDDLE, "http"),
    *_cells("memory", "load", LAST),
    *_cells("memory", "prefill", MIDDLE),
    *_cells("memory", "decode", "engine", LAST),
    *_cells("cut", "idle", "http"),
    Cell("cut", "idle", MIDDLE, line=r"worker rank \d .*: .*"),
    Cell("cut", "decode", FIRST, line=r"worker rank \d .*: .*"),
    Cell("cut", "decode", LAST, line=r"worker rank \d .*: .*"),
    Cell("full", "load", "parent", line=".*No space left on device.*",
         function=("headrace.supervise.private", "write_config")),
    Cell("full", "always", "parent", ends=False, code=0),
)  # fmt: skip
"""What `make faults` puts in."""

LEFT_OUT = (
    ("any fault, warm-up, HTTP", "the HTTP process has none: it serves 503 from its load until the engine is ready"),
    ("SIGKILL, SIGSTOP, exception, prefill, last stage and HTTP", "between the last two rows of a prompt and the first "
     "of its answer the same code runs as at decode"),
    ("hang, supervisor", "nothing of ours watches the supervisor: the service goes on without it, and the service "
     "manager's watchdog, no longer fed, is what ends it (docs/service.md); that needs systemd and was not run"),
    ("prefill, supervisor", "the supervisor does not know prompts from answers"),
    ("closed sockets, load and warm-up", "as a peer that is killed there: the same error on the same socket"),
    ("out of memory, HTTP", "within a request it is an exception there; the system's own kill is a SIGKILL"),
    ("full disk, any stage", "only the supervisor writes files, and the ranks a trace if asked for"),
)  # fmt: skip
"""Cells without a run, and why."""
