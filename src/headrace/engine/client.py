"""An engine's client for asyncio: what the HTTP process uses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from headrace.channel import join, join_url
from headrace.errors import Fault
from headrace.step import Abort, EngineMessage, EngineStatus, Hello, Output, Outputs, SamplingParams, Submit, pack
from headrace.supervise.private import read_config

SILENCE_S = 15.0
"""An engine that says nothing for so long is lost: it sends its status every second."""


class EngineClient:
    """Joined to the engine of one private directory; belongs to one event loop."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._status = EngineStatus("starting")
        self._lost: str | None = None
        self._queues: dict[str, asyncio.Queue[Output | None]] = {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._socket: zmq.Socket[bytes] | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def status(self) -> EngineStatus:
        """The latest; phase "starting" until the first."""
        return self._status

    @property
    def lost(self) -> str | None:
        """Why the engine can no longer be used, in one line; None while it can."""
        return self._lost

    async def start(self) -> None:
        """Connect and listen."""
        transport = read_config(self._directory).engine.run.transport
        url = join_url(self._directory, transport, "clients")
        socket = await asyncio.to_thread(join, zmq.Context.instance(), url)
        self._socket = socket
        socket.send(self._encode(Hello()))
        self._reader = asyncio.create_task(self._read(socket), name="engine-client")

    async def stop(self) -> None:
        """Disconnect; requests that still run end with a Fault."""
        self._lose("the client was stopped")
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    async def generate(self, request_id: str, tokens: Sequence[int], sampling: SamplingParams) -> AsyncIterator[Output]:
        """The request's outputs; they end after the one with a finish_reason. Closing the iterator early aborts it.

        Raises Fault if the engine is lost.
        """
        if self._lost is not None or self._socket is None:
            raise Fault(self._lost or "not connected to the engine")
        assert request_id not in self._queues, f"request id {request_id} is in use"
        queue: asyncio.Queue[Output | None] = asyncio.Queue()
        self._queues[request_id] = queue
        finished = False
        try:
            self._socket.send(self._encode(Submit(request_id, pack(tokens), sampling)))
            while not finished:
                output = await queue.get()
                if output is None:
                    raise Fault(self._lost or "the engine is lost")
                finished = output.finish_reason is not None
                yield output
        finally:
            del self._queues[request_id]
            if not finished and self._lost is None and self._socket is not None:
                self._socket.send(self._encode(Abort([request_id])))

    async def _read(self, socket: zmq.Socket[bytes]) -> None:
        # A shadow for waiting only: the plain socket then drains everything that is there at one wake-up.
        waiting = zmq.asyncio.Socket.shadow(socket.underlying)
        decode = msgspec.msgpack.Decoder(EngineMessage).decode
        try:
            while True:
                if not await waiting.poll(int(SILENCE_S * 1000)):
                    self._lose(f"no word from the engine for {SILENCE_S:g} s")
                    return
                while socket.poll(0):
                    self._take(decode(socket.recv(zmq.NOBLOCK)))
        except zmq.ZMQError as error:
            self._lose(f"connection to the engine: {error}")

    def _take(self, message: Outputs | EngineStatus) -> None:
        if isinstance(message, EngineStatus):
            self._status = message
            if message.phase == "stopping":
                self._lose("the engine is stopping")
            return
        for output in message.outputs:
            queue = self._queues.get(output.request_id)
            if queue is not None:
                queue.put_nowait(output)

    def _lose(self, why: str) -> None:
        if self._lost is None:
            self._lost = why
            for queue in self._queues.values():
                queue.put_nowait(None)
