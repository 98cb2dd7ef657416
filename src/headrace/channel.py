"""ZeroMQ between the processes of one engine: sockets in its private directory, or TCP with CURVE.

Over TCP the engine writes where it listens and the keys to `endpoints.json` in that directory (mode 0700): only who can
read it can connect, and nothing crosses in the clear.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal
from urllib.parse import urlparse

import msgspec
import zmq

from headrace.errors import PeerLost

ENDPOINTS = "endpoints.json"
CLIENTS = "clients"
POLL_S = 0.01


class Endpoints(msgspec.Struct, frozen=True):
    """Where an engine listens over TCP."""

    clients: str
    workers: str
    server_public: str
    client_public: str
    client_secret: str


class Listener:
    """The engine's two ROUTER sockets."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], directory: Path, transport: Literal["ipc", "tcp"]
    ) -> None:
        self.clients, self.workers = context.socket(zmq.ROUTER), context.socket(zmq.ROUTER)
        for socket in (self.clients, self.workers):
            socket.linger = 1000
            socket.sndhwm = socket.rcvhwm = 0  # the scheduler bounds what is under way
        if transport == "ipc":
            self.clients.bind(join_url(directory, "ipc", "clients"))
            self.workers.bind(join_url(directory, "ipc", "workers"))
            return
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        found = []
        for socket in (self.clients, self.workers):
            socket.curve_server = True
            socket.curve_secretkey, socket.curve_publickey = server_secret, server_public
            port = socket.bind_to_random_port("tcp://127.0.0.1")
            found.append(f"tcp://127.0.0.1:{port}")
        endpoints = Endpoints(
            found[0], found[1], server_public.decode(), client_public.decode(), client_secret.decode()
        )
        draft = directory / f"{ENDPOINTS}.new"
        draft.write_bytes(msgspec.json.encode(endpoints))
        draft.rename(directory / ENDPOINTS)  # readers see it whole or not at all


def join(
    context: zmq.Context[zmq.Socket[bytes]], url: str, *, identity: bytes | None = None, timeout_s: float = 60.0
) -> zmq.Socket[bytes]:
    """A DEALER socket joined to an engine (see `join_url`).

    Over TCP, waits until the engine listens; raises PeerLost if it never does.
    """
    socket = context.socket(zmq.DEALER)
    socket.linger = 1000
    socket.sndhwm = socket.rcvhwm = 0
    if identity is not None:
        socket.identity = identity
    if url.startswith("ipc://"):
        socket.connect(url)
        return socket
    parts = urlparse(url)
    assert parts.scheme == "file", url
    endpoints = _await_endpoints(Path(parts.path), timeout_s)
    socket.curve_serverkey = endpoints.server_public.encode()
    socket.curve_publickey = endpoints.client_public.encode()
    socket.curve_secretkey = endpoints.client_secret.encode()
    socket.connect(endpoints.clients if parts.fragment == CLIENTS else endpoints.workers)
    return socket


def join_url(directory: Path, transport: Literal["ipc", "tcp"], what: Literal["clients", "workers"]) -> str:
    """Where to join the engine whose private directory this is: a socket, or the file that says where it listens."""
    if transport == "ipc":
        return f"ipc://{directory}/{what}.sock"
    return f"file://{directory}/{ENDPOINTS}#{what}"


def _await_endpoints(path: Path, timeout_s: float) -> Endpoints:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise PeerLost(f"the engine did not listen within {timeout_s:g} s")
        time.sleep(POLL_S)
    return msgspec.json.decode(path.read_bytes(), type=Endpoints)
