"""The HTTP process: sockets, the web server, and its life from starting to drained."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Generator

import uvicorn

from headrace.api.app import create_app
from headrace.api.engine import Engine
from headrace.api.service import ServedModel, Service
from headrace.config import HttpConfig, ServeConfig
from headrace.errors import Fault, PeerLost, UserError
from headrace.supervise.beat import Work
from headrace.telemetry.metrics import Metrics
from headrace.text.chat import load_chat_template
from headrace.text.tokenizer import load_tokenizer
from headrace.weights.source import read_spec, resolve

POLL_S = 0.05
BACKLOG = 2048


def make_service(config: ServeConfig, engine: Engine) -> Service:
    """Tokenizer, template and names of the configured model, over an engine. Raises UserError."""
    model = config.engine.model.model
    assert model is not None, "the supervisor resolves the model"
    source = resolve(model, say=lambda _: None)
    name = config.http.served_name or source.name
    service = Service(
        engine=engine,
        tokenizer=load_tokenizer(source),
        template=load_chat_template(source),
        model=ServedModel(name=name, root=str(source.path), vocab_size=read_spec(source).vocab_size),
        metrics=Metrics(name, lambda: engine.status, lambda: service.not_ready is None),
        api_key=config.http.api_key,
        has_priorities=config.engine.schedule.policy == "priority",
    )
    return service


def bind(http: HttpConfig) -> list[socket.socket]:
    """Listening sockets on every address of the host, all on one port. Raises UserError."""
    where = f"--host {http.host} --port {http.port}"
    try:
        addresses = socket.getaddrinfo(http.host, http.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise UserError(f"{where}: {error}") from None
    sockets: list[socket.socket] = []
    problem: OSError | None = None
    for family, _, _, _, address in dict.fromkeys(addresses):
        # Port 0 picks one for the first address; the others follow it.
        port = sockets[0].getsockname()[1] if sockets else address[1]
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
            sockets.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address[0], port, *address[2:]))
            # Now, not when the loop runs: a port that another server has is found here.
            listener.listen(BACKLOG)
            listener.setblocking(False)
        except OSError as error:
            sockets.pop().close()
            problem = error
    if not sockets:
        raise UserError(f"{where}: {problem.strerror if problem else 'no address'}")
    return sockets


def listens(listener: socket.socket) -> bool:
    """Whether a socket that was made to listen still does."""
    try:
        return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False


def url_of(http: HttpConfig, listener: socket.socket) -> str:
    """Where clients on this machine reach the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(http.host, http.host)  # noqa: S104  # compared
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"http://{host}:{listener.getsockname()[1]}"


class Server(uvicorn.Server):
    """uvicorn, with signals left to the process that it runs in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Take none."""
        yield


class HttpProcess:
    """Serves from the start, with 503 until the engine is ready; `stop` may be called at any time, from a signal."""

    def __init__(self, service: Service, http: HttpConfig) -> None:
        self._service = service
        self._sockets = bind(http)
        self.url = url_of(http, self._sockets[0])
        config = uvicorn.Config(
            create_app(service),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=1,
        )
        self._server = Server(config)
        self._drain_s = http.drain_timeout_s
        self._stop = False
        self._turns = -1

    def stop(self) -> None:
        """Take no more requests; those in flight have the time to drain, what is left then is told."""
        self._stop = True
        self._service.stopping = True

    def fail(self, why: str) -> None:
        """Tell everyone at once why there will be no answer, and end; from any thread."""
        self._service.failure = why

    def work(self) -> Work:
        """For the beats: that the loop turns."""
        return Work(turns=self._turns)

    async def run(self, on_ready: Callable[[str], None]) -> None:
        """Serve until stopped; `on_ready` gets the URL once. Raises PeerLost when the engine is lost before a stop."""
        engine = self._service.engine
        serving = asyncio.create_task(self._server.serve(sockets=self._sockets))
        joining = asyncio.create_task(engine.start())
        try:
            await self._watch((serving, joining), on_ready)
            lost = None if self._is_ending else engine.lost
            await self._drain()
        finally:
            joining.cancel()
            await engine.stop()
            self._server.should_exit = True
            await serving
        if lost is not None:
            raise PeerLost(f"the engine is lost: {lost}")

    async def _watch(self, tasks: tuple[asyncio.Task[None], ...], on_ready: Callable[[str], None]) -> None:
        """Wait for a stop or the loss of the engine. Raises what a task raised, and Fault where nobody can connect."""
        announced = False
        while not self._is_ending and self._service.engine.lost is None:
            for task in tasks:
                if task.done():
                    task.result()
            if not all(map(listens, self._sockets)):
                # Nobody could come any more, and all else would look well.
                raise Fault(f"the socket that listens at {self.url} has been shut")
            if not announced and self._server.started and self._service.not_ready is None:
                announced = True
                on_ready(self.url)
            self._turns += 1
            await asyncio.sleep(POLL_S)

    @property
    def _is_ending(self) -> bool:
        return self._stop or self._service.failure is not None

    async def _drain(self) -> None:
        """Wait for the requests in flight; without an engine there is nothing to wait for."""
        deadline = asyncio.get_running_loop().time() + self._drain_s
        while self._service.num_active and self._service.engine.lost is None and self._service.failure is None:
            if asyncio.get_running_loop().time() >= deadline:
                return
            self._turns += 1
            await asyncio.sleep(POLL_S)
