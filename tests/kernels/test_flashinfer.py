"""Plans for FlashInfer, on a fake of it that holds every argument to the library's contract, against the reference."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.attention import Expansion
from headrace.kernels.flashinfer import LEAST_WORKSPACE, FlashInferAttention, Planner, Shape, workspace_bytes
from headrace.kernels.gqa_attention import gqa_reference
from headrace.kernels.mla_attention import mla_reference
from tests.fakes import flashinfer
from tests.kernels.paged_rows import SLOTS, Rows, error, make_rows, poison

CPU = torch.device("cpu")
GQA = Shape(6, 2, 64, 64, 64**-0.5, 16, torch.bfloat16)
MLA = Shape(4, 1, 576, 512, 192**-0.5, 16, torch.bfloat16)
ROUNDED = 1e-2
"""bfloat16 results, norm-wise; a position more or less is off by far more."""


@pytest.fixture(autouse=True, scope="module")
def library() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", flashinfer)
        yield


def plan(planner: Planner, rows: Rows, expansion: Expansion | None = None) -> FlashInferAttention:
    slots, starts, counts, _ = (array.numpy().astype(np.int64) for array in rows.arrays)
    chunks = np.flatnonzero(counts != 1)
    num_decodes = int(chunks[0]) if len(chunks) else len(counts)
    return planner.plan(slots, starts, counts, rows.page_table.numpy(), num_decodes, expansion)


def inputs(rows: Rows, shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, the cache, NaN wherever nothing may be read, and what the attention is."""
    kept = (2, shape.num_kv_heads, shape.dim) if not shape.latent else (shape.dim,)
    cache = torch.randn(*rows.held.shape, *kept, dtype=shape.dtype)
    if shape.latent:
        q = torch.randn(rows.tokens, shape.num_heads, shape.dim, dtype=shape.dtype) * 2
        expected = mla_reference(
            q.double(), cache.double(), *rows.arrays, rows.page_table, shape.value_dim, shape.scale
        )
    else:
        fused = torch.randn(rows.tokens, shape.num_heads + 2 * shape.num_kv_heads, shape.dim, dtype=shape.dtype) * 2
        q = fused[:, : shape.num_heads]
        expected = gqa_reference(q.double(), cache.double(), *rows.arrays, rows.page_table, shape.scale)
    return q, poison(cache, rows), expected


def run(attention: FlashInferAttention, shape: Shape, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    if shape.latent:
        return attention.mla(q, cache, shape.value_dim, shape.scale)
    return attention.gqa(q, cache, shape.scale)


def check(attention: FlashInferAttention, shape: Shape, rows: Rows) -> None:
    q, cache, expected = inputs(rows, shape)
    got = run(attention, shape, q, cache)
    assert got.shape == expected.shape and got.dtype == shape.dtype
    assert error(got, expected) < ROUNDED
    assert not got[rows.padding].any()


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Rows (slot, start, count): single tokens, then chunks, and perhaps single tokens behind those; some are pads."""
    slots = draw(st.permutations(range(SLOTS)))
    num = draw(st.integers(1, SLOTS))
    decodes = draw(st.integers(0, num))
    rows = []
    for i, slot in enumerate(slots[:num]):
        count = 1 if i < decodes else draw(st.integers(1, 20))
        rows.append((slot if draw(st.integers(0, 4)) else -1, draw(st.integers(0, 40)), count))
    return rows


@settings(max_examples=60, deadline=None)
@given(rows=steps(), size=st.integers(1, 17), shape=st.sampled_from([GQA, replace(GQA, num_kv_heads=6), MLA]))
def test_any_rows_and_any_page_size(rows: list[tuple[int, int, int]], size: int, shape: Shape) -> None:
    made = make_rows(rows, size)
    shape = replace(shape, page_size=size)
    check(plan(Planner(shape, CPU, 1), made), shape, made)


@pytest.mark.parametrize("shape", [GQA, MLA])
def test_one_plan_serves_every_layer_and_waits_for_the_next_ones(shape: Shape) -> None:
    planner = Planner(shape, CPU, 3)
    made = [make_rows([(3, 5, 1), (0, n, 1), (7, 0, 30 + n), (2, 40, 5)], shape.page_size) for n in range(3)]
    planned = [plan(planner, rows) for rows in made]
    for attention, rows in zip(planned, made, strict=True):
        for _ in range(2):
            check(attention, shape, rows)
    plan(planner, make_rows([(1, 9, 1)], shape.page_size))  # in the place of the first
    with pytest.raises(AssertionError):
        check(planned[0], shape, made[0])


def test_chunks_whose_keys_and_values_are_made_are_not_planned() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    rows = make_rows([(3, 5, 1), (0, 20, 1), (7, 0, 30)], MLA.page_size)
    attention = plan(Planner(MLA, CPU, 1), rows, Expansion(2, none, none, none, none, none, 30))
    assert attention.expansion is not None
    q, cache, expected = inputs(rows, MLA)
    assert error(run(attention, MLA, q[:2], cache), expected[:2]) < ROUNDED
    alone = make_rows([(7, 0, 30)], MLA.page_size)
    assert plan(Planner(MLA, CPU, 1), alone, Expansion(0, none, none, none, none, none, 30)).parts == ()


def test_what_was_not_planned_for_is_not_computed() -> None:
    rows = make_rows([(3, 5, 1), (0, 4, 9)], GQA.page_size)
    attention = plan(Planner(GQA, CPU, 1), rows)
    q, cache, _ = inputs(rows, GQA)
    with pytest.raises(AssertionError):
        attention.gqa(q, cache, 2 * GQA.scale)
    with pytest.raises(AssertionError):
        attention.gqa(q[:-1], cache, GQA.scale)
    with pytest.raises(AssertionError):
        attention.gqa(q.float(), cache.float(), GQA.scale)
    with pytest.raises(AssertionError):
        attention.gqa(q, cache[:, :8], GQA.scale)


def test_the_workspace_holds_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.kernels.flashinfer.num_sms", lambda device: 132)
    assert workspace_bytes(MLA, CPU) == workspace_bytes(GQA, CPU) == LEAST_WORKSPACE
    many = replace(GQA, num_heads=64, num_kv_heads=4, dim=128, value_dim=128)
    # 264 parts of 4 KV heads' groups, 16 heads of them in tiles of 128 pairs.
    assert workspace_bytes(many, CPU) >= 264 // 4 * 64 * 128 * (128 + 1) * 4
