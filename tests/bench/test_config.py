"""Flags of the benchmark that cannot be right are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.bench.config import BenchConfig
from headrace.errors import UserError


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"url": "localhost:8000"}, "--url"),
        ({"url": "http://host:port"}, "--url"),
        ({"url": "ftp://host"}, "--url"),
        ({"concurrency": ()}, "--concurrency"),
        ({"concurrency": (4, 0)}, "--concurrency"),
        ({"input": 0}, "--input"),
        ({"output": 0}, "--output"),
        ({"requests": 0}, "--requests"),
        ({"duration_s": 0.0}, "--duration"),
        ({"timeout_s": -1.0}, "--timeout"),
        ({"requests": 5, "duration_s": 1.0}, "--duration"),
    ],
)
def test_a_bad_flag_is_named(values: dict[str, Any], flag: str) -> None:
    with pytest.raises(UserError, match=flag):
        BenchConfig(**values)


def test_how_many_requests_are_sent() -> None:
    assert [BenchConfig().num_requests(c) for c in (1, 4, 32)] == [6, 12, 96]
    assert BenchConfig(requests=5).num_requests(32) == 5
    assert BenchConfig(duration_s=3.0).num_requests(32) is None
