"""Requests that are pre-empted and recomputed say what they would have said: nothing is lost, repeated or changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from tests.parity.reference import prompts
from tests.tiny import write_tiny


@pytest.mark.parametrize(("family", "options"), [("llama_tied", {"pp": 2}), ("deepseek_v3", {})])
def test_pressure_changes_nothing(tmp_path: Path, family: str, options: dict[str, int]) -> None:
    folder = write_tiny(tmp_path / "m", family, seed=4)
    asked = prompts(2, 10, longest=30)
    params = [
        SamplingParams(
            temperature=0.0 if i % 2 else 1.2, seed=i, max_tokens=40, ignore_eos=True, logprobs=1,
            prompt_logprobs=0 if i % 2 else None,
            presence_penalty=0.5 if i % 3 == 0 else 0.0, repetition_penalty=1.3 if i % 5 == 0 else 1.0,
        )
        for i in range(10)
    ]  # fmt: skip
    outcomes = []
    for room in (4000, 160):
        per_token = 40 if family == "deepseek_v3" else 64
        memory = room * per_token * 6 * 4 // options.get("pp", 1)
        with LLM(
            str(folder), dtype="float32", max_len=80, page_size=4, kv_memory=memory, chunk=16, device="cpu", **options
        ) as llm:
            got = llm.generate(asked, params)
            # A later throughput: the engine is as good as new once the pressure is gone.
            again = llm.generate(asked[:2], params[:2])
            assert [g.token_ids for g in again] == [g.token_ids for g in got[:2]]
            while llm.status.num_running:
                llm.generate([1], SamplingParams(max_tokens=1))
            assert (llm.status.num_preemptions > 0) == (room == 160)
            assert llm.status.kv_usage == 0.0
        for i, one in enumerate(got):
            assert one.logprobs is not None and (one.prompt_logprobs is not None) == bool(i % 2)
            assert len(one.logprobs) == len(one.token_ids) == 40
            assert one.prompt_logprobs is None or len(one.prompt_logprobs) == len(one.prompt_token_ids) - 1
        outcomes.append(got)
    roomy, tight = outcomes
    for a, b in zip(roomy, tight, strict=True):
        assert a.token_ids == b.token_ids
        assert [e.logprob for e in a.logprobs or []] == pytest.approx([e.logprob for e in b.logprobs or []], abs=1e-4)
