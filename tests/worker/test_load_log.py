"""A rank's lines about its loading."""

from __future__ import annotations

from headrace.worker.load_log import LoadLog


def test_a_line_now_and_then_and_one_at_the_end() -> None:
    said: list[str] = []
    now = 100.0
    log = LoadLog(said.append, clock=lambda: now)
    for done in range(13):
        log.progress(done * 10**9, 12 * 10**9)
        now += 1.0
    assert said == [
        "loading weights: 41% (5.0 GB of 12.0 GB, 1.0 GB/s)",
        "loading weights: 83% (10.0 GB of 12.0 GB, 1.0 GB/s)",
        "loading weights: 100% (12.0 GB of 12.0 GB, 1.0 GB/s)",
    ]


def test_what_is_there_soon_needs_no_line() -> None:
    said: list[str] = []
    log = LoadLog(said.append, clock=lambda: 5.0)
    for done in (40, 98):
        log.progress(done, 98)
    assert not said
