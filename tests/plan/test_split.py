"""The split against every split there is, by time and within memory."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from headrace.mesh import Mesh
from headrace.plan.cost import Roofline
from headrace.plan.experts import Uniform
from headrace.plan.hardware import Gpu, Machine, catalogue
from headrace.plan.load import Load
from headrace.plan.memory import Limits, kv_tokens, room, weight_bytes
from headrace.plan.split import Splitter
from tests.plan.specs import BARE, K2, SLICE

LIMITS, WIDE = Limits(chunk=512, max_running=16), Limits(chunk=8192, max_running=256)
H200 = catalogue().gpu("h200")


def every_split(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    return [
        tuple(b - a for a, b in itertools.pairwise((0, *cuts, num_layers)))
        for cuts in itertools.combinations(range(1, num_layers), num_stages - 1)
    ]


def slowest(mesh: Mesh, machine: Machine, load: Load) -> float:
    return float(Roofline(SLICE, mesh, machine, Uniform()).steps_s(load).max())


def fits(mesh: Mesh, machine: Machine, num_tokens: int) -> bool:
    try:
        return min(kv_tokens(SLICE, mesh, machine, LIMITS)) >= num_tokens
    except ValueError:
        return False


@pytest.mark.parametrize(("pp", "tp", "ep"), [(2, 1, 1), (3, 1, 1), (4, 1, 1), (3, 2, 2)])
@pytest.mark.parametrize("load", [Load.decode(1, 100), Load.decode(16, 100), Load.prompt(0, 512, samples=True)])
@pytest.mark.parametrize("memory_gib", [24, 40, 140])
def test_no_split_that_fits_is_faster(pp: int, tp: int, ep: int, load: Load, memory_gib: int) -> None:
    gpus = [replace(H200, memory_bytes=memory_gib * 2**30)] * (pp * tp)
    gpus[0] = replace(gpus[0], slug="slow", bandwidth=H200.bandwidth / 2)  # one is unlike the others
    machine = Machine(gpus=tuple(gpus), link=catalogue().link("nvlink-h200"))
    open_mesh = Mesh(pp=pp, tp=tp, ep=ep, split=(0,) * pp)
    found = Splitter(SLICE, open_mesh, machine, Uniform()).fastest(load, LIMITS, 1000)
    meshes = [replace(open_mesh, split=split) for split in every_split(8, pp)]
    fitting = [mesh for mesh in meshes if fits(mesh, machine, 1000)]
    if not fitting:
        assert found is None
        return
    assert found is not None and replace(open_mesh, split=found) in fitting
    best = min(slowest(mesh, machine, load) for mesh in fitting)
    assert slowest(replace(open_mesh, split=found), machine, load) == pytest.approx(best)


def test_k2_splits_are_the_ones_computed_by_hand() -> None:
    """Bandwidth alone: with microbatches of one the head is worth nearly five layers, and ever less with more."""
    mesh = Mesh(pp=8, tp=1, ep=1, split=(0,) * 8)
    splitter = Splitter(K2, mesh, Machine(gpus=(BARE,) * 8, link=None), Uniform())
    one, four, sixteen = (splitter.fastest(Load.decode(rows, 1), LIMITS, 2) for rows in (1, 4, 16))
    assert one is not None and one[-1] == 4 and sorted(one) == [4, 7, 8, 8, 8, 8, 9, 9]  # which is which is a tie
    assert four == (8, 8, 8, 8, 8, 8, 8, 5)
    assert sixteen is not None and sorted(sixteen) == sorted((8, 8, 8, 8, 8, 7, 7, 7))


def test_the_best_split_beats_the_field_by_what_was_computed() -> None:
    """At four rows a microbatch 7,7,7,8,8,8,8,8 keeps stages busy 77% of the time, the best split 99%."""
    machine = Machine(gpus=(BARE,) * 8, link=None)
    load = Load.decode(4, 1)
    slow, fast = (
        Roofline(K2, Mesh(pp=8, tp=1, ep=1, split=split), machine, Uniform()).steps_s(load).max()
        for split in ((7, 7, 7, 8, 8, 8, 8, 8), (8, 8, 8, 8, 8, 8, 8, 5))
    )
    assert slow / fast == pytest.approx(99 / 77, rel=0.02)


def test_memory_of_k2_over_eight_gpus() -> None:
    gpu = catalogue().gpu("rtx-pro-6000")
    mesh = Mesh(pp=8, tp=1, ep=1, split=(8, 8, 8, 8, 8, 8, 8, 5))
    machine = Machine(gpus=(gpu,) * 8, link=None)
    assert weight_bytes(K2, mesh, 1) / 2**30 == pytest.approx(8 * 9.135, rel=1e-3)
    assert weight_bytes(K2, mesh, 7) / 2**30 == pytest.approx(5 * 9.135 + 2.188, rel=1e-3)
    tokens = kv_tokens(K2, mesh, machine, WIDE)
    left = room(K2, mesh, machine, 1, WIDE) - weight_bytes(K2, mesh, 1)
    assert min(tokens) == tokens[1] == int(left // (8 * 1152))
    assert 1.5e6 < tokens[1] < 2.1e6


def test_latents_are_replicated_and_key_heads_are_not() -> None:
    machine = Machine(gpus=(H200,) * 2, link=None)
    piped, sliced = (
        min(kv_tokens(SLICE, mesh, machine, LIMITS))
        for mesh in (Mesh(pp=2, tp=1, ep=1, split=(4, 4)), Mesh(pp=1, tp=2, ep=1, split=(8,)))
    )
    assert piped > 1.9 * sliced


def test_more_memory_never_holds_fewer_tokens() -> None:
    mesh = Mesh(pp=2, tp=1, ep=1, split=(4, 4))

    def tokens(gpu: Gpu) -> int:
        return min(kv_tokens(SLICE, mesh, Machine(gpus=(gpu,) * 2, link=None), LIMITS))

    held = [tokens(replace(H200, memory_bytes=gib * 2**30)) for gib in (48, 64, 80, 141)]
    assert held == sorted(held)
