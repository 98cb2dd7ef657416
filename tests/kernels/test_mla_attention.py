"""Latent attention: the kernels under the interpreter against float64, and what they compile to for real devices."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from headrace.kernels import attention_tiles
from headrace.kernels.attention_tiles import SHARED_SM90, SHARED_SM120, expanded_tiles, latent_tiles, merge
from headrace.kernels.mla_attention import (
    expanded_kernel,
    expanded_reference,
    mla_decode,
    mla_kernel,
    mla_prefill,
    mla_prefill_expanded,
    mla_reference,
)
from tests.kernels.paged_rows import error, make_rows, poison
from tests.kernels.test_gqa_attention import DECODE, MIXED

ROOT = Path(__file__).parents[2]

COUNTS, LENGTHS, OFFSETS, BASES = ([1, 3, 40], [40, 3, 50], [0, 1, 4], [5, 80, 120])


def test_decode_is_prefill_of_one() -> None:
    torch.manual_seed(0)
    rows = make_rows(DECODE, 16)
    q, cache = torch.randn(rows.tokens, 3, 48), poison(torch.randn(*rows.held.shape, 48), rows)
    one = mla_decode(q, cache, rows.slot, rows.start, rows.page_table, 32, 0.3, 4)
    many = mla_prefill(q, cache, *rows.arrays, rows.page_table, 32, 0.3, 1)
    assert torch.equal(one, many)
    assert not one[rows.padding].any()


def packed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    offsets, counts, bases, lengths = (torch.tensor(x, dtype=torch.int32) for x in (OFFSETS, COUNTS, BASES, LENGTHS))
    return offsets, counts, bases, lengths


def test_expanded_is_latent_with_the_weights_multiplied_out() -> None:
    torch.manual_seed(0)
    heads, rank, nope, rope, value = 2, 24, 16, 8, 20
    rows = make_rows([(1, 6, 9), (4, 0, 5)], 4)
    latent = torch.randn(*rows.held.shape, rank + rope, dtype=torch.float64)
    w_uk, w_uv = (torch.randn(heads, rank, n, dtype=torch.float64) for n in (nope, value))
    q = torch.randn(rows.tokens, heads, nope + rope, dtype=torch.float64)
    absorbed = torch.cat((torch.einsum("thn,hcn->thc", q[..., :nope], w_uk), q[..., nope:]), -1)
    through = torch.einsum(
        "thc,hcv->thv", mla_reference(absorbed, latent, *rows.arrays, rows.page_table, rank, 0.3), w_uv
    )
    flat = torch.cat(
        [latent[rows.page_table[slot].long()].flatten(0, 1)[:length] for slot, length in ((1, 15), (4, 5))]
    )
    k, v = (torch.einsum("lc,hcn->lhn", flat[:, :rank], w) for w in (w_uk, w_uv))
    bases, lengths = (torch.tensor(x, dtype=torch.int32) for x in ([0, 15], [15, 5]))
    got = mla_prefill_expanded(q, k, flat[:, rank:], v, rows.offset, rows.count, bases, lengths, 0.3, 9)
    torch.testing.assert_close(got, through)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("size", "heads", "dim", "value", "splits", "least", "decode"),
    [
        (1, 2, 48, 32, 1, 1, True), (3, 3, 40, 24, 3, 16, True), (16, 2, 48, 32, 4, 64, True),
        (16, 2, 48, 32, 1, 1, False), (3, 3, 40, 24, 2, 16, False), (16, 2, 48, 32, 2, 32, False),
    ],
)  # fmt: skip
def test_rows_of_any_kind(size: int, heads: int, dim: int, value: int, splits: int, least: int, decode: bool) -> None:
    torch.manual_seed(size)
    rows = make_rows(DECODE if decode else MIXED, size)
    q, cache = torch.randn(rows.tokens, heads, dim), torch.randn(*rows.held.shape, dim)
    expected = mla_reference(q.double(), cache.double(), *rows.arrays, rows.page_table, value, 0.3)
    count, offset, most = (None, None, 1) if decode else (rows.count, rows.offset, int(rows.count.max()))
    poison(cache, rows)
    out = torch.full((rows.tokens, heads, value), float("nan"))
    page_table = rows.page_table
    got = mla_kernel(
        q, cache, rows.slot, rows.start, count, offset, page_table, value, 0.3, most, splits, None, out, least
    )
    assert error(got, expected) < 1e-5
    assert not got[rows.padding].any()


@pytest.mark.interpreted
@pytest.mark.parametrize("narrow", [0, 1024])
def test_parts_are_merged_by_their_mass(narrow: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tiles, "MERGE_NARROW", narrow)
    torch.manual_seed(narrow)
    dim, splits, used = 300, 24, (0, 1, 7, 24)  # padding, a row of one part, which is not touched, and others
    slot = torch.tensor([-1, 0, 1, 2], dtype=torch.int32)
    start = torch.tensor([5, 31, 32 * 7 - 5, 32 * 24 - 1], dtype=torch.int32)
    partial, lse = torch.randn(4, 2, splits, dim), torch.randn(4, 2, splits)
    expected, out = torch.zeros(4, 2, dim), torch.full((4, 2, dim), 3.0)
    expected[1] = 3.0
    for row in (2, 3):
        weight = torch.softmax(lse[row, :, : used[row]] * math.log(2), -1)
        expected[row] = torch.einsum("hz,hzd->hd", weight, partial[row, :, : used[row]])
    for row, parts in enumerate(used):
        for x in (partial, lse):
            x[row, :, parts:] = float("nan")
    merge(partial, lse, out, slot, start, None, None, 1, 32, 16)
    torch.testing.assert_close(out, expected)


@pytest.mark.interpreted
@pytest.mark.parametrize(("heads", "nope", "rope", "value"), [(2, 32, 16, 32), (1, 24, 8, 40)])
def test_expanded_rows(heads: int, nope: int, rope: int, value: int) -> None:
    torch.manual_seed(nope)
    q, kv = torch.randn(sum(COUNTS), heads, nope + rope), torch.randn(220, heads, nope + value)
    latent = torch.randn(220, rope + 7)
    views = kv[..., :nope], latent[:, 7:], kv[..., nope:]
    wide = views[0].double(), views[1].double(), views[2].double()
    expected = expanded_reference(q.double(), *wide, *packed(), 0.3)
    for x in (kv, latent):
        x[:5], x[45:80], x[170:] = (float("nan"),) * 3
    got = expanded_kernel(q, *views, *packed(), 0.3, max(COUNTS))
    assert error(got, expected) < 1e-5


def test_tiles_fit_the_device() -> None:
    for limit in (SHARED_SM90, SHARED_SM120):
        for queries in (8, 16, 64, 4096):
            assert latent_tiles(limit, queries, 576, 512, 2).shared_bytes(576, 576, 2) <= limit
        assert expanded_tiles(limit, 192, 128, 2).shared_bytes(192, 320, 2) <= limit
    assert latent_tiles(SHARED_SM120, 4, 48, 32, 4).block_m == 16


def test_compiled_shared_memory_is_what_the_tiles_say() -> None:
    pytest.importorskip("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled_attention"], env=env, cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 4
    for kernel in found:
        assert kernel["shared"] <= kernel["estimate"] <= kernel["limit"], kernel
