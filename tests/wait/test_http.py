"""The HTTP side against scripted servers: one that is ready too early, that dies, that hangs, that never comes."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

import pytest

from headrace.errors import UserError
from headrace.wait import http as http_side
from headrace.wait.http import HttpSide
from headrace.wait.watch import Outcome, watch
from tests.wait.clock import FakeClock

MODELS = (200, {"data": [{"id": "tiny"}]})
TEXT = (200, {"choices": [{"text": " there"}]})
CHAT = (200, {"choices": [{"message": {"content": None}, "finish_reason": "length"}]})
LOADING = (503, {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}})

Answer = tuple[int, Any]


@dataclass
class Engine:
    """A server of which the test says what each route answers; None keeps the caller waiting."""

    routes: dict[str, Answer | None]
    asked: list[tuple[str, dict[str, Any], str | None]] = field(default_factory=list)
    let_go: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer({})

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

            def _answer(self, body: dict[str, Any]) -> None:
                engine.asked.append((self.path, body, self.headers["authorization"]))
                answer = engine.routes.get(self.path, (404, {"detail": "Not Found"}))
                if answer is None:
                    engine.let_go.wait(60)
                    return
                data = answer[1].encode() if isinstance(answer[1], str) else json.dumps(answer[1]).encode()
                self.send_response(answer[0])
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        # Not HTTPServer: it asks the resolver for the machine's name.
        self.server = ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        # The default looks for an end twice a second.
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    def die(self) -> None:
        self.let_go.set()
        self.server.shutdown()
        self.server.server_close()


Start = Callable[..., Engine]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(http_side, "LOOK_TIMEOUT_S", 1.0)
    engines: list[Engine] = []

    def start(**routes: Answer | None) -> Engine:
        paths = {"models": "/v1/models", "text": "/v1/completions", "chat": "/v1/chat/completions", "health": "/health"}
        engines.append(Engine({paths[name]: answer for name, answer in routes.items()}))
        return engines[-1]

    yield start
    for engine in engines:
        engine.die()


def wait(
    side: HttpSide, events: dict[float, Callable[[], None]] | None = None, timeout_s: float = 60
) -> tuple[Outcome, list[str]]:
    said: list[str] = []
    clock = FakeClock(events)
    outcome = watch([side], clock, every_s=5, timeout_s=timeout_s, say=lambda at, text: said.append(f"{at:.0f} {text}"))
    return outcome, said


def test_an_engine_that_completes_is_ready_at_once(start: Start) -> None:
    engine = start(models=MODELS, text=TEXT)
    side = HttpSide(engine.url)
    outcome, said = wait(side)
    assert (outcome.verdict, outcome.elapsed_s, said) == ("ready", 0, [])
    assert outcome.text.startswith("HTTP: model tiny answers, the first time in ")
    assert (side.model, side.probe_s is not None) == ("tiny", True)
    assert engine.asked[-1][:2] == (
        "/v1/completions", {"model": "tiny", "prompt": "Hello", "max_tokens": 4, "temperature": 0},
    )  # fmt: skip


def test_200_before_it_can_answer_is_not_ready(start: Start) -> None:
    engine = start(health=(200, {}), models=MODELS, text=(500, {"error": "not compiled"}))
    events = {20.0: lambda: engine.routes.update({"/v1/completions": TEXT})}
    outcome, said = wait(HttpSide(engine.url), events)
    assert (outcome.verdict, outcome.elapsed_s) == ("ready", 20)
    assert said == [f"{at} HTTP: model tiny; a completion failed: 500: not compiled" for at in (0, 5, 10, 15)]


def test_without_a_probe_a_listed_model_is_believed(start: Start) -> None:
    engine = start(models=LOADING)
    events = {10.0: lambda: engine.routes.update({"/v1/models": MODELS})}
    outcome, said = wait(HttpSide(engine.url, probe=False), events)
    assert (outcome.verdict, outcome.elapsed_s, outcome.text) == ("ready", 10, "HTTP: model tiny")
    assert said == ["0 HTTP: 503: Loading model", "5 HTTP: 503: Loading model"]
    assert {path for path, _, _ in engine.asked} == {"/v1/models"}


def test_an_engine_that_dies_is_failed_at_the_second_refusal(start: Start) -> None:
    engine = start(models=LOADING)
    outcome, said = wait(HttpSide(engine.url), {10.0: engine.die})
    assert (outcome.verdict, outcome.elapsed_s) == ("failed", 15)
    assert outcome.text == "HTTP: it has answered, and is gone: no connection: refused"
    assert said[-1] == "10 HTTP: no connection: refused"


def test_where_the_process_is_looked_at_too_it_may_come_back(start: Start) -> None:
    engine = start(models=LOADING)
    outcome, _ = wait(HttpSide(engine.url, fails_when_gone=False), {10.0: engine.die})
    assert (outcome.verdict, outcome.elapsed_s) == ("timed out", 60)


def test_an_engine_that_hangs_in_its_first_completion_is_given_up(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(models=MODELS, text=None)
    monkeypatch.setattr(http_side, "LOOK_TIMEOUT_S", 0.2)
    clock = FakeClock()
    side = HttpSide(engine.url, clock=clock.now)
    outcome = watch([side], clock, every_s=5, timeout_s=60, say=lambda _at, _text: None)
    assert outcome.verdict == "timed out"
    assert outcome.text == "HTTP: model tiny; a completion asked for 60 s ago has not come"
    assert sum(path == "/v1/completions" for path, _, _ in engine.asked) == 1


def test_an_engine_that_accepts_and_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_side, "LOOK_TIMEOUT_S", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        outcome, _ = wait(HttpSide(f"http://127.0.0.1:{mute.getsockname()[1]}"), timeout_s=20)
    assert (outcome.verdict, outcome.text) == ("timed out", "HTTP: connected, but no answer within 0.02 s")


def test_an_engine_that_never_comes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    outcome, said = wait(HttpSide(f"http://127.0.0.1:{port}"), timeout_s=300)
    assert (outcome.verdict, outcome.elapsed_s) == ("timed out", 300)
    assert len(said) == 60


def test_an_engine_with_chat_alone_and_one_without_a_list(start: Start) -> None:
    assert wait(HttpSide(start(models=MODELS, chat=CHAT).url))[0].verdict == "ready"
    assert wait(HttpSide(start(text=TEXT).url))[0].text.startswith("HTTP: an engine that lists no models answers")
    assert wait(HttpSide(start(text=TEXT).url, probe=False))[0].verdict == "timed out"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((200, {"choices": []}), "an answer without choices"),
        ((200, {"choices": [{"text": ""}]}), "a choice without text"),
        ((200, {"error": {"message": "the engine is dead"}}), "the engine is dead"),
        ((200, "<html>"), "an answer that is no JSON"),
        ((503, "x" * 500), "503: " + "x" * 117 + "..."),
    ],
)
def test_what_is_no_completion(start: Start, answer: Answer, words: str) -> None:
    outcome, _ = wait(HttpSide(start(models=MODELS, text=answer).url), timeout_s=5)
    assert (outcome.verdict, outcome.text) == ("timed out", f"HTTP: model tiny; a completion failed: {words}")


def test_the_key_is_sent_and_a_refusal_ends_it(start: Start) -> None:
    engine = start(models=MODELS, text=TEXT)
    wait(HttpSide(engine.url, api_key="k"))
    assert {key for _, _, key in engine.asked} == {"Bearer k"}
    for routes in ({"models": (401, {"error": "no"})}, {"models": MODELS, "text": (403, {"error": "no"})}):
        with pytest.raises(UserError, match="^--api-key: http://.* refuses it: no$"):
            wait(HttpSide(start(**routes).url))
