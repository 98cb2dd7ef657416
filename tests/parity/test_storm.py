"""One server, two stages: clients that come and go, resets and scrapes in between; then all is as before."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.parity.server import Server, metric, served
from tests.tiny import write_tiny

PROMPT = [5, 6, 7, 8] * 6
ASKED = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
NUM_PAGES = 120


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_tiny(tmp_path_factory.mktemp("storm") / "m", "llama_tied", seed=2)
    memory = str(NUM_PAGES * 4 * 64 * 3 * 4)  # pages of four tokens, 64 values a layer and three layers a stage
    flags = ["--pp", "2", "--run-ahead", "2", "--page-size", "4", "--chunk", "64", "--max-running", "32"]
    flags += ["--kv-memory", memory, "--max-len", "200", "--dtype", "float32", "--device", "cpu"]
    with served(str(folder), *flags, stderr=tmp_path_factory.mktemp("log") / "log") as server:
        yield server


def ask(server: Server) -> str:
    answer = httpx.post(f"{server.url}/v1/completions", json=ASKED, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def settle(server: Server) -> None:
    """Until nothing runs, and what the engine says of its pages is of now."""
    while metric(server, "headrace:num_requests_running") or metric(server, "headrace:num_requests_waiting"):
        pass
    while metric(server, "headrace:kv_cache_usage_perc"):
        pass


async def come_and_go(server: Server, number: int, heard: int) -> None:
    """Open a connection of its own, ask for a stream, hear so many lines of it, and close."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    prompt = [number % 250, *PROMPT[: number % 7], *range(number % 90)]
    body = json.dumps({**ASKED, "prompt": prompt, "max_tokens": 100, "stream": True}).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode())
    writer.write(b"Content-Type: application/json\r\n\r\n" + body)
    await writer.drain()
    for _ in range(heard):
        assert await reader.readline()
    writer.transport.abort()


async def meanwhile(server: Server, over: asyncio.Event) -> None:
    """Reset the cache and read the metrics, for as long as it goes on."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as client:
        while not over.is_set():
            assert (await client.post("/reset_prefix_cache")).status_code == 200
            assert (await client.get("/metrics")).status_code == 200


def test_two_hundred_that_close_leave_nothing(server: Server) -> None:
    before = ask(server)

    async def storm() -> None:
        over = asyncio.Event()
        busy = asyncio.create_task(meanwhile(server, over))
        for first in range(0, 200, 50):
            await asyncio.gather(*(come_and_go(server, i, heard=i % 3 * 6) for i in range(first, first + 50)))
        over.set()
        await busy

    asyncio.run(storm())
    assert ask(server) == before
    settle(server)
    assert httpx.post(f"{server.url}/reset_prefix_cache", trust_env=False).status_code == 200
    assert ask(server) == before


def test_a_thousand_requests_leave_memory_as_it_was(server: Server) -> None:
    processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    assert len(processes) == 5
    sizes = []
    for count in (400, 600):  # first, until caches and pools have grown as large as they get
        for first in range(0, count, 100):
            prompts = [[(first + i) % 250, i, *PROMPT[:6]] for i in range(100)]
            body = {**ASKED, "prompt": prompts, "max_tokens": 2}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120, trust_env=False)
            assert answer.status_code == 200
        settle(server)
        sizes.append([process.memory_info().rss for process in processes])
    grown = [after - before for before, after in zip(*sizes, strict=True)]
    assert max(grown) < 2**22, grown
    assert metric(server, "headrace:kv_cache_cached_perc") > 0.9, "pages hold what was last"
