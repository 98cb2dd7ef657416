"""One measurement: a closed loop that keeps a number of requests in flight."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.bench.client import Connection, Record
from headrace.bench.config import BenchConfig
from headrace.bench.probe import Target
from headrace.errors import Fault

WARM_UP_TOKENS = 4
REQUESTS_A_LEVEL = 1_000_000
"""Numbers set apart for each measurement, so that no two share a prompt."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """What was seen with one number of requests in flight; times as in `Record`."""

    concurrency: int
    records: list[Record]
    start_s: float
    full_until_s: float
    """When there was first nothing more to start: from here on fewer requests are in flight than asked for."""
    end_s: float
    cpu_s: float
    """Processor time of the client, all of which is one thread's."""


async def measure(config: BenchConfig, target: Target, concurrency: int, first_number: int) -> Level:
    """Warm up, then run the closed loop. Requests are numbered from `first_number`."""
    numbers = itertools.count(first_number)
    connections = [Connection(target.address) for _ in range(concurrency)]
    try:
        warm_up = [_request(target, next(numbers), min(WARM_UP_TOKENS, config.output)) for _ in connections]
        sends = (_send(one, request, config) for one, request in zip(connections, warm_up, strict=True))
        await asyncio.gather(*sends)
        return await _loop(config, target, connections, numbers)
    finally:
        for connection in connections:
            connection.close()


async def _loop(config: BenchConfig, target: Target, connections: list[Connection], numbers: Iterator[int]) -> Level:
    count = config.num_requests(len(connections))
    # Written beforehand where their number is known: the loop itself then does nothing but send and read.
    ready = None if count is None else iter([_request(target, next(numbers), config.output) for _ in range(count)])
    records: list[Record] = []
    full_until_s: list[float] = []
    cpu_s, start_s = time.thread_time(), time.perf_counter()
    deadline_s = start_s + (config.duration_s or 0.0)

    def take() -> bytes | None:
        if ready is not None:
            return next(ready, None)
        return _request(target, next(numbers), config.output) if time.perf_counter() < deadline_s else None

    async def work(connection: Connection) -> None:
        while (request := take()) is not None:
            records.append(await _send(connection, request, config))
        full_until_s.append(time.perf_counter())

    await asyncio.gather(*(work(connection) for connection in connections))
    return Level(
        concurrency=len(connections),
        records=records,
        start_s=start_s,
        full_until_s=min(full_until_s),
        end_s=max((record.end_s for record in records), default=start_s),
        cpu_s=time.thread_time() - cpu_s,
    )


def _request(target: Target, number: int, max_tokens: int) -> bytes:
    return target.address.post("/v1/completions", target.workload.body(number, max_tokens))


async def _send(connection: Connection, request: bytes, config: BenchConfig) -> Record:
    """A failure to connect is one failed request, not the end of the measurement."""
    start_s = time.perf_counter()
    try:
        return await connection.send(request, config.timeout_s)
    except Fault as fault:
        # A server that is gone refuses at once: do not spin on it.
        await asyncio.sleep(0.1)
        return Record(start_s, end_s=time.perf_counter(), error=str(fault))
