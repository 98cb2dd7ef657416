"""INT4 experts for decode: the fragment order, the reference, and the CUDA source itself run on a CPU lane by lane."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F

from headrace.kernels.dispatch import ExpertPlan
from headrace.kernels.int4_experts import (
    SOURCE,
    Fragments,
    Tile,
    down,
    fits,
    gate_up,
    product_reference,
    repack,
    tile_for,
    unpack_fragments,
)
from headrace.weights.formats import dequantise, unpack_int4
from tests.kernels.emulated import emulated, needs_compiler


def blocks_of(ids_Tk: torch.Tensor, held: range, block: int, spare: int = 3) -> ExpertPlan:
    """The plan in plain Python, with `spare` unused blocks of nonsense at the end."""
    pairs = [(int(e) - held.start, p) for p, e in enumerate(ids_Tk.flatten()) if int(e) in held]
    rows: list[int] = []
    found: list[tuple[int, int, int]] = []
    for expert in range(len(held)):
        mine = [p for e, p in pairs if e == expert]
        for start in range(0, len(mine), block):
            found.append((expert, len(rows) + start, min(block, len(mine) - start)))
        rows += mine
    num_blocks = len(found)
    found += [(1 << 20, 1 << 20, 1 << 20)] * spare
    rows += [1 << 20] * (ids_Tk.numel() - len(rows))
    experts, firsts, counts = torch.tensor(found, dtype=torch.int32).T.contiguous()
    used = torch.tensor([num_blocks], dtype=torch.int32)
    return ExpertPlan(torch.tensor(rows, dtype=torch.int32), experts, firsts, counts, used, block)


def stored(experts: int, rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(-(1 << 31), 1 << 31, (experts, rows, columns // 8), generator=generator).to(torch.int32)
    scale = (torch.rand(experts, rows, columns // 32, generator=generator) * 0.02 + 0.001).bfloat16()
    return packed, scale


def expected(x: torch.Tensor, ids: torch.Tensor, held: range, matrices: torch.Tensor, *, gated: bool) -> torch.Tensor:
    """float64 at pair index, NaN where no held expert was chosen."""
    k = ids.shape[1]
    width = matrices.shape[1] // (2 if gated else 1)
    out = torch.full((ids.numel(), width), float("nan"), dtype=torch.float64)
    for pair, expert in enumerate(ids.flatten().tolist()):
        if expert in held:
            y = matrices[expert - held.start] @ x[pair // k if gated else pair].double()
            out[pair] = F.silu(y[:width]) * y[width:] if gated else y
    return out


def test_fragment_order_is_the_documented_one() -> None:
    packed, scale = stored(2, 32, 128)
    q = unpack_int4(packed).int() + 8
    words, scales = repack(packed.clone(), scale.clone())
    for x, nb, kb, lane, j in [(0, 0, 0, 0, 0), (1, 1, 1, 31, 3), (0, 1, 0, 13, 2), (1, 0, 1, 22, 1)]:
        g, t = divmod(lane, 4)
        c = 64 * kb + 32 * (j // 2) + 8 * t + 4 * (j % 2)
        word = int(words[x, nb, kb, lane, j])
        for nibble, (row, column) in enumerate([(0, 0), (8, 0), (0, 2), (8, 2), (0, 1), (8, 1), (0, 3), (8, 3)]):
            assert (word >> 4 * nibble) & 15 == int(q[x, 16 * nb + g + row, c + column])
        for half in range(2):
            for group in range(2):
                assert scales[x, nb, kb, g, half, group] == scale[x, 16 * nb + g + 8 * half, 2 * kb + group]


@pytest.mark.parametrize("shape", [(1, 16, 64), (3, 48, 192)])
def test_repack_stays_in_place_and_can_be_undone(shape: tuple[int, int, int]) -> None:
    packed, scale = stored(*shape)
    memory, scale_memory = packed.clone(), scale.clone()
    words, scales = repack(memory, scale_memory)
    assert words.data_ptr() == memory.data_ptr()
    assert scales.data_ptr() == scale_memory.data_ptr()
    back, scale_back = unpack_fragments(words, scales)
    assert torch.equal(back, packed)
    assert torch.equal(scale_back, scale)
    stack = Fragments(words, scales)
    assert (stack.rows, stack.columns) == shape[1:]
    last = shape[0] - 1
    expected_matrix = dequantise(packed[last], scale[last], torch.float32)
    assert torch.equal(stack.matrix(last, torch.float32), expected_matrix)


def test_fits() -> None:
    assert fits(16, 64)
    assert fits(4096, 7168, 2)
    assert not fits(16, 64, 2)
    assert not fits(24, 64)
    assert not fits(16, 96)


@pytest.mark.parametrize("held", [range(6), range(2, 5)])
def test_reference(held: range) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(6, generator=generator)[:2] for _ in range(11)])
    plan = blocks_of(ids, held, 8)
    packed, scale = stored(len(held), 64, 128)
    matrices = torch.stack([dequantise(p, s, torch.float64) for p, s in zip(packed, scale, strict=True)])
    stack = Fragments(*repack(packed, scale))
    x = torch.randn(11, 128, generator=generator)
    inner = torch.randn(22, 128, generator=generator)
    for got, want in (
        (gate_up(x, plan, stack), expected(x, ids, held, matrices, gated=True)),
        (down(inner, plan, stack), expected(inner, ids, held, matrices, gated=False)),
    ):
        chosen = ~want.isnan()
        torch.testing.assert_close(got.double()[chosen], want[chosen], rtol=1e-4, atol=1e-4)


def test_every_shape_has_a_tile() -> None:
    for columns in (64, 192, 1024, 2048, 7168):
        for pairs in (1, 8, 64, 1024, 8192):
            for gated in (True, False):
                tile = tile_for(gated, columns, pairs)
                assert tile.nb == 1
                # A multiprocessor has 64k registers; a lane needs about 64 for one row block and one block of tokens.
                assert 32 * tile.ks * tile.wr * tile.minb * 64 <= 1 << 16
    assert tile_for(True, 7168, 4096, 16).nb == 2


def emulate(x: torch.Tensor, plan: ExpertPlan, stack: Fragments, tile: Tile, grid: int, *, gated: bool) -> torch.Tensor:
    """What the kernel writes, over NaN; its loads stay inside and on their alignment, and every weight is read once."""
    steps = stack.columns // 64
    width = stack.rows // (2 if gated else 1)
    out = torch.full((plan.rows.shape[0], width), float("nan"), dtype=torch.bfloat16)
    loads = ctypes.c_long()

    def memory(tensor: torch.Tensor) -> ctypes.c_void_p:
        return ctypes.c_void_p(tensor.data_ptr())

    def sized(tensor: torch.Tensor) -> tuple[ctypes.c_void_p, ctypes.c_long]:
        return memory(tensor), ctypes.c_long(tensor.numel() * tensor.element_size())

    bad = emulated("int4_experts_emulated.cpp", SOURCE, tile.macros(gated, steps)).emulate(
        grid, *sized(x), *sized(stack.words), *sized(stack.scales), memory(out), memory(plan.rows),
        *(memory(t) for t in (plan.block_expert, plan.block_first, plan.block_count, plan.num_blocks)),
        width // 16, steps, plan.rows.shape[0] // x.shape[0], ctypes.byref(loads),
    )  # fmt: skip
    assert bad == 0
    items = tile.items(gated, stack.rows, int(plan.num_blocks))
    assert loads.value == items * tile.wr * tile.rb * steps * 32
    return out


# Every macro takes each of its values; steps a warp: none, fewer and more than are kept in flight, a multiple and not.
EMULATED_TILES = [
    (True, Tile(), 128 * 8, 32, None),
    (True, Tile(ks=4, wr=2, pf=2, order=1), 64 * 11, 48, 5),
    (True, Tile(ks=2, wr=1, rb=2, pf=4), 64 * 9, 48, 4),
    (True, Tile(ks=8, wr=4, pf=2), 64 * 3, 48, 2),
    (True, Tile(ks=1, wr=4, pf=2), 64, 16, None),
    (False, Tile(), 64 * 16, 64, 3),
    (False, Tile(ks=2, wr=2, pf=4, order=1), 64 * 13, 80, 3),
    (False, Tile(ks=2, wr=2, rb=2, pf=2, nb=2, order=1), 64 * 10, 80, 2),
    (False, Tile(ks=1, wr=4, pf=2), 64, 16, None),
    (False, Tile(ks=1, wr=2, rb=2), 64 * 8, 16 * 9, 2),
    (False, Tile(ks=1, wr=2, rb=4, pf=2), 64 * 4, 16 * 11, 3),
]


@needs_compiler
@pytest.mark.parametrize(("gated", "tile", "columns", "width", "grid"), EMULATED_TILES)
def test_source_on_a_cpu(gated: bool, tile: Tile, columns: int, width: int, grid: int | None) -> None:
    generator = torch.Generator().manual_seed(columns)
    held, tokens = range(1, 4), 13
    # Expert 2 takes one choice of every token: more than a block of 8, fewer than one of 16.
    others = torch.tensor([0, 1, 3, 4])[torch.randint(0, 4, (tokens,), generator=generator)]
    ids = torch.stack((others, torch.full((tokens,), 2)), dim=1)
    plan = blocks_of(ids, held, 8 * tile.nb)
    packed, scale = stored(len(held), width * (2 if gated else 1), columns)
    matrices = torch.stack([dequantise(p, s, torch.float64) for p, s in zip(packed, scale, strict=True)])
    stack = Fragments(*repack(packed, scale))
    x = torch.randn(tokens if gated else ids.numel(), columns, generator=generator).bfloat16()
    everything = tile.items(gated, stack.rows, plan.block_expert.shape[0])
    got = emulate(x, plan, stack, tile, grid or everything, gated=gated)
    want = expected(x, ids, held, matrices, gated=gated)
    assert torch.equal(got.isnan(), want.isnan())
    chosen = ~want.isnan()
    assert (got.double() - want)[chosen].norm() < 4e-3 * want[chosen].norm()
    # And close to the reference, which rounds in other places.
    reference = product_reference(x.float(), plan, stack, gated=gated).double()
    assert (got.double() - reference)[chosen].norm() < 4e-3 * want[chosen].norm()
