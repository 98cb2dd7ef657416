"""Every error is OpenAI-shaped: bad values name the field, an overflow says both numbers, nothing shows a traceback."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.harness import Caller, events_of, make_caller
from tests.fakes.engine import FakeEngine


def _error(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("temperature", "a"), ("temperature", 1000000000.0), ("top_p", 0), ("top_p", 1.5),
        ("min_p", -1), ("top_k", -2), ("top_k", 2**70), ("top_k", 1.5), ("presence_penalty", 3),
        ("frequency_penalty", -3), ("repetition_penalty", 0), ("seed", 2**63), ("n", 0), ("n", 65),
        ("max_tokens", -3), ("max_tokens", True), ("min_tokens", -1), ("min_tokens", 17), ("logprobs", 21),
        ("logprobs", True), ("stop", ""), ("stop", ["x"] * 17), ("stop", 5), ("stop_token_ids", [272]),
        ("logit_bias", {"272": 1}), ("logit_bias", {"a": 1}), ("logit_bias", {"1": 101}), ("stream", "yes"),
        ("suffix", "end"), ("best_of", 2), ("prompt", ""), ("prompt", []), ("prompt", [[]]), ("prompt", None),
        ("prompt", {"a": 1}), ("prompt", [272]), ("prompt", [-1]), ("stream_options", {"include_usage": True}),
        ("response_format", {"type": "json_object"}), ("echo", 1),
    ],
)  # fmt: skip
def test_a_bad_value_is_a_400_that_names_its_field(caller: Caller, engine: FakeEngine, field: str, value: Any) -> None:
    error = _error(caller.complete(**{"prompt": "a", "max_tokens": 16} | {field: value}), 400)
    assert error["param"].startswith(field)
    assert error["message"].startswith(error["param"])
    assert error["type"] == "invalid_request_error"
    assert engine.submitted == []


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have_are_refused(caller: Caller, number: str) -> None:
    for body in (f'{{"prompt":"a","temperature":{number}}}', f'{{"prompt":"a","logit_bias":{{"1":{number}}}}}'):
        headers = {"content-type": "application/json"}
        assert _error(caller("POST", "/v1/completions", content=body, headers=headers), 400)["param"] in (
            "temperature",
            "logit_bias",
        )


@pytest.mark.parametrize(
    ("content", "kind"),
    [("{", "application/json"), ("", "application/json"), ("[]", "application/json"), ("{}", "text/plain"),
     ("1" * 5000, "application/json"), ("[" * 100_000, "application/json"), ("\xff", "application/json")],
)  # fmt: skip
def test_a_body_that_is_no_json_object(caller: Caller, content: str, kind: str) -> None:
    error = _error(
        caller("POST", "/v1/completions", content=content.encode("latin-1"), headers={"content-type": kind}), 400
    )
    assert "body" in error["message"]


def test_too_many_choices_over_all_prompts(caller: Caller) -> None:
    error = _error(caller.complete(prompt=["a"] * 100, n=20), 400)
    assert error["param"] == "n"
    assert "2000" in error["message"]


def test_a_body_that_is_too_large(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.api.gate.MAX_BODY", 1000)

    async def in_chunks() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b" " * 400

    headers = {"content-type": "application/json"}
    for content in (b" " * 1001, in_chunks()):
        error = _error(caller("POST", "/v1/completions", content=content, headers=headers), 413)
        assert "1000 bytes" in error["message"]
    assert caller("POST", "/v1/completions", content=b'{"prompt":"a"}'.ljust(1000), headers=headers).status_code == 200


def test_a_prompt_past_the_context_says_both_numbers(caller: Caller) -> None:
    error = _error(caller.complete(prompt="x" * 200, max_tokens=1), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "128" in error["message"]
    assert "200" in error["message"]


def test_a_prompt_and_an_answer_past_the_context_say_all_numbers(caller: Caller) -> None:
    error = _error(caller.complete(prompt="x" * 100, max_tokens=40), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert all(number in error["message"] for number in ("128", "100", "40", "140"))
    error = _error(caller.chat("x" * 200), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_a_request_that_just_fits_is_served(caller: Caller) -> None:
    assert caller.complete(prompt="x" * 100, max_tokens=28).json()["usage"]["total_tokens"] == 128


def test_an_unknown_model_is_a_404(caller: Caller) -> None:
    for response in (
        caller.complete(model="gpt-9", prompt="a"),
        caller.chat("a", model="gpt-9"),
        caller("GET", "/v1/models/gpt-9"),
        caller("POST", "/tokenize", json={"model": "gpt-9", "prompt": "a"}),
    ):
        error = _error(response, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "gpt-9" in error["message"]


def test_unknown_routes_and_methods(caller: Caller) -> None:
    assert "/v1/nothing" in _error(caller("GET", "/v1/nothing"), 404)["message"]
    response = caller("GET", "/v1/completions")
    assert "GET" in _error(response, 405)["message"]
    assert response.headers["allow"] == "POST"


def test_an_engine_error_is_told_with_its_words(tmp_path: Path) -> None:
    caller = make_caller(tmp_path, FakeEngine(fail_after=2))
    error = _error(caller.complete(prompt="a"), 500)
    assert (error["message"], error["type"]) == ("page table is on fire", "server_error")


def test_a_lost_engine_is_a_503(tmp_path: Path) -> None:
    caller = make_caller(tmp_path, FakeEngine(lose_after=2))
    assert "worker rank 1 died" in _error(caller.complete(prompt="a", n=3), 503)["message"]


@pytest.mark.parametrize(("engine", "status"), [(FakeEngine(fail_after=0), 500), (FakeEngine(lose_after=0), 503)])
def test_a_failure_before_the_first_token_of_a_stream_has_its_own_status(
    tmp_path: Path, engine: FakeEngine, status: int
) -> None:
    _error(make_caller(tmp_path, engine).complete(prompt="a", stream=True), status)


@pytest.mark.parametrize("engine", [FakeEngine(fail_after=2), FakeEngine(lose_after=2)])
def test_a_failure_within_a_stream_is_an_event_and_its_end(tmp_path: Path, engine: FakeEngine) -> None:
    response = make_caller(tmp_path, engine).complete(prompt="a", stream=True)
    assert response.status_code == 200
    events = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n") if line]
    assert [next(iter(event)) for event in events] == ["id", "id", "error"]
    assert set(events[-1]["error"]) == {"message", "type", "param", "code"}


def test_what_nobody_expected_is_logged_and_not_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(FakeEngine):
        def _check(self) -> None:
            raise ZeroDivisionError("secret detail")

    caller = make_caller(tmp_path, Broken())
    for stream in (False, True):
        response = caller.complete(prompt="a", stream=stream)
        _error(response, 500)
        assert "secret" not in response.text
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError] * 2


def test_one_failed_choice_aborts_the_others(tmp_path: Path) -> None:
    class OneFails(FakeEngine):
        async def _hold(self, index: int) -> None:
            await super()._hold(index)
            if index == 3 and len(self.submitted) == 3 and not self.lost:
                raise ZeroDivisionError

    engine = OneFails()
    _error(make_caller(tmp_path, engine).complete(prompt="a", n=3), 500)
    assert len(engine.aborted) == 3


def test_streams_say_done_when_they_are(caller: Caller) -> None:
    assert len(events_of(caller.complete(prompt="a", stream=True, max_tokens=2))) == 2
