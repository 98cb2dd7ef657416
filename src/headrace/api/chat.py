"""POST /v1/chat/completions."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any
from uuid import uuid4

from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from headrace.api.errors import ApiError, bad_value, unsupported
from headrace.api.generation import Entry, collect, run_all
from headrace.api.logprobs import chat_logprobs
from headrace.api.request import check_fields, check_model, encode_prompt, generations, room_for, sampling_of
from headrace.api.schema import ChatRequest, Message, Tool
from headrace.api.service import Service
from headrace.api.shapes import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChunkChoice,
    Usage,
    describe,
    usage_of,
)
from headrace.api.stream import DONE, EventStream, answer, event
from headrace.text.chat import InvalidChat


def render(
    service: Service,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    kwargs: dict[str, Any] | None,
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt of a conversation. Raises a 400 where the template refuses it."""
    if service.template is None:
        raise ApiError(400, "This model has no chat template; use /v1/completions.", code="no_chat_template")
    given = [message.model_dump(exclude_none=True) for message in messages]
    for message in given:
        # OpenAI's newer name, which the templates of open models do not know.
        if message["role"] == "developer":
            message["role"] = "system"
    try:
        return service.template.render(
            given,
            tools=[tool.model_dump(exclude_none=True) for tool in tools] if tools else None,
            add_generation_prompt=add_generation_prompt,
            **_template_kwargs(kwargs or {}),
        )
    except InvalidChat as error:
        where, colon, _ = str(error).partition(": ")
        named = colon and where.startswith(("messages[", "chat_template_kwargs"))
        text = str(error) if named else f"messages: {error}"
        raise ApiError(400, text, param=where if named else "messages", code="invalid_value") from None


def _template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    for name in ("messages", "tools", "add_generation_prompt"):
        if name in kwargs:
            raise bad_value("chat_template_kwargs", f"{name} is a field of the request")
    return kwargs


class _Job:
    """One request, checked and tokenised."""

    def __init__(self, service: Service, body: ChatRequest, tokens: list[int]) -> None:
        self.service = service
        self.body = body
        self.id = f"chatcmpl-{uuid4().hex}"
        self.created = int(time.time())
        self.num_prompt = len(tokens)
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        asked: int | None = getattr(body, field)
        room = room_for(len(tokens), asked, service.engine.status.max_len, param="messages", field=field)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        sampling = sampling_of(body, service.model.vocab_size, max_tokens=room, logprobs=logprobs)
        self.runs = generations(service, [(tokens, sampling)], body.n or 1, body.priority or 0)

    def usage(self) -> Usage:
        """Of all choices."""
        return usage_of(self.num_prompt, self.runs, len(self.runs))

    def logprobs(self, entries: list[Entry]) -> ChatLogprobs | None:
        """None where none were asked for."""
        return chat_logprobs(self.service.tokenizer, entries) if self.body.logprobs else None


async def _stream(job: _Job) -> AsyncGenerator[bytes, None]:
    usage = None if job.body.include_usage else UNSET
    model = job.service.model.name
    greeted = [False] * len(job.runs)
    async with contextlib.aclosing(run_all(job.service, job.runs)) as pieces:
        async for run, piece in pieces:
            head = b""
            if not greeted[run]:
                greeted[run] = True
                hello = ChunkChoice(run, ChatDelta(role="assistant", content=""), None, None)
                head = event(ChatChunk(job.id, job.created, model, [hello], usage))
            delta = ChatDelta(content=piece.text) if piece.text else ChatDelta()
            choice = ChunkChoice(run, delta, job.logprobs(piece.entries), piece.finish_reason)
            yield head + event(ChatChunk(job.id, job.created, model, [choice], usage))
    tail = event(ChatChunk(job.id, job.created, model, [], job.usage())) if job.body.include_usage else b""
    yield tail + DONE


async def _whole(job: _Job) -> ChatCompletion:
    found = await collect(run_all(job.service, job.runs), len(job.runs))
    choices = [
        ChatChoice(index, ChatMessage(one.text), job.logprobs(one.entries), one.finish_reason)
        for index, one in enumerate(found)
    ]
    return ChatCompletion(job.id, job.created, job.service.model.name, choices, job.usage())


def _check(service: Service, body: ChatRequest) -> None:
    check_model(service, body.model)
    check_fields(service, body)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_value("top_logprobs", "only with logprobs: true")
    choice = body.tool_choice
    if choice is not None and choice not in ("none", "auto"):
        named = "a named tool" if isinstance(choice, dict) else repr(choice)
        raise unsupported("tool_choice", f'{named} is not served yet; "none" and "auto" are')


def chat_routes(service: Service) -> APIRouter:
    """The route, for the application to include."""
    router = APIRouter()

    @router.post(
        "/v1/chat/completions", responses=describe(ChatCompletion, errors=(400, 401, 404, 413, 429, 500, 503), sse=True)
    )
    async def create_chat_completion(request: Request, body: ChatRequest) -> Response:
        """Answer a conversation."""
        _check(service, body)
        tools = None if body.tool_choice == "none" else body.tools
        prompt = render(service, body.messages, tools, body.chat_template_kwargs)
        # A template writes its own special tokens.
        tokens = await encode_prompt(service, prompt, add_special=False, param="messages")
        job = _Job(service, body, tokens)
        return EventStream(_stream(job)) if body.stream else await answer(request, _whole(job))

    return router
