"""A plan from its making to its commit: its deltas, and whom its result is for."""

from __future__ import annotations

from collections.abc import Callable

from headrace.schedule.request import Job
from headrace.step import ROW_WIDTH, Register, StepPlan, pack


class Flight:
    """Rows and deltas as they gather, then the jobs that wait for the result, in the order of their rows."""

    __slots__ = ("closing", "num_returning", "pages", "plan_id", "register", "rows", "sampled", "scored")

    def __init__(self, plan_id: int) -> None:
        self.plan_id = plan_id
        self.rows: list[int] = []
        self.register: list[Register] = []
        self.pages: list[int] = []
        self.sampled: list[Job] = []
        """Whose token each sampling row makes."""
        self.scored: list[tuple[int, Job, int]] = []
        """(row index, job, start) of rows that bring prompt log-probabilities."""
        self.closing: list[Job] = []
        """Jobs that sample nothing and end with this plan."""
        self.num_returning = 0
        """Jobs that are out with this plan and decode on after it: its size, to those who level microbatches."""

    def tell_pages(self, job: Job) -> None:
        """Append to the job's table what it has got since the workers last heard of it."""
        for page in job.pages[job.num_told :]:
            self.pages += (job.slot, page)
        job.num_told = len(job.pages)

    def add_decodes(self, jobs: list[Job], grow: Callable[[Job, int, Flight], None]) -> list[Job]:
        """Compute the token that each job will have sampled by then, and sample the next; return whom that ends.

        grow: gives a job pages up to a position.
        """
        plan_id, starts, closed = self.plan_id, [], []
        for job in jobs:
            start = job.num_computed
            if start == job.capacity:
                grow(job, start + 1, self)
            starts.append(start)
            job.num_computed = end = start + 1
            job.num_tokens = end = end + 1
            job.num_uncommitted += 1
            job.sampled_in = plan_id
            if end == job.limit:
                closed.append(job)
        rows = [1] * (ROW_WIDTH * len(jobs))
        rows[0::ROW_WIDTH] = [job.slot for job in jobs]
        rows[1::ROW_WIDTH] = starts
        self.rows += rows
        self.sampled += jobs
        self.num_returning += len(jobs) - len(closed)
        return closed

    def add_row(self, job: Job, count: int) -> bool:
        """Compute the job's next `count` positions; say whether nothing of it is left to compute after them."""
        start = job.num_computed
        end = start + count
        job.num_computed = end
        if job.prompt_logprobs is not None and start < job.num_prompt:
            self.scored.append((len(self.rows) // ROW_WIDTH, job, start))
        if end < job.num_tokens:
            self.rows += (job.slot, start, count, 0)
            return False
        job.num_uncommitted += 1
        if end == job.limit:
            self.rows += (job.slot, start, count, 0)
            self.closing.append(job)
            return True
        self.rows += (job.slot, start, count, 1)
        self.sampled.append(job)
        job.sampled_in = self.plan_id
        job.num_tokens += 1
        if job.num_tokens == job.limit:
            return True
        self.num_returning += 1
        return False

    def plan(self, free: list[int]) -> StepPlan:
        """What the workers are told."""
        return StepPlan(self.plan_id, pack(self.rows), free, self.register, pack(self.pages))
