"""The engine in virtual time: the same scheduler, driven as the engine's loop drives it, over virtual stages."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headrace.plan.arrivals import NEVER, Arrivals, Ask
from headrace.plan.cost import CostModel
from headrace.plan.pipeline import Pipeline
from headrace.schedule import Request, Scheduler, SchedulerConfig
from headrace.schedule.balance import Balance


@dataclass(slots=True)
class Record:
    """What became of a request."""

    ask: Ask
    token_times_s: list[float] = field(default_factory=list)
    """When each of its tokens reached the engine."""
    queued_s: float = 0.0
    done: bool = False


class VirtualEngine:
    """One engine: requests and results are events, and after each all is planned that can be."""

    def __init__(
        self, config: SchedulerConfig, cost: CostModel, *, balance: Balance | None = None, record: bool = False
    ) -> None:
        self.scheduler = Scheduler(config, balance)
        self.pipeline = Pipeline(cost, config.max_running, record)
        self.records: list[Record] = []
        self.active_s = 0.0
        """Time with plans in flight: what a stage was not busy of it is its bubble."""

    def run(self, arrivals: Arrivals) -> None:
        """Serve all that comes. Raises UserError for a request that can never fit."""
        now_s, results = 0.0, self.pipeline.results
        while True:
            next_s = min(arrivals.due_s, results[0][0] if results else NEVER)
            if next_s == NEVER:
                break
            if self.scheduler.num_in_flight:
                self.active_s += next_s - now_s
            now_s = next_s
            while arrivals.due_s <= now_s:
                self._submit(arrivals.take(), now_s)
            while results and results[0][0] <= now_s:
                self._commit(arrivals, now_s)
            while (plan := self.scheduler.schedule(now_s)) is not None:
                self.pipeline.send(plan, now_s)
        assert not self.scheduler.has_work, "nothing is in flight, and requests are left that nothing is planned for"

    def _submit(self, ask: Ask, now_s: float) -> None:
        number = len(self.records)
        # No two prompts are alike, so that none is another's cached prefix.
        prompt = np.full(ask.input, number, "<i4").tobytes()
        self.scheduler.submit(Request(str(number), prompt, ask.output), now_s)
        self.records.append(Record(ask))

    def _commit(self, arrivals: Arrivals, now_s: float) -> None:
        _, result = self.pipeline.results.popleft()
        for event in self.scheduler.commit(result, now_s):
            record = self.records[int(event.request_id)]
            if not record.token_times_s:
                record.queued_s = event.queued_s
            record.token_times_s += [now_s] * len(event.tokens)
            if event.finish_reason is not None:
                record.done = True
                arrivals.finished(now_s)
