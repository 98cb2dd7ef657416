"""The notification protocol against real datagram sockets, named and abstract."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.supervise.notify import Notifier


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A manager's socket and its address as the environment has it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        if request.param == "path":
            address = str(tmp_path / "notify")
            bound.bind(address)
        else:
            address = f"@headrace-test-{os.getpid()}"
            bound.bind("\0" + address[1:])
        bound.setblocking(False)
        yield bound, address


def test_assignments_arrive_as_one_datagram(manager: tuple[socket.socket, str]) -> None:
    bound, address = manager
    Notifier(address).send(READY=1, STATUS="ready\nat  http://x:8000", EXTEND_TIMEOUT_USEC=5)
    assert bound.recv(4096) == b"READY=1\nSTATUS=ready at http://x:8000\nEXTEND_TIMEOUT_USEC=5"
    with pytest.raises(BlockingIOError):
        bound.recv(4096)


def test_a_manager_that_does_not_read_holds_nobody_up(manager: tuple[socket.socket, str]) -> None:
    bound, address = manager
    for index in range(10_000):
        Notifier(address).send(STATUS=index)
    assert bound.recv(4096) == b"STATUS=0"


def test_without_a_manager_or_where_it_is_gone_nothing_happens(tmp_path: Path) -> None:
    Notifier(None).send(READY=1)
    Notifier(str(tmp_path / "gone")).send(READY=1)
    Notifier("@" + "x" * 200).send(READY=1)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Notifier(None, None)),
        ({"NOTIFY_SOCKET": "/run/n"}, Notifier("/run/n", None)),
        ({"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "30000000"}, Notifier("@n", 30.0)),
        ({"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, Notifier("@n", 30.0)),
        ({"NOTIFY_SOCKET": "@n", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, Notifier("@n", None)),
        ({"NOTIFY_SOCKET": "", "WATCHDOG_USEC": "0"}, Notifier(None, None)),
        ({"WATCHDOG_USEC": "soon"}, Notifier(None, None)),
    ],
)
def test_the_environment_is_taken_and_not_handed_on(environ: dict[str, str], expected: Notifier) -> None:
    left = {**environ, "HOME": "/root"}
    assert Notifier.take(left) == expected
    assert left == {"HOME": "/root"}
