"""`headrace bench`: probe the server, measure every concurrency, say what was found."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable

import msgspec
import uvloop
from rich.console import Console

from headrace.bench.config import BenchConfig
from headrace.bench.measure import REQUESTS_A_LEVEL, measure
from headrace.bench.probe import probe
from headrace.bench.report import LevelReport, Report, summarise, table


def bench(config: BenchConfig) -> int:
    """Run and print; the exit code is 1 where a measurement has no request that succeeded."""
    progress = Console(stderr=True, highlight=False)
    report = run_bench(config, say=progress.print)
    if config.json:
        sys.stdout.write(msgspec.json.encode(report.keys()).decode() + "\n")
    else:
        Console().print(table(report))
    return 0 if all(level.completed for level in report.levels) else 1


def run_bench(config: BenchConfig, *, say: Callable[[str], None] = lambda _: None) -> Report:
    """Measure the server at every concurrency; `say` gets a line before and after each.

    Raises UserError where the server cannot be measured, Fault where it is not there.
    """
    return uvloop.run(_run(config, say))


async def _run(config: BenchConfig, say: Callable[[str], None]) -> Report:
    seed = secrets.randbits(32) if config.seed is None else config.seed
    target = await probe(config, seed)
    say(f"{config.url}: model {target.model or 'unnamed'}, {target.dialect.words}")
    levels: list[LevelReport] = []
    for index, concurrency in enumerate(config.concurrency):
        count = config.num_requests(concurrency)
        say(f"{concurrency} in flight: {f'{count} requests' if count else f'{config.duration_s:g} s'} ...")
        level = summarise(await measure(config, target, concurrency, index * REQUESTS_A_LEVEL))
        levels.append(level)
        say(f"{concurrency} in flight: {level.steady_output_throughput:.1f} output tokens/s, {level.failed} failed")
    return Report(
        url=config.url,
        model=target.model,
        input=config.input,
        output=config.output,
        seed=seed,
        dialect=target.dialect.words,
        notes=target.notes + list(_warnings(config, levels)),
        levels=levels,
    )


def _warnings(config: BenchConfig, levels: list[LevelReport]) -> list[str]:
    notes = []
    for level in levels:
        who = f"{level.max_concurrency} in flight"
        if level.failed:
            notes.append(f"{who}: {level.failed} failed, the first with: {level.first_error}")
        if level.completed and abs(level.mean_output_tokens - config.output) > 0.5:
            notes.append(f"{who}: answers have {level.mean_output_tokens:.1f} tokens, not {config.output}")
        if level.completed and level.counted_by_usage and abs(level.mean_input_tokens - config.input) > 0.5:
            notes.append(f"{who}: prompts have {level.mean_input_tokens:.1f} tokens, not {config.input}")
        if level.client_cpu_share > 0.5:
            notes.append(f"{who}: the client took {level.client_cpu_share:.0%} of a core and may be the limit")
    return notes
