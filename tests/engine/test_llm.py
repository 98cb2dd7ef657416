"""The Python interface, over real processes: one pipeline of three stages, started once for all that can share it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from headrace import LLM, SamplingParams
from headrace.errors import Fault, UserError
from headrace.supervise.private import trace_folder
from headrace.telemetry.trace import StepSpan, read_steps, save_trace
from tests.telemetry.trace_format import HALF_NS, read, slices
from tests.tiny import write_tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[7], [5, 6, 7, 8], list(range(40)), [200, 3, 9] * 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny", "llama_tied", seed=5)


@pytest.fixture(scope="module")
def llm(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    trace = tmp_path_factory.mktemp("trace") / "t.json"
    with LLM(str(folder), pp=3, dtype="float32", max_len=256, chunk=64, trace=str(trace), transport="tcp") as llm:
        yield llm
        llm.generate([1], GREEDY)
    assert slices(read(trace), "step")


def steps_of(llm: LLM) -> list[StepSpan]:
    """What its ranks have recorded by now."""
    llm.settle()
    return list(read_steps(trace_folder(llm.directory)))


@pytest.fixture(scope="module")
def single(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float32", max_len=256, chunk=64) as llm:
        yield llm


def test_one_prompt_or_many_texts_or_ids(llm: LLM) -> None:
    together = llm.generate(PROMPTS, GREEDY)
    assert [len(g.token_ids) for g in together] == [12] * 4
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert [g.token_ids for g in alone] == [g.token_ids for g in together]
    text = llm.generate("Hello", GREEDY)[0]
    assert text.prompt_token_ids == llm.tokenizer.encode("Hello", add_special=True)
    assert text.text == llm.tokenizer.decode(text.token_ids, skip_special=True)


def test_sampled_text_depends_on_the_seed_and_not_on_layout_or_load(llm: LLM, single: LLM) -> None:
    drawn = [SamplingParams(temperature=1.5, seed=seed, max_tokens=16, ignore_eos=True) for seed in range(8)]
    prompts = [[1, 2, 3]] * 8
    expected = [g.token_ids for g in single.generate(prompts, drawn)]
    assert [g.token_ids for g in llm.generate(prompts, drawn)] == expected
    assert llm.generate([1, 2, 3], drawn[5])[0].token_ids == expected[5]
    assert len({tuple(ids) for ids in expected}) == 8


def test_a_request_without_a_seed_gets_one_of_its_own(single: LLM) -> None:
    hot = SamplingParams(temperature=2.0, max_tokens=16, ignore_eos=True)
    first, second = single.generate([[1, 2], [1, 2]], hot)
    assert first.token_ids != second.token_ids


def test_exactly_one_logprob_a_token_and_a_prompt_position(llm: LLM) -> None:
    wanted = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, prompt_logprobs=0, ignore_eos=True)
    (got,) = llm.generate(list(range(100)), wanted)
    assert got.logprobs is not None and got.prompt_logprobs is not None
    assert [entry.token for entry in got.logprobs] == got.token_ids
    assert [entry.token for entry in got.prompt_logprobs] == list(range(1, 100))
    assert all(len(entry.top_tokens) == 2 and entry.logprob == entry.top_logprobs[0] for entry in got.logprobs)


def test_what_is_cached_is_taken_and_changes_nothing(llm: LLM) -> None:
    shared = [7 * i % 250 for i in range(100)]
    prompts = [[*shared, i] for i in range(6)]
    llm.reset_prefix_cache()
    taking = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1, ignore_eos=True)
    # Who asks for the log-probabilities of a prompt computes all of it.
    computing = msgspec.structs.replace(taking, prompt_logprobs=0)
    together, again = llm.generate(prompts, taking), llm.generate(prompts, taking)
    expected = llm.generate(prompts, computing)
    # Six whole pages of sixteen, each computed by whoever comes first.
    assert sum(one.num_cached for one in together) == 5 * 96
    assert [one.num_cached for one in again] == [96] * 6
    assert [one.num_cached for one in expected] == [0] * 6
    for found in (together, again):
        for one, other in zip(found, expected, strict=True):
            assert one.token_ids == other.token_ids
            assert one.logprobs is not None and other.logprobs is not None
            assert [e.logprob for e in one.logprobs] == pytest.approx([e.logprob for e in other.logprobs], abs=1e-4)
    (turn,) = llm.generate([*prompts[0], *expected[0].token_ids, 9], GREEDY)
    assert turn.num_cached == 112
    llm.reset_prefix_cache()
    assert llm.generate(prompts[0], GREEDY)[0].num_cached == 0


def test_scoring_without_generating(llm: LLM) -> None:
    (got,) = llm.generate([4, 5, 6], SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert got.token_ids == [] and got.finish_reason == "length"
    assert got.prompt_logprobs is not None and len(got.prompt_logprobs) == 2


def test_stop_text_is_cut_and_ends_the_request(llm: LLM) -> None:
    (free,) = llm.generate("abc", SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    stop = free.text[4:6]
    (cut,) = llm.generate("abc", SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop=(stop,)))
    assert cut.finish_reason == "stop"
    assert cut.text == free.text[: free.text.index(stop)]


def test_stop_token_ids_and_min_tokens(llm: LLM) -> None:
    (free,) = llm.generate([9, 8], GREEDY)
    stopper = free.token_ids[3]
    first = free.token_ids.index(stopper)
    (cut,) = llm.generate([9, 8], SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(stopper,)))
    assert cut.token_ids == free.token_ids[: first + 1] and cut.finish_reason == "stop"
    (held,) = llm.generate(
        [9, 8], SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(stopper,), min_tokens=first + 2)
    )
    assert stopper not in held.token_ids[: first + 1] and len(held.token_ids) > first + 1


def test_chat_goes_through_the_template(llm: LLM) -> None:
    (got,) = llm.chat([{"role": "user", "content": "Hi"}], GREEDY)
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert got.prompt_token_ids == llm.tokenizer.encode(expected, add_special=False)


@pytest.mark.parametrize(
    ("prompt", "params", "word"),
    [
        ([], {}, "prompt"),
        ([1, 9999], {}, "token ids"),
        ([1] * 300, {}, "300"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"stop_token_ids": (9999,)}, "stop_token_ids"),
    ],
)
def test_what_cannot_be_is_said_and_harms_nobody(
    llm: LLM, prompt: list[int], params: dict[str, object], word: str
) -> None:
    with pytest.raises(UserError, match=word):
        llm.generate([[1, 2], prompt], SamplingParams(**params))  # type: ignore[arg-type]
    assert len(llm.generate([1, 2], GREEDY)[0].token_ids) == 12


def test_a_stage_computes_the_next_plan_while_the_following_stage_computes_this_one(llm: LLM) -> None:
    llm.generate([list(range(60))] * 12, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    spans = {(span.stage, span.plan_id): span for span in steps_of(llm)}
    for stage in (0, 1):
        overlapping = 0
        for (at, plan_id), span in spans.items():
            following = spans.get((stage, plan_id + 1))
            if at == stage + 1 and following is not None:
                overlapping += following.start_ns < span.end_ns and span.start_ns < following.end_ns
        assert overlapping > 0, f"stage {stage} never computed while stage {stage + 1} did"


def test_stages_run_plans_strictly_in_order(llm: LLM) -> None:
    llm.generate(PROMPTS, GREEDY)
    spans = steps_of(llm)
    for stage in range(3):
        mine = [span for span in spans if span.stage == stage]
        assert [span.plan_id for span in mine] == list(range(len(mine)))
        assert all(a.end_ns <= b.wait_start_ns for a, b in itertools.pairwise(mine))


def test_a_trace_shows_each_plan_go_from_stage_to_stage(llm: LLM, tmp_path: Path) -> None:
    llm.generate(PROMPTS, GREEDY)
    num_steps = llm.settle().stages[0].num_steps
    save_trace(trace_folder(llm.directory), tmp_path / "t.json")
    events = read(tmp_path / "t.json")  # which fails where two slices of a stage overlap
    by_plan: dict[int, list[dict[str, Any]]] = {}
    for event in slices(events, "step"):
        by_plan.setdefault(event["args"]["plan"], []).append(event)
    assert by_plan.keys() == set(range(num_steps))
    for of_plan in by_plan.values():
        assert [event["tid"] for event in of_plan] == sorted({event["tid"] for event in of_plan})
        assert len(of_plan) == 3
        for before, after in itertools.pairwise(of_plan):
            assert before["ts"] + before["dur"] <= after["ts"] + HALF_NS
    assert len([event for event in events if event["ph"] == "s"]) == 2 * num_steps
    # The warm-up's chunk, and a token of its that nobody reads.
    first = by_plan[0][0]["args"]
    assert (first["rows"], first["tokens"], first["decode rows"], first["prompt tokens"]) == (1, 64, 0, 64)
    assert by_plan[1][0]["args"]["decode rows"] == 1


def test_the_last_word_of_the_stages_is_all_that_they_did(llm: LLM) -> None:
    before = llm.settle()
    llm.generate(PROMPTS, GREEDY)
    after, steps = llm.settle(), steps_of(llm)
    assert after.settled and after.num_running == 0
    assert after.stages[0].num_steps > before.stages[0].num_steps
    for stage in after.stages:
        mine = [step for step in steps if step.stage == stage.stage]
        assert (stage.num_steps, stage.num_tokens) == (len(mine), sum(step.num_tokens for step in mine))
        assert stage.activations_wait_s == pytest.approx(1e-9 * sum(step.activations_wait_ns for step in mine))
        assert stage.tokens_wait_s == pytest.approx(1e-9 * sum(step.tokens_wait_ns for step in mine))
        assert (stage.activations_wait_s > 0, stage.tokens_wait_s > 0) == (stage.stage > 0, stage.stage == 0)
        # A step's slice leaves out the moment in which its plan is taken in.
        assert stage.busy_s > 1e-9 * sum(step.end_ns - step.start_ns for step in mine) > 0
        waits = stage.activations_wait_s + stage.tokens_wait_s + stage.plan_wait_s
        assert stage.busy_s + waits + stage.communication_s == pytest.approx(stage.active_s)
        assert stage.plan_wait_s > 0 and stage.edge_s > 0


def test_embedding_and_head_lie_where_they_are_used(llm: LLM, single: LLM) -> None:
    vocabulary = 288 * 64 * 4
    norms = 64 * 4
    layer = single.status.stages[0].weight_bytes - vocabulary - norms
    assert layer % 6 == 0
    first, middle, last = (stage.weight_bytes for stage in llm.status.stages)
    layers = [stage.num_layers for stage in llm.status.stages]
    # Tied: the first and the last stage hold a copy each, nobody else does.
    assert first == vocabulary + layers[0] * layer // 6
    assert middle == layers[1] * layer // 6
    assert last == vocabulary + norms + layers[2] * layer // 6


def test_nothing_is_left_behind(folder: Path) -> None:
    with LLM(str(folder), dtype="float32", max_len=64) as llm:
        directory = llm.directory
        children = [p for p in psutil.Process().children(recursive=True) if str(directory) in " ".join(p.cmdline())]
        assert len(children) == 2 and directory.is_dir()
        assert (directory.stat().st_mode & 0o777) == 0o700
    assert not directory.exists()
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in children)
    with pytest.raises(Fault, match="closed"):
        llm.generate([1], GREEDY)


def test_the_death_of_a_stage_is_named(folder: Path) -> None:
    with LLM(str(folder), pp=2, dtype="float32", max_len=64) as llm:
        victim = next(
            p for p in psutil.Process().children(recursive=True)
            if str(llm.directory) in " ".join(p.cmdline()) and p.cmdline()[-6:][:2] == ["--rank", "1"]
        )  # fmt: skip
        os.kill(victim.pid, 9)
        with pytest.raises(Fault, match=r"rank 1 \(stage 1\).*SIGKILL"):
            llm.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=50, ignore_eos=True))


def test_unknown_options_are_named() -> None:
    with pytest.raises(UserError, match="piplines"):
        LLM("nowhere", piplines=2)
