"""What the scheduler costs, and how level and busy it keeps a pipeline: `python bench/scheduler.py [speed | levels]`.

`speed`: what the scheduler takes alone for a plan of all requests at once, and how many steps a second it makes where
they are spread over stages; a step is one plan and its commit. Half of every prompt is shared, and where there is a
prefix cache, the pool is full of what others left. `levels`: a pipeline in virtual time, with a host between a result
and the plan that answers it: how unlike the microbatches are, how near the tokens a second come to the best of level
ones without a host, how many rows are computed past a stop.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from headrace.schedule import Request, Scheduler, SchedulerConfig
from headrace.step import ROW_WIDTH, SamplerSpec, StepPlan, StepResult, pack, unpack

NUM_STEPS = 10_000
NUM_WHOLE = 1500
NUM_RUNS = 3
NUM_REQUESTS = 256
NUM_STAGES = 8

NUM_LEVEL_STEPS = 1600
NUM_WARM_STEPS = 300
HOST_MS = 0.5
"""From a sampled token on the last stage to the plan that answers it on the first."""
STOP = 2
STOP_EVERY = 200
"""A request of `levels` stops after so many tokens, on average."""


def answer(plan: StepPlan) -> StepResult:
    """A result that gives every sampling row token 1."""
    return StepResult(plan.plan_id, pack(np.ones(int(unpack(plan.rows, ROW_WIDTH)[:, 3].sum()), np.int32)))


def make(num_stages: int, num_pages: int, run_ahead: int, *, prefix_cache: bool) -> Scheduler:
    """A scheduler whose pages, where they are cached, all hold what somebody computed before."""
    config = SchedulerConfig(
        num_stages=num_stages,
        max_running=NUM_REQUESTS,
        chunk=2048,
        page_size=16,
        num_pages=num_pages,
        max_len=32768,
        run_ahead=run_ahead,
        prefix_cache=prefix_cache,
    )
    scheduler = Scheduler(config)
    length = min(16 * num_pages, config.max_len) - 16
    for number in range(16 * num_pages // length + 1 if prefix_cache else 0):
        scheduler.submit(Request(f"before {number}", pack(np.arange(length) + number + 1), 1), 0.0)
        while scheduler.has_work:
            plans = list(iter(lambda: scheduler.schedule(0.0), None))
            for plan in plans:
                scheduler.commit(answer(plan), 0.0)
    return scheduler


def prompt_of(number: int, length: int) -> bytes:
    """Half of it as all others have it."""
    half = length // 2
    return pack([*range(half), *range(number, number + length - half)])


def whole_plans(run_ahead: int, *, prefix_cache: bool) -> tuple[float, float]:
    """Median seconds for a plan of all requests, and for its commit, on one stage."""
    scheduler = make(1, 40_000, run_ahead, prefix_cache=prefix_cache)
    for number in range(NUM_REQUESTS):
        request = Request(f"r{number}", prompt_of(number, 128), 2000, SamplerSpec(stop_token_ids=[STOP]))
        scheduler.submit(request, 0.0)
    in_flight: deque[StepPlan] = deque()
    plans_s, commits_s = [], []
    while len(plans_s) < NUM_WHOLE:
        if in_flight:
            result = answer(in_flight.popleft())
            started = time.perf_counter()
            scheduler.commit(result, 0.0)
            commits_s.append(time.perf_counter() - started)
        while True:
            started = time.perf_counter()
            plan = scheduler.schedule(0.0)
            ended = time.perf_counter()
            if plan is None:
                break
            in_flight.append(plan)
            if len(plan.rows) == 4 * ROW_WIDTH * NUM_REQUESTS and not plan.register:
                plans_s.append(ended - started)
    return float(np.median(plans_s)), float(np.median(commits_s[-NUM_WHOLE:]))


def measure(
    prompt_len: int, output_len: int, num_pages: int, run_ahead: int, *, prefix_cache: bool
) -> tuple[float, int, int]:
    """Seconds inside the scheduler for NUM_STEPS steps of a closed loop, tokens made, pre-emptions."""
    scheduler = make(NUM_STAGES, num_pages, run_ahead, prefix_cache=prefix_cache)
    sampler = SamplerSpec(stop_token_ids=[STOP])
    num_submitted = num_tokens = num_steps = 0
    in_flight: deque[StepPlan] = deque()
    spent_s = 0.0
    while num_steps < NUM_STEPS:
        results = [answer(in_flight.popleft())] if in_flight else []
        missing = NUM_REQUESTS - scheduler.num_running - scheduler.num_waiting
        # Lengths differ, so that requests do not all end at once.
        new = [
            Request(f"r{number}", prompt_of(number, prompt_len), output_len // 2 + number * 37 % output_len, sampler)
            for number in range(num_submitted, num_submitted + missing)
        ]
        num_submitted += missing
        started = time.perf_counter()
        for request in new:
            scheduler.submit(request, 0.0)
        for result in results:
            num_tokens += len(scheduler.commit(result, 0.0))
            num_steps += 1
        while (plan := scheduler.schedule(0.0)) is not None:
            in_flight.append(plan)
        spent_s += time.perf_counter() - started
    return spent_s, num_tokens, scheduler.num_preemptions


def stage_ms(num_rows: int) -> float:
    """A stage's time for a plan of so many decode rows; of prompt tokens, forty cost as much as one."""
    return 0.3 + 0.06 * num_rows


def best_tokens_per_ms(num_stages: int, num_requests: int) -> float:
    """Level microbatches, one a stage, and a host that takes no time."""
    num_live = min(num_stages, num_requests)
    times = [stage_ms(num_requests // num_live + (i < num_requests % num_live)) for i in range(num_live)]
    return num_requests / max(sum(times), num_stages * max(times))


@dataclass
class Pipeline:
    """Stages in virtual time. Each runs plans in order; a decode row waits for its token on the first."""

    num_stages: int
    stops: bool
    ends_ms: list[float] = field(default_factory=list)
    """When each stage is done with its last plan."""
    token_ms: dict[int, float] = field(default_factory=dict)
    """By slot: when its last token was sampled."""
    results: deque[tuple[float, StepResult]] = field(default_factory=deque)
    sizes: list[int] = field(default_factory=list)
    """Decode rows of each plan."""
    num_sampled: int = 0

    def run(self, plan: StepPlan, now_ms: float) -> None:
        """Compute a plan that the engine sent at `now_ms`."""
        ends = self.ends_ms or [0.0] * self.num_stages
        rows = unpack(plan.rows, ROW_WIDTH).tolist()
        for slot in plan.free:
            self.token_ms.pop(slot, None)
        decodes = [slot for slot, _, count, _ in rows if count == 1]
        cost_ms = stage_ms(len(decodes)) + stage_ms(0) / 40 * sum(row[2] for row in rows if row[2] > 1)
        at_ms = max([now_ms + HOST_MS / 2, *(self.token_ms.get(slot, 0.0) for slot in decodes)])
        for stage, end_ms in enumerate(ends):
            at_ms = ends[stage] = max(at_ms, end_ms) + cost_ms
        self.ends_ms = ends
        sampling = [(slot, start + count) for slot, start, count, samples in rows if samples]
        self.token_ms |= {slot: at_ms for slot, _ in sampling}
        tokens = [self._token(slot, position) for slot, position in sampling]
        self.results.append((at_ms + HOST_MS / 2, StepResult(plan.plan_id, pack(tokens))))
        self.sizes.append(len(decodes))
        self.num_sampled += len(tokens)

    def _token(self, slot: int, position: int) -> int:
        stops = self.stops and zlib.crc32(pack([slot, position, self.num_sampled])) % STOP_EVERY == 0
        return STOP if stops else 1


@dataclass(frozen=True)
class Level:
    """How a pipeline ran."""

    mean_spread: float
    """Difference in size among the latest microbatches, over all plans."""
    worst_spread: int
    share_of_best: float
    share_wasted: float
    """Of sampled tokens, those past a stop."""


def level(num_stages: int, num_requests: int, run_ahead: int, *, stops: bool) -> Level:
    """A closed loop of so many requests, from after its start."""
    config = SchedulerConfig(
        num_stages=num_stages,
        max_running=NUM_REQUESTS,
        chunk=2048,
        page_size=16,
        num_pages=100_000,
        max_len=100_000,
        run_ahead=run_ahead,
    )
    scheduler, pipeline = Scheduler(config), Pipeline(num_stages, stops)
    num_submitted = num_tokens = num_warm_tokens = 0
    now_ms = warm_ms = 0.0
    for step in range(NUM_LEVEL_STEPS):
        for _ in range(num_requests - scheduler.num_running - scheduler.num_waiting):
            sampler = SamplerSpec(stop_token_ids=[STOP])
            scheduler.submit(Request(f"r{num_submitted}", pack(range(16)), None, sampler), now_ms)
            num_submitted += 1
        while (plan := scheduler.schedule(now_ms)) is not None:
            pipeline.run(plan, now_ms)
        now_ms, result = pipeline.results.popleft()
        num_tokens += len(scheduler.commit(result, now_ms))
        if step == NUM_WARM_STEPS:
            warm_ms, num_warm_tokens = now_ms, num_tokens
    num_live = min(num_stages, num_requests)
    windows = [pipeline.sizes[i : i + num_live] for i in range(NUM_WARM_STEPS, NUM_LEVEL_STEPS - num_live)]
    spreads = [max(window) - min(window) for window in windows]
    rate = (num_tokens - num_warm_tokens) / (now_ms - warm_ms)
    num_due = sum(len(unpack(result.tokens)) for _, result in pipeline.results)
    num_committed = pipeline.num_sampled - num_due
    return Level(
        float(np.mean(spreads)),
        max(spreads),
        rate / best_tokens_per_ms(num_stages, num_requests),
        1 - num_tokens / num_committed,
    )


def show_speed() -> None:
    """Print a line a workload: with nothing but running requests, the best of several runs."""
    print(f"a plan of {NUM_REQUESTS} rows, median of {NUM_WHOLE}")
    for prefix_cache in (False, True):
        for run_ahead in (0, 2):
            runs = [whole_plans(run_ahead, prefix_cache=prefix_cache) for _ in range(NUM_RUNS)]
            plan_s, commit_s = min(run[0] for run in runs), min(run[1] for run in runs)
            print(f"cache {prefix_cache:1} ahead {run_ahead}{1e6 * plan_s:8.0f} us, its commit {1e6 * commit_s:.0f} us")
    print(f"{NUM_STEPS} steps, {NUM_REQUESTS} requests, {NUM_STAGES} stages")
    for name, prompt_len, output_len, num_pages in (
        ("long decodes", 128, 20_000, 400_000),
        ("short requests", 512, 128, 400_000),
        ("short of pages", 512, 512, 6_000),
    ):
        for prefix_cache in (False, True):
            for run_ahead in (0, 2):
                runs_of = [
                    measure(prompt_len, output_len, num_pages, run_ahead, prefix_cache=prefix_cache)
                    for _ in range(NUM_RUNS)
                ]
                spent_s, num_tokens, num_preemptions = min(runs_of)
                print(
                    f"{name:<16}cache {prefix_cache:1} ahead {run_ahead}{spent_s:6.2f} s {NUM_STEPS / spent_s:8.0f} "
                    f"steps/s {1e6 * spent_s / NUM_STEPS:6.0f} us/step {1e6 * spent_s / num_tokens:6.2f} us/token "
                    f"{num_preemptions:6} pre-emptions"
                )


def show_levels() -> None:
    """Print a line for each number of stages and requests: the same requests for ever, then with stops and arrivals."""
    columns = "".join(f"{f'ahead {run_ahead}, {kind}':>38}" for run_ahead in (0, 2) for kind in ("steady", "stops"))
    print(f"{'stages':>6}{'requests':>9}{columns}")
    for num_stages in (2, 4, 8):
        for num_requests in (1, 2, 3, 8, 16, 33, 64):
            cells = []
            for run_ahead in (0, 2):
                for stops in (False, True):
                    got = level(num_stages, num_requests, run_ahead, stops=stops)
                    spread = f"spread {got.mean_spread:.2f}, most {got.worst_spread}"
                    cells.append(f"{spread}{got.share_of_best:6.0%}, lost {got.share_wasted:.1%}")
            print(f"{num_stages:>6}{num_requests:>9}{''.join(f'{cell:>38}' for cell in cells)}")


def main() -> None:
    """Show what is asked for, or both."""
    wanted = sys.argv[1:] or ["speed", "levels"]
    assert set(wanted) <= {"speed", "levels"}, "speed, levels or both"
    if "speed" in wanted:
        show_speed()
    if "levels" in wanted:
        show_levels()


if __name__ == "__main__":
    main()
