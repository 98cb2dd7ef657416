"""Any events in any order: what must hold after each, and in the end."""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.errors import UserError
from headrace.schedule import Scheduler, SchedulerConfig
from headrace.step import SamplerSpec, StepPlan
from tests.schedule.driver import Driver
from tests.strategies import TOKENS, sampler_specs, scheduler_configs


class AnyEvents(RuleBasedStateMachine):
    """A driver, and a second scheduler that is told the same events."""

    @initialize(config=scheduler_configs())
    def start(self, config: SchedulerConfig) -> None:
        self.driver = Driver(config)
        self.twin = Scheduler(config)
        self.plans: list[StepPlan] = []

    @rule(
        prompt=st.lists(TOKENS, min_size=1, max_size=20),
        max_tokens=st.sampled_from([None, 0, 1, 2, 7, 30]),
        sampler=sampler_specs(),
    )
    def submit(self, prompt: list[int], max_tokens: int | None, sampler: SamplerSpec) -> None:
        try:
            name = self.driver.submit(prompt, max_tokens, sampler)
        except UserError:
            config = self.driver.config
            least = len(prompt) + (max_tokens != 0)
            assert least > min(config.max_len, config.num_pages * config.page_size)
        else:
            self.twin.submit(self.driver.requests[name].request, self.driver.now)

    @rule()
    def schedule(self) -> None:
        """One plan."""
        scheduler, executor = self.driver.scheduler, self.driver.executor
        plan = scheduler.schedule(self.driver.now)
        assert msgspec.msgpack.encode(plan) == msgspec.msgpack.encode(self.twin.schedule(self.driver.now))
        if plan is not None:
            executor.execute(plan)
        else:
            assert executor.in_flight or not scheduler.has_work, "stuck"

    @precondition(lambda self: self.driver.executor.in_flight)
    @rule()
    def commit(self) -> None:
        result = self.driver.executor.in_flight[0].result
        events = self.driver.commit()
        assert events == self.twin.commit(result, self.driver.now)

    @precondition(lambda self: self.driver.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        driver, scheduler = self.driver, self.driver.scheduler
        live = [name for name, got in driver.requests.items() if not got.aborted and got.finish_reason is None]
        if not live:
            return
        name = data.draw(st.sampled_from(live))
        held, used = len(scheduler._jobs[name].pages), scheduler.num_pages_used
        assert driver.abort(name)
        assert self.twin.abort(name)
        assert scheduler.num_pages_used == used - held
        assert not scheduler.abort(name)

    @invariant()
    def pages_add_up(self) -> None:
        scheduler = self.driver.scheduler
        owned = [page for job in scheduler._running for page in job.pages]
        assert len(set(owned)) == len(owned) == scheduler.num_pages_used
        assert sorted(owned + scheduler._pool._free) == list(range(self.driver.config.num_pages))

    @invariant()
    def jobs_are_where_they_should_be(self) -> None:
        scheduler = self.driver.scheduler
        running, waiting = list(scheduler._running), list(scheduler._waiting.values())
        order = list(self.driver.requests)
        places = [order.index(job.id) for job in running + waiting]
        assert places == sorted(places), "running requests are older than waiting ones"
        assert len(running) <= self.driver.config.max_running
        coming = sum(flight.num_returning for flight in scheduler._flights)
        assert len(running) == len(scheduler._prefilling) + len(scheduler._ready) + coming
        assert all(not job.pages and job.slot < 0 and not job.num_computed for job in waiting)

    @invariant()
    def in_flight_is_bounded(self) -> None:
        config = self.driver.config
        assert self.driver.scheduler.num_in_flight <= (config.max_in_flight or config.num_stages)

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.run()
            self.driver.check()


TestAnyEvents = AnyEvents.TestCase
TestAnyEvents.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
