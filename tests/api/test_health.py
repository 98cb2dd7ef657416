"""Health, readiness, the key, request ids, models, version, metrics, tokenising."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import headrace
from headrace.api.app import create_app
from headrace.step import EngineStatus
from tests.api.harness import NAME, Caller, make_caller, make_service
from tests.fakes.engine import READY, FakeEngine


@pytest.mark.parametrize(
    ("phase", "state"),
    [("starting", "starting"), ("loading", "loading"), ("warming", "warming"), ("stopping", "failed")],
)
def test_only_a_ready_engine_is_ready(tmp_path: Path, phase: str, state: str) -> None:
    engine = FakeEngine(status=EngineStatus(phase, "3 of 8 GB", load_bytes=(3, 8)))  # type: ignore[arg-type]  # one of its values
    caller = make_caller(tmp_path, engine)
    assert caller("GET", "/health").status_code == 200
    for response in (
        caller("GET", "/ready"),
        caller("GET", "/v1/models"),
        caller("GET", "/v1/nothing"),
        caller.complete(prompt="a"),
        caller.complete(prompt=5),
        caller.chat("a", stream=True),
    ):
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        error = response.json()["error"]
        assert error["code"] == "not_ready"
        assert f"{state}: 3 of 8 GB" in error["message"]
    answer = caller("GET", "/ready").json()
    assert (answer["status"], answer["detail"]) == (state, "3 of 8 GB")
    assert (answer["done_bytes"], answer["total_bytes"]) == ((3, 8) if state == "loading" else (0, 0))
    engine.status = READY
    assert caller("GET", "/ready").status_code == 200
    assert caller.complete(prompt="a").status_code == 200


def test_a_lost_engine_is_not_ready_again(caller: Caller, engine: FakeEngine) -> None:
    assert caller("GET", "/ready").json()["status"] == "ready"
    engine.lost = "worker rank 1 (stage 1) died"
    for path in ("/ready", "/v1/models"):
        response = caller("GET", path)
        assert response.status_code == 503
        assert "worker rank 1 (stage 1) died" in response.json()["error"]["message"]
    assert caller("GET", "/ready").json()["status"] == "failed"
    assert caller("GET", "/health").status_code == 200


def test_a_stopping_server_is_not_ready(tmp_path: Path, engine: FakeEngine) -> None:
    service = make_service(tmp_path, engine)
    service.stopping = True
    caller = Caller(create_app(service))
    assert caller("GET", "/ready").status_code == 503
    assert caller("GET", "/ready").json()["status"] == "draining"
    assert "stopping" in caller.complete(prompt="a").json()["error"]["message"]


def test_the_key_guards_v1_and_nothing_else(tmp_path: Path, engine: FakeEngine) -> None:
    caller = make_caller(tmp_path, engine, api_key="s3crét")
    for value in (None, "Bearer wrong", "Bearer ", "s3crét", "Basic s3crét", "Bearer s3crét2"):
        headers = {} if value is None else {"authorization": value.encode()}
        response = caller("GET", "/v1/models", headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
    for value in ("Bearer s3crét", "bearer  s3crét"):
        assert caller("GET", "/v1/models", headers={"authorization": value.encode()}).status_code == 200
    for path in ("/health", "/ready", "/metrics", "/version"):
        assert caller("GET", path).status_code == 200


def test_the_prefix_cache_is_reset_by_who_may(tmp_path: Path, engine: FakeEngine) -> None:
    caller = make_caller(tmp_path, engine, api_key="key")
    assert caller("POST", "/reset_prefix_cache").status_code == 401
    assert engine.num_resets == 0
    key = {"authorization": "Bearer key"}
    assert caller("POST", "/reset_prefix_cache", headers=key).json()["status"] == "ok"
    assert engine.num_resets == 1
    assert caller("GET", "/reset_prefix_cache", headers=key).status_code == 405
    engine.status = EngineStatus("loading")
    assert caller("POST", "/reset_prefix_cache", headers=key).status_code == 503
    engine.status = READY
    engine.lost = "worker rank 0 died"
    assert caller("POST", "/reset_prefix_cache", headers=key).status_code == 503
    assert engine.num_resets == 1


def test_the_key_is_asked_for_before_readiness(tmp_path: Path) -> None:
    caller = make_caller(tmp_path, FakeEngine(status=EngineStatus("loading")), api_key="key")
    assert caller("GET", "/v1/models").status_code == 401


def test_request_ids_are_echoed_or_made(caller: Caller) -> None:
    assert caller("GET", "/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert caller.complete(prompt=5).headers["x-request-id"]
    for bad in ("has space", "x" * 129, ""):
        made = caller("GET", "/health", headers={"x-request-id": bad}).headers["x-request-id"]
        assert made != bad
        assert len(made) == 32


def test_two_requests_of_one_id_are_two_requests(caller: Caller, engine: FakeEngine) -> None:
    for _ in range(2):
        caller("POST", "/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "same"})
    assert len({one.request_id for one in engine.submitted}) == 2


def test_models(caller: Caller) -> None:
    listed = caller("GET", "/v1/models").json()
    (model,) = listed["data"]
    assert listed["object"] == "list"
    assert model["id"] == NAME
    assert model["root"] == "/models/tiny"
    assert model["max_model_len"] == 128
    assert caller("GET", f"/v1/models/{NAME}").json() == model


def test_a_model_name_may_hold_a_slash(tmp_path: Path, engine: FakeEngine) -> None:
    service = make_service(tmp_path, engine)
    service.model = type(service.model)(name="org/model", root="/x", vocab_size=272)
    assert Caller(create_app(service))("GET", "/v1/models/org/model").json()["id"] == "org/model"


def test_version(caller: Caller) -> None:
    assert caller("GET", "/version").json() == {"version": headrace.__version__}


def test_text_to_tokens_and_back(caller: Caller) -> None:
    answer = caller("POST", "/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
    assert answer == {
        "count": 3,
        "max_model_len": 128,
        "tokens": [104, 0xC3, 0xA9],
        "token_strs": ["h", "\ufffd", "\ufffd"],
    }
    assert caller("POST", "/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "hé"}
    said = [{"role": "user", "content": "a"}]
    answer = caller("POST", "/tokenize", json={"messages": said, "add_generation_prompt": False}).json()
    text = caller("POST", "/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"]
    assert text == "<|im_start|>user\na<|im_end|>\n"


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}])
def test_tokenize_takes_a_prompt_or_messages(caller: Caller, body: dict[str, object]) -> None:
    response = caller("POST", "/tokenize", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "give either prompt or messages"


def test_metrics(caller: Caller) -> None:
    caller.complete(prompt="abc", max_tokens=4)
    caller.complete(prompt="abc", stop="x" * 3, max_tokens=2, n=2)
    response = caller("GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    families = list(text_string_to_metric_families(response.text))
    assert all(sample.labels["model_name"] == NAME for family in families for sample in family.samples)
    samples = {
        (sample.name.removeprefix("headrace:"), sample.labels.get("stage"), sample.labels.get("finished_reason")): (
            sample.value
        )
        for family in families
        for sample in family.samples
        if "le" not in sample.labels
    }
    expected = {
        "num_requests_running": 3, "num_requests_waiting": 2, "kv_cache_usage_perc": 0.25, "num_preemptions_total": 1,
        "kv_cache_tokens": 4096, "ready": 1, "prompt_tokens_total": 9, "generation_tokens_total": 8,
        "time_to_first_token_seconds_count": 3, "inter_token_latency_seconds_count": 5,
        "time_per_output_token_seconds_count": 3, "e2e_request_latency_seconds_count": 3,
        "request_queue_time_seconds_count": 3, "request_queue_time_seconds_sum": 1.5,
        "engine_host_seconds_total": 0.125, "kv_cache_cached_perc": 0.5, "prefix_cache_queries_total": 900,
        "prefix_cache_hits_total": 300,
    }  # fmt: skip
    assert {name: samples[name, None, None] for name in expected} == expected
    assert samples["request_success_total", None, "length"] == 3
    assert samples["request_success_total", None, "abort"] == 0
    assert samples["stage_step_seconds_count", "0", None] == 10
    assert samples["stage_step_seconds_sum", "1", None] == 0.25
    assert samples["stage_busy_ratio", "0", None] == 0.5
    assert samples["stage_bubble_ratio", "1", None] == 0.75
    assert samples["stage_communication_seconds_total", "0", None] == 0.125
    assert samples["stage_edge_seconds_total", "0", None] == 0.375
    assert samples["stage_tokens_total", "1", None] == 80
    assert samples["stage_layers", "1", None] == 2
    assert samples["stage_weight_bytes", "1", None] == 1100
    waits = {
        (sample.labels["stage"], sample.labels["kind"]): sample.value
        for family in families
        for sample in family.samples
        if sample.name == "headrace:stage_wait_seconds_total"
    }
    assert waits == {
        ("0", "activations"): 0, ("0", "sampled_tokens"): 0.125, ("0", "plan"): 0.25,
        ("1", "activations"): 0.75, ("1", "sampled_tokens"): 0, ("1", "plan"): 0,
    }  # fmt: skip
