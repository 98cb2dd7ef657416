"""Drives a scheduler as the engine's loop does, with workers that are fakes, and checks what each request gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.schedule import Event, Request, Scheduler, SchedulerConfig
from headrace.step import FinishReason, SamplerSpec, StepResult, TokenLogprobs, pack, unpack
from tests.fakes.executor import Executed, Expected, FakeExecutor, expect
from tests.schedule.stages import Stages


def config(**changes: Any) -> SchedulerConfig:
    """Two stages and plenty of everything, but for the changes."""
    sizes: dict[str, Any] = {
        "num_stages": 2,
        "max_running": 64,
        "chunk": 256,
        "page_size": 4,
        "num_pages": 4096,
        "max_len": 4096,
    }
    return SchedulerConfig(**{**sizes, **changes})


@dataclass
class Collected:
    """What a request has got so far."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached: int = 0
    num_events: int = 0
    aborted: bool = False

    def add(self, event: Event) -> None:
        assert self.finish_reason is None, "an event after the last"
        assert not self.aborted, "an event after the abort"
        assert not event.prompt_logprobs or not self.num_events, "prompt log-probabilities after the first event"
        assert not event.num_cached or not self.num_events, "cached tokens after the first event"
        self.num_events += 1
        self.num_cached += event.num_cached
        self.tokens += event.tokens
        self.logprobs += event.logprobs
        self.prompt_logprobs += event.prompt_logprobs
        self.finish_reason = event.finish_reason


class Driver:
    """One scheduler and its workers. `now` is the number of events so far."""

    def __init__(self, config: SchedulerConfig, executor: FakeExecutor | Stages | None = None) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.executor = executor or FakeExecutor(config)
        self.last_result: StepResult | None = None
        self.requests: dict[str, Collected] = {}
        self.events: list[Event] = []
        self.now = 0.0

    def submit(
        self,
        prompt: int | Sequence[int],
        max_tokens: int | None = None,
        sampler: SamplerSpec | None = None,
        priority: int = 0,
    ) -> str:
        """Submit a prompt, or one of so many tokens; returns its id."""
        self.now += 1
        name = f"r{len(self.requests)}"
        if isinstance(prompt, int):
            prompt = [(len(self.requests) + i) % 30 for i in range(prompt)]
        request = Request(name, pack(prompt), max_tokens, sampler or SamplerSpec(), priority)
        self.scheduler.submit(request, self.now)
        self.requests[name] = Collected(request)
        return name

    def abort(self, name: str) -> bool:
        self.now += 1
        self.requests[name].aborted = True
        return self.scheduler.abort(name)

    def schedule(self) -> list[Executed]:
        """Plan and execute all that can be planned now."""
        done = []
        while (plan := self.scheduler.schedule(self.now)) is not None:
            done.append(self.executor.execute(plan))
        assert self.executor.in_flight or not self.scheduler.has_work, "stuck: work, and nothing in flight"
        return done

    def commit(self) -> list[Event]:
        """Bring one result back."""
        self.now += 1
        self.last_result = self.executor.next_result()
        events = self.scheduler.commit(self.last_result, self.now)
        for event in events:
            self.requests[event.request_id].add(event)
        self.events += events
        self.check_places()
        return events

    def check_places(self) -> None:
        """Every running request is in one place: prefilling, ready, or out with a plan."""
        scheduler = self.scheduler
        num_out = sum(flight.num_returning for flight in scheduler._flights)
        assert scheduler._running.keys() >= {*scheduler._prefilling, *scheduler._ready}
        assert len(scheduler._running) == len(scheduler._prefilling) + len(scheduler._ready) + num_out

    def step(self) -> list[Executed]:
        """Bring one result back, if one is due, and plan what that allows."""
        if self.executor.in_flight:
            self.commit()
        return self.schedule()

    def run(self, most: int = 20_000) -> None:
        """Until nothing is left to do."""
        self.schedule()
        while self.scheduler.has_work:
            self.step()
            most -= 1
            assert most, "never ends"

    def expected(self, name: str) -> Expected:
        """What the request must have got in the end."""
        request = self.requests[name].request
        prompt = unpack(request.tokens).tolist()
        limit = min(self.config.max_len, self.config.num_pages * self.config.page_size)
        if request.max_tokens is not None:
            limit = min(limit, len(prompt) + request.max_tokens)
        return expect(prompt, request.sampler, limit)

    def expected_of(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """What a request without a sampler's wishes would get."""
        return expect(prompt, SamplerSpec(), len(prompt) + max_tokens).tokens

    def check(self) -> None:
        """All that were not aborted have got exactly what they must; nothing is held any more."""
        for name, got in self.requests.items():
            want = self.expected(name)
            if got.aborted:
                assert got.tokens == want.tokens[: len(got.tokens)]
                continue
            assert got.tokens == want.tokens
            assert got.finish_reason == want.finish_reason
            assert got.logprobs == want.logprobs
            assert got.prompt_logprobs == want.prompt_logprobs
        scheduler = self.scheduler
        assert (scheduler.num_pages_used, scheduler.num_pages_free) == (0, self.config.num_pages)
        assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_in_flight) == (0, 0, 0)
