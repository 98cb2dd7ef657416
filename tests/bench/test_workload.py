"""Prompts: as long as asked for, each of its own, the same again for the same seed."""

from __future__ import annotations

import json

from headrace.bench.workload import FIRST_ID, WORDS, Dialect, Workload


def test_prompts_of_token_ids_are_exact_and_distinct() -> None:
    workload = Workload("m", Dialect(length=17, last_id=300), seed=1)
    prompts = [json.loads(workload.body(number, 8))["prompt"] for number in range(-50, 50)]
    assert {len(prompt) for prompt in prompts} == {17}
    assert all(FIRST_ID <= token < 300 for prompt in prompts for token in prompt)
    assert len({tuple(prompt) for prompt in prompts}) == 100


def test_the_same_seed_gives_the_same_request() -> None:
    bodies = [Workload("m", Dialect(), seed=seed).body(3, 8) for seed in (1, 1, 2)]
    assert bodies[0] == bodies[1] != bodies[2]


def test_a_request_has_only_what_the_server_knows() -> None:
    body = json.loads(Workload("m", Dialect(), 0).body(0, 8))
    assert {name: body[name] for name in ("model", "max_tokens", "temperature", "stream", "ignore_eos")} == {
        "model": "m",
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    assert body["stream_options"] == {"include_usage": True}
    plain = Dialect(token_ids=False, ignore_eos=None, stream_options=False, length=5)
    body = json.loads(Workload(None, plain, 0).body(0, 8))
    assert set(body) == {"prompt", "max_tokens", "temperature", "stream"}
    assert len(body["prompt"].split()) == 5


def test_the_end_of_a_text_can_be_switched_off_by_a_generation_config() -> None:
    body = json.loads(Workload("m", Dialect(ignore_eos="generation_config"), 0).body(0, 8))
    assert json.loads(body["generation_config"]) == {"eos_token_id": -1, "do_sample": False, "max_new_tokens": 8}


def test_words_are_distinct() -> None:
    assert len(set(WORDS)) == len(WORDS) > 200


def test_a_request_that_asks_holds_the_highest_id() -> None:
    workload = Workload("m", Dialect(length=3, last_id=300), seed=1)
    for number in range(-1, -20, -1):
        assert json.loads(workload.body(number, 1))["prompt"][-1] == 299
