"""Any events in any order: what must hold after each, and in the end. Then the same with plans that run ahead."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.errors import QueueFull, UserError
from headrace.schedule import Request, Scheduler, SchedulerConfig
from headrace.schedule.order import FirstComeFirstServed
from headrace.step import SamplerSpec, StepPlan, pack, unpack
from tests.schedule.driver import Driver
from tests.schedule.stages import Stages
from tests.schedule.tree import check_tree
from tests.strategies import ALIKE, PROMPTS, TOKENS, sampler_specs, scheduler_configs


class AnyEvents(RuleBasedStateMachine):
    """A driver, and a second scheduler that is told the same events."""

    @initialize(config=scheduler_configs())
    def start(self, config: SchedulerConfig) -> None:
        self.driver = Driver(config)
        self.twin = Scheduler(config)
        self.plans: list[StepPlan] = []

    @rule(
        prompt=PROMPTS,
        max_tokens=st.sampled_from([None, 0, 1, 2, 7, 30]),
        sampler=sampler_specs(),
        priority=st.integers(-1, 1),
    )
    def submit(self, prompt: list[int], max_tokens: int | None, sampler: SamplerSpec, priority: int = 0) -> None:
        config, num_waiting = self.driver.config, self.driver.scheduler.num_waiting
        refused = Request("refused", pack(prompt), max_tokens, sampler, priority)
        try:
            name = self.driver.submit(prompt, max_tokens, sampler, priority)
        except QueueFull:
            assert config.max_waiting is not None
            assert self.driver.scheduler.num_waiting >= config.max_waiting
            with pytest.raises(QueueFull):
                self.twin.submit(refused, self.driver.now)
        except UserError:
            least = len(prompt) + (max_tokens != 0)
            assert least > min(config.max_len, config.num_pages * config.page_size)
        else:
            self.twin.submit(self.driver.requests[name].request, self.driver.now)
            most = max(config.max_waiting or 0, num_waiting)
            assert config.max_waiting is None or self.driver.scheduler.num_waiting <= most

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
        events = self.driver.commit()
        assert self.driver.last_result is not None
        assert events == self.twin.commit(self.driver.last_result, self.driver.now)

    @precondition(lambda self: self.driver.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        driver, scheduler = self.driver, self.driver.scheduler
        live = [name for name, got in driver.requests.items() if not got.aborted and got.finish_reason is None]
        if not live:
            return
        name = data.draw(st.sampled_from(live))
        used, job = scheduler.num_pages_used, scheduler._jobs[name]
        alone = [page for page in job.pages if scheduler._pool._holders[page] == 1]
        assert driver.abort(name)
        assert self.twin.abort(name)
        assert scheduler.num_pages_used == used - len(alone)
        assert not scheduler.abort(name)

    @precondition(lambda self: self.driver.requests)
    @rule(number=st.integers(0, 7), more=st.lists(TOKENS, max_size=3), max_tokens=st.sampled_from([None, 0, 1, 7]))
    def submit_the_next_turn(self, number: int, more: list[int], max_tokens: int | None) -> None:
        """A prompt, and what was made of it so far."""
        got = list(self.driver.requests.values())[-1 - number % len(self.driver.requests)]
        self.submit([*unpack(got.request.tokens).tolist(), *got.tokens, *more], max_tokens, got.request.sampler)

    @rule(really=st.sampled_from([*[False] * 9, True]))
    def reset_prefix_cache(self, really: bool) -> None:
        if not really:
            return
        self.driver.scheduler.reset_prefix_cache()
        self.twin.reset_prefix_cache()
        assert not self.driver.scheduler.num_pages_cached

    @invariant()
    def pages_add_up(self) -> None:
        check_tree(self.driver.scheduler)

    @invariant()
    def jobs_are_where_they_should_be(self) -> None:
        scheduler = self.driver.scheduler
        running, waiting = list(scheduler._running), scheduler._waiting._jobs
        if isinstance(self.driver.config.policy, FirstComeFirstServed):
            order = list(self.driver.requests)
            places = [order.index(job.id) for job in running + waiting]
            assert places == sorted(places), "running requests are older than waiting ones"
        assert [job.rank for job in waiting] == sorted(job.rank for job in waiting)
        prefilling = [job.rank for job in scheduler._prefilling]
        assert prefilling == sorted(prefilling)
        assert len(running) <= self.driver.config.max_running
        self.driver.check_places()
        assert len({*scheduler._prefilling, *scheduler._ready}) == len(scheduler._prefilling) + len(scheduler._ready)
        assert all(not job.pages and job.slot < 0 and not job.num_computed for job in waiting)

    @invariant()
    def in_flight_is_bounded(self) -> None:
        config = self.driver.config
        most = config.max_in_flight or config.num_stages + config.run_ahead
        assert self.driver.scheduler.num_in_flight <= most

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.run()
            self.driver.check()


class AnyEventsAhead(AnyEvents):
    """Plans run ahead of results, and every stage goes at its own pace."""

    @initialize(config=scheduler_configs(), run_ahead=st.integers(0, 3))
    def start(self, config: SchedulerConfig, run_ahead: int) -> None:
        config = replace(config, run_ahead=run_ahead)
        super().start(config)
        self.stages = Stages(config)
        self.driver = Driver(config, self.stages)

    @rule(prompt=ALIKE, stop_ids=st.lists(TOKENS, min_size=4, max_size=12, unique=True))
    def submit_one_that_stops(self, prompt: list[int], stop_ids: list[int]) -> None:
        """Soon, that is, with rows of it in flight."""
        self.submit(prompt, None, SamplerSpec(stop_token_ids=stop_ids))

    @rule(stage=st.integers(0, 3))
    def advance(self, stage: int) -> None:
        """Let one stage run a plan, if it has one and that plan's tokens are there."""
        if stage < self.driver.config.num_stages:
            self.stages.advance(stage)

    @invariant()
    def jobs_out_are_with_the_last_plans(self) -> None:
        scheduler = self.driver.scheduler
        for flight in scheduler._flights:
            out = [job for job in flight.sampled if job.sampled_in == flight.plan_id and not job.done]
            assert flight.num_returning == (len(out) if flight.plan_id >= scheduler._first_out else 0)


TestAnyEvents = AnyEvents.TestCase
TestAnyEvents.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestAnyEventsAhead = AnyEventsAhead.TestCase
TestAnyEventsAhead.settings = settings(max_examples=100, stateful_step_count=80, deadline=None)
