"""A small HTTP client that spends little on a streamed token: one connection, one request at a time."""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from headrace.errors import Fault


class Usage(msgspec.Struct, frozen=True):
    """Tokens as the server counts them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None


class _Event(msgspec.Struct, frozen=True):
    """What a chunk of a stream is read for."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class Record:
    """One request, in seconds of `time.perf_counter`."""

    start_s: float
    end_s: float = 0.0
    status: int = 0
    token_times_s: list[float] = field(default_factory=list)
    """When each event that brought text came."""
    last_s: float = 0.0
    """When the last event of a choice came, with text or without."""
    usage: Usage | None = None
    error: str | None = None
    """Why the request does not count, in one line."""
    body: bytes = b""
    """The answer, where it was no stream."""


class Address:
    """Where a server is: parsed once."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        assert parts.hostname is not None, url
        self.host = parts.hostname
        self.port = parts.port or (443 if secure else 80)
        self.ssl = ssl.create_default_context() if secure else None
        self.path = parts.path.rstrip("/").removesuffix("/v1")
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = f"Host: {parts.netloc.rpartition('@')[2]}\r\n{key}Accept-Encoding: identity\r\n"

    def get(self, path: str) -> bytes:
        """The bytes of a GET request."""
        return f"GET {self.path}{path} HTTP/1.1\r\n{self._head}\r\n".encode()

    def post(self, path: str, body: bytes) -> bytes:
        """The bytes of a POST request."""
        head = f"{self._head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return f"POST {self.path}{path} HTTP/1.1\r\n{head}\r\n".encode() + body


class Connection(asyncio.Protocol):
    """One connection, opened when it is needed. `send` is the only call; one at a time."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._done: asyncio.Future[None] | None = None
        self._record = Record(0.0)
        self._now_s = 0.0
        self._is_stream = False
        self._saw_done = False
        self._keeps_open = False
        self._rest = b""

    async def send(self, request: bytes, timeout_s: float) -> Record:
        """Send a request and read its answer to the end. What goes wrong is in the record.

        Raises Fault where no connection can be made.
        """
        if self._transport is None or self._transport.is_closing():
            await self._open(timeout_s)
        assert self._transport is not None
        record = self._record = Record(time.perf_counter())
        self._is_stream, self._saw_done, self._rest = False, False, b""
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            async with asyncio.timeout(timeout_s):
                await self._done
        except TimeoutError:
            record.error = f"no complete answer within {timeout_s:g} s"
        finally:
            record.end_s = self._now_s if record.error is None else time.perf_counter()
            if not self._done.done() or record.error is not None or not self._keeps_open:
                self.close()
            self._done = None
        if record.status != 200 and record.error is None:
            record.error = f"HTTP {record.status}: {message_of(record.body)}"
        return record

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._transport is not None:
            self._transport.abort()
        self._transport = None

    async def _open(self, timeout_s: float) -> None:
        address, loop = self._address, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(min(timeout_s, 30.0)):
                await loop.create_connection(lambda: self, address.host, address.port, ssl=address.ssl)
        except (OSError, TimeoutError) as error:
            reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
            raise Fault(f"cannot connect to {address.host}:{address.port}: {reason}") from None

    # --- what the event loop calls ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not HTTP: {error}")

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        # What has neither a length nor chunks ends with its connection; a stream says when it is complete.
        if self._saw_done:
            self.on_message_complete()
        self._fail("the server closed the connection")

    def _fail(self, why: str) -> None:
        if self._done is not None and not self._done.done():
            self._record.error = why
            self._done.set_result(None)

    # --- what the parser calls ---

    def on_header(self, name: bytes, value: bytes) -> None:
        """Find out whether the answer is a stream."""
        if name.lower() == b"content-type" and value.startswith(b"text/event-stream"):
            self._is_stream = True

    def on_headers_complete(self) -> None:
        """Note the status."""
        assert self._parser is not None
        self._record.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Read the events that are whole."""
        if not self._is_stream:
            self._record.body += body
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def on_message_complete(self) -> None:
        """The answer is whole."""
        # Only now does the parser know.
        self._keeps_open = self._parser is not None and self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _event(self, data: bytes) -> None:
        record = self._record
        if data == b"[DONE]":
            self._saw_done = True
            return
        try:
            event = _decode(data)
        except msgspec.DecodeError as error:
            record.error = record.error or f"an event that cannot be read: {error}"
            return
        if event.error is not None:
            record.error = record.error or message_of(data)
        if event.usage is not None:
            record.usage = event.usage
        if event.choices:
            record.last_s = self._now_s
            if event.choices[0].text:
                record.token_times_s.append(self._now_s)


def message_of(body: bytes) -> str:
    """The words of an error's body, in one line."""
    try:
        found = msgspec.json.decode(body)
        for key in ("error", "message", "detail"):
            if isinstance(found, dict) and found.get(key):
                found = found[key]
        text = found if isinstance(found, str) else body.decode("utf-8", "replace")
    except msgspec.DecodeError:
        text = body.decode("utf-8", "replace")
    return " ".join(text.split())[:300] or "no message"
