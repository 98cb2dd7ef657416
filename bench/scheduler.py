"""How many steps a second the scheduler makes alone: `python bench/scheduler.py`. A step is one plan and its commit."""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from headrace.schedule import Request, Scheduler, SchedulerConfig
from headrace.step import ROW_WIDTH, SamplerSpec, StepPlan, StepResult, pack, unpack

NUM_STEPS = 10_000
NUM_REQUESTS = 256
NUM_STAGES = 8


def answer(plan: StepPlan) -> StepResult:
    """A result that gives every sampling row token 1."""
    return StepResult(plan.plan_id, pack(np.ones(int(unpack(plan.rows, ROW_WIDTH)[:, 3].sum()), np.int32)))


def measure(prompt_len: int, output_len: int, num_pages: int) -> tuple[float, int, int]:
    """Seconds inside the scheduler for NUM_STEPS steps of a closed loop, tokens made, pre-emptions."""
    config = SchedulerConfig(
        num_stages=NUM_STAGES, max_running=NUM_REQUESTS, chunk=2048, page_size=16, num_pages=num_pages, max_len=32768
    )
    scheduler = Scheduler(config)
    prompt = pack(range(prompt_len))
    sampler = SamplerSpec(stop_token_ids=[2])
    num_submitted = num_tokens = num_steps = 0
    in_flight: deque[StepPlan] = deque()
    spent_s = 0.0
    while num_steps < NUM_STEPS:
        results = [answer(in_flight.popleft())] if in_flight else []
        missing = NUM_REQUESTS - scheduler.num_running - scheduler.num_waiting
        started = time.perf_counter()
        for _ in range(missing):
            # Lengths differ, so that requests do not all end at once.
            length = output_len // 2 + num_submitted * 37 % output_len
            scheduler.submit(Request(f"r{num_submitted}", prompt, length, sampler), 0.0)
            num_submitted += 1
        for result in results:
            num_tokens += len(scheduler.commit(result, 0.0))
            num_steps += 1
        while (plan := scheduler.schedule(0.0)) is not None:
            in_flight.append(plan)
        spent_s += time.perf_counter() - started
    return spent_s, num_tokens, scheduler.num_preemptions


def main() -> None:
    """Print a line a workload."""
    print(f"{NUM_STEPS} steps, {NUM_REQUESTS} requests, {NUM_STAGES} stages")
    for name, prompt_len, output_len, num_pages in (
        ("long decodes", 128, 20_000, 400_000),
        ("short requests", 512, 128, 400_000),
        ("short of pages", 512, 512, 6_000),
    ):
        spent_s, num_tokens, num_preemptions = measure(prompt_len, output_len, num_pages)
        print(
            f"{name:<16}{spent_s:6.2f} s {NUM_STEPS / spent_s:8.0f} steps/s {1e6 * spent_s / NUM_STEPS:6.0f} us/step "
            f"{1e6 * spent_s / num_tokens:6.2f} us/token {num_preemptions:6} pre-emptions"
        )


if __name__ == "__main__":
    main()
