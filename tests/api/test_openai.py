"""The `openai` package against a real server: chat, stream, completions, log-probabilities, errors."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from headrace.api.app import create_app
from tests.api.harness import NAME, make_service, serving
from tests.fakes.engine import FakeEngine

KEY = "s3cret"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    engine = FakeEngine(reply="Grüße, wörld".encode())
    service = make_service(tmp_path_factory.mktemp("openai"), engine, api_key=KEY)
    with (
        serving(create_app(service)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=20) as client,
    ):
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "headrace"


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        logprobs=True,
        top_logprobs=3,
        max_completion_tokens=50,
        n=2,
        stop=["never"],
        seed=1,
        extra_body={"top_k": 5, "min_p": 0.1},
    )
    assert [choice.message.content for choice in answer.choices] == ["Grüße, wörld"] * 2
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * 16
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 16
    assert b"".join(bytes(one.bytes or ()) for one in logprobs.content[:-1]).decode() == "Grüße, wörld"
    assert [len(one.top_logprobs) for one in logprobs.content] == [3] * 16


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Grüße, wörld"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert last.usage is not None
    assert last.usage.completion_tokens == 16
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens == 0


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt=["a", "b"], max_tokens=50, logprobs=2, echo=True)
    assert [choice.text for choice in answer.choices] == ["aGrüße, wörld", "bGrüße, wörld"]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert len(logprobs.tokens) == 17


def test_completion_stream(client: openai.OpenAI) -> None:
    stream = client.completions.create(model=NAME, prompt=[97, 98], max_tokens=50, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Grüße, wörld"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_errors_have_the_types_that_clients_catch(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as bad:
        client.completions.create(model=NAME, prompt="a", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=NAME, prompt="a" * 500)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="nope"):
        client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_an_error_within_a_stream_is_raised(tmp_path_factory: pytest.TempPathFactory) -> None:
    service = make_service(tmp_path_factory.mktemp("fails"), FakeEngine(fail_after=2))
    with (
        serving(create_app(service)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=20) as client,
    ):
        stream = client.completions.create(model=NAME, prompt="a", stream=True)
        assert [next(stream).choices[0].text for _ in range(2)] == ["t", "u"]
        with pytest.raises(openai.APIError, match="page table is on fire"):
            next(stream)


def test_a_full_queue_is_a_rate_limit(tmp_path_factory: pytest.TempPathFactory) -> None:
    service = make_service(tmp_path_factory.mktemp("full"), FakeEngine(max_requests=0))
    with (
        serving(create_app(service)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0, timeout=20) as client,
        pytest.raises(openai.RateLimitError, match="5 requests wait already") as full,
    ):
        client.completions.create(model=NAME, prompt="a", stream=True)
    assert full.value.response.headers["retry-after"] == "1"
