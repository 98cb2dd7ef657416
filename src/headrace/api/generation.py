"""One request's run, shared by both endpoints and both modes: engine outputs to text, log-probabilities and an end."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from headrace.api.errors import ApiError
from headrace.api.service import Service
from headrace.errors import Fault
from headrace.sampling import SamplingParams
from headrace.step import Output, TokenLogprobs
from headrace.telemetry.metrics import RequestTimer
from headrace.text.detokenizer import Detokenizer

Finish = Literal["stop", "length"]
Entry = tuple[TokenLogprobs, int]
"""Log-probabilities of a generated token, and how many characters of the output lie before its text."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one engine output adds for the client; text and entries that a stop string may still cut are not in it."""

    text: str
    entries: list[Entry]
    prompt_logprobs: list[TokenLogprobs]
    finish_reason: Finish | None


@dataclass(slots=True)
class Collected:
    """All that a run gave."""

    text: str = ""
    entries: list[Entry] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: Finish = "stop"


class Generation:
    """One engine request, one choice of an answer. Iterate `pieces` once; leaving it early aborts the request."""

    def __init__(
        self,
        request_id: str,
        tokens: Sequence[int],
        sampling: SamplingParams,
        detokenizer: Detokenizer,
        timer: RequestTimer,
        priority: int = 0,
    ) -> None:
        self.request_id = request_id
        self.tokens = tokens
        self.sampling = sampling
        self.priority = priority
        self.num_tokens = 0
        """Tokens generated so far, up to the one that completed a stop string."""
        self.num_cached = 0
        """Prompt tokens that the engine had computed before."""
        self._detokenizer = detokenizer
        self._timer = timer
        self._pending: deque[Entry] = deque()
        self._shown = 0

    async def pieces(self, service: Service) -> AsyncGenerator[Piece, None]:
        """Run the request. Raises ApiError or Fault when it cannot end well."""
        outputs = service.engine.generate(self.request_id, self.tokens, self.sampling, self.priority)
        reason = "abort"
        try:
            async for output in outputs:
                piece = self._read(output)
                if piece is None:
                    continue
                reason = piece.finish_reason or reason
                yield piece
                if piece.finish_reason:
                    return
            raise ApiError(500, "The engine ended the request without a reason.", code="engine_error")
        except (ApiError, Fault) as error:
            reason = "error"
            if service.failure is not None:
                raise ApiError(503, f"The service has failed: {service.failure}", code="service_failed") from error
            if service.stopping:
                raise ApiError(503, "The server is stopping.", code="stopping") from error
            raise
        finally:
            self._timer.end(reason)
            await _close(outputs)

    def _read(self, output: Output) -> Piece | None:
        """What the client gets of an output; None if nothing yet."""
        if output.finish_reason in ("abort", "error"):
            raise _failure(output)
        delta = self._detokenizer.push(output.tokens)
        self.num_tokens += delta.num_tokens
        self.num_cached += output.num_cached
        self._timer.output(delta.num_tokens, output.queued_s)
        # An entry for each token that was read; the rest lies behind a stop string.
        self._pending.extend(zip(output.logprobs, delta.offsets, strict=False))
        finish: Finish | None = None
        text, stopped = delta.text, delta.stopped
        if not stopped and output.finish_reason is not None:
            rest = self._detokenizer.finish()
            text, stopped = text + rest.text, rest.stopped
            finish = "stop" if output.finish_reason == "stop" else "length"
        if stopped:
            finish = "stop"
        self._shown += len(text)
        entries = self._release(cut=stopped, ended=finish is not None) if self._pending else []
        if not (text or entries or finish or output.prompt_logprobs):
            return None
        return Piece(text, entries, output.prompt_logprobs, finish)

    def _release(self, *, cut: bool, ended: bool) -> list[Entry]:
        """Entries whose text is out; at the end the rest too, but for what a stop string cut."""
        pending = self._pending
        if (ended and not cut) or not self.sampling.stop:
            entries = list(pending)
            pending.clear()
            return entries
        entries = []
        while pending and pending[0][1] < self._shown:
            entries.append(pending.popleft())
        if ended:
            pending.clear()
        return entries


def _failure(output: Output) -> ApiError:
    if output.finish_reason == "abort":
        return ApiError(503, "The engine gave the request up; it is stopping.", code="aborted")
    if output.refused:
        return ApiError(429, f"Too many requests: {output.error}.", code="rate_limit_exceeded")
    return ApiError(500, output.error or "The engine failed on this request.", code="engine_error")


async def _close(outputs: AsyncIterator[Output]) -> None:
    # At once, not when the garbage collector comes: closing is what aborts the request.
    if isinstance(outputs, AsyncGenerator):
        await outputs.aclose()


async def run_all(service: Service, runs: Sequence[Generation]) -> AsyncGenerator[tuple[int, Piece], None]:
    """Pieces of all runs as they come, each with its run's index. One that fails ends all."""
    if len(runs) == 1:
        async with contextlib.aclosing(runs[0].pieces(service)) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, Piece] | BaseException | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_feed(service, run, index, queue)) for index, run in enumerate(runs)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def collect(pieces: AsyncGenerator[tuple[int, Piece], None], num_runs: int) -> list[Collected]:
    """Wait for all runs to end."""
    found = [Collected() for _ in range(num_runs)]
    texts: list[list[str]] = [[] for _ in range(num_runs)]
    async with contextlib.aclosing(pieces):
        async for run, piece in pieces:
            texts[run].append(piece.text)
            found[run].entries += piece.entries
            found[run].prompt_logprobs += piece.prompt_logprobs
            found[run].finish_reason = piece.finish_reason or found[run].finish_reason
    for run, parts in enumerate(texts):
        found[run].text = "".join(parts)
    return found


async def _feed(
    service: Service, run: Generation, index: int, queue: asyncio.Queue[tuple[int, Piece] | BaseException | None]
) -> None:
    try:
        async with contextlib.aclosing(run.pieces(service)) as pieces:
            async for piece in pieces:
                queue.put_nowait((index, piece))
    except Exception as error:
        queue.put_nowait(error)
    else:
        queue.put_nowait(None)
