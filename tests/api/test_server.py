"""The HTTP process from its first answer to its end: ready once, drained on a stop, gone when the engine is."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from headrace.api.server import HttpProcess, bind, url_of
from headrace.config import HttpConfig
from headrace.errors import Fault, PeerLost, UserError
from headrace.step import EngineStatus
from tests.api.harness import make_service
from tests.fakes.engine import READY, FakeEngine

Script = Callable[[HttpProcess, httpx.AsyncClient, list[str]], Awaitable[None]]


def _run(tmp_path: Path, engine: FakeEngine, script: Script, *, drain_s: float = 30.0) -> list[str]:
    """Run a process and a script against it; what was announced. Raises what the process raised."""
    announced: list[str] = []

    async def main() -> None:
        process = HttpProcess(make_service(tmp_path, engine), HttpConfig(port=0, drain_timeout_s=drain_s))

        def announce(url: str) -> None:
            announced.append(url)
            engine.changed.set()

        running = asyncio.create_task(process.run(announce))
        try:
            async with httpx.AsyncClient(base_url=process.url, timeout=10) as client:
                await script(process, client, announced)
        finally:
            process.stop()
            await running

    asyncio.run(main())
    return announced


def test_it_answers_from_the_start_and_is_ready_once(tmp_path: Path) -> None:
    engine = FakeEngine(status=EngineStatus("loading", "3 of 8 GB"))

    async def script(_process: HttpProcess, client: httpx.AsyncClient, announced: list[str]) -> None:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
        assert announced == []
        engine.status = READY
        await engine.until(lambda: bool(announced))
        assert (await client.get("/ready")).status_code == 200
        assert announced == [str(client.base_url)]

    assert len(_run(tmp_path, engine, script)) == 1
    assert engine.stopped


def test_a_stop_lets_requests_in_flight_end_and_takes_no_more(tmp_path: Path) -> None:
    engine = FakeEngine(reply=b"done", hold_after=2)

    async def script(process: HttpProcess, client: httpx.AsyncClient, _announced: list[str]) -> None:
        asked = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
        await engine.until(lambda: engine.num_held == 1)
        process.stop()
        assert (await client.get("/ready")).status_code == 503
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 503
        engine.release.set()
        assert (await asked).json()["choices"][0]["text"] == "done"

    _run(tmp_path, engine, script)
    assert engine.aborted == []


def test_what_does_not_end_in_time_is_told(tmp_path: Path) -> None:
    engine = FakeEngine(reply=b"never", hold_after=2)

    async def script(process: HttpProcess, client: httpx.AsyncClient, _announced: list[str]) -> None:
        whole = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
        stream = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "stream": True}))
        await engine.until(lambda: engine.num_held == 2)
        process.stop()
        assert (await whole).status_code == 503
        events = [line for line in (await stream).text.split("\n\n") if line]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["message"] == "The server is stopping."

    _run(tmp_path, engine, script, drain_s=0.0)


def test_a_service_that_fails_tells_everyone_why_at_once(tmp_path: Path) -> None:
    engine = FakeEngine(reply=b"never", hold_after=2)
    why = "worker rank 1 (stage 1): killed by signal 9 (SIGKILL)"

    async def script(process: HttpProcess, client: httpx.AsyncClient, _announced: list[str]) -> None:
        whole = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
        stream = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "stream": True}))
        await engine.until(lambda: engine.num_held == 2)
        before = process.work().turns
        process.fail(why)
        process.stop()
        answer = await whole
        assert answer.status_code == 503
        events = [line for line in (await stream).text.split("\n\n") if line]
        for error in (answer.json()["error"], json.loads(events[-1].removeprefix("data: "))["error"]):
            assert (error["code"], error["message"]) == ("service_failed", f"The service has failed: {why}")
        assert process.work().turns >= before >= 0

    _run(tmp_path, engine, script)


def test_a_lost_engine_ends_the_process_as_a_secondary_fault(tmp_path: Path) -> None:
    engine = FakeEngine(lose_after=1)

    async def script(_process: HttpProcess, client: httpx.AsyncClient, _announced: list[str]) -> None:
        answer = await client.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 503
        await engine.until(lambda: engine.stopped)

    with pytest.raises(PeerLost, match="worker rank 1 died"):
        _run(tmp_path, engine, script)


def test_an_engine_that_cannot_be_joined_ends_the_process(tmp_path: Path) -> None:
    class Unreachable(FakeEngine):
        async def start(self) -> None:
            raise PeerLost("the engine did not listen within 60 s")

    async def script(_process: HttpProcess, _client: httpx.AsyncClient, _announced: list[str]) -> None:
        await engine.until(lambda: engine.stopped)

    engine = Unreachable(status=EngineStatus("starting"))
    with pytest.raises(PeerLost, match="did not listen"):
        _run(tmp_path, engine, script)


def test_a_socket_that_no_longer_listens_ends_the_process(tmp_path: Path) -> None:
    engine = FakeEngine()

    async def script(process: HttpProcess, _client: httpx.AsyncClient, _announced: list[str]) -> None:
        process._sockets[0].shutdown(socket.SHUT_RDWR)
        await engine.until(lambda: engine.stopped)

    with pytest.raises(Fault, match="the socket that listens at http://127.0.0.1:.* has been shut"):
        _run(tmp_path, engine, script)


def test_a_port_in_use_is_the_users_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port}"):
            bind(HttpConfig(port=port))


def test_every_address_of_a_host_gets_the_same_port() -> None:
    sockets = bind(HttpConfig(host="localhost", port=0))
    try:
        assert len({one.getsockname()[1] for one in sockets}) == 1
    finally:
        for one in sockets:
            one.close()


@pytest.mark.parametrize(
    ("host", "shown"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("example.org", "example.org")]
)
def test_the_url_is_one_that_clients_can_use(host: str, shown: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert url_of(HttpConfig(host=host), listener) == f"http://{shown}:{listener.getsockname()[1]}"
