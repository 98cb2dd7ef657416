"""Sizes and lists as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cli.units import parse_bytes, parse_ints, parse_seconds
from headrace.errors import UserError


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("1024", 1024),
        ("512MB", 512_000_000),
        ("512 mb", 512_000_000),
        ("2GiB", 2 << 30),
        ("2Gi", 2 << 30),
        ("1.5G", 1_500_000_000),
        (".5k", 500),
        ("3TiB", 3 << 40),
        ("7b", 7),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@given(st.integers(0, 1 << 62))
def test_digits_are_exact(count: int) -> None:
    assert parse_bytes(str(count)) == count


@pytest.mark.parametrize("text", ["", "-1", "GB", "12Q", "1e9", "1,5G", "0x10", "1 2", "nan"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UserError, match="512MB"):
        parse_bytes(text)


@given(st.lists(st.integers(-100, 100), min_size=1))
def test_lists(values: list[int]) -> None:
    assert parse_ints(",".join(map(str, values))) == tuple(values)


@pytest.mark.parametrize("text", ["", "8,", "8,x", "8;7", "1.5"])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(UserError, match="8,8,7"):
        parse_ints(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5", 5.0), ("2.5", 2.5), ("5s", 5.0), ("250ms", 0.25), ("30m", 1800.0), ("1h30m", 5400.0), ("2d", 172_800.0)],
)
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "5x", "1h 30m", "5sm", "-5s", "inf", "nan", "1e400"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(UserError, match="like 30s"):
        parse_seconds(text)
