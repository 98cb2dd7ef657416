"""Every layout of eight ranks: a small Kimi-K2 in INT4 writes what the reference would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from headrace.config import LayoutConfig
from tests.parity.reference import check, prompts, written_by
from tests.tiny import load_reference, write_tiny

K2: dict[str, Any] = {
    "num_hidden_layers": 9, "num_attention_heads": 8, "num_key_value_heads": 8, "n_routed_experts": 16,
    "moe_intermediate_size": 256, "intermediate_size": 256,
}  # fmt: skip
"""What eight ranks divide: of an expert's 256 columns a group of 32 each."""
WIDE = ("ep8", "tp8", "tp8ep2", "tp8ep4", "pp2tp4", "pp2tp4ep2", "pp4tp2", "pp4ep2")
ALWAYS = ("pp8", "pp2ep4")


@pytest.mark.parametrize("name", [*ALWAYS, *(pytest.param(name, marks=pytest.mark.parity) for name in WIDE)])
def test_eight_ranks(name: str, tmp_path: Path) -> None:
    layout = LayoutConfig(layout=name)
    assert layout.pp * max(layout.tp, layout.ep) == 8
    folder = write_tiny(tmp_path / "m", "kimi_k2_int4", seed=8, tokenizer=False, **K2)
    asked = prompts(8, 12, longest=40)
    params = SamplingParams(temperature=0.0, max_tokens=10, logprobs=2, ignore_eos=True)
    with LLM(
        str(folder), dtype="float32", device="cpu", max_len=64, chunk=24, pp=layout.pp, tp=layout.tp, ep=layout.ep
    ) as llm:
        got = llm.generate(asked, params)
        assert llm.mesh.num_ranks == 8
    reference = load_reference(folder, tmp_path / "plain")
    assert [one.prompt_token_ids for one in got] == asked
    for one in got:
        check(reference, written_by(one), name)
