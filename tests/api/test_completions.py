"""/v1/completions: prompts of every shape, choices, echo, log-probabilities, stops, streams."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api.harness import NAME, Caller, events_of, make_caller
from tests.fakes.engine import FakeEngine

Says = Callable[[str], Caller]


def usage(num_prompt: int, num_completion: int, num_cached: int = 0) -> dict[str, Any]:
    """What an answer says of its tokens."""
    return {
        "prompt_tokens": num_prompt, "completion_tokens": num_completion, "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }  # fmt: skip


def test_a_text_is_completed_and_counted(says: Says) -> None:
    answer = says("héllo").complete(model=NAME, prompt="ab", max_tokens=50).json()
    assert answer["object"] == "text_completion"
    assert answer["model"] == NAME
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [{"index": 0, "text": "héllo", "logprobs": None, "finish_reason": "stop"}]
    # Six bytes and the end token.
    assert answer["usage"] == usage(2, 7)


def test_no_model_means_the_served_one_and_sixteen_tokens_are_the_default(caller: Caller, engine: FakeEngine) -> None:
    answer = caller.complete(prompt="ab").json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"
    assert engine.submitted[0].sampling.max_tokens == 16


def test_the_default_shrinks_to_the_room_that_is_left(caller: Caller, engine: FakeEngine) -> None:
    assert caller.complete(prompt="x" * 125).json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("ab", [[97, 98]]),
        ([97, 98], [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_prompts_of_every_shape(caller: Caller, engine: FakeEngine, prompt: Any, tokens: list[list[int]]) -> None:
    answer = caller.complete(prompt=prompt, max_tokens=1).json()
    assert [one.tokens for one in engine.submitted] == tokens
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(tokens)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, tokens))


def test_choices_are_indexed_prompt_by_prompt_and_their_seeds_differ(caller: Caller, engine: FakeEngine) -> None:
    answer = caller.complete(prompt=["a", "c"], n=2, seed=5, max_tokens=2).json()
    asked = {one.request_id.rpartition("-")[2]: one for one in engine.submitted}
    assert [asked[str(i)].tokens for i in range(4)] == [[97], [97], [99], [99]]
    assert [asked[str(i)].sampling.seed for i in range(4)] == [5, 6, 5, 6]
    # The fake's first letter is 97 + (tokens + seed) % 26.
    assert [choice["text"] for choice in answer["choices"]] == ["yz", "za", "ab", "bc"]
    assert answer["usage"] == usage(2, 8)


def test_cached_tokens_count_once_a_prompt(caller: Caller, engine: FakeEngine) -> None:
    engine.num_cached = 2
    body = {"prompt": ["abc", "def"], "n": 3, "max_tokens": 2}
    assert caller.complete(**body).json()["usage"] == usage(6, 12, 2 * 2)
    *_, last = events_of(caller.complete(**body, stream=True, stream_options={"include_usage": True}))
    assert last["usage"] == usage(6, 12, 2 * 2)
    assert caller.complete(prompt="abc", max_tokens=0).json()["usage"] == usage(3, 0)


def test_a_priority_reaches_an_engine_that_looks_at_it(tmp_path: Path, engine: FakeEngine) -> None:
    caller = make_caller(tmp_path, engine, has_priorities=True)
    caller.complete(prompt="a", priority=-3, n=2, max_tokens=1)
    caller.chat("a", priority=7, max_tokens=1)
    caller.complete(prompt="a", max_tokens=1)
    assert [one.priority for one in engine.submitted] == [-3, -3, 7, 0]


def test_a_priority_that_nobody_looks_at_is_an_error(caller: Caller) -> None:
    assert caller.complete(prompt="a", priority=0).status_code == 200
    for response in (caller.complete(prompt="a", priority=1), caller.chat("a", priority=-1)):
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("priority", "invalid_value")
        assert "--policy priority" in error["message"]


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"n": 3}, {"n": 3, "stream": True}])
def test_a_full_queue_is_429_and_says_when_to_come_again(caller: Caller, engine: FakeEngine, body: Any) -> None:
    engine.max_requests = 0
    for response in (caller.complete(prompt="a", **body), caller.chat("a", **body)):
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        error = response.json()["error"]
        assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "rate_limit_exceeded", None)
        assert error["message"] == "Too many requests: 5 requests wait already."
    engine.max_requests = None
    assert caller.complete(prompt="a", **body).status_code == 200


def test_the_last_seed_of_64_bits_has_a_successor(caller: Caller, engine: FakeEngine) -> None:
    assert caller.complete(prompt="a", n=2, seed=2**63 - 1, max_tokens=1).status_code == 200
    assert sorted(one.sampling.seed or 0 for one in engine.submitted) == [-(2**63), 2**63 - 1]


def test_every_sampling_field_reaches_the_engine(caller: Caller, engine: FakeEngine) -> None:
    fields = {
        "temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.25, "presence_penalty": 1, "frequency_penalty": -1.5,
        "repetition_penalty": 1.25, "seed": 3, "min_tokens": 2, "ignore_eos": True, "max_tokens": 4, "logprobs": 2,
    }  # fmt: skip
    extra = {"logit_bias": {"97": -100}, "stop": ["zz"], "stop_token_ids": [98], "user": "me", "best_of": 1}
    assert caller.complete(prompt="a", **fields, **extra, unknown_field=1, suffix="").status_code == 200
    sampling = engine.submitted[0].sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert sampling.logit_bias == {97: -100.0}
    assert sampling.stop == ("zz",)
    assert sampling.stop_token_ids == (98,)


@pytest.mark.parametrize("top_k", [-1, 0, 272, 2**62])
def test_a_top_k_that_keeps_everything_is_none(caller: Caller, engine: FakeEngine, top_k: int) -> None:
    assert caller.complete(prompt="a", top_k=top_k, max_tokens=1).status_code == 200
    assert engine.submitted[0].sampling.top_k == 0


def test_null_is_the_same_as_absent(caller: Caller) -> None:
    body = dict.fromkeys(("temperature", "n", "stop", "stream", "logprobs", "echo", "seed", "max_tokens", "suffix"))
    assert caller.complete(prompt="a", **body).status_code == 200


# --- echo and log-probabilities -------------------------------------------------------------------------------------


def test_log_probabilities_have_one_entry_a_token(says: Says) -> None:
    choice = says("aé").complete(prompt="x", logprobs=2).json()["choices"][0]
    found = choice["logprobs"]
    assert found["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "<|im_end|>"]
    assert found["token_logprobs"] == [-1 / 8, -2 / 8, -3 / 8, -4 / 8]
    assert found["text_offset"] == [0, 1, 1, 2]
    assert found["top_logprobs"][0] == {"a": -1 / 8, "b": -2 / 8}


def test_zero_log_probabilities_give_the_token_alone(says: Says) -> None:
    found = says("ab").complete(prompt="x", logprobs=0).json()["choices"][0]["logprobs"]
    assert found["top_logprobs"] == [{"a": -1 / 8}, {"b": -2 / 8}, {"<|im_end|>": -3 / 8}]


@pytest.mark.parametrize("prompt", ["xéy", [120, 0xC3, 0xA9, 121]])
def test_echo_with_log_probabilities_covers_the_prompt(says: Says, prompt: Any) -> None:
    choice = says("ab").complete(prompt=prompt, echo=True, logprobs=1).json()["choices"][0]
    assert choice["text"] == "xéyab"
    found = choice["logprobs"]
    assert found["tokens"] == ["x", "bytes:\\xc3", "bytes:\\xa9", "y", "a", "b", "<|im_end|>"]
    assert found["token_logprobs"] == [None, -2 / 8, -3 / 8, -4 / 8, -1 / 8, -2 / 8, -3 / 8]
    assert found["top_logprobs"][0] is None
    assert found["text_offset"] == [0, 1, 1, 2, 3, 4, 5]


def test_echo_alone_asks_for_no_log_probabilities(says: Says) -> None:
    caller = says("ab")
    assert caller.complete(prompt="xy", echo=True).json()["choices"][0]["text"] == "xyab"
    assert caller.complete(prompt=["x", "y"], echo=True).json()["choices"][1]["text"] == "yab"


def test_no_tokens_can_be_asked_for(caller: Caller, engine: FakeEngine) -> None:
    answer = caller.complete(prompt="xy", max_tokens=0, echo=True).json()
    assert answer["choices"] == [{"index": 0, "text": "xy", "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == usage(2, 0)
    assert engine.submitted == []


def test_no_tokens_with_echo_and_log_probabilities_scores_the_prompt(caller: Caller, engine: FakeEngine) -> None:
    for stream in (False, True):
        response = caller.complete(prompt="xyz", max_tokens=0, echo=True, logprobs=1, stream=stream)
        choice = (events_of(response)[0] if stream else response.json())["choices"][0]
        assert choice["text"] == "xyz"
        assert choice["finish_reason"] == "length"
        assert choice["logprobs"]["tokens"] == ["x", "y", "z"]
        assert choice["logprobs"]["token_logprobs"] == [None, -2 / 8, -3 / 8]
    assert engine.submitted[0].sampling.max_tokens == 0
    assert engine.submitted[0].sampling.prompt_logprobs == 1


# --- stops ----------------------------------------------------------------------------------------------------------


def test_a_stop_string_ends_the_text_before_it_and_aborts_the_engine(tmp_path: Any) -> None:
    engine = FakeEngine(reply=b"one STOP two")
    answer = make_caller(tmp_path, engine).complete(prompt="x", stop="STOP", max_tokens=50).json()
    assert answer["choices"][0]["text"] == "one "
    assert answer["choices"][0]["finish_reason"] == "stop"
    # Up to the token that completed it.
    assert answer["usage"]["completion_tokens"] == 8
    assert engine.aborted == [engine.submitted[0].request_id]


def test_entries_of_tokens_that_a_stop_string_cut_are_dropped(says: Says) -> None:
    choice = says("abSTOP").complete(prompt="x", stop=["STOP"], logprobs=0).json()["choices"][0]
    assert choice["text"] == "ab"
    assert choice["logprobs"]["tokens"] == ["a", "b"]


def test_a_stop_string_that_never_completes_is_text(says: Says) -> None:
    choice = says("abSTO").complete(prompt="x", stop=["STOP"], logprobs=0).json()["choices"][0]
    assert choice["text"] == "abSTO"
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"] == [*"abSTO", "<|im_end|>"]


@settings(max_examples=60, deadline=None)
@given(
    reply=st.text("abé\u4f60", max_size=12),
    stop=st.lists(st.text("abé", min_size=1, max_size=3), max_size=2),
    per_output=st.integers(1, 4),
    max_tokens=st.integers(1, 20),
)
def test_a_stream_adds_up_to_the_whole(
    tmp_path_factory: pytest.TempPathFactory, reply: str, stop: list[str], per_output: int, max_tokens: int
) -> None:
    engine = FakeEngine(reply=reply.encode(), per_output=per_output)
    caller = make_caller(tmp_path_factory.getbasetemp() / "stream", engine)
    body = {"prompt": "x", "stop": stop, "logprobs": 1, "max_tokens": max_tokens}
    whole = caller.complete(**body).json()
    events = events_of(caller.complete(**body, stream=True, stream_options={"include_usage": True}))
    *chunks, last = events
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["choices"][0]["text"]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    for key, values in whole["choices"][0]["logprobs"].items():
        assert [value for choice in choices for value in choice["logprobs"][key]] == values
    # What may be shown, by definition: all bytes given, cut at the first complete stop string.
    text = reply.encode()[:max_tokens].decode("utf-8", "replace")
    ends = [text.find(s) + len(s) for s in stop if s in text]
    expected = text
    if ends:
        expected = text[: min(ends)]
        expected = expected.removesuffix(max((s for s in stop if expected.endswith(s)), key=len))
    assert whole["choices"][0]["text"] == expected
    if not ends:
        assert len(whole["choices"][0]["logprobs"]["tokens"]) == whole["usage"]["completion_tokens"]


def test_a_stream_of_several_choices_interleaves_them(caller: Caller) -> None:
    events = events_of(caller.complete(prompt=["a", "b"], n=2, max_tokens=3, stream=True, seed=0, echo=True))
    texts, ends = [""] * 4, [0] * 4
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] += choice["finish_reason"] == "length"
    assert texts == ["atuv", "auvw", "buvw", "bvwx"]
    assert ends == [1] * 4
    assert "usage" not in events[0]


def test_a_whole_number_may_have_a_decimal_point(caller: Caller, engine: FakeEngine) -> None:
    headers = {"content-type": "application/json"}
    body = b'{"prompt": "a", "max_tokens": 2.0, "seed": 1e3}'
    assert caller("POST", "/v1/completions", content=body, headers=headers).status_code == 200
    assert (engine.submitted[0].sampling.max_tokens, engine.submitted[0].sampling.seed) == (2, 1000)
