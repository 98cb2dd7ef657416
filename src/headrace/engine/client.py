"""An engine's client for asyncio: what the HTTP process uses."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import zmq

from headrace.channel import join, join_url
from headrace.errors import Fault
from headrace.sampling import SamplingParams
from headrace.step import (
    Abort,
    ClientMessage,
    EngineMessage,
    EngineStatus,
    Hello,
    Output,
    Outputs,
    ResetPrefixCache,
    Submit,
    pack,
)
from headrace.supervise.private import read_config

WATCH_S = 1.0
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
        self._decode = msgspec.msgpack.Decoder(EngineMessage).decode
        self._socket: zmq.Socket[bytes] | None = None
        self._descriptor = -1
        self._watcher: asyncio.Task[None] | None = None
        self._heard_s = 0.0

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
        self._socket = await asyncio.to_thread(join, zmq.Context.instance(), url)
        self._heard_s = time.monotonic()
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        asyncio.get_running_loop().add_reader(self._descriptor, self._drain)
        self._watcher = asyncio.create_task(self._watch(), name="engine-client")
        self._send(Hello())

    async def stop(self) -> None:
        """Disconnect; requests that still run end with a Fault."""
        self._lose("the client was stopped")
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._descriptor)
            self._socket.close(linger=0)
            self._socket = None

    async def generate(
        self, request_id: str, tokens: Sequence[int], sampling: SamplingParams, priority: int = 0
    ) -> AsyncIterator[Output]:
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
            self._send(Submit(request_id, pack(tokens), sampling, priority))
            while not finished:
                output = await queue.get()
                if output is None:
                    raise Fault(self._lost or "the engine is lost")
                finished = output.finish_reason is not None
                yield output
        finally:
            del self._queues[request_id]
            if not finished and self._lost is None and self._socket is not None:
                self._send(Abort([request_id]))

    def reset_prefix_cache(self) -> None:
        """Forget what is cached: requests after this find nothing from before. Raises Fault if the engine is lost."""
        if self._lost is not None or self._socket is None:
            raise Fault(self._lost or "not connected to the engine")
        self._send(ResetPrefixCache())

    def _drain(self) -> None:
        """Take in all that is there.

        ZeroMQ's descriptor signals an edge, and any call on the socket may consume it: so it is drained when the
        descriptor fires, and after every send.
        """
        socket = self._socket
        try:
            while socket is not None and socket.poll(0):
                self._take(self._decode(socket.recv(zmq.NOBLOCK)))
                self._heard_s = time.monotonic()
                socket = self._socket
        except zmq.ZMQError as error:
            self._lose(f"connection to the engine: {error}")

    def _send(self, message: ClientMessage) -> None:
        assert self._socket is not None
        self._socket.send(self._encode(message))
        self._drain()

    async def _watch(self) -> None:
        """Notice an engine that falls silent."""
        while self._lost is None:
            await asyncio.sleep(WATCH_S)
            self._drain()  # before judging: this process may have been the one that slept
            if time.monotonic() - self._heard_s > SILENCE_S:
                self._lose(f"no word from the engine for {SILENCE_S:g} s")

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
