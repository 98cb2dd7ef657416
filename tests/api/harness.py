"""A service over a fake engine and a tiny tokenizer, called in-process or through a real server."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from headrace.api.app import create_app
from headrace.api.service import ServedModel, Service
from headrace.telemetry.metrics import Metrics
from headrace.text.chat import load_chat_template
from headrace.text.tokenizer import load_tokenizer
from tests.fakes.engine import FakeEngine
from tests.tiny_tokenizer import CHATML, write_tiny_tokenizer

T = TypeVar("T")

VOCAB = 272
NAME = "tiny"


@dataclass(frozen=True)
class _Folder:
    path: Path
    kind: str = "folder"


def make_service(
    folder: Path,
    engine: FakeEngine,
    *,
    api_key: str | None = None,
    chat_template: str | None = CHATML,
    has_priorities: bool = False,
) -> Service:
    """A service over the tokenizer that it writes to the folder: one token a byte."""
    write_tiny_tokenizer(folder, VOCAB, chat_template=chat_template)
    source = _Folder(folder)
    service = Service(
        engine=engine,
        tokenizer=load_tokenizer(source),
        template=load_chat_template(source),
        model=ServedModel(name=NAME, root="/models/tiny", vocab_size=VOCAB),
        metrics=Metrics(NAME, lambda: engine.status, lambda: service.not_ready is None),
        api_key=api_key,
        has_priorities=has_priorities,
        created=1700000000,
    )
    return service


@dataclass
class Caller:
    """Calls the application in-process; every call runs a loop of its own."""

    app: FastAPI

    def __call__(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(call())

    def complete(self, **body: Any) -> httpx.Response:
        """POST /v1/completions."""
        return self("POST", "/v1/completions", json=body)

    def chat(self, *messages: Any, **body: Any) -> httpx.Response:
        """POST /v1/chat/completions; a plain text is what the user says."""
        said = [{"role": "user", "content": m} if isinstance(m, str) else m for m in messages]
        return self("POST", "/v1/chat/completions", json={"messages": said, **body})


def make_caller(folder: Path, engine: FakeEngine, **options: Any) -> Caller:
    """A caller of a fresh application."""
    return Caller(create_app(make_service(folder, engine, **options)))


def events_of(response: httpx.Response) -> list[Any]:
    """The events of a stream, decoded; the last must be [DONE], which is left out."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@dataclass(frozen=True)
class Served:
    """A server in a thread."""

    address: tuple[str, int]
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.address[0]}:{self.address[1]}"

    def call(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run something in its loop."""
        return asyncio.run_coroutine_threadsafe(work(), self.loop).result(10)


@contextmanager
def serving(app: ASGIApp) -> Iterator[Served]:
    """Serve an application on a free port from a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http="httptools", log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(server.serve(sockets=[listener]),), daemon=True)
    thread.start()
    try:
        yield Served(listener.getsockname(), loop)
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()
        loop.close()
