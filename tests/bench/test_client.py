"""The client against raw bytes: events cut anywhere, answers that end badly, connections that are used again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench.client import Address, Connection, Record, message_of
from headrace.errors import Fault

EVENTS = (
    b'data: {"choices":[{"text":"a"}]}\n\n',
    b'data: {"choices":[{"text":""}]}\r\n\r\n',
    b": a comment\n\n",
    b'data:{"choices":[{"text":"\xc3\xa9"}],"usage":null}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}\n\n',
    b"data: [DONE]\n\n",
)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


def _chunked(body: bytes, size: int) -> bytes:
    chunks = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


def _ask(answers: Sequence[Sequence[bytes]], timeout_s: float = 10.0) -> tuple[list[Record], int]:
    """Send as many requests as there are answers on one `Connection`, to a server that writes each answer's parts.

    An empty last part closes the connection. The records, and how many connections were made.
    """
    num_connections = 0
    waiting = iter(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                for part in next(waiting):
                    if not part:
                        return
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    async def main() -> list[Record]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            host, port = server.sockets[0].getsockname()
            address = Address(f"http://{host}:{port}/base/v1/", "key")
            connection = Connection(address)
            records = [await connection.send(address.get("/v1/x"), timeout_s) for _ in answers]
            connection.close()
        return records

    return asyncio.run(main()), num_connections


@settings(max_examples=25, deadline=None)
@given(chunk=st.integers(1, 400), part=st.integers(1, 400))
def test_events_may_be_cut_anywhere(chunk: int, part: int) -> None:
    answer = STREAM_HEAD + _chunked(b"".join(EVENTS), chunk)
    parts = [answer[i : i + part] for i in range(0, len(answer), part)]
    (record,), _ = _ask([parts])
    assert (record.status, record.error) == (200, None)
    assert len(record.token_times_s) == 2
    assert record.usage is not None
    assert (record.usage.prompt_tokens, record.usage.completion_tokens) == (3, 4)
    assert record.start_s <= record.token_times_s[0] <= record.token_times_s[1] <= record.last_s <= record.end_s


def test_a_connection_is_used_again() -> None:
    answer = STREAM_HEAD + _chunked(b"".join(EVENTS), 50)
    records, num_connections = _ask([[answer]] * 3)
    assert [len(record.token_times_s) for record in records] == [2, 2, 2]
    assert num_connections == 1


def test_a_connection_that_ends_is_opened_again() -> None:
    answer = STREAM_HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + _chunked(b"".join(EVENTS), 50)
    records, num_connections = _ask([[answer, b""]] * 2)
    assert [record.error for record in records] == [None, None]
    assert num_connections == 2


def test_a_stream_may_end_with_its_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    (whole, cut), _ = _ask([[head + b"".join(EVENTS), b""], [head + b"".join(EVENTS[:2]), b""]])
    assert whole.error is None
    assert cut.error == "the server closed the connection"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\nbang", "HTTP 500: bang"),
        (b'HTTP/1.1 400 Bad\r\nContent-Length: 29\r\n\r\n{"error":{"message":"a\\n b"}}', "HTTP 400: a b"),
        (b"SSH-2.0-OpenSSH\r\n", "not HTTP"),
        (STREAM_HEAD + _chunked(b"data: {oops\n\n", 99), "an event that cannot be read"),
        (STREAM_HEAD + _chunked(b'data: {"error":{"message":"it broke"}}\n\n', 99), "it broke"),
    ],
)
def test_what_goes_wrong_is_in_the_record(answer: bytes, error: str) -> None:
    (record, after), _ = _ask([[answer], [STREAM_HEAD + _chunked(b"".join(EVENTS), 99)]])
    assert error in (record.error or "")
    # The next request is not harmed.
    assert after.error is None


def test_an_answer_that_does_not_come_is_given_up() -> None:
    (record,), _ = _ask([[STREAM_HEAD]], timeout_s=0.05)
    assert record.error == "no complete answer within 0.05 s"


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = Address(f"http://127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(Fault, match="cannot connect to 127.0.0.1"):
            asyncio.run(Connection(address).send(address.get("/"), 5.0))


def test_requests_carry_path_and_key() -> None:
    address = Address("https://user@example.org:444/base/v1/", "k3y")
    assert (address.host, address.port, address.ssl is not None) == ("example.org", 444, True)
    head, _, body = address.post("/v1/completions", b"{}").partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /base/v1/completions HTTP/1.1"
    assert b"Host: example.org:444" in lines
    assert b"Authorization: Bearer k3y" in lines
    assert b"Content-Length: 2" in lines
    assert body == b"{}"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": "flat"}', "flat"),
        (b'{"error": {"message": "nested"}}', "nested"),
        (b'{"detail": "fastapi"}', "fastapi"),
        (b'{"detail": [{"msg": "list"}]}', '{"detail": [{"msg": "list"}]}'),
        (b"<html>\n</html>", "<html> </html>"),
        (b"", "no message"),
        (b"\xff", "\ufffd"),
    ],
)
def test_an_error_in_one_line(body: bytes, message: str) -> None:
    assert message_of(body) == message
