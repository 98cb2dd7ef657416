"""The scheduler: a state machine that decides, plan by plan, which positions of which requests are computed."""

from __future__ import annotations

from collections import deque
from itertools import islice

from headrace.errors import QueueFull, UserError
from headrace.schedule.balance import Balance, Level, unequal_quota
from headrace.schedule.config import SchedulerConfig
from headrace.schedule.flight import Flight
from headrace.schedule.order import Queue, rank_of
from headrace.schedule.policy import decode_quota, prompt_counts
from headrace.schedule.prefix import PrefixCache
from headrace.schedule.request import Event, Job, Request
from headrace.step import StepPlan, StepResult, unpack

PROMPT_SHARE = 8
"""One in so many tokens of a plan is kept for prompts, where there are any."""


class Scheduler:
    """Decides what runs. The same events give the same plans; nothing here reads a clock, a file or a random number.

    After every event call `schedule` until it says None; run the plans strictly in order; bring every result, in the
    same order, to `commit`. Because plans run in order on every worker, a page or slot given up here is free for the
    very next plan, even while earlier plans that use it are in flight.

    A job is in `_waiting`, or in `_running` (there in `_prefilling`, in `_ready`, or out with a plan), or closed: its
    last row is planned, it holds nothing, and only its results are due. Admission takes the first in rank, pre-emption
    the last.

    A job is out with the plan that samples its next token until that plan returns: at its commit, or with `run_ahead`
    as soon as so many plans followed it as are live, for then its next row no longer keeps a stage waiting. Plans
    return in order, so those out are the last ones, and they are the other microbatches to those who level them.
    """

    def __init__(self, config: SchedulerConfig, balance: Balance | None = None) -> None:
        self.config = config
        self._balance = balance or Level()
        self._max_in_flight = config.max_in_flight or config.num_stages + config.run_ahead
        self._ways = min(config.num_stages, self._max_in_flight)
        self._prefix = PrefixCache(config.num_pages, config.page_size, enabled=config.prefix_cache)
        self._pool = self._prefix.pool
        self._slots = list(range(config.max_running - 1, -1, -1))
        self._freed: list[int] = []
        self._jobs: dict[str, Job] = {}
        self._waiting = Queue()
        self._running: dict[Job, None] = {}
        self._prefilling: dict[Job, None] = {}
        self._ready: deque[Job] = deque()
        self._flights: deque[Flight] = deque()
        self._num_submitted = 0
        self._next_plan_id = 0
        self._first_out = 0
        """The oldest plan that jobs are out with; all before it have returned."""
        self.num_preemptions = 0
        """Lives cut short to give their pages to an older request, since start."""
        self.num_prefix_queries = 0
        """Prompt tokens looked up in the prefix cache, since start."""
        self.num_prefix_hits = 0
        """Those of them that were there."""

    # --- what others see ----------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a plan uncommitted."""
        return bool(self._jobs or self._flights)

    @property
    def num_waiting(self) -> int:
        """Requests not admitted yet, or pre-empted."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests admitted and not finished."""
        return len(self._jobs) - len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        """Plans issued and not committed."""
        return len(self._flights)

    @property
    def num_pages_used(self) -> int:
        """Pages that requests hold, each counted once."""
        return self._pool.num_used

    @property
    def num_pages_free(self) -> int:
        """Pages that no request holds, those that are cached included."""
        return self._pool.num_free

    @property
    def num_pages_cached(self) -> int:
        """Free pages that are kept for what they hold."""
        return self._pool.num_kept

    # --- events -------------------------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        """Queue a request. Raises UserError, naming both numbers, for one that can never fit, and QueueFull."""
        assert request.id not in self._jobs, f"request {request.id} is here already"
        num_prompt = request.num_prompt
        if not num_prompt:
            raise UserError("prompt: has no tokens")
        wanted = self.config.max_len if request.max_tokens is None else request.max_tokens
        limit = min(num_prompt + wanted, self.config.max_len, self._pool.num_tokens)
        if limit < num_prompt + min(1, wanted):
            what = f"{num_prompt} tokens and one to generate" if wanted else f"{num_prompt} tokens"
            where = "max_len" if limit == self.config.max_len else "the KV cache, which holds"
            raise UserError(f"prompt: {what} do not fit in {where} {limit}")
        job = Job(request, limit, now, self.config.policy.rank(request, self._num_submitted))
        self._waiting.add(job)
        most = self.config.max_waiting
        if most is not None and len(self._waiting) > most:
            self._admit()  # who waits for nothing but the next plan does not count
            if len(self._waiting) > most and self._waiting.remove(job):
                raise QueueFull(f"{len(self._waiting)} requests wait already, and no more may (--max-waiting {most})")
        self._num_submitted += 1
        self._jobs[job.id] = job

    def abort(self, request_id: str) -> bool:
        """Forget a request: its pages are free at once, its late results are dropped. False if it is not here."""
        job = self._jobs.pop(request_id, None)
        if job is None:
            return False
        job.done = True
        if job in self._running:
            self._withdraw(job)
        else:
            self._waiting.remove(job)
        return True

    def reset_prefix_cache(self) -> None:
        """Forget what is cached. Pages in use stay with their owners, who share them with nobody new."""
        self._prefix.reset(self._running)

    def schedule(self, now: float) -> StepPlan | None:
        """The next plan, or None when nothing can or should be planned before another event."""
        if len(self._flights) >= self._max_in_flight:
            return None
        self._admit()
        while True:
            self._return_ahead()
            decodes, prompts = self._pick()
            if not decodes and not prompts:
                return None
            if self._fits(decodes, prompts):
                return self._issue(decodes, prompts, now)
            self._preempt(max(self._running, key=rank_of))

    def commit(self, result: StepResult, now: float) -> list[Event]:
        """Take a plan's result, in plan order; what each request gained. `now` decides nothing here yet."""
        flight = self._flights[0]
        assert result.plan_id == flight.plan_id, f"result of plan {result.plan_id}, plan {flight.plan_id} is due"
        tokens: list[int] = unpack(result.tokens).tolist()
        for row, job, start in flight.scored:
            job.collect(start, result.prompt_logprobs.get(row, []))
        events = []
        for index, (job, token) in enumerate(zip(flight.sampled, tokens, strict=True)):
            if job.done:  # aborted, or computed past a stop
                continue
            reason = job.take(token)
            logprobs = [result.logprobs[index]] if index in result.logprobs else []
            if len(job.generated) == 1:
                prompt = job.deliver_prompt_logprobs()
                event = Event(job.id, [token], reason, logprobs, prompt, job.queued_s, job.num_cached)
            else:
                event = Event(job.id, [token], reason, logprobs)
            events.append(event)
            if reason is not None:
                self._finish(job)
        for job in flight.closing:
            if not job.done:
                prompt = job.deliver_prompt_logprobs()
                events.append(Event(job.id, [], "length", [], prompt, job.queued_s, job.num_cached))
                self._finish(job)
        if flight.plan_id == self._first_out:
            self._return(flight)
        self._flights.popleft()
        return events

    # --- making a plan ------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let the first in rank in, as far as slots go and pages for all their tokens and one more.

        What of them is in the prefix cache they take at once: it counted as free, and may be shared.
        """
        if not self._waiting:
            return
        room = self._pool.num_free - sum(self._pages_to_come(job) for job in self._prefilling)
        while self._waiting and len(self._running) < self.config.max_running:
            job = self._waiting.first
            if job.num_uncommitted:  # pre-empted, and its tokens in flight are not known yet
                return
            needed = self._pool.pages_for(self.config.headroom * len(self._running))
            if self._running and self._waiting.is_put_off(room - needed, len(self._prefilling)):
                return
            num_free = self._pool.num_free
            num_cached = self._prefix.begin(job)
            left = room - (num_free - self._pool.num_free) - self._pages_to_come(job)
            if left < needed:
                self._waiting.put_off(room - needed, len(self._prefilling))
                self._prefix.release(job)
                job.vacate()
                return
            room = left
            if job.is_new:
                job.num_cached = num_cached
            self._waiting.remove(job)
            self._running[job] = None
            is_last = not self._prefilling or next(reversed(self._prefilling)).rank < job.rank
            self._prefilling[job] = None
            if not is_last:
                self._prefilling = dict.fromkeys(sorted(self._prefilling, key=rank_of))

    def _pages_to_come(self, job: Job) -> int:
        """Pages that a job still needs for its known tokens and the next."""
        return self._pool.pages_for(min(job.num_tokens + 1, job.limit)) - len(job.pages)

    def _return_ahead(self) -> None:
        """Return what was issued so many plans ago as are live now, without waiting for its tokens.

        Prompts fill any number of plans: while one is left to compute, decode rows come round once in a whole trip, or
        every chunk would wait for the token of the plan before it. Few rows chase their own tokens instead, round after
        round; `most` rounds keep `run_ahead` plans queued, and more would only delay who arrives.
        """
        live = max(1, self._ways if self._prefilling else min(self._ways, len(self._running)))
        most = 1 - -self.config.run_ahead // live
        while self._first_out <= self._next_plan_id - live:
            flight = self._flight(self._first_out)
            # The first speaks for all: decode rows stand before those of prompts, which have been out once.
            if next((job.num_uncommitted for job in flight.sampled if job.slot >= 0), 0) >= most:
                return
            self._return(flight)

    def _return(self, flight: Flight) -> None:
        """Make ready whom the oldest plan out has with it. A slot tells: who left has none."""
        self._ready += [job for job in flight.sampled if job.slot >= 0]
        flight.num_returning = 0
        self._first_out = flight.plan_id + 1

    def _flight(self, plan_id: int) -> Flight:
        """A plan in flight."""
        return self._flights[plan_id - self._flights[0].plan_id]

    def _pick(self) -> tuple[list[Job], list[tuple[Job, int]]]:
        """Choose decode rows, and prompt chunks as (job, count). Prompts take what is cached."""
        num_decoding, num_ready = len(self._running) - len(self._prefilling), len(self._ready)
        targets = self._balance.sizes(num_decoding, self._ways) if num_ready else None
        if targets is None:
            out = [flight.num_returning for flight in self._flights]
            num_decodes = decode_quota(num_decoding, num_ready, out, self._ways)
        else:
            num_decodes = unequal_quota(targets, num_ready, self._next_plan_id)
        # Prompts get some of every plan, however many decode: else one would wait for whole answers to end.
        kept = -(-self.config.chunk // PROMPT_SHARE) if self._prefilling and self.config.chunk > 1 else 0
        num_decodes = min(num_decodes, self.config.chunk - kept)
        decodes, picked = list(islice(self._ready, num_decodes)), []
        if self._prefilling:
            for job in self._prefilling:
                self._follow(job)
            prompts = [(job.num_computed, job.num_tokens - job.num_computed) for job in self._prefilling]
            room, num_decoding = self.config.chunk - num_decodes, len(self._running) - len(self._prefilling)
            counts = prompt_counts(prompts, room, num_decoding, self._ways, self.config.curve)
            picked = [(job, count) for job, count in zip(self._prefilling, counts, strict=True) if count]
        return decodes, picked

    def _fits(self, decodes: list[Job], prompts: list[tuple[Job, int]]) -> bool:
        """Whether the free pages hold all picked rows."""
        if self._pool.num_free >= self.config.chunk:  # no row needs more pages than it has tokens
            return True
        needed = sum(job.num_computed == job.capacity for job in decodes)
        for job, count in prompts:
            end = job.num_computed + count
            if end > job.capacity:
                needed += self._pool.pages_for(end) - len(job.pages)
        return needed <= self._pool.num_free

    def _issue(self, decodes: list[Job], prompts: list[tuple[Job, int]], now: float) -> StepPlan:
        """Turn picked rows into a plan in flight."""
        flight = Flight(self._next_plan_id)
        self._next_plan_id += 1
        free, self._freed = self._freed, []
        self._slots += free
        if len(decodes) == len(self._ready):
            self._ready.clear()
        else:
            for _ in decodes:
                self._ready.popleft()
        closed = flight.add_decodes(decodes, self._grow)
        for job, count in prompts:
            # Prompts before it in this plan may be alike: it goes on where they end. They hold what it takes, so the
            # pages that were found to be free still are.
            self._follow(job, only_held=True)
            end = self._end_of(job, count)
            if job.slot < 0:
                self._register(job, flight, now)
            self._grow(job, end, flight)
            if flight.add_row(job, end - job.num_computed):
                closed.append(job)
            self._prefix.enter(job)
            if job.num_uncommitted:  # its last known token is planned
                self._end_prompt(job)
        for job in closed:  # only now: nobody else in this plan may have their pages
            self._release(job)
        self._flights.append(flight)
        return flight.plan(free)

    def _register(self, job: Job, flight: Flight, now: float) -> None:
        """Give the job a slot and the workers its tokens."""
        flight.register.append(job.register(self._slots.pop()))
        if job.queued_s < 0:
            job.queued_s = now - job.submitted_at

    def _grow(self, job: Job, end: int, flight: Flight) -> None:
        """Give the job pages up to position `end`, and tell the workers of all that it got."""
        if end > job.capacity:
            job.pages += self._pool.allocate(self._pool.pages_for(end) - len(job.pages))
            job.capacity = len(job.pages) * self._pool.page_size
        flight.tell_pages(job)

    def _end_of(self, job: Job, count: int) -> int:
        """Where a prompt's row of up to `count` tokens ends: with a page, so that others can take all of it."""
        end = job.num_computed + count
        if end >= job.num_tokens:
            return job.num_tokens
        whole = end // self._pool.page_size * self._pool.page_size
        return whole if whole > job.num_computed and self.config.prefix_cache else end

    def _follow(self, job: Job, *, only_held: bool = False) -> None:
        """Let a prompt take what the prefix cache holds of it."""
        num_cached = self._prefix.follow(job, only_held=only_held)
        if job.is_new:
            job.num_cached += num_cached

    def _end_prompt(self, job: Job) -> None:
        """The whole of a prompt is planned."""
        del self._prefilling[job]
        if job.is_new and self.config.prefix_cache and job.request.sampler.prompt_logprobs is None:
            self.num_prefix_queries += job.num_prompt
            self.num_prefix_hits += job.num_cached

    # --- leaving ------------------------------------------------------------------------------------------------------

    def _preempt(self, job: Job) -> None:
        """Send a running job, the last in rank, back to wait; it comes again with all its tokens.

        Its pages are free at once, as after an abort. Tokens of it in flight are not lost: their commits reach the
        waiting job, which is admitted no earlier.
        """
        if job.slot >= 0:
            self.num_preemptions += 1
            job.is_new = False
        self._withdraw(job)
        self._waiting.add(job)

    def _finish(self, job: Job) -> None:
        """End a job whose last token has come, wherever it is; rows in flight past that token count for nothing."""
        job.done = True
        del self._jobs[job.id]
        if job in self._running:
            self._withdraw(job)
        else:
            self._waiting.remove(job)

    def _withdraw(self, job: Job) -> None:
        """Stop a running job before its time."""
        if job.sampled_in >= self._first_out:
            self._flight(job.sampled_in).num_returning -= 1
        elif job not in self._prefilling:
            self._ready.remove(job)
        self._release(job)

    def _release(self, job: Job) -> None:
        """Take slot and pages from a job that is in no queue but the running ones."""
        del self._running[job]
        self._prefilling.pop(job, None)
        self._prefix.release(job)
        if job.slot >= 0:
            self._freed.append(job.slot)
        job.vacate()
