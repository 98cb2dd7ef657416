"""Answers that end when the client goes away: server-sent events, and a plain wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from headrace.api.errors import as_api_error

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would hold events back otherwise.
    (b"x-accel-buffering", b"no"),
]


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


def event(chunk: msgspec.Struct) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(chunk) + b"\n\n"


class EventStream(Response):
    """Sends events as they come.

    The status is sent with the first event, so a failure before it has a status of its own; a later one is sent as an
    event, after which the stream ends.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        self.raw_headers = _HEADERS
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the events end or the client is gone."""
        try:
            await until_gone(receive, self._send_all(send))
        except ClientGone:
            pass
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        started = False
        try:
            async for data in self._events:
                if not started:
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": list(self.raw_headers)})
                await send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            if not started:
                raise
            body = b"data: " + as_api_error(error).encode() + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def answer(request: Request, work: Coroutine[Any, Any, msgspec.Struct]) -> Response:
    """Wait for the work and send its result as JSON; the work is cancelled when the client goes away."""
    try:
        return json_response(await until_gone(request.receive, work))
    except ClientGone:
        # Nobody reads it; 499 is what logs know for this.
        return Response(status_code=499)


def json_response(body: msgspec.Struct, status: int = 200) -> Response:
    """A struct as the whole answer."""
    return Response(_encode(body), status, media_type="application/json")


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run the work to its end, or cancel it and raise ClientGone when the client closes the connection first."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
