from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headrace.errors import UserError
from headrace.plan.arrivals import NEVER, Ask, Closed, Open, random_times, read_asks


def test_open_arrivals_come_in_order_of_their_times() -> None:
    arrivals = Open([Ask(2.0, 1, 1), Ask(1.0, 2, 2)])
    assert arrivals.due_s == 1.0
    assert [arrivals.take(), arrivals.take()] == [Ask(1.0, 2, 2), Ask(2.0, 1, 1)]
    arrivals.finished(3.0)
    assert arrivals.due_s == NEVER


def test_a_closed_loop_asks_again_when_answered_until_all_are_asked() -> None:
    arrivals = Closed(2, 3, 10, 5)
    assert [arrivals.take(), arrivals.take()] == [Ask(0.0, 10, 5)] * 2
    assert arrivals.due_s == NEVER
    arrivals.finished(4.0)
    arrivals.finished(5.0)  # nothing is left to ask
    assert arrivals.due_s == 4.0
    assert arrivals.take() == Ask(4.0, 10, 5)
    assert arrivals.due_s == NEVER


def test_fewer_requests_than_clients() -> None:
    arrivals = Closed(8, 2, 10, 5)
    arrivals.take()
    arrivals.take()
    assert arrivals.due_s == NEVER


@pytest.mark.parametrize(("shape", "spread"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_random_gaps_have_the_rate_and_the_spread(shape: float, spread: float) -> None:
    gaps = np.diff(random_times(20_000, 4.0, shape, seed=3))
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(spread, rel=0.05)
    assert random_times(10, 4.0, shape, seed=3) == random_times(10, 4.0, shape, seed=3)


def test_a_file_of_arrivals(tmp_path: Path) -> None:
    file = tmp_path / "arrivals.jsonl"
    file.write_text(
        '{"arrival_s": 10, "input": 7, "output": 3}\n\n'
        '{"arrival_s": 10.5}\n'
        '{"timestamp": 12000, "input_length": 4, "output_length": 2, "hash_ids": [1, 2]}\n'
    )
    assert read_asks(file, 100, 50) == [Ask(0.0, 7, 3), Ask(0.5, 100, 50), Ask(2.0, 4, 2)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no requests"),
        ('{"arrival_s": 1}\n{"input": 3}\n', "line 2: arrival_s is missing"),
        ('{"arrival_s": 1, "output": 0}\n', "line 1: input and output must be at least 1"),
        ('{"arrival_s": "soon"}\n', "line 1: Expected `float"),
        ("arrival_s,input\n", "line 1: JSON is malformed"),
        ('{"arrival_s": 1e999}\n', "line 1: "),
        ('{"arrival_s": \x80}\n', "line 1: "),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "arrivals.jsonl"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=message):
        read_asks(file, 100, 50)


def test_no_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--arrivals .*nowhere: cannot be read: No such file"):
        read_asks(tmp_path / "nowhere", 100, 50)
