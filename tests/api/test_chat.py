"""/v1/chat/completions: messages to a prompt, answers, log-probabilities, streams, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.api.harness import Caller, events_of, make_caller
from tests.fakes.engine import FakeEngine

Says = Callable[[str], Caller]


def _prompt(engine: FakeEngine) -> str:
    names = {256: "<|endoftext|>", 257: "<|im_start|>", 258: "<|im_end|>"}
    return "".join(names.get(token, chr(token)) for token in engine.submitted[-1].tokens)


def test_an_answer(says: Says) -> None:
    answer = says("héllo").chat("hi").json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    message = {"role": "assistant", "content": "héllo"}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"]["completion_tokens"] == 7


def test_messages_go_through_the_template(caller: Caller, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    said = [{"role": "developer", "content": "be good"}, {"role": "user", "content": parts}]
    assert caller.chat(*said, max_tokens=1).status_code == 200
    assert _prompt(engine) == (
        "<|im_start|>system\nbe good<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    )


def test_by_default_all_that_fits_is_generated(caller: Caller, engine: FakeEngine) -> None:
    answer = caller.chat("hi").json()
    assert answer["usage"]["total_tokens"] == engine.status.max_len
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit_work(caller: Caller, field: str) -> None:
    assert caller.chat("hi", **{field: 3}).json()["usage"]["completion_tokens"] == 3


def test_the_newer_name_of_the_limit_wins(caller: Caller) -> None:
    assert caller.chat("hi", max_tokens=9, max_completion_tokens=2).json()["usage"]["completion_tokens"] == 2


def test_log_probabilities_have_one_entry_a_token(says: Says) -> None:
    content = says("aé").chat("x", logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in content] == ["a", "\ufffd", "\ufffd", "<|im_end|>"]
    assert [one["bytes"] for one in content[:3]] == [[97], [0xC3], [0xA9]]
    assert [one["logprob"] for one in content] == [-1 / 8, -2 / 8, -3 / 8, -4 / 8]
    assert content[0]["top_logprobs"] == [
        {"token": "a", "logprob": -1 / 8, "bytes": [97]},
        {"token": "b", "logprob": -2 / 8, "bytes": [98]},
    ]


def test_log_probabilities_without_the_best_tokens(says: Says) -> None:
    content = says("a").chat("x", logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert [one["top_logprobs"] for one in content] == [[], []]


def test_cached_tokens_are_told(caller: Caller, engine: FakeEngine) -> None:
    engine.num_cached = 5
    assert caller.chat("x", max_tokens=2).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}
    *_, last = events_of(caller.chat("x", max_tokens=2, n=2, stream=True, stream_options={"include_usage": True}))
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}


def test_a_stream_greets_every_choice_once_and_ends_each(says: Says) -> None:
    response = says("hé").chat("x", stream=True, n=2, stream_options={"include_usage": True})
    *chunks, last = events_of(response)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in (*chunks, last)}) == 1
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert [one["delta"].get("content", "") for one in mine[1:]] == ["h", "é", ""]
        assert [one["finish_reason"] for one in mine] == [None, None, None, "stop"]
    assert last["choices"] == []
    # "h", two bytes and the end, twice.
    assert last["usage"]["completion_tokens"] == 8
    assert all(chunk["usage"] is None for chunk in chunks)


def test_tools_reach_the_template_unless_they_are_not_to_be_used(tmp_path: Path, engine: FakeEngine) -> None:
    template = "{{ tools | tojson if tools else 'no tools' }}{{ color }}{{ messages[0]['content'] }}"
    caller = make_caller(tmp_path, engine, chat_template=template)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
    asked = {"tools": [tool], "chat_template_kwargs": {"color": "red"}, "max_tokens": 1}
    assert caller.chat("hi", **asked, tool_choice="none").status_code == 200
    assert _prompt(engine) == "no toolsredhi"
    engine.status = type(engine.status)("ready", max_len=1000)
    assert caller.chat("hi", **asked, tool_choice="auto", parallel_tool_calls=True).status_code == 200
    assert '"name": "f"' in _prompt(engine)
    assert '"strict": true' in _prompt(engine)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ],
)
def test_what_is_not_served_is_a_400_that_names_the_field(caller: Caller, body: dict[str, Any], param: str) -> None:
    response = caller.chat("hi", **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert param in error["message"]


def test_plain_text_is_a_response_format(caller: Caller) -> None:
    assert caller.chat("hi", response_format={"type": "text"}, max_tokens=1).status_code == 200


def test_an_image_is_refused_by_its_place(caller: Caller, engine: FakeEngine) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    response = caller.chat({"role": "user", "content": [{"type": "text", "text": "what is"}, image]})
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == "messages[0].content[1]"
    assert "images are not served" in error["message"]
    assert engine.submitted == []


def test_the_words_of_a_template_that_refuses_reach_the_client(tmp_path: Path, engine: FakeEngine) -> None:
    caller = make_caller(tmp_path, engine, chat_template="{{ raise_exception('users and assistants must alternate') }}")
    response = caller.chat("hi")
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "messages: users and assistants must alternate"


def test_a_model_without_a_template_says_so(tmp_path: Path, engine: FakeEngine) -> None:
    response = make_caller(tmp_path, engine, chat_template=None).chat("hi")
    assert response.status_code == 400
    assert "no chat template" in response.json()["error"]["message"]


def test_unpaired_surrogates_in_any_field_do_no_harm(caller: Caller) -> None:
    body = b'{"messages": [{"role": "user", "content": "a", "name": "\\ud800"}], "max_tokens": 1, "stop": "\\ud800"}'
    response = caller("POST", "/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stop"
