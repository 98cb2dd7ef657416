"""Values that a person writes with more than digits: bytes and seconds with units, lists with commas."""

from __future__ import annotations

import math
import re

from headrace.errors import UserError

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}{end}": 1000**n for n, prefix in enumerate("kmgt", start=1) for end in ("", "b")},
    **{f"{prefix}{end}": 1024**n for n, prefix in enumerate("kmgt", start=1) for end in ("i", "ib")},
}

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(text: str) -> int:
    """Bytes from `512MB`, `2GiB`, `1.5G` or plain digits. Raises UserError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-zA-Z]*)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise UserError("not a size; write it like 512MB, 2GiB or 1.5G")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def parse_seconds(text: str) -> float:
    """Seconds from `30s`, `5m`, `1h30m`, `250ms` or a plain number. Raises UserError."""
    try:
        seconds = float(text)
    except ValueError:
        parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)", text)
        written = parts and "".join(map("".join, parts)) == text
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts) if written else math.nan
    if not math.isfinite(seconds):
        raise UserError("must be a number of seconds, or like 30s, 5m or 1h30m")
    return seconds


def parse_int(text: str) -> int:
    """An integer; 1.5 is none. Raises UserError."""
    try:
        return int(text)
    except ValueError:
        raise UserError("must be an integer") from None


def parse_ints(text: str) -> tuple[int, ...]:
    """Integers from `8,8,7`. Raises UserError."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError("not a list of integers; write it like 8,8,7") from None
