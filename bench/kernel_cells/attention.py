"""Cells of paged attention: latent decode and prefill of K2, expanded prefill, and grouped-query decode and prefill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from bench.kernel_cells import Cell

from headrace.kernels import mla_attention
from headrace.kernels.attention_tiles import Tiles
from headrace.kernels.gqa_attention import gqa_decode, gqa_prefill, gqa_splits
from headrace.kernels.mla_attention import mla_kernel, mla_prefill, mla_prefill_expanded, mla_splits

DEVICE = torch.device("cuda", 0)
DIM, VALUE, SCALE = 576, 512, 192**-0.5
SETS, SET_BYTES = 8, 400 << 20
"""At most so many inputs in turn, and at least so many bytes of them."""


def cells() -> Iterator[Cell]:
    """Latent decode first: it is what decode of K2 spends its attention on."""
    for rows in (1, 32, 256):
        for context in (1024, 16384, 65536):
            yield from latent_decode(rows, context, 64, 64)
    for heads in (32, 16):
        yield from latent_decode(32, 16384, heads, 64)
    for size in (1, 16):
        yield from latent_decode(32, 16384, 64, size)
    for rows, context in ((1, 1024), (8, 1024), (16, 1024), (32, 1024), (64, 400), (128, 200), (100, 1024)):
        yield from short_decode(rows, context)
    yield from latent_prefill(8192, 0)
    yield from latent_prefill(2048, 16384)
    yield from expanded(8192, 0, 64)
    yield from expanded(2048, 16384, 64)
    for rows, context in ((1, 1024), (1, 65536), (32, 1024), (32, 16384), (256, 1024), (256, 4096)):
        yield grouped_decode(rows, context)
    yield grouped_prefill(8192, 0)


def paged(rows: int, context: int, size: int, row_bytes: int) -> tuple[int, torch.Tensor, list[torch.Tensor]]:
    """(pages, page table, slots of each set of rows), pages in random order."""
    sets = max(1, min(SETS, -(-SET_BYTES // (rows * context * row_bytes))))
    each = -(-context // size)
    table = torch.randperm(sets * rows * each, device=DEVICE).int().view(sets * rows, each)
    slots = torch.arange(sets * rows, dtype=torch.int32, device=DEVICE).view(sets, rows)
    return table.numel(), table, list(slots.unbind())


def random(*shape: int) -> torch.Tensor:
    """bf16, filled in place: a whole float32 copy of a large cache would not fit."""
    return torch.empty(*shape, dtype=torch.bfloat16, device=DEVICE).normal_()


def exact(q_HC: torch.Tensor, kept_LC: torch.Tensor, scale: float) -> torch.Tensor:
    """[H, V] one token's latent attention in float64."""
    k = kept_LC.double()
    out: torch.Tensor = (q_HC.double() @ k.T * scale).softmax(-1) @ k[:, :VALUE]
    return out


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm-wise."""
    return float((got.double() - expected).norm() / expected.norm())


def latent_decode(rows: int, context: int, heads: int, size: int) -> Iterator[Cell]:
    """The shipped form and what it was chosen from."""
    pages, table, sets = paged(rows, context, size, 2 * DIM)
    cache, start = random(pages, size, DIM), torch.full((rows,), context - 1, dtype=torch.int32, device=DEVICE)
    q = random(rows, heads, DIM)
    chosen = mla_splits(rows, heads, context, DEVICE)
    variants: list[tuple[str, int, bool | None]] = [("", chosen, None)]
    if size == 64:
        variants += [("portable", chosen, False)]
        variants += [(f"splits{n}", n, None) for n in {max(1, chosen // 2), chosen * 2} - {chosen}]

    def call(slots: torch.Tensor, splits: int, hopper: bool | None) -> torch.Tensor:
        return mla_kernel(q, cache, slots, start, None, None, table, VALUE, SCALE, 1, splits, hopper)

    for name, splits, hopper in variants:
        calls: list[Callable[[], object]] = [partial(call, slots, splits, hopper) for slots in sets]

        def check(a: int = splits, b: bool | None = hopper) -> float:
            got = call(sets[0], a, b)
            last = cache[table[rows - 1].long()].flatten(0, 1)[:context]
            return relative(got[rows - 1], exact(q[rows - 1], last, SCALE))

        yield Cell(
            "mla_decode",
            {"rows": rows, "context": context, "heads": heads, "page": size},
            calls,
            bytes=rows * (context * DIM + heads * (DIM + VALUE)) * 2,
            flops=2.0 * rows * context * heads * (DIM + VALUE),
            variant=name,
            check=check,
            tags={"splits": str(splits)},
        )


def short_decode(rows: int, context: int, most: int = 262144) -> Iterator[Cell]:
    """Contexts far shorter than the length that a graph's splits were chosen for."""
    heads, size = 64, 64
    pages, table, sets = paged(rows, context, size, 2 * DIM)
    cache, start = random(pages, size, DIM), torch.full((rows,), context - 1, dtype=torch.int32, device=DEVICE)
    q, splits = random(rows, heads, DIM), mla_splits(rows, heads, most, DEVICE)
    for least in (None, 64, 128, 256, 512, 1024):
        calls: list[Callable[[], object]] = [
            lambda slots=slots, n=least: mla_kernel(  # type: ignore[misc]
                q, cache, slots, start, None, None, table, VALUE, SCALE, 1, splits, None, None, n
            )
            for slots in sets
        ]
        yield Cell(
            "mla_decode_short",
            {"rows": rows, "context": context, "max_len": most},
            calls,
            bytes=rows * (context * DIM + heads * (DIM + VALUE)) * 2,
            flops=2.0 * rows * context * heads * (DIM + VALUE),
            variant="" if least is None else f"least{least}",
            tags={"splits": str(splits)},
        )


def one_row(count: int, prefix: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slot, start, count and offset of a single chunk."""
    slot, start, counts, offset = torch.tensor([[0], [prefix], [count], [0]], dtype=torch.int32, device=DEVICE)
    return slot, start, counts, offset


def pairs(count: int, prefix: int) -> float:
    """(query, key) pairs of a causal chunk."""
    return count * prefix + count * (count + 1) / 2


def latent_prefill(count: int, prefix: int) -> Iterator[Cell]:
    """Absorbed attention of a chunk, both kernels."""
    size, length = 64, prefix + count
    cache, q = random(-(-length // size), size, DIM), random(count, 64, DIM)
    table = torch.randperm(len(cache), device=DEVICE).int().view(1, -1)
    rows = one_row(count, prefix)
    last = cache[table[0].long()].flatten(0, 1)[:length]
    for name, hopper in (("", None), ("portable", False)):

        def call(hopper: bool | None = hopper) -> torch.Tensor:
            if hopper is None:
                return mla_prefill(q, cache, *rows, table, VALUE, SCALE, count)
            return mla_kernel(q, cache, *rows, table, VALUE, SCALE, count, 1, hopper)

        yield Cell(
            "mla_prefill",
            {"tokens": count, "prefix": prefix},
            [call],
            bytes=(length * DIM + count * 64 * (DIM + VALUE)) * 2,
            flops=2 * 64 * (DIM + VALUE) * pairs(count, prefix),
            variant=name,
            check=lambda call=call: relative(call()[-1], exact(q[-1], last, SCALE)),  # type: ignore[misc]
        )


def expanded(count: int, prefix: int, heads: int) -> Iterator[Cell]:
    """Attention over keys and values that a product made."""
    length = prefix + count
    q, kv, kept = random(count, heads, 192), random(length, heads, 256), random(length, DIM)
    array = one_row(count, length)
    offset, kv_len, counts = array[3], array[1], array[2]

    def call(tiles: Tiles | None = None) -> torch.Tensor:
        module: Any = mla_attention
        chosen = module.expanded_tiles
        if tiles is not None:
            module.expanded_tiles = lambda *_: tiles
        try:
            return mla_prefill_expanded(
                q, kv[..., :128], kept[:, 512:], kv[..., 128:], offset, counts, offset, kv_len, SCALE, count
            )
        finally:
            module.expanded_tiles = chosen

    def check(tiles: Tiles | None = None) -> float:
        keys = torch.cat((kv[..., :128], kept[:, None, 512:].expand(-1, heads, -1)), -1).double()
        weights = (torch.einsum("hd,lhd->hl", q[-1].double(), keys) * SCALE).softmax(-1)
        return relative(call(tiles)[-1], torch.einsum("hl,lhd->hd", weights, kv[..., 128:].double()))

    for name, tiles in (("", None), ("128x64x3", Tiles(128, 64, 8, 3)), ("128x64x2", Tiles(128, 64, 8, 2))):
        yield Cell(
            "mla_prefill_expanded",
            {"tokens": count, "prefix": prefix},
            [lambda tiles=tiles: call(tiles)],  # type: ignore[misc]
            bytes=(length * heads * 256 + count * heads * 320) * 2,
            flops=2 * heads * 320 * pairs(count, prefix),
            variant=name,
            check=lambda tiles=tiles: check(tiles),  # type: ignore[misc]
        )


def grouped_decode(rows: int, context: int) -> Cell:
    """64 heads over 8 KV heads of 128."""
    size, heads, kv_heads, dim = 64, 64, 8, 128
    pages, table, sets = paged(rows, context, size, 4 * kv_heads * dim)
    cache, start = random(pages, size, 2, kv_heads, dim), torch.full((rows,), context - 1, device=DEVICE).int()
    q, splits = random(rows, heads, dim), gqa_splits(rows, kv_heads, context, DEVICE)
    calls: list[Callable[[], object]] = [
        lambda slots=slots: gqa_decode(q, cache, slots, start, table, dim**-0.5, splits)  # type: ignore[misc]
        for slots in sets
    ]
    return Cell(
        "gqa_decode",
        {"rows": rows, "context": context},
        calls,
        bytes=rows * (context * 2 * kv_heads + 2 * heads) * dim * 2,
        flops=4.0 * rows * context * heads * dim,
        tags={"splits": str(splits)},
    )


def grouped_prefill(count: int, prefix: int) -> Cell:
    """64 heads over 8 KV heads of 128."""
    size, heads, kv_heads, dim = 64, 64, 8, 128
    cache, q = random(-(-(prefix + count) // size), size, 2, kv_heads, dim), random(count, heads, dim)
    table, rows = torch.randperm(len(cache), device=DEVICE).int().view(1, -1), one_row(count, prefix)
    return Cell(
        "gqa_prefill",
        {"tokens": count, "prefix": prefix},
        [lambda: gqa_prefill(q, cache, *rows, table, dim**-0.5, count)],
        bytes=(2 * kv_heads * (prefix + count) + 2 * heads * count) * dim * 2,
        flops=4 * heads * dim * pairs(count, prefix),
    )
