"""What ranks record while they run, and the one trace that is made of it at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.errors import UserError
from headrace.telemetry.trace import Trace, check_path, read_steps, save_trace
from tests.telemetry.trace_format import read, slices

MS = 10**6


@contextmanager
def rank(folder: Path, number: int = 0, **more: int) -> Iterator[Trace]:
    trace = Trace(folder, number, number, **more)
    yield trace
    trace.close()


def record(trace: Trace, plan_id: int, start_ms: int, wait: tuple[int, int] = (0, 0), decodes: int = 2) -> None:
    times = (start_ms * MS, (start_ms + 10) * MS, wait[0] * MS, wait[1] * MS)
    trace.step(plan_id, num_tokens=5, num_rows=3, num_decodes=decodes, times_ns=times)


def test_ranks_are_merged_by_time(tmp_path: Path) -> None:
    with rank(tmp_path / "steps") as first, rank(tmp_path / "steps", 1) as second:
        for plan in range(3):
            record(first, plan, 1000 + 20 * plan)
            record(second, plan, 1010 + 20 * plan, wait=(0, 10))
    assert [(step.plan_id, step.rank) for step in read_steps(tmp_path / "steps")] == [
        (plan, rank) for plan in range(3) for rank in (0, 1)
    ]
    line = save_trace(tmp_path / "steps", tmp_path / "t.json")
    assert line.startswith(f"trace of 3 steps in {tmp_path / 't.json'}")
    steps = slices(read(tmp_path / "t.json"), "step")
    assert [(event["ts"], event["dur"]) for event in steps] == [(10_000 * i, 10_000) for i in range(6)]
    assert steps[0]["args"] == {"plan": 0, "rows": 3, "tokens": 5, "decode rows": 2, "prompt tokens": 3}


def test_waits_stand_before_their_step(tmp_path: Path) -> None:
    with rank(tmp_path / "steps") as trace:
        record(trace, 0, 100, wait=(30, 20))
    save_trace(tmp_path / "steps", tmp_path / "t.json")
    assert [(e["name"], e["ts"], e["dur"]) for e in slices(read(tmp_path / "t.json"))] == [
        ("waiting for sampled tokens", 0, 30_000), ("waiting for activations", 30_000, 20_000),
        ("mixed 0", 50_000, 10_000),
    ]  # fmt: skip


@pytest.mark.parametrize(("decodes", "name"), [(0, "prompt 0"), (3, "mixed 0"), (5, "decode 0")])
def test_a_slice_is_named_by_what_the_step_held(tmp_path: Path, decodes: int, name: str) -> None:
    with rank(tmp_path / "steps") as trace:
        record(trace, 0, 100, decodes=decodes)
    save_trace(tmp_path / "steps", tmp_path / "t.json")
    assert [event["name"] for event in slices(read(tmp_path / "t.json"))] == [name]


def test_only_the_latest_steps_are_kept_and_that_is_said(tmp_path: Path) -> None:
    with rank(tmp_path / "steps", most_steps=10) as trace:
        for plan in range(33):
            record(trace, plan, 1000 + 20 * plan)
            kept = [step.plan_id for step in read_steps(tmp_path / "steps")]
            assert kept == list(range(kept[0], plan + 1)) and min(plan + 1, 6) <= len(kept) <= 10
    line = save_trace(tmp_path / "steps", tmp_path / "t.json")
    assert line.startswith("trace of the last 8 of 33 steps") and "there is room for" in line
    assert len(slices(read(tmp_path / "t.json"))) == 8


def test_a_line_that_a_killed_rank_left_half_written_is_left_out(tmp_path: Path) -> None:
    with rank(tmp_path) as trace:
        record(trace, 0, 100)
        record(trace, 1, 200)
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert [step.plan_id for step in read_steps(tmp_path)] == [0]


def test_nothing_recorded_is_an_empty_trace(tmp_path: Path) -> None:
    assert save_trace(tmp_path / "none", tmp_path / "t.json").startswith("trace of 0 steps")
    assert not slices(read(tmp_path / "t.json"))


def test_a_path_that_cannot_be_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("keep me")
    check_path(tmp_path / "old.json")
    check_path(tmp_path / "new.json")
    assert (tmp_path / "old.json").read_text() == "keep me" and not (tmp_path / "new.json").exists()
    for path in (tmp_path, tmp_path / "nowhere" / "t.json"):
        with pytest.raises(UserError, match=f"^--trace {path}: "):
            check_path(path)


def test_a_trace_that_cannot_be_written_in_the_end_is_one_line(tmp_path: Path) -> None:
    assert save_trace(tmp_path, tmp_path / "gone" / "t.json").endswith("not written: No such file or directory")
