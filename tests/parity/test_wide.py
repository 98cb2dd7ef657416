"""Layouts wider than the model's KV heads, and experts in groups of sliced ranks: the same as one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from tests.parity.reference import check, prompts, written_by
from tests.tiny import load_reference, write_tiny


@pytest.mark.parametrize(("family", "layout"), [("llama", {"tp": 4}), ("qwen3_moe", {"tp": 4, "ep": 2})])
def test_four_ranks(tmp_path: Path, family: str, layout: dict[str, int]) -> None:
    folder = write_tiny(tmp_path / "m", family, seed=6)
    asked = prompts(3, 6, longest=40)
    params = SamplingParams(temperature=0.0, max_tokens=10, logprobs=2, ignore_eos=True)
    with LLM(str(folder), dtype="float32", device="cpu", max_len=64, **layout) as llm:
        got = llm.generate(asked, params)
    reference = load_reference(folder, tmp_path / "plain")
    assert [one.prompt_token_ids for one in got] == asked
    for one in got:
        check(reference, written_by(one), family)
