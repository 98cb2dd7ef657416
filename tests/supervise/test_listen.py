"""Addresses that can and cannot be served on."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from headrace.errors import UserError
from headrace.supervise.listen import check_address


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_free_port_is_free_again_afterwards(taken: int) -> None:
    for _ in range(2):
        check_address("127.0.0.1", 0)
        check_address("localhost", 0)


def test_a_port_in_use_is_named(taken: int) -> None:
    with pytest.raises(UserError, match=rf"^--port {taken}: already in use on 127\.0\.0\.1"):
        check_address("127.0.0.1", taken)


@pytest.mark.parametrize("host", ["203.0.113.7", "no such name", "x" * 300])
def test_an_address_that_is_not_ours_is_named(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A name is never looked up outside in a test.
    real = socket.getaddrinfo

    def numbers_only(name: str, port: int, **more: int) -> object:
        return real(name, port, **{**more, "flags": more.get("flags", 0) | socket.AI_NUMERICHOST})

    monkeypatch.setattr(socket, "getaddrinfo", numbers_only)
    with pytest.raises(UserError, match=f"^--host {host}: not a"):
        check_address(host, 0)


def test_a_port_that_needs_rights_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(UserError, match="^--port 80: not permitted"):
        check_address("127.0.0.1", 80)
