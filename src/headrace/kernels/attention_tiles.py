"""What the paged attention kernels share: tile sizes, how a context is split, and the merge of the splits.

Shapes: T tokens of the step, R rows, H query heads, D value dims, Z splits of a context.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from headrace.kernels.device import limits
from headrace.kernels.jit import await_inputs, jit, launch_options, let_next_start, tl, triton

SHARED_SM90 = 232448
SHARED_SM120 = 101376
MAX_SPLITS = 128
"""Splits of one context; their partial results are merged by one program a head."""
SPLIT_COST = 192
"""What one more program costs, in context positions: queries read, partial results written, the pipeline filled."""
MERGE_COST = 96
"""What merging costs once, in the same unit: a launch."""
SCRATCH = 6144
MERGE_TILE = 2048
"""(Part, dim) pairs that a merging program takes at once."""
MERGE_NARROW = 1024
"""Heads of all tokens up to which a merging program takes a quarter of a wide head: rows are few, parts are many."""
PRECISION = {torch.bfloat16: "tf32", torch.float16: "tf32", torch.float32: "ieee"}
"""Of products: float32 is never rounded to TF32; the word means nothing for narrower types."""


@dataclass(frozen=True)
class Tiles:
    """How a kernel is cut: query rows and context positions a step, warps, tiles of the context in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, dim: int, kept: int, element: int) -> int:
        """Shared memory, at most: queries [block_m, dim], tiles [block_n, kept] in flight, what warps exchange."""
        return (self.block_m * dim + self.num_stages * self.block_n * kept) * element + SCRATCH


def padded(dim: int) -> int:
    """The tile dim of a head dim: a power of two, 16 at least."""
    return max(16, 1 << (dim - 1).bit_length())


# First that fits wins. Rows: (most query rows it is meant for, tiles).
_GQA = (
    (16, Tiles(16, 64, 4, 3)), (16, Tiles(16, 64, 4, 2)), (16, Tiles(16, 32, 4, 2)), (16, Tiles(16, 16, 4, 2)),
    (32, Tiles(32, 64, 4, 3)), (32, Tiles(32, 64, 4, 2)), (32, Tiles(32, 32, 4, 2)), (32, Tiles(32, 16, 4, 2)),
    (64, Tiles(64, 64, 4, 3)), (64, Tiles(64, 64, 4, 2)), (64, Tiles(64, 32, 4, 2)), (64, Tiles(64, 16, 4, 2)),
)  # fmt: skip
_GQA_WIDE = (Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 16, 4, 2))
_LATENT = (Tiles(64, 64, 8, 2), Tiles(16, 32, 8, 2), Tiles(16, 16, 8, 2))
_EXPANDED = (Tiles(128, 128, 8, 2), Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2), Tiles(32, 16, 4, 1))


def _first(choices: tuple[Tiles, ...], limit: int, dim: int, kept: int, element: int) -> Tiles:
    for tiles in choices:
        if tiles.shared_bytes(dim, kept, element) <= limit:
            return tiles
    raise ValueError(f"attention over {dim} dims does not fit {limit} bytes of shared memory")


@cache
def gqa_tiles(shared_limit: int, queries: int, dim: int, element: int) -> Tiles:
    """For `queries` (head, position) pairs that share a KV head."""
    wide = padded(dim)
    if queries > 64:
        return _first(_GQA_WIDE, shared_limit, wide, 2 * wide, element)
    need = min(padded(queries), 64)
    return _first(tuple(tiles for most, tiles in _GQA if most == need), shared_limit, wide, 2 * wide, element)


@cache
def latent_tiles(shared_limit: int, queries: int, dim: int, value_dim: int, element: int) -> Tiles:
    """For `queries` (head, position) pairs over one latent row a position; values are its first `value_dim`."""
    wide = padded(value_dim) + padded(dim - value_dim)
    choices = tuple(tiles for tiles in _LATENT if tiles.block_m <= max(16, padded(queries))) or _LATENT
    return _first(choices, shared_limit, wide, wide, element)


@cache
def expanded_tiles(shared_limit: int, dim: int, value_dim: int, element: int) -> Tiles:
    """For chunks over packed keys [dim] and values [value_dim]."""
    wide = padded(value_dim) + (padded(dim - value_dim) if dim > value_dim else 0)
    return _first(_EXPANDED, shared_limit, wide, wide + padded(value_dim), element)


def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that one block may have."""
    return limits(device).smem if device.type == "cuda" else SHARED_SM120


def num_sms(device: torch.device) -> int:
    """Multiprocessors of the device."""
    return limits(device).multiprocessors if device.type == "cuda" else 1


@cache
def decode_splits(num_rows: int, num_blocks: int, max_len: int, sms: int, step: int = 64) -> int:
    """In how many parts at most each context is computed: what takes the least time if every row is `max_len` long.

    `num_blocks` programs a row and part (KV heads, or blocks of heads), each program alone on one of `sms` places.
    Of those that come within a sixteenth of it, the fewest: a graph's `max_len` is the model's, most rows are far
    shorter, and parts that they do not need (`least_part`) are programs that start for nothing.
    """
    costs: dict[int, int] = {}
    for splits in range(1, max(1, min(MAX_SPLITS, -(-max_len // step))) + 1):
        part = -(-max_len // (splits * step)) * step
        waves = -(-num_rows * num_blocks * splits // sms)
        cost = waves * (part + SPLIT_COST) + (MERGE_COST if splits > 1 else 0)
        costs[splits] = cost
    return next(splits for splits, cost in costs.items() if cost <= min(costs.values()) * 17 // 16)


@cache
def least_part(programs: int, places: int) -> int:
    """Positions that a part of a context has at least, if one part a row is `programs` programs on `places` places.

    A part costs about as much as SPLIT_COST positions, and merging on top. Few rows leave most of the device idle, so
    even short parts win; many rows fill it alone, and each is better done by one program that writes the result itself.
    """
    for part, share in ((64, 16), (128, 5), (256, 2)):
        if programs * share <= places:
            return part
    return 512


@jit
def split_length(length, num_splits, least, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Positions of one part of a context: whole tiles, and not fewer than `least`; so the last parts may be empty."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, num_splits), BLOCK_N) * BLOCK_N, least)


@jit
def fold(s, top, mass):  # type: ignore[no-untyped-def]
    """One tile of base-2 scores into the running softmax: (weights, what earlier sums keep, new maximum, new mass)."""
    new = tl.maximum(top, tl.max(s, 1))
    safe = tl.where(new == -float("inf"), 0.0, new)  # a part of the context may begin past a position's own end
    p = tl.exp2(s - safe[:, None])
    keep = tl.exp2(top - safe)
    return p, keep, new, mass * keep + tl.sum(p, 1)


@jit
def finish(acc, top, mass):  # type: ignore[no-untyped-def]
    """(acc / mass, base-2 logarithm of the mass); zeros and -inf where nothing was seen."""
    some = tl.where(mass > 0, mass, 1.0)
    return acc / some[:, None], top + tl.log2(some)


@jit
def _merge(  # type: ignore[no-untyped-def]
    partial, lse, out, row_slot, row_start, row_count, row_offset, num_heads, num_splits, least, most_tokens,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Z: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One token, head and block of dims: the parts weighted by the mass that each one saw; padding becomes zeros."""
    await_inputs(PDL)
    row, head, dims = tl.program_id(1), tl.program_id(2) // tl.cdiv(D, BLOCK_D), tl.program_id(2) % tl.cdiv(D, BLOCK_D)
    at = tl.program_id(0)
    start, count, token = tl.load(row_start + row), 1, row
    if CHUNKS:
        count, token = tl.load(row_count + row), tl.load(row_offset + row) + at
    if at >= count:
        return
    length = start + count
    if tl.load(row_slot + row) < 0:
        length = 0
    part = split_length(length, num_splits, least, BLOCK_N)
    if (length > 0) & (length <= part):
        return  # a single part: written where it was computed
    used = tl.minimum(start + at, length - 1) // part + 1  # parts that begin at or before this token's own position
    if length == 0:
        used = 0
    d = dims * BLOCK_D + tl.arange(0, BLOCK_D)
    first = (token * num_heads + head).to(tl.int64)
    parts = ((row * most_tokens + at) * num_heads + head).to(tl.int64) * num_splits
    most = -float("inf")
    mass = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for z in range(0, used, BLOCK_Z):
        zs = z + tl.arange(0, BLOCK_Z)
        seen = tl.load(lse + parts + zs, mask=zs < used, other=-float("inf"))
        values = tl.load(
            partial + (parts + zs)[:, None] * D + d[None, :],
            mask=(zs < used)[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip
        new = tl.maximum(most, tl.max(seen, 0))
        weight = tl.exp2(seen - new)
        acc = acc * tl.exp2(most - new) + tl.sum(values * weight[:, None], 0)
        mass = mass * tl.exp2(most - new) + tl.sum(weight, 0)
        most = new
    acc = acc / tl.where(mass > 0, mass, 1.0)
    let_next_start(PDL)
    tl.store(out + first * D + d, acc.to(out.dtype.element_ty), mask=d < D)


def merge(
    partial_RHZD: torch.Tensor, lse_RHZ: torch.Tensor, out_THD: torch.Tensor, row_slot: torch.Tensor,
    row_start: torch.Tensor, row_count: torch.Tensor | None, row_offset: torch.Tensor | None, max_count: int,
    least: int, block_n: int,
) -> None:  # fmt: skip
    """Write `out` from the parts. `lse`: base-2 logarithm of each part's mass. Empty parts are not read."""
    _, heads, splits, dim = partial_RHZD.shape
    block_d = padded(dim)
    if row_slot.shape[0] * max_count * heads <= MERGE_NARROW:
        block_d = min(block_d, 128)
    _merge[(max_count, row_slot.shape[0], heads * triton.cdiv(dim, block_d))](
        partial_RHZD, lse_RHZ, out_THD, row_slot, row_start, row_count, row_offset, heads, splits, least, max_count,
        D=dim, BLOCK_D=block_d, BLOCK_Z=max(2, MERGE_TILE // block_d), BLOCK_N=block_n, CHUNKS=row_count is not None,
        **launch_options(out_THD.device),
    )  # fmt: skip


def reference_paged(
    q_THD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, row_slot: torch.Tensor, row_start: torch.Tensor,
    row_count: torch.Tensor, row_offset: torch.Tensor, page_table: torch.Tensor, scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Row by row over pages `keys` [N, S, K, D] and `values` [N, S, K, V]; copies to the host, so never captured."""
    heads, kv_heads, size = q_THD.shape[1], keys.shape[2], keys.shape[1]
    wide = torch.float64 if q_THD.dtype == torch.float64 else torch.float32
    out = q_THD.new_zeros(q_THD.shape[0], heads, values.shape[-1]) if out is None else out
    rows = zip(row_slot.tolist(), row_start.tolist(), row_count.tolist(), row_offset.tolist(), strict=True)
    for slot, start, count, offset in rows:
        if slot < 0 or count == 0:
            out[offset : offset + count] = 0
            continue
        pos = torch.arange(start + count, device=q_THD.device)
        at = page_table[slot].long()[pos // size], pos % size
        k, v = (x[at].to(wide).repeat_interleave(heads // kv_heads, 1) for x in (keys, values))
        scores = torch.einsum("thd,lhd->htl", q_THD[offset : offset + count].to(wide), k) * scale
        scores.masked_fill_(pos[None, :] > pos[start:, None], float("-inf"))
        out[offset : offset + count] = torch.einsum("htl,lhd->thd", scores.softmax(-1), v).to(out.dtype)
    return out
