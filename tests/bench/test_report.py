"""Figures from known times."""

from __future__ import annotations

import pytest

from headrace.bench.client import Record, Usage
from headrace.bench.measure import Level
from headrace.bench.report import summarise


def _record(start_s: float, times_s: list[float], end_s: float, num_tokens: int | None = None) -> Record:
    usage = None if num_tokens is None else Usage(10, num_tokens)
    return Record(start_s, end_s, 200, times_s, times_s[-1], usage)


def _level(records: list[Record], concurrency: int, full_until_s: float, end_s: float) -> Level:
    return Level(
        concurrency=concurrency, records=records, start_s=0.0, full_until_s=full_until_s, end_s=end_s, cpu_s=0.5
    )


def test_times_of_one_request() -> None:
    report = summarise(_level([_record(0.0, [0.5, 0.75, 1.0], 1.25, 3)], 1, 1.25, 1.25))
    assert report.stats["ttft"]["mean"] == pytest.approx(500)
    assert report.stats["tpot"]["median"] == pytest.approx(250)
    assert report.stats["itl"]["p99"] == pytest.approx(250)
    assert report.stats["e2el"]["mean"] == pytest.approx(1250)
    assert report.stats["itl"]["std"] == 0
    assert report.output_throughput == pytest.approx(3 / 1.25)
    assert report.total_token_throughput == pytest.approx(13 / 1.25)
    assert report.client_cpu_share == pytest.approx(0.4)


def test_tokens_are_counted_from_usage_not_from_events() -> None:
    report = summarise(_level([_record(0.0, [1.0, 2.0], 2.0, 5)], 1, 2.0, 2.0))
    assert report.total_output_tokens == 5
    assert report.stats["tpot"]["mean"] == pytest.approx(250)
    uncounted = summarise(_level([_record(0.0, [1.0, 2.0], 2.0)], 1, 2.0, 2.0))
    assert (uncounted.total_output_tokens, uncounted.counted_by_usage) == (2, False)


def test_the_steady_rate_leaves_out_the_tail() -> None:
    # One worker has nothing to do after 4 s; the other goes on alone to 8 s.
    records = [_record(0.0, [1.0, 2.0, 3.0, 4.0], 4.0, 4), _record(0.0, [2.0, 4.0, 6.0, 8.0], 8.0, 4)]
    report = summarise(_level(records, 2, 4.0, 8.0))
    assert report.output_throughput == pytest.approx(1.0)
    assert report.steady_output_throughput == pytest.approx(6 / 4)
    assert report.effective_concurrency == pytest.approx(12 / 8)


def test_too_few_requests_have_no_steady_rate() -> None:
    report = summarise(_level([_record(0.0, [1.0, 2.0], 2.0, 2)], 4, 0.0, 2.0))
    assert report.steady_output_throughput == report.output_throughput == pytest.approx(1.0)


def test_failed_requests_count_for_nothing_else() -> None:
    bad = Record(0.0, end_s=1.0, error="HTTP 500: bang", token_times_s=[0.5])
    report = summarise(_level([_record(0.0, [1.0, 2.0], 2.0, 2), bad], 1, 2.0, 2.0))
    assert (report.completed, report.failed, report.first_error) == (1, 1, "HTTP 500: bang")
    assert report.total_output_tokens == 2
    assert report.stats["ttft"]["mean"] == pytest.approx(1000)


def test_nothing_succeeded() -> None:
    report = summarise(_level([Record(0.0, end_s=1.0, error="x")], 1, 1.0, 1.0))
    assert (report.completed, report.output_throughput, report.stats["ttft"]) == (0, 0.0, {})


def test_a_single_token_has_no_time_per_further_token() -> None:
    report = summarise(_level([_record(0.0, [1.0], 1.0, 1)], 1, 1.0, 1.0))
    assert report.stats["tpot"] == {}
    assert report.stats["ttft"]["mean"] == pytest.approx(1000)


def test_a_text_that_shows_nothing_has_its_end_for_a_first_token() -> None:
    report = summarise(_level([Record(0.0, 3.0, 200, [], 2.0, Usage(1, 4))], 1, 3.0, 3.0))
    assert report.stats["ttft"]["mean"] == pytest.approx(2000)
    assert report.steady_output_throughput == pytest.approx(4 / 3)
