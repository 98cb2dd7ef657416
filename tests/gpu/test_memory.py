"""What GPUs hold once an engine is ready is what the plan says, each its own; and nothing is compiled after that."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.plan.inventory import rank_bytes
from tests.gpu.test_parity import K2, QWEN
from tests.tiny import tiny_config, write_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

WIDE: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32768, "max_position_embeddings": 4096,
}  # fmt: skip
"""3.7 GB: more than what a process takes besides."""
KV = 1 << 30
BESIDE = 2 << 30
"""A context, libraries, graphs and what steps need: at most."""


@dataclass(frozen=True)
class Case:
    """One engine to start."""

    name: str
    layout: dict[str, Any]
    num_gpus: int = 2


CASES = (
    Case("pp2-7,1", {"pp": 2, "split": (7, 1)}),
    Case("pp2-1,7", {"pp": 2, "split": (1, 7)}),
    Case("tp2", {"tp": 2}),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_gpu_holds_what_the_plan_says_and_none_holds_anothers(case: Case, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama") | WIDE | {"torch_dtype": "bfloat16"}))
    for device in range(2):
        torch.zeros(1, device=f"cuda:{device}")
    torch.cuda.synchronize()
    free = [torch.cuda.mem_get_info(device)[0] for device in range(2)]
    with LLM(
        str(tmp_path),
        device="cuda",
        weights="random",
        chunk=512,
        max_len=2048,
        max_running=8,
        kv_memory=KV,
        **case.layout,
    ) as llm:
        held = [before - torch.cuda.mem_get_info(device)[0] for device, before in enumerate(free)]
        stages, spec, mesh = llm.status.stages, llm.spec, llm.mesh
        for device, got in enumerate(held):
            stage = device if mesh.pp == 2 else 0
            planned = rank_bytes(
                spec, mesh.tp, mesh.layers_of(stage), first=stage == 0, last=stage == mesh.pp - 1
            )  # fmt: skip
            assert stages[stage].weight_bytes == pytest.approx(planned, rel=1e-3)
            least = planned + stages[stage].kv_bytes
            assert least <= got <= least + BESIDE, f"GPU {device} holds {got} bytes, {planned:.0f} of weights planned"
    # The two differ by more than what is beside them, so one could not hold the other's unseen.
    if mesh.pp == 2:
        assert abs(held[0] - held[1]) > 5 * (WIDE["hidden_size"] * WIDE["intermediate_size"] * 3 * 2)


@pytest.mark.parametrize(
    ("family", "changes", "graphs"),
    [("kimi_k2_int4", K2, True), ("qwen3_moe", QWEN, True), ("kimi_k2_int4", K2, False)],
    ids=["k2", "qwen", "k2-no-graphs"],
)
def test_nothing_is_compiled_while_a_request_waits(
    family: str, changes: dict[str, Any], graphs: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny(
        tmp_path / "m", family, dtype="bfloat16", seed=7, tokenizer=False, **changes | {"max_position_embeddings": 4096}
    )
    source = random.Random(1)
    with LLM(
        str(folder), device="cuda", dtype="bfloat16", chunk=256, max_len=1024, max_running=16, kv_memory=256 << 20,
        graphs=graphs,
    ) as llm:  # fmt: skip
        for lengths in ((1,), (2, 3), (17,), (130, 1, 64), (255, 256, 257, 600), (33,) * 16, (5, 700, 31)):
            prompts = [[source.randrange(250) for _ in range(length)] for length in lengths]
            for temperature in (0.0, 0.8):
                llm.generate(prompts, SamplingParams(temperature=temperature, top_p=0.9, max_tokens=5, logprobs=2))
    assert "was made while requests wait" not in capfd.readouterr().err
