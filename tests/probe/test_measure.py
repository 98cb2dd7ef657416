"""Processes that hang, crash and fail: each a named problem of one task, within its deadline, and the rest goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil
import pytest

from headrace.probe import measure
from headrace.probe.measure import run_tasks
from headrace.probe.task import Outcome, Subject, Task
from headrace.supervise.group import ProcessGroup
from headrace.supervise.launch import Command

CHILD = str(Path(__file__).with_name("fake_child.py"))
SHORT_S, LONG_S = 0.2, 60.0


def task(name: str, do: str = "", *, subject: Subject = "memory", about: str = "", vital: bool = False) -> Task:
    deadline_s = SHORT_S if do == "hang" else LONG_S
    return Task(name, subject, {"do": do}, deadline_s, about, vital)


def run(tasks: Sequence[Task], ranks: int = 1, start_s: float = LONG_S) -> tuple[list[Outcome], list[str]]:
    """The outcomes, and which tasks were begun."""
    begun: list[str] = []

    def commands(left: Sequence[Task]) -> list[Command]:
        text = msgspec.json.encode(list(left)).decode()
        argv = (sys.executable, CHILD, "--tasks", text, "--rank")
        return [Command(who=f"fake {rank}", argv=(*argv, str(rank))) for rank in range(ranks)]

    return list(run_tasks(tasks, commands, begun=lambda one: begun.append(one.name), start_s=start_s)), begun


def test_values_come_in_order_from_one_process() -> None:
    outcomes, begun = run([task("a"), task("b"), task("c")])
    fields = [outcome.fields or {} for outcome in outcomes]
    assert [one["name"] for one in fields] == begun == ["a", "b", "c"]
    assert len({one["pid"] for one in fields}) == 1


def test_what_hangs_crashes_and_fails_is_named_and_the_rest_is_measured() -> None:
    tasks = [task("good"), task("hangs", "hang"), task("crashes", "crash"), task("leaves", "leave", subject="host")]
    outcomes, begun = run([*tasks, task("fails", "fail", subject="host"), task("last", subject="host")])
    assert begun == [outcome.task.name for outcome in outcomes]
    assert {outcome.task.name: outcome.problem for outcome in outcomes} == {
        "good": "",
        "hangs": "no answer within 0.2 s, killed",
        "crashes": "its process was ended by SIGSEGV",
        "leaves": "its process ended with 0",
        "fails": "it broke here",
        "last": "",
    }
    assert not [child for child in psutil.Process().children() if CHILD in child.cmdline()]


def test_what_is_broken_everywhere_does_not_cost_a_deadline_each() -> None:
    outcomes, begun = run([task(f"pair {i}", "hang", subject="peer") for i in range(9)] + [task("other")])
    assert [outcome.tried for outcome in outcomes] == [True] * 3 + [False] * 6 + [True]
    assert outcomes[5].problem == "not tried, for 3 like it went wrong"
    assert begun == ["pair 0", "pair 1", "pair 2", "other"]
    assert outcomes[-1].fields is not None


def test_nothing_else_is_tried_of_what_does_not_answer() -> None:
    tasks = [
        task("GPU 0", "hang", subject="device", about="GPU 0", vital=True),
        task("memory of GPU 0", about="GPU 0"),
        task("GPU 1", subject="device", about="GPU 1", vital=True),
    ]
    outcomes, _ = run(tasks)
    assert [outcome.problem for outcome in outcomes] == [
        "no answer within 0.2 s, killed", "not tried, for GPU 0 does not work", "",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("start", "start_s", "problem"),
    [
        ("hang", SHORT_S, "did not come up within 0.2 s, killed"),
        ("fail", LONG_S, "it broke here"),
        ("crash", LONG_S, "its process was ended by SIGSEGV"),
    ],
)
def test_processes_that_do_not_come_up(start: str, start_s: float, problem: str) -> None:
    first = Task("a", "memory", {"start": start}, LONG_S)
    outcomes, _ = run([first, task("b")], start_s=start_s)
    assert [outcome.problem for outcome in outcomes] == [problem, "not tried, for the same reason"]
    assert [outcome.tried for outcome in outcomes] == [True, False]


def test_of_several_ranks_the_cause_is_told_not_what_follows_from_it() -> None:
    outcomes, _ = run([task("sum", "peer fails")], ranks=2)
    assert outcomes[0].problem == "root cause"


def test_ranks_measure_together() -> None:
    outcomes, _ = run([task("a"), task("b")], ranks=3)
    assert [outcome.problem for outcome in outcomes] == ["", ""]


def test_a_process_that_cannot_be_killed_is_left_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    kill = ProcessGroup.kill
    groups: list[ProcessGroup] = []
    monkeypatch.setattr(ProcessGroup, "kill", lambda group: groups.append(group))
    monkeypatch.setattr(measure, "KILL_S", 0.1)
    started = time.monotonic()
    outcomes, _ = run([task("hangs", "hang")])
    try:
        assert "hangs in the driver and cannot be killed" in outcomes[0].problem
        assert time.monotonic() - started < LONG_S
    finally:
        monkeypatch.setattr(ProcessGroup, "kill", kill)
        groups[0].close()
