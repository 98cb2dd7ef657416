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
from tests.fakes.memory import Memory

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


@dataclass(eq=False)
class Mirror:
    """What a worker knows of a slot's life; two are equal only if they are the same one."""

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
    num_skipped: int
    """Positions that rows passed over because pages held them."""
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
        self.holders: dict[int, list[Mirror]] = {}
        """By page."""
        self.memory = Memory(config.page_size)
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
        done = Executed(plan, 0, 0, sum(row[2] for row in rows), 0, StepResult(plan.plan_id, b""), [])
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
            done.num_skipped += start - mirror.num_computed
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
            mirror = self.slots.pop(slot)
            for page in mirror.pages:
                self.holders[page].remove(mirror)
        for register in plan.register:
            self._register(register)
        for slot, page in unpack(plan.pages, 2).tolist():
            assert 0 <= page < self.config.num_pages
            mirror, holders = self.slots[slot], self.holders.setdefault(page, [])
            assert mirror not in holders, f"page {page} twice in a request"
            assert self.config.prefix_cache or not holders, f"page {page} has two owners"
            holders.append(mirror)
            mirror.pages.append(page)

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
        assert start >= mirror.num_computed, "each position is computed once"
        if start > mirror.num_computed:
            assert start % size == mirror.num_computed % size == 0, "whole pages are shared"
            assert self.config.prefix_cache
            assert mirror.sampler.prompt_logprobs is None, "every position's result is wanted"
            assert start < mirror.num_registered, "the last known token is always computed"
        assert end <= len(mirror.tokens) <= self.config.max_len
        self.memory.write(mirror.pages, start, mirror.tokens[start:end])
        mirror.num_computed = end
        history = self.memory.read(mirror.pages, end)
        assert history == mirror.tokens[:end], "another request wrote into these pages"
        return history
