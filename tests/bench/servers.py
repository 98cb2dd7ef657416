"""Servers that understand less than ours: each a small ASGI application that streams words."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

ALL = frozenset(
    ("model", "prompt", "max_tokens", "temperature", "stream", "stream_options", "ignore_eos", "generation_config")
)


@dataclass
class OddServer:
    """Counts a token a word, and one more for BOS where `bos` is set; refuses fields that it does not know."""

    fields: frozenset[str] = ALL
    token_ids: bool = True
    vocab_size: int = 50_000
    bos: int = 0
    usage: bool = True
    early: int = 0
    """Tokens by which an answer falls short where `ignore_eos` was not asked for."""
    fail_every: int = 0
    """Every so many requests, one fails within its stream."""
    asked: list[dict[str, Any]] = field(default_factory=list)

    @property
    def app(self) -> Starlette:
        """The application."""
        return Starlette(routes=[Route("/v1/completions", self._complete, methods=["POST"])])

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        unknown = sorted(set(body) - self.fields)
        if unknown:
            return JSONResponse({"detail": f"Unexpected fields in the request: {unknown}"}, 422)
        prompt = body["prompt"]
        if not isinstance(prompt, str) and (not self.token_ids or max(prompt) >= self.vocab_size):
            return JSONResponse({"detail": "prompt must be a string."}, 400)
        self.asked.append(body)
        return StreamingResponse(self._events(body), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        prompt = body["prompt"]
        num_prompt = self.bos + len(prompt.split() if isinstance(prompt, str) else prompt)
        goes_on = body.get("ignore_eos") or "eos_token_id" in body.get("generation_config", "")
        count = body["max_tokens"] if goes_on else max(1, body["max_tokens"] - self.early)
        fails = self.fail_every and len(self.asked) % self.fail_every == 0
        for index in range(count):
            if fails and index == 1:
                yield 'data: {"error": {"message": "it broke"}}\r\n\r\n'
                return
            yield f"data: {json.dumps({'choices': [{'index': 0, 'text': 'x'}]})}\r\n\r\n"
        if self.usage:
            usage = {"prompt_tokens": num_prompt, "completion_tokens": count}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\r\n\r\n"
        yield "data: [DONE]\r\n\r\n"
