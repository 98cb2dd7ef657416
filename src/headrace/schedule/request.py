"""A request as it is asked, as the scheduler carries it, and what a step adds to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from headrace.sampling import SamplingParams
from headrace.step import FinishReason, Register, SamplerSpec, TokenLogprobs, pack

if TYPE_CHECKING:
    from headrace.schedule.prefix import Node

TOKEN_BYTES = 4

Rank = tuple[int, int]


@dataclass(frozen=True)
class Request:
    """What is asked. Its id is unique among the unfinished requests of one scheduler."""

    id: str
    tokens: bytes
    """Prompt, packed int32, at least one token. The scheduler counts tokens and never looks at their values."""
    max_tokens: int | None = None
    """Most tokens to generate; None: as many as fit. 0 computes the prompt and samples nothing."""
    sampler: SamplerSpec = field(default_factory=SamplerSpec)
    """Its stop_token_ids are all the ids that end the request, none of them before min_tokens."""
    priority: int = 0
    """Lower goes first, where the policy asks for it."""

    @classmethod
    def from_sampling(
        cls,
        request_id: str,
        tokens: bytes,
        sampling: SamplingParams,
        *,
        eos_ids: Iterable[int],
        seed: int,
        priority: int = 0,
    ) -> Request:
        """Resolve what a user asked: `eos_ids` are the model's, `seed` serves a request that brings none."""
        stop_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_ids)}
        sampler = SamplerSpec(
            seed=seed if sampling.seed is None else sampling.seed,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=sampling.logit_bias,
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            min_tokens=sampling.min_tokens,
            stop_token_ids=sorted(stop_ids),
        )
        return cls(request_id, tokens, sampling.max_tokens, sampler, priority)

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens) // TOKEN_BYTES


class Event(msgspec.Struct, frozen=True, gc=False):
    """What one commit added to one request."""

    request_id: str
    tokens: list[int] = []
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = []
    """One a token, where asked for."""
    prompt_logprobs: list[TokenLogprobs] = []
    """All prompt positions but the first, with the first token (or with the end, where there is none)."""
    queued_s: float = 0.0
    """From submission to the first plan, in the first event only."""
    num_cached: int = 0
    """Prompt tokens that were found in the prefix cache, in the first event only."""


class Job:
    """A request on its way. Only the scheduler changes it; two jobs are equal only if they are the same one.

    The counts speak of what is planned, not of what is known, so the next row can be planned without the value of
    the token before it: `num_tokens` includes tokens that a plan in flight will sample, `num_computed` positions that
    a plan in flight will compute.
    """

    __slots__ = (
        "capacity", "done", "generated", "id", "is_new", "limit", "max_tokens", "min_tokens", "node", "num_cached",
        "num_computed", "num_entered", "num_prompt", "num_tokens", "num_told", "num_uncommitted", "pages",
        "prompt_logprobs", "queued_s", "rank", "request", "sampled_in", "slot", "stop_ids", "submitted_at",
    )  # fmt: skip

    def __init__(self, request: Request, limit: int, now: float, rank: Rank = (0, 0)) -> None:
        self.request = request
        self.rank = rank
        """Lower goes first."""
        self.id = request.id
        self.num_prompt = request.num_prompt
        self.limit = limit
        """Tokens at which it ends, prompt and output together."""
        self.max_tokens = limit - self.num_prompt
        self.min_tokens = request.sampler.min_tokens
        self.stop_ids = frozenset(request.sampler.stop_token_ids)
        self.submitted_at = now
        self.queued_s = -1.0
        """Negative until the first plan."""
        self.generated: list[int] = []
        self.num_tokens = self.num_prompt
        self.num_uncommitted = 0
        """Rows in flight whose result changes the request: those that sample, and the last of one that never does."""
        self.prompt_logprobs: list[TokenLogprobs] | None = None if request.sampler.prompt_logprobs is None else []
        """Collected so far; None when not wanted or already delivered."""
        self.is_new = True
        """Not pre-empted yet: what it finds in the prefix cache is not its own."""
        self.num_cached = 0
        """Prompt tokens found there until then."""
        self.done = False
        self.vacate()

    def vacate(self) -> None:
        """Forget what the workers hold of it: it has no slot and no pages, and nothing of it is computed."""
        self.slot = -1
        self.pages: list[int] = []
        self.capacity = 0
        """Positions its pages hold."""
        self.num_told = 0
        """Pages that the workers know of."""
        self.node: Node | None = None
        """Its place in the prefix cache."""
        self.num_entered = 0
        """Pages that are found there, or whose tokens are."""
        self.num_computed = 0
        self.sampled_in = -1
        """Plan of its last sampling row."""

    @property
    def num_known(self) -> int:
        """Tokens whose values are known."""
        return self.num_prompt + len(self.generated)

    def page_tokens(self, index: int, size: int) -> bytes:
        """The known tokens of its page `index`, packed."""
        first, num_prompt = index * size, self.num_prompt
        last = first + size
        if first >= num_prompt:
            return pack(self.generated[first - num_prompt : last - num_prompt])
        tokens = self.request.tokens[first * TOKEN_BYTES : last * TOKEN_BYTES]
        return tokens if last <= num_prompt else tokens + pack(self.generated[: last - num_prompt])

    def register(self, slot: int) -> Register:
        """Begin a life on a slot, with every token known so far."""
        assert not self.num_uncommitted, f"{self.id}: a token in flight is not known yet"
        self.slot = slot
        sampler = self.request.sampler
        if self.prompt_logprobs is None and sampler.prompt_logprobs is not None:  # delivered in an earlier life
            sampler = msgspec.structs.replace(sampler, prompt_logprobs=None)
        return Register(slot, self.request.tokens + pack(self.generated), self.num_prompt, sampler)

    def collect(self, start: int, entries: list[TokenLogprobs]) -> None:
        """Keep the prompt log-probabilities of a row that began at `start`, once each whatever life they come from."""
        if self.prompt_logprobs is not None:
            have = len(self.prompt_logprobs)
            assert start <= have, f"{self.id}: prompt log-probabilities from {start} on, {have} known"
            self.prompt_logprobs.extend(entries[have - start :])

    def deliver_prompt_logprobs(self) -> list[TokenLogprobs]:
        """What was collected, the first time; nothing after."""
        entries, self.prompt_logprobs = self.prompt_logprobs, None
        if entries is None:
            return []
        assert len(entries) == self.num_prompt - 1, f"{self.id}: {len(entries)} prompt log-probabilities"
        return entries

    def take(self, token: int) -> FinishReason | None:
        """Add the token that a row in flight sampled; why the request ends with it, if it does."""
        self.num_uncommitted -= 1
        self.generated.append(token)
        num_generated = len(self.generated)
        if token in self.stop_ids and num_generated >= self.min_tokens:
            return "stop"
        return "length" if num_generated >= self.max_tokens else None
