"""The asyncio client against a played engine: nothing that has arrived waits for the next message."""

from __future__ import annotations

import asyncio
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from headrace.channel import Listener
from headrace.config import ServeConfig
from headrace.engine.client import EngineClient
from headrace.errors import Fault
from headrace.sampling import SamplingParams
from headrace.step import Abort, ClientMessage, EngineStatus, Hello, Output, Outputs, Submit
from headrace.supervise.private import write_config


class Played:
    """An engine that says what it is told to say."""

    def __init__(self, directory: Path) -> None:
        write_config(directory, ServeConfig())
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.listener = Listener(self.context, directory, "ipc")
        self.client = b""

    def hear(self) -> Any:
        assert self.listener.clients.poll(5000)
        self.client, data = self.listener.clients.recv_multipart()
        return msgspec.msgpack.decode(data, type=ClientMessage)

    def say(self, message: Outputs | EngineStatus) -> None:
        self.listener.clients.send_multipart([self.client, msgspec.msgpack.encode(message)])


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Played]:
    played = Played(tmp_path)
    yield played
    played.listener.clients.close(linger=0)
    played.listener.workers.close(linger=0)
    played.context.term()


async def hear(engine: Played) -> Any:
    return await asyncio.to_thread(engine.hear)


def test_a_send_never_swallows_the_signal_of_what_has_arrived(engine: Played, tmp_path: Path) -> None:
    async def scenario() -> None:
        client = EngineClient(tmp_path)
        await client.start()
        assert isinstance(await hear(engine), Hello)
        outputs = client.generate("a", [1], SamplingParams())
        first = asyncio.ensure_future(anext(outputs))
        assert isinstance(await hear(engine), Submit)
        for _ in range(20):
            # From here to the send the loop does not run: the output arrives unseen, its signal still pending.
            engine.say(Outputs([Output("a", [7])]))
            assert select.select([client._descriptor], [], [], 5)[0]
            client._send(Abort(["nobody"]))
            assert (await asyncio.wait_for(first, 5)).tokens == [7]
            first = asyncio.ensure_future(anext(outputs))
            await asyncio.sleep(0)
        first.cancel()
        await client.stop()

    asyncio.run(scenario())


def test_closing_early_aborts_and_ending_does_not(engine: Played, tmp_path: Path) -> None:
    async def scenario() -> None:
        client = EngineClient(tmp_path)
        await client.start()
        await hear(engine)
        outputs = client.generate("a", [1], SamplingParams())
        first = asyncio.ensure_future(anext(outputs))
        await hear(engine)
        engine.say(Outputs([Output("a", [7])]))
        await first
        await outputs.aclose()  # type: ignore[attr-defined]  # it is a generator
        assert await hear(engine) == Abort(["a"])
        done = client.generate("b", [1], SamplingParams())
        last = asyncio.ensure_future(anext(done))
        await hear(engine)
        engine.say(Outputs([Output("b", [7], finish_reason="stop")]))
        assert (await last).finish_reason == "stop"
        with pytest.raises(StopAsyncIteration):
            await anext(done)
        client._send(Hello())
        assert isinstance(await hear(engine), Hello)  # and no abort before it
        await client.stop()

    asyncio.run(scenario())


def test_an_engine_that_stops_ends_what_runs_with_one_line(engine: Played, tmp_path: Path) -> None:
    async def scenario() -> None:
        client = EngineClient(tmp_path)
        await client.start()
        await hear(engine)
        waiting = asyncio.ensure_future(anext(client.generate("a", [1], SamplingParams())))
        await hear(engine)
        engine.say(EngineStatus("stopping"))
        with pytest.raises(Fault, match="stopping"):
            await asyncio.wait_for(waiting, 5)
        assert client.lost is not None and client.status.phase == "stopping"
        await client.stop()

    asyncio.run(scenario())
