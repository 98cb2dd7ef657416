"""A plan that does not end names what it waits for: tokens, hidden states, or the device itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.errors import PeerLost
from headrace.step import StepPlan, pack, unpack
from headrace.worker.batch import Rows
from headrace.worker.clock import HostClocks
from headrace.worker.runner import Flying, Held, Runner


class Told:
    """A receive that is done, or not."""

    def __init__(self, done: bool) -> None:
        self._done = done

    def wait(self) -> torch.Tensor:
        raise AssertionError("nobody waits here")

    def is_done(self) -> bool:
        return self._done


def runner() -> Any:
    made = Runner.__new__(Runner)
    made._timeout_s, made._last_done_s = 0.0, 0.0
    made._comm = SimpleNamespace(  # type: ignore[assignment]  # as much of it as is looked at
        previous=SimpleNamespace(name="activations from rank 0"), feedback_in=SimpleNamespace(name="sampled tokens")
    )
    return made


@pytest.mark.parametrize(
    ("tokens", "hidden", "named"),
    [
        ([], False, "activations from rank 0"),
        ([True], False, "activations from rank 0"),
        ([True, False], True, "sampled tokens"),
        ([False], None, "sampled tokens"),
        ([True], True, "the device"),
        ([], None, "the device"),
    ],
)
def test_what_is_named(tokens: list[bool], hidden: bool | None, named: str) -> None:
    held = Held(StepPlan(7, b""), Rows.of(unpack(pack([0, 0, 1, 1]), 4)), 0, None if hidden is None else Told(hidden))
    flying = Flying(held, HostClocks().start(0), [Told(done) for done in tokens], issued_s=1.0)
    with pytest.raises(PeerLost, match=rf"^{named}, plan 7: nothing within 0 s \(--timeout\)"):
        runner()._check_deadline(flying)


def test_a_plan_waits_for_those_before_it() -> None:
    made = runner()
    made._timeout_s, made._last_done_s = 1e9, 0.0
    made._check_deadline(Flying(Held(StepPlan(0, b""), Rows.of(unpack(b"", 4)), 0), HostClocks().start(0), []))
