"""A client that goes away, over a real connection: its requests are aborted, streaming or not."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import httpx
import pytest

from headrace.api.app import create_app
from tests.api.harness import make_service, serving
from tests.fakes.engine import FakeEngine


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("hold_after", [0, 2])
def test_a_client_that_goes_away_aborts_its_requests(tmp_path: Path, stream: bool, hold_after: int) -> None:
    engine = FakeEngine(hold_after=hold_after)
    with serving(create_app(make_service(tmp_path, engine))) as server:
        body = json.dumps({"prompt": "a", "n": 2, "stream": stream, "max_tokens": 9}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        with socket.create_connection(server.address, timeout=10) as client:
            client.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            server.call(lambda: engine.until(lambda: engine.num_held == 2))
            assert engine.aborted == []
        server.call(lambda: engine.until(lambda: engine.num_ended == 2))
        assert sorted(engine.aborted) == sorted(one.request_id for one in engine.submitted)


def test_a_client_that_waits_gets_everything(tmp_path: Path) -> None:
    engine = FakeEngine(hold_after=1)
    with serving(create_app(make_service(tmp_path, engine))) as server:
        with httpx.stream("POST", f"{server.url}/v1/completions", json={"prompt": "a", "stream": True}) as response:
            lines = response.iter_lines()
            # The first token is on the wire while the second is not yet made.
            assert '"text":"' in next(lines)
            server.loop.call_soon_threadsafe(engine.release.set)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert engine.aborted == []
