"""FlashInfer's kernels through our plans, against float64: scattered pages, mixed steps, plans that run ahead."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.kernels.flashinfer import FlashInferAttention, Planner, Shape
from headrace.kernels.gqa_attention import gqa_reference
from headrace.kernels.mla_attention import mla_reference
from tests.kernels.paged_rows import Rows, error, make_rows
from tests.tiny import write_tiny

pytest.importorskip("flashinfer")

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]  # kernels are compiled when they are first planned

DEVICE = torch.device("cuda")
DECODE = [(3, 0, 1), (-1, 5, 1), (0, 1300, 1), (7, 63, 1), (2, 64, 1), (5, 127, 1), (-1, 0, 1), (6, 700, 1)]
MIXED = [(3, 0, 1), (2, 64, 1), (-1, 5, 2), (0, 400, 90), (7, 0, 133), (5, 513, 3), (1, 9, 1)]
GQA = Shape(32, 8, 128, 128, 128**-0.5, 16, torch.bfloat16)
MLA = Shape(64, 1, 576, 512, 192**-0.5, 16, torch.bfloat16)
SHAPES = [
    GQA,
    replace(GQA, num_heads=7, num_kv_heads=1, dim=64, value_dim=64, scale=64**-0.5, page_size=1),
    replace(GQA, num_heads=16, num_kv_heads=4, dim=256, value_dim=256, scale=256**-0.5, page_size=64),
    replace(GQA, page_size=3),
    MLA,
    replace(MLA, num_heads=16, page_size=1),
    replace(MLA, num_heads=128, page_size=64),
    replace(MLA, num_heads=8, page_size=3),
]


def plan(planner: Planner, rows: Rows) -> FlashInferAttention:
    slots, starts, counts, _ = (array.cpu().numpy().astype(np.int64) for array in rows.arrays)
    chunks = np.flatnonzero(counts != 1)
    num_decodes = int(chunks[0]) if len(chunks) else len(counts)
    return planner.plan(slots, starts, counts, rows.page_table.cpu().numpy(), num_decodes)


def inputs(rows: Rows, shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kept = (shape.dim,) if shape.latent else (2, shape.num_kv_heads, shape.dim)
    cache = torch.randn(*rows.held.shape, *kept, device=DEVICE, dtype=shape.dtype)
    fused = torch.randn(rows.tokens, shape.num_heads + 2, shape.dim, device=DEVICE, dtype=shape.dtype) * 2
    at = rows.arrays
    if shape.latent:
        q = fused[:, : shape.num_heads].contiguous()
        expected = mla_reference(q.double(), cache.double(), *at, rows.page_table, shape.value_dim, shape.scale)
    else:
        q = fused[:, : shape.num_heads]
        expected = gqa_reference(q.double(), cache.double(), *at, rows.page_table, shape.scale)
    return q, cache, expected


def run(attention: FlashInferAttention, shape: Shape, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    if shape.latent:
        return attention.mla(q, cache, shape.value_dim, shape.scale)
    return attention.gqa(q, cache, shape.scale)


@pytest.mark.parametrize("kind", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(shape: Shape, kind: list[tuple[int, int, int]]) -> None:
    torch.manual_seed(1)
    rows = make_rows(kind, shape.page_size, "cuda")
    q, cache, expected = inputs(rows, shape)
    got = run(plan(Planner(shape, DEVICE, 1), rows), shape, q, cache)
    assert error(got, expected) < 1e-2
    assert not got[rows.padding].any()


@pytest.mark.parametrize("shape", [GQA, MLA], ids=["gqa", "mla"])
def test_plans_made_while_the_device_is_behind(shape: Shape) -> None:
    torch.manual_seed(2)
    planner = Planner(shape, DEVICE, 2)
    made = [
        make_rows([(3, 5, 1), (0, 100 * n, 1), (7, 0, 30 + n), (2, 40, 5)], shape.page_size, "cuda") for n in range(5)
    ]
    given = [inputs(rows, shape) for rows in made]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # a tenth of a second: no copy of a plan has happened when the next one is made
    got = [run(plan(planner, rows), shape, q, cache) for rows, (q, cache, _) in zip(made, given, strict=True)]
    for one, (_, _, expected) in zip(got, given, strict=True):
        assert error(one, expected) < 1e-2


LLAMA: dict[str, Any] = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}


def test_an_engine(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m", "llama", dtype="bfloat16", seed=7, tokenizer=False, **LLAMA)
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1, ignore_eos=True)
    prompts = [[(7 * i + n) % 250 for i in range(n)] for n in (1, 17, 130)]
    found = []
    for attention in ("flashinfer", "triton"):
        with LLM(str(folder), device="cuda", attention=attention, chunk=64, max_len=256, kv_memory=64 << 20) as llm:
            if attention == "flashinfer":
                assert {stage.backend for stage in llm.status.stages} == {"flashinfer"}
            found.append([(one.logprobs or [])[0].logprob for one in llm.generate(prompts, params)])
    assert found[0] == pytest.approx(found[1], abs=0.15)
