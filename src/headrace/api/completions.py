"""POST /v1/completions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from uuid import uuid4

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from headrace.api.errors import bad_value, unsupported
from headrace.api.generation import Entry, Piece, collect, run_all
from headrace.api.logprobs import completion_logprobs, joined, prompt_logprobs
from headrace.api.request import check_fields, check_model, encode_prompt, generations, room_for, sampling_of
from headrace.api.schema import CompletionRequest
from headrace.api.service import Service
from headrace.api.shapes import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Usage,
    describe,
    usage_of,
)
from headrace.api.stream import DONE, EventStream, answer, event
from headrace.sampling import SamplingParams
from headrace.step import TokenLogprobs
from headrace.text.unicode import well_formed

DEFAULT_MAX_TOKENS = 16
MAX_RUNS = 1024
"""Most choices of one request, all its prompts together."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    tokens: list[int]
    text: str
    """What `echo` gives back; empty without it."""


class _Job:
    """One request, checked and tokenised."""

    def __init__(self, service: Service, body: CompletionRequest, prompts: list[_Prompt]) -> None:
        self.service = service
        self.body = body
        self.prompts = prompts
        self.num_each = body.n or 1
        self.id = f"cmpl-{uuid4().hex}"
        self.created = int(time.time())
        self.echo = bool(body.echo)
        params = [self._sampling(prompt) for prompt in prompts]
        pairs = [(prompt.tokens, sampling) for prompt, sampling in zip(prompts, params, strict=True)]
        self.runs = generations(service, pairs, self.num_each, body.priority or 0)

    def _sampling(self, prompt: _Prompt) -> SamplingParams:
        body, max_len = self.body, self.service.engine.status.max_len
        room = max_len - len(prompt.tokens)
        asked = min(DEFAULT_MAX_TOKENS, room) if body.max_tokens is None and room > 0 else body.max_tokens
        max_tokens = room_for(len(prompt.tokens), asked, max_len, param="prompt", field="max_tokens")
        return sampling_of(
            body,
            self.service.model.vocab_size,
            max_tokens=max_tokens,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if self.echo else None,
        )

    def prompt_of(self, run: int) -> _Prompt:
        """The prompt that a choice continues."""
        return self.prompts[run // self.num_each]

    def usage(self) -> Usage:
        """Of all choices of all prompts."""
        return usage_of(sum(len(p.tokens) for p in self.prompts), self.runs, self.num_each)

    def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """What the engine gives; nothing runs where nothing is computed."""
        if self.body.max_tokens == 0 and not (self.echo and self.body.logprobs is not None):
            return _nothing(len(self.runs))
        return run_all(self.service, self.runs)

    def logprobs(
        self, run: int, entries: Sequence[Entry], prompt: Sequence[TokenLogprobs] | None
    ) -> CompletionLogprobs | None:
        """Entries of the echoed prompt (None: not now) and of generated tokens; None where none were asked for."""
        if self.body.logprobs is None:
            return None
        text_len = len(self.prompt_of(run).text)
        first = None
        if prompt is not None:
            first = prompt_logprobs(self.service.tokenizer, self.prompt_of(run).tokens, prompt, text_len)
        return joined(first, completion_logprobs(self.service.tokenizer, entries, text_len))

    def completion(self, choices: list[CompletionChoice], usage: Usage | None | UnsetType = UNSET) -> Completion:
        """The envelope around choices."""
        return Completion(self.id, self.created, self.service.model.name, choices, usage)


async def _nothing(num_runs: int) -> AsyncGenerator[tuple[int, Piece], None]:
    for run in range(num_runs):
        yield run, Piece("", [], [], "length")


async def _stream(job: _Job) -> AsyncGenerator[bytes, None]:
    usage = None if job.body.include_usage else UNSET
    greeted = [not job.echo] * len(job.runs)
    async with contextlib.aclosing(job.pieces()) as pieces:
        async for run, piece in pieces:
            text, prompt = piece.text, None
            if not greeted[run]:
                greeted[run] = True
                text, prompt = job.prompt_of(run).text + text, piece.prompt_logprobs
            logprobs = job.logprobs(run, piece.entries, prompt)
            yield event(job.completion([CompletionChoice(run, text, logprobs, piece.finish_reason)], usage))
    if job.body.include_usage:
        yield event(job.completion([], job.usage()))
    yield DONE


async def _whole(job: _Job) -> Completion:
    choices = []
    for run, part in enumerate(await collect(job.pieces(), len(job.runs))):
        text = job.prompt_of(run).text + part.text
        logprobs = job.logprobs(run, part.entries, part.prompt_logprobs if job.echo else None)
        choices.append(CompletionChoice(run, text, logprobs, part.finish_reason))
    return job.completion(choices, job.usage())


async def _read_prompts(service: Service, body: CompletionRequest) -> list[_Prompt]:
    """The prompts as tokens, whichever of its four shapes the field has."""
    given = body.prompt
    several = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    prompts = []
    for index, prompt in enumerate(several):
        param = f"prompt[{index}]" if several is given else "prompt"
        if isinstance(prompt, str):
            tokens = await encode_prompt(service, prompt, add_special=True, param=param)
            prompts.append(_Prompt(tokens, well_formed(prompt) if body.echo else ""))
            continue
        if max(prompt) >= service.model.vocab_size:
            raise bad_value(param, f"token ids must be under {service.model.vocab_size}")
        text = service.tokenizer.decode(prompt, skip_special=False) if body.echo else ""
        prompts.append(_Prompt(prompt, text))
    return prompts


def _check(service: Service, body: CompletionRequest) -> None:
    check_model(service, body.model)
    check_fields(service, body)
    if body.suffix:
        raise unsupported("suffix", "is not served")
    if body.best_of is not None and body.best_of > 1:
        raise unsupported("best_of", "only 1 is served; use n")
    count = (1 if isinstance(body.prompt, str) or isinstance(body.prompt[0], int) else len(body.prompt)) * (body.n or 1)
    if count > MAX_RUNS:
        raise bad_value("n", f"{count} choices over all prompts; at most {MAX_RUNS} are served")


def completion_routes(service: Service) -> APIRouter:
    """The route, for the application to include."""
    router = APIRouter()

    @router.post(
        "/v1/completions", responses=describe(Completion, errors=(400, 401, 404, 413, 429, 500, 503), sse=True)
    )
    async def create_completion(request: Request, body: CompletionRequest) -> Response:
        """Continue a text."""
        _check(service, body)
        job = _Job(service, body, await _read_prompts(service, body))
        return EventStream(_stream(job)) if body.stream else await answer(request, _whole(job))

    return router
