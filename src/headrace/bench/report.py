"""Figures of a measurement, for programs (the JSON keys that other benchmarks use) and for people (a table)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.table import Table

from headrace.bench.client import Record
from headrace.bench.measure import Level

METRICS = ("ttft", "tpot", "itl", "e2el")
QUANTILES = (90, 95, 99)


@dataclass(frozen=True, kw_only=True)
class LevelReport:
    """The figures of one number of requests in flight."""

    max_concurrency: int
    effective_concurrency: float
    """Requests in flight on average."""
    completed: int
    failed: int
    first_error: str | None
    duration: float
    """Seconds, first request sent to last answer complete."""
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    """Tokens generated a second over the whole duration."""
    steady_output_throughput: float
    """The same while as many requests as asked for were in flight."""
    total_token_throughput: float
    mean_input_tokens: float
    mean_output_tokens: float
    client_cpu_share: float
    """Of one core, taken by the client."""
    counted_by_usage: bool
    """False: the server reports no usage, tokens are events."""
    stats: dict[str, dict[str, float]]
    """Of each of `METRICS`: mean, median, std, p90, p95, p99 in milliseconds; empty without a value."""

    def keys(self) -> dict[str, Any]:
        """The figures by the names that tools read."""
        fields = {name: value for name, value in vars(self).items() if name != "stats"}
        times = {f"{stat}_{name}_ms": value for name, of in self.stats.items() for stat, value in of.items()}
        # Goodput needs targets to be good by, and none can be given yet.
        return fields | {"request_goodput": None} | times


@dataclass(frozen=True, kw_only=True)
class Report:
    """All measurements of one run."""

    url: str
    model: str | None
    input: int
    output: int
    seed: int
    dialect: str
    """How the server was asked."""
    notes: list[str] = field(default_factory=list)
    levels: list[LevelReport] = field(default_factory=list)

    def keys(self) -> dict[str, Any]:
        """One JSON object; a single measurement's figures are at its top, too."""
        head = {name: value for name, value in vars(self).items() if name != "levels"}
        levels = [level.keys() for level in self.levels]
        return head | (levels[0] if len(levels) == 1 else {}) | {"levels": levels}


def summarise(level: Level) -> LevelReport:
    """Figures of the requests that succeeded; those that failed are counted."""
    good = [record for record in level.records if record.error is None]
    failed = [record for record in level.records if record.error is not None]
    duration = max(level.end_s - level.start_s, 1e-9)
    num_in = sum(record.usage.prompt_tokens for record in good if record.usage)
    num_out = sum(map(num_tokens, good))
    return LevelReport(
        max_concurrency=level.concurrency,
        effective_concurrency=sum(record.end_s - record.start_s for record in level.records) / duration,
        completed=len(good),
        failed=len(failed),
        first_error=failed[0].error if failed else None,
        duration=duration,
        total_input_tokens=num_in,
        total_output_tokens=num_out,
        request_throughput=len(good) / duration,
        output_throughput=num_out / duration,
        steady_output_throughput=_steady(level, good, num_out / duration),
        total_token_throughput=(num_in + num_out) / duration,
        mean_input_tokens=num_in / len(good) if good else 0.0,
        mean_output_tokens=num_out / len(good) if good else 0.0,
        client_cpu_share=level.cpu_s / duration,
        counted_by_usage=all(record.usage is not None for record in good),
        stats={name: _stats(values) for name, values in zip(METRICS, _times(good), strict=True)},
    )


def num_tokens(record: Record) -> int:
    """Tokens generated, by the server's count where it gives one."""
    return record.usage.completion_tokens if record.usage else len(record.token_times_s)


def _steady(level: Level, good: Iterable[Record], overall: float) -> float:
    """Tokens a second while all workers had a request; `overall` where that never lasted."""
    window = level.full_until_s - level.start_s
    if len(level.records) < level.concurrency or window <= 0:
        return overall
    tokens = 0.0
    for record in good:
        times = record.token_times_s
        if times:
            # An event may bring several tokens, or text that was held back.
            within = sum(time <= level.full_until_s for time in times)
            tokens += num_tokens(record) * within / len(times)
        elif record.end_s <= level.full_until_s:
            tokens += num_tokens(record)
    return tokens / window


def _times(good: Iterable[Record]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Seconds: to the first token, per further token, between events, to the end."""
    ttft, tpot, itl, e2el = [], [], [], []
    for record in good:
        e2el.append(record.end_s - record.start_s)
        # A text that shows nothing (special tokens only) has just its end to go by.
        first_s = record.token_times_s[0] if record.token_times_s else record.last_s
        if first_s:
            ttft.append(first_s - record.start_s)
        if num_tokens(record) > 1 and record.token_times_s:
            tpot.append((record.last_s - first_s) / (num_tokens(record) - 1))
        itl += [b - a for a, b in zip(record.token_times_s, record.token_times_s[1:], strict=False)]
    return ttft, tpot, itl, e2el


def _stats(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ms = np.asarray(seconds) * 1000
    found = {"mean": ms.mean(), "median": np.median(ms), "std": ms.std()}
    found |= {f"p{q}": np.percentile(ms, q) for q in QUANTILES}
    return {name: float(value) for name, value in found.items()}


def table(report: Report) -> Table:
    """For people: one row a measurement, within 80 columns. Times are median / p99."""
    title = f"{report.model or 'model'} at {report.url}: {report.input} tokens in, {report.output} out"
    shown = Table(
        title=title,
        caption="\n".join(report.notes) or None,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE,
        collapse_padding=True,
        pad_edge=False,
    )
    for name in ("in flight", "done", "out tok/s", "TTFT ms", "TPOT ms", "E2E s", "CPU"):
        shown.add_column(name, justify="right", no_wrap=True)
    for level in report.levels:
        effective = f" ({level.effective_concurrency:.1f})" if level.max_concurrency > 1 else ""
        failed = f" +{level.failed} bad" if level.failed else ""
        shown.add_row(
            f"{level.max_concurrency}{effective}",
            f"{level.completed}{failed}",
            f"{level.steady_output_throughput:.1f}",
            _pair(level.stats["ttft"]),
            _pair(level.stats["tpot"]),
            _pair(level.stats["e2el"], in_s=True),
            f"{level.client_cpu_share:.0%}",
        )
    return shown


def _pair(of: dict[str, float], *, in_s: bool = False) -> str:
    if not of:
        return "-"
    values = (of[name] / 1000 if in_s else of[name] for name in ("median", "p99"))
    return " / ".join(f"{value:.3g}" if value < 100 else f"{value:.0f}" for value in values)
