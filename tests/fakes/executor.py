"""Workers without devices: runs plans on a toy model and checks, row by row, every promise that plans make."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from headrace.schedule import SchedulerConfig
from headrace.step import (
    ROW_WIDTH,
    FinishReason,
    Register,
    SamplerSpec,
    StepPlan,
    StepResult,
    TokenLogprobs,
    pack,
    unpack,
)

VOCAB_SIZE = 31


def next_token(history: Sequence[int], sampler: SamplerSpec, num_prompt: int) -> int:
    """The toy model: a hash of all tokens before, so that one wrong or missing token changes all that follow."""
    token = zlib.crc32(pack(history), sampler.seed) % VOCAB_SIZE
    while len(history) - num_prompt < sampler.min_tokens and token in sampler.stop_token_ids:
        token = (token + 1) % VOCAB_SIZE
    return token


def logprobs_of(history: Sequence[int], token: int) -> TokenLogprobs:
    """The toy model's log-probability of `token` after `history`."""
    return TokenLogprobs(token, -float(zlib.crc32(pack([*history, token])) % 1000))


@dataclass
class Expected:
    """What a request must give, whatever runs beside it."""

    tokens: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]


def expect(prompt: Sequence[int], sampler: SamplerSpec, limit: int) -> Expected:
    """Run one request alone until it stops or has `limit` tokens, prompt included."""
    history, logprobs = list(prompt), []
    reason: FinishReason = "length"
    while len(history) < limit:
        token = next_token(history, sampler, len(prompt))
        logprobs.append(logprobs_of(history, token))
        history.append(token)
        if token in sampler.stop_token_ids:
            reason = "stop"
            break
    return Expected(
        tokens=history[len(prompt) :],
        finish_reason=reason,
        logprobs=logprobs if sampler.logprobs is not None else [],
        prompt_logprobs=[logprobs_of(prompt[:i], prompt[i]) for i in range(1, len(prompt))]
        if sampler.prompt_logprobs is not None
        else [],
    )


@dataclass
class Mirror:
    """What a worker knows of a slot's life."""

    tokens: list[int]
    num_registered: int
    num_prompt: int
    sampler: SamplerSpec
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    awaited: bool = False
    """A token of it was sampled and the scheduler has not heard of it."""


@dataclass
class Executed:
    """What a plan held."""

    plan: StepPlan
    num_decodes: int
    """Rows of one generated token."""
    num_chunks: int
    """Other rows: prompts, and what pre-empted requests recompute."""
    num_tokens: int
    """Positions computed."""
    result: StepResult
    sampled: list[Mirror]

    @property
    def num_prompt_tokens(self) -> int:
        """Positions that are no decode rows."""
        return self.num_tokens - self.num_decodes


class FakeExecutor:
    """`execute` plans in order as they are made; take their results, in the same order, whenever it suits the test."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.slots: dict[int, Mirror] = {}
        self.owners: dict[int, Mirror] = {}
        self.cache: dict[tuple[int, int], int] = {}
        """(page, offset) to the token whose KV is there."""
        self.in_flight: deque[Executed] = deque()
        self.executed: list[Executed] = []

    def next_result(self) -> StepResult:
        """The result that the scheduler must get next."""
        done = self.in_flight.popleft()
        for mirror in done.sampled:
            mirror.awaited = False
        return done.result

    def execute(self, plan: StepPlan) -> Executed:
        """Apply the deltas, compute the rows."""
        assert plan == msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)
        assert plan.plan_id == len(self.executed)
        self._apply(plan)
        rows = unpack(plan.rows, ROW_WIDTH).tolist()
        assert rows, "a plan with nothing to compute"
        assert len({row[0] for row in rows}) == len(rows), "a slot twice in a plan"
        done = Executed(plan, 0, 0, sum(row[2] for row in rows), StepResult(plan.plan_id, b""), [])
        assert done.num_tokens <= self.config.chunk
        tokens: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        for index, (slot, start, count, samples) in enumerate(rows):
            mirror = self.slots[slot]
            if start >= mirror.num_registered:
                assert not done.num_chunks, "decode rows come first"
                done.num_decodes += 1
            else:
                done.num_chunks += 1
            history = self._compute(mirror, start, count)
            if mirror.sampler.prompt_logprobs is not None:
                prompt_logprobs[index] = [
                    logprobs_of(history[: i + 1], mirror.tokens[i + 1])
                    for i in range(start, min(start + count, mirror.num_prompt - 1))
                ]
            if samples:
                token = next_token(history, mirror.sampler, mirror.num_prompt)
                if mirror.sampler.logprobs is not None:
                    logprobs[len(tokens)] = logprobs_of(history, token)
                assert mirror.num_computed == len(mirror.tokens), "sampled before the last known token"
                mirror.tokens.append(token)
                mirror.awaited = True
                tokens.append(token)
                done.sampled.append(mirror)
        done.result = StepResult(plan.plan_id, pack(tokens), logprobs, prompt_logprobs)
        self.executed.append(done)
        self.in_flight.append(done)
        return done

    def _apply(self, plan: StepPlan) -> None:
        for slot in plan.free:
            for page in self.slots.pop(slot).pages:
                del self.owners[page]
        for register in plan.register:
            self._register(register)
        for slot, page in unpack(plan.pages, 2).tolist():
            assert 0 <= page < self.config.num_pages
            assert page not in self.owners, f"page {page} has two owners"
            self.owners[page] = self.slots[slot]
            self.slots[slot].pages.append(page)

    def _register(self, register: Register) -> None:
        assert 0 <= register.slot < self.config.max_running
        assert register.slot not in self.slots, f"slot {register.slot} begins a second life"
        tokens = unpack(register.tokens).tolist()
        self.slots[register.slot] = Mirror(tokens, len(tokens), register.num_prompt, register.sampler)

    def _compute(self, mirror: Mirror, start: int, count: int) -> list[int]:
        """Write the row's KV, then read all that the request's pages hold up to its end."""
        size, end = self.config.page_size, start + count
        ahead = bool(self.config.run_ahead)
        assert ahead or not mirror.awaited, "a row of a request whose last token the scheduler does not know"
        assert count >= 1
        assert start == mirror.num_computed, "positions follow each other, each computed once"
        assert end <= len(mirror.tokens) <= self.config.max_len
        assert end <= len(mirror.pages) * size, "a row outside the request's pages"
        for i in range(start, end):
            self.cache[mirror.pages[i // size], i % size] = mirror.tokens[i]
        mirror.num_computed = end
        history = [self.cache[mirror.pages[i // size], i % size] for i in range(end)]
        assert history == mirror.tokens[:end], "another request wrote into these pages"
        return history
