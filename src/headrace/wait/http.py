"""The HTTP side of an engine: what /v1/models answers, and whether one completion comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from headrace.errors import UserError
from headrace.wait.watch import Sight

LOOK_TIMEOUT_S = 5.0
PROMPT = "Hello"
MAX_TOKENS = 4
MAX_TEXT = 120
GONE_LOOKS = 2
"""So many refused connections after an answer mean that the engine has gone."""


@dataclass
class _Probe:
    """A completion that is being asked for."""

    since_s: float
    end_s: float | None = None
    error: str | None = None
    """What came instead; None with an `end_s` is success."""
    refused: bool = False
    """Whether the key was refused: no time heals that."""
    done: threading.Event = field(default_factory=threading.Event)


class HttpSide:
    """Ready when a model is listed and, with `probe`, a completion of it has come back. Lost, where it is the only side
    (`fails_when_gone`), when nobody listens any more.

    The completion is asked for in a thread of its own: an engine may compile for minutes before its first answer, and
    one that hangs is looked at on.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        probe: bool = True,
        fails_when_gone: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = url
        self.model: str | None = None
        """The model that was found."""
        self.probe_s: float | None = None
        """How long the completion took."""
        self._wants_probe = probe
        self._fails_when_gone = fails_when_gone
        self._has_answered = False
        self._num_refused = 0
        self._clock = clock
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # Certificates take their time to load, and http needs none.
        self._verify = url.startswith("https:")
        self._probe: _Probe | None = None

    def look(self) -> Sight:
        """Ask for the models, and see what has become of the completion."""
        try:
            # A connection for each look: whether one can be made is part of what is looked at.
            with self._open(httpx.Timeout(LOOK_TIMEOUT_S)) as client:
                response = client.get(f"{self.url}/v1/models")
        except httpx.HTTPError as error:
            self._forget()
            return self._no_answer(error)
        self._has_answered, self._num_refused = True, 0
        if response.status_code in (401, 403):
            raise UserError(f"--api-key: {self.url} refuses it: {_message(response)}")
        if response.status_code == 404:
            # An engine of one model without a list of it.
            return self._look_further(None)
        if response.status_code != 200:
            self._forget()
            return Sight(f"HTTP: {response.status_code}: {_message(response)}")
        model = _first_model(response)
        if model is None:
            return Sight("HTTP: no model is listed yet")
        return self._look_further(model)

    def last_lines(self) -> list[str]:
        """None: the log is not to be had over HTTP."""
        return []

    def _look_further(self, model: str | None) -> Sight:
        self.model = model
        name = f"model {model}" if model else "an engine that lists no models"
        if not self._wants_probe:
            # Without a list there is nothing that says that it is ready.
            return Sight(f"HTTP: {name}", ready=model is not None)
        probe = self._probe
        if probe is None:
            probe = self._probe = self._start(model)
            probe.done.wait(LOOK_TIMEOUT_S)
        if probe.end_s is None:
            return Sight(f"HTTP: {name}; a completion asked for {self._clock() - probe.since_s:.0f} s ago has not come")
        if probe.refused:
            raise UserError(f"--api-key: {self.url} refuses it: {probe.error}")
        if probe.error is not None:
            # The next look asks again.
            self._probe = None
            return Sight(f"HTTP: {name}; a completion failed: {probe.error}")
        self.probe_s = probe.end_s - probe.since_s
        return Sight(f"HTTP: {name} answers, the first time in {self.probe_s:.1f} s", ready=True)

    def _no_answer(self, error: httpx.HTTPError) -> Sight:
        """Nobody listens yet; or no longer, where no other side would show that."""
        if isinstance(error, httpx.ConnectError):
            self._num_refused += 1
            if self._fails_when_gone and self._has_answered and self._num_refused >= GONE_LOOKS:
                return Sight(f"HTTP: it has answered, and is gone: {_words(error)}", failed=True)
        return Sight(f"HTTP: {_words(error)}")

    def _forget(self) -> None:
        """An answer from before says nothing about an engine that has gone since."""
        self._probe = None

    def _open(self, timeout: httpx.Timeout) -> httpx.Client:
        # Not the environment's proxies: engines are near.
        return httpx.Client(timeout=timeout, trust_env=False, headers=self._headers, verify=self._verify)

    def _start(self, model: str | None) -> _Probe:
        probe = _Probe(self._clock())

        def run() -> None:
            try:
                probe.error, probe.refused = self._complete(model)
            except httpx.HTTPError as error:
                probe.error = _words(error)
            probe.end_s = self._clock()
            probe.done.set()

        threading.Thread(target=run, name="probe", daemon=True).start()
        return probe

    def _complete(self, model: str | None) -> tuple[str | None, bool]:
        """Ask for a completion; what is wrong with the answer, and whether the key was refused."""
        named = {"model": model} if model else {}
        shared: dict[str, Any] = {**named, "max_tokens": MAX_TOKENS, "temperature": 0}
        forms: tuple[tuple[str, dict[str, Any]], ...] = (
            ("completions", {"prompt": PROMPT}),
            ("chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
        )
        problem = ""
        # Its own client: the thread may outlive its time.
        with self._open(httpx.Timeout(10.0, read=None)) as client:
            for route, form in forms:
                response = client.post(f"{self.url}/v1/{route}", json={**shared, **form})
                if response.status_code in (401, 403):
                    return _message(response), True
                if response.status_code == 200:
                    wrong = _what_is_wrong(response)
                    return wrong, False
                problem = problem or f"{response.status_code}: {_message(response)}"
                # Not every engine has both forms.
                if response.status_code not in (400, 404, 405, 422):
                    break
        return problem, False


def _what_is_wrong(response: httpx.Response) -> str | None:
    """What is wrong with a completion; None where it is one."""
    try:
        body = response.json()
    except ValueError:
        return "an answer that is no JSON"
    if not isinstance(body, dict) or body.get("error"):
        return _message(response)
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return "an answer without choices"
    choice = choices[0]
    message = choice.get("message")
    text = message.get("content") or message.get("reasoning_content") if isinstance(message, dict) else None
    # A text may be empty where the first token ends it; then the reason says so.
    if not (text or choice.get("text") or choice.get("finish_reason")):
        return "a choice without text"
    return None


def _first_model(response: httpx.Response) -> str | None:
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        return None


def _message(response: httpx.Response) -> str:
    """The words of an answer that is no success, in one short line."""
    try:
        found = response.json()
    except ValueError:
        found = response.text
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    text = " ".join((found if isinstance(found, str) else response.text).split())
    return (text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "...") or response.reason_phrase or "no words"


def _words(error: httpx.HTTPError) -> str:
    """An error of the connection, for a reader."""
    if isinstance(error, httpx.ConnectTimeout | httpx.PoolTimeout):
        return "no connection"
    if isinstance(error, httpx.ConnectError):
        return "no connection: refused" if "refused" in str(error).lower() else f"no connection: {error}"
    if isinstance(error, httpx.TimeoutException):
        return f"connected, but no answer within {LOOK_TIMEOUT_S:g} s"
    return str(error) or type(error).__name__
