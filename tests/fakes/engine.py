"""An engine that answers from a script: no processes, no clock; what it was asked and what was aborted is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from headrace.errors import Fault
from headrace.sampling import SamplingParams
from headrace.step import EngineStatus, FinishReason, Output, StageStats, TokenLogprobs

READY = EngineStatus(
    phase="ready",
    num_running=3,
    num_waiting=2,
    num_preemptions=1,
    kv_tokens=4096,
    kv_usage=0.25,
    kv_cached=0.5,
    prefix_queries=900,
    prefix_hits=300,
    max_len=128,
    stages=[
        StageStats(
            0,
            0,
            2,
            1000,
            500,
            num_steps=10,
            num_tokens=80,
            active_s=1.0,
            busy_s=0.5,
            tokens_wait_s=0.125,
            plan_wait_s=0.25,
            communication_s=0.125,
            edge_s=0.375,
        ),
        StageStats(1, 2, 2, 1100, 500, num_steps=10, num_tokens=80, active_s=1.0, busy_s=0.25, activations_wait_s=0.75),
    ],
    host_s=0.125,
)


@dataclass(frozen=True)
class Submitted:
    """A request as the engine got it."""

    request_id: str
    tokens: list[int]
    sampling: SamplingParams
    priority: int = 0


@dataclass
class FakeEngine:
    """Gives every request the same reply, a byte a token, then its end token; without a reply letters that depend on
    the seed, up to max_tokens.
    """

    reply: bytes | None = None
    eos: int = 258
    per_output: int = 1
    """Tokens of an output."""
    status: EngineStatus = READY
    lost: str | None = None
    hold_after: int | None = None
    """Wait for `release` once a request has given so many outputs."""
    lose_after: int | None = None
    """Be lost once a request has given so many outputs."""
    fail_after: int | None = None
    """End a request with an error after so many outputs."""
    submitted: list[Submitted] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    num_cached: int = 0
    """Prompt tokens that every request is told to have found."""
    max_requests: int | None = None
    """Refuse requests beyond so many."""
    num_resets: int = 0
    stopped: bool = False
    num_held: int = 0
    """Requests that wait for `release`, or waited."""
    num_ended: int = 0
    release: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on this engine holds."""
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    def reset_prefix_cache(self) -> None:
        """Count."""
        self._check()
        self.num_resets += 1

    async def start(self) -> None:
        """Nothing to connect."""

    async def stop(self) -> None:
        """Requests that wait end with a Fault."""
        self.stopped = True
        self.lost = self.lost or "stopped"
        self.changed.set()
        self.release.set()

    async def generate(
        self, request_id: str, tokens: Sequence[int], sampling: SamplingParams, priority: int = 0
    ) -> AsyncIterator[Output]:
        """The scripted outputs."""
        self._check()
        self.submitted.append(Submitted(request_id, list(tokens), sampling, priority))
        finished = self.max_requests is not None and len(self.submitted) > self.max_requests
        if finished:
            yield Output(request_id, finish_reason="error", error="5 requests wait already", refused=True)
            return
        try:
            for index, output in enumerate(self._outputs(request_id, tokens, sampling)):
                await self._hold(index)
                if index == self.fail_after:
                    finished = True
                    yield Output(request_id, finish_reason="error", error="page table is on fire")
                    return
                finished = output.finish_reason is not None
                yield output
        finally:
            if not finished and self.lost is None:
                self.aborted.append(request_id)
            self.num_ended += 1
            self.changed.set()

    async def _hold(self, index: int) -> None:
        # Other tasks run between any two outputs, as they do behind a socket.
        await asyncio.sleep(0)
        if index == self.hold_after:
            self.num_held += 1
            self.changed.set()
            await self.release.wait()
        if index == self.lose_after:
            self.lost = "worker rank 1 died"
        self._check()

    def _check(self) -> None:
        if self.lost is not None:
            raise Fault(self.lost)

    def _outputs(self, request_id: str, tokens: Sequence[int], sampling: SamplingParams) -> list[Output]:
        made, reason = self._reply(tokens, sampling)
        prompt = []
        if sampling.prompt_logprobs is not None:
            prompt = [_logprobs(token, i, sampling.prompt_logprobs) for i, token in enumerate(tokens)][1:]
        groups = [made[i : i + self.per_output] for i in range(0, len(made), self.per_output)] or [[]]
        outputs, count = [], 0
        for index, group in enumerate(groups):
            entries = []
            if sampling.logprobs is not None:
                entries = [_logprobs(token, count + i, sampling.logprobs) for i, token in enumerate(group)]
            count += len(group)
            outputs.append(
                Output(
                    request_id,
                    tokens=group,
                    logprobs=entries,
                    prompt_logprobs=prompt if index == 0 else [],
                    finish_reason=reason if index == len(groups) - 1 else None,
                    queued_s=0.5 if index == 0 else 0.0,
                    num_cached=self.num_cached if index == 0 else 0,
                )
            )
        return outputs

    def _reply(self, tokens: Sequence[int], sampling: SamplingParams) -> tuple[list[int], FinishReason]:
        most = self.status.max_len - len(tokens) if sampling.max_tokens is None else sampling.max_tokens
        if self.reply is None:
            first = sum(tokens) + (sampling.seed or 0)
            return [97 + (first + i) % 26 for i in range(most)], "length"
        made = [*self.reply, self.eos]
        return (made, "stop") if len(made) <= most else (made[:most], "length")


def _logprobs(token: int, index: int, num_top: int) -> TokenLogprobs:
    top = [(token + i) % 256 for i in range(num_top)]
    return TokenLogprobs(token, -(index + 1) / 8, top, [-(index + 1 + i) / 8 for i in range(num_top)])
