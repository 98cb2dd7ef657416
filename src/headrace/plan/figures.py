"""Figures of a simulated run: for programs under the keys that `headrace bench` uses, for people a page of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from headrace.plan.hardware import GIB
from headrace.plan.virtual import Record, VirtualEngine

METRICS = ("ttft", "tpot", "itl", "e2el")
QUANTILES = (90, 95, 99)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What was simulated, in words and numbers."""

    model: str
    layout: str
    split: Sequence[int]
    gpu: str
    num_gpus: int
    links: str
    hosts: int
    network: str | None
    workload: str
    """In words: how requests came and how long they were."""
    weight_bytes: Sequence[float]
    """By stage, of each rank."""
    stage_kv_tokens: Sequence[int]
    """What each stage alone could hold."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What came of it. Times are milliseconds where the name says so, else seconds."""

    completed: int
    duration: float
    """First request to last token."""
    total_input_tokens: int
    total_output_tokens: int
    request_throughput: float
    output_throughput: float
    """Tokens generated a second over the whole duration."""
    steady_output_throughput: float | None
    """The same until the first client of a closed loop had nothing more to ask."""
    total_token_throughput: float
    effective_concurrency: float
    """Requests under way, on average."""
    bubble: list[float]
    """By stage: the share of the time with work in flight during which it did not compute."""
    edge_busy: list[float]
    """By edge: the share of that time during which its link was occupied."""
    num_plans: int
    num_preemptions: int
    times: dict[str, dict[str, float]]
    """Of each of `METRICS`: mean, median, std, p90, p95, p99 in milliseconds; empty without a value."""

    def keys(self) -> dict[str, object]:
        """By the names that tools read."""
        fields = {name: value for name, value in vars(self).items() if name != "times"}
        return fields | {f"{stat}_{name}_ms": value for name, of in self.times.items() for stat, value in of.items()}


def figures(engine: VirtualEngine, *, closed: bool) -> Figures:
    """Of an engine that has served all that came; `closed`: from clients that asked again when they were answered."""
    records, pipeline = engine.records, engine.pipeline
    start_s = min(record.ask.at_s for record in records)
    ends_s = [record.token_times_s[-1] for record in records]
    duration = max(ends_s) - start_s
    num_in, num_out = sum(record.ask.input for record in records), sum(len(record.token_times_s) for record in records)
    active_s = max(engine.active_s, 1e-12)
    return Figures(
        completed=len(records),
        duration=duration,
        total_input_tokens=num_in,
        total_output_tokens=num_out,
        request_throughput=len(records) / duration,
        output_throughput=num_out / duration,
        steady_output_throughput=_steady(records) if closed else None,
        total_token_throughput=(num_in + num_out) / duration,
        effective_concurrency=sum(end - record.ask.at_s for end, record in zip(ends_s, records, strict=True))
        / duration,
        bubble=np.clip(1 - pipeline.busy_s / active_s, 0, 1).tolist(),
        edge_busy=np.clip(pipeline.edge_s / active_s, 0, 1).tolist(),
        num_plans=pipeline.num_plans,
        num_preemptions=engine.scheduler.num_preemptions,
        times={name: _stats(values) for name, values in zip(METRICS, _times(records), strict=True)},
    )


def _steady(records: Sequence[Record]) -> float:
    """Tokens a second until the first end after the last request came: so long all clients are busy."""
    last_ask_s = max(record.ask.at_s for record in records)
    until_s = min(record.token_times_s[-1] for record in records if record.token_times_s[-1] > last_ask_s)
    return sum(time <= until_s for record in records for time in record.token_times_s) / until_s


def to_json(setup: Setup, found: Figures) -> str:
    """One object: what was simulated, then what came of it."""
    return msgspec.json.encode(vars(setup) | found.keys()).decode()


def to_text(setup: Setup, found: Figures) -> str:
    """For people, within 80 columns where names allow."""
    return "\n".join(_lines(setup, found))


def _lines(setup: Setup, found: Figures) -> Iterator[str]:
    hosts = f", {setup.hosts} hosts joined by {setup.network or 'nothing priced'}" if setup.hosts > 1 else ""
    split = ",".join(map(str, setup.split[:16])) + (",..." if len(setup.split) > 16 else "")
    yield f"{setup.model}, {setup.layout}, layers {split}"
    yield f"{setup.num_gpus} x {setup.gpu}, links: {setup.links}{hosts}"
    yield setup.workload
    yield ""
    steady = found.steady_output_throughput
    beside = "" if steady is None else f"   {steady:.1f} while no client was done"
    yield f"output tokens/s {found.output_throughput:10.1f}{beside}"
    yield f"requests/s      {found.request_throughput:10.2f}   {found.effective_concurrency:.1f} under way on average"
    yield f"duration, s     {found.duration:10.1f}   {found.num_plans} plans, {found.num_preemptions} pre-emptions"
    yield ""
    yield f"{'':8}{'mean':>10}{'median':>10}{'p90':>10}{'p95':>10}{'p99':>10}"
    for name in METRICS:
        of = found.times[name]
        cells = "".join(f"{of[stat]:10.1f}" for stat in ("mean", "median", "p90", "p95", "p99")) if of else f"{'-':>10}"
        yield f"{name.upper():4} ms {cells}"
    yield ""
    yield f"{'stage':>5}{'layers':>8}{'weights GiB':>13}{'KV tokens':>12}{'busy':>8}{'bubble':>8}"
    shown = (
        range(len(setup.split)) if len(setup.split) <= 32 else (0, 1, 2, *range(len(setup.split) - 3, len(setup.split)))
    )
    for stage in shown:
        yield (
            f"{stage:5}{setup.split[stage]:8}{setup.weight_bytes[stage] / GIB:13.1f}{setup.stage_kv_tokens[stage]:12}"
            f"{1 - found.bubble[stage]:8.0%}{found.bubble[stage]:8.0%}"
        )


def _times(records: Sequence[Record]) -> tuple[list[float], list[float], list[float], list[float]]:
    """Seconds: to the first token, per further token, between tokens, to the end."""
    ttft, tpot, itl, e2el = [], [], [], []
    for record in records:
        times = record.token_times_s
        ttft.append(times[0] - record.ask.at_s)
        e2el.append(times[-1] - record.ask.at_s)
        if len(times) > 1:
            tpot.append((times[-1] - times[0]) / (len(times) - 1))
            itl += np.diff(times).tolist()
    return ttft, tpot, itl, e2el


def _stats(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ms = np.asarray(seconds) * 1000
    found: Mapping[str, float] = {"mean": ms.mean(), "median": np.median(ms), "std": ms.std()}
    found = {**found, **{f"p{q}": np.percentile(ms, q) for q in QUANTILES}}
    return {name: float(value) for name, value in found.items()}
