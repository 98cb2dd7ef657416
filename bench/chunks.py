"""What chunks that adapt change: closed loops in virtual time, beside whole chunks: `python bench/chunks.py`.

The embedded model in float32 on two cores, assumed: 31 ms to read its weights (540 MB at 17.4 GB/s) and 2.2 ms a token
(61 billion multiply-adds a second), spread over the stages; chunks of at most 512 tokens. Prints tokens a second, time
to first token and time between tokens, in ms.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from headrace.schedule import Request, Scheduler, SchedulerConfig
from headrace.schedule.cost import CostCurve
from headrace.step import ROW_WIDTH, StepResult, pack, unpack

READ_MS, TOKEN_MS, CHUNK = 31.0, 2.2, 512
# Of SmolLM2 135M in float32, attention left out; the floor of an eighth of the chunk counts.
CURVE = CostCurve(token=106_000_000, pair=0, step=106_000_000 * CHUNK // 8)


@dataclass(frozen=True)
class Load:
    """So many requests, so many of them at once."""

    at_once: int
    requests: int
    num_prompt: int
    num_output: int


def run(load: Load, num_stages: int, curve: CostCurve | None) -> tuple[float, list[float], list[float]]:
    """Tokens a second, times to first token and between tokens in ms."""
    config = SchedulerConfig(
        num_stages=num_stages, max_running=256, chunk=CHUNK, page_size=16, num_pages=20_000, max_len=4096, curve=curve
    )  # fmt: skip
    scheduler, ends_ms = Scheduler(config), [0.0] * num_stages
    results: deque[tuple[float, StepResult]] = deque()
    started_ms: dict[str, float] = {}
    last_ms: dict[str, float] = {}
    ttft_ms: list[float] = []
    itl_ms: list[float] = []
    now_ms, num_ended = 0.0, 0
    while num_ended < load.requests:
        while len(started_ms) < min(load.requests, num_ended + load.at_once):
            name = f"r{len(started_ms)}"
            started_ms[name] = now_ms
            prompt = pack([len(started_ms), *range(load.num_prompt - 1)])
            scheduler.submit(Request(name, prompt, load.num_output), now_ms)
        while (plan := scheduler.schedule(now_ms)) is not None:
            rows = unpack(plan.rows, ROW_WIDTH)
            cost_ms, at_ms = (READ_MS + TOKEN_MS * float(rows[:, 2].sum())) / num_stages, now_ms
            for stage, end_ms in enumerate(ends_ms):
                at_ms = ends_ms[stage] = max(at_ms, end_ms) + cost_ms
            results.append((at_ms, StepResult(plan.plan_id, pack([1] * int(rows[:, 3].sum())))))
        now_ms, result = results.popleft()
        for event in scheduler.commit(result, now_ms):
            name = event.request_id
            if name in last_ms:
                itl_ms.append(now_ms - last_ms[name])
            else:
                ttft_ms.append(now_ms - started_ms[name])
            last_ms[name] = now_ms
            num_ended += event.finish_reason is not None
    return 1000 * load.requests * load.num_output / now_ms, ttft_ms, itl_ms


def main() -> None:
    """Print a line a load, number of stages and kind of chunk."""
    print(
        f"{'stages':>6}{'at once':>9}{'in':>5}{'out':>5}{'':>10}{'tok/s':>8}{'TTFT mean, p99':>18}{'ITL mean, p99':>16}"
    )
    for num_stages in (1, 2):
        for load in (Load(32, 32, 64, 64), Load(32, 160, 64, 64), Load(8, 40, 400, 32), Load(32, 160, 400, 32)):
            for kind, curve in (("whole", None), ("adapting", CURVE)):
                rate, ttft_ms, itl_ms = run(load, num_stages, curve)
                first, between = (f"{np.mean(x):.0f}, {np.quantile(x, 0.99):.0f}" for x in (ttft_ms, itl_ms))
                what = f"{num_stages:>6}{load.at_once:>9}{load.num_prompt:>5}{load.num_output:>5}{kind:>10}"
                print(f"{what}{rate:>8.1f}{first:>18}{between:>16}")


if __name__ == "__main__":
    main()
