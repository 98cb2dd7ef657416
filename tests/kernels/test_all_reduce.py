"""The CUDA C++ of the small all-reduce, emulated on the CPU, and its protocol in every order of events."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels import all_reduce as module
from headrace.kernels import nvrtc
from headrace.kernels.all_reduce import REFRESH, SOURCE, Buffers, all_reduce_reference, blocks_of, buffer_bytes, fits
from headrace.kernels.nvrtc import Address
from tests.kernels.emulated import emulated, needs_compiler
from tests.kernels.stamped_words import Overwritten, Protocol, State

VECTORS, THREADS, BLOCKS = 11, 4, 3
"""The most that a launch has: its last block lacks a thread's data."""


def address(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@needs_compiler
@pytest.mark.parametrize(
    ("ranks", "dtype", "first_epoch"),
    [(2, torch.bfloat16, 1), (3, torch.float32, 1), (2, torch.bfloat16, -5)],
)
def test_every_rank_gets_the_sum(ranks: int, dtype: torch.dtype, first_epoch: int) -> None:
    """Messages of many sizes in turn; epochs that pass zero, and stamps that are renewed often."""
    sizes = torch.tensor([11, 1, 3, 4, 11, 9, 9, 1, 11, 5, 2, 11, 11, 7], dtype=torch.int32)
    launches, values = len(sizes), VECTORS * 16 // dtype.itemsize
    data = torch.randn(ranks, launches, values).to(dtype)
    parts = data.clone()
    epochs = torch.full((ranks, BLOCKS), first_epoch, dtype=torch.int32)
    words = buffer_bytes(ranks, BLOCKS, THREADS) // 8
    buffers = torch.zeros(ranks, words, dtype=torch.int64)
    macros = {"RANKS": ranks, "THREADS": THREADS, "FLOAT": int(dtype == torch.float32), "REFRESH": 3}
    emulated("all_reduce_on_cpu.cpp", SOURCE, macros.items()).run(
        address(data), address(sizes), launches, VECTORS, address(epochs), BLOCKS, address(buffers),
        ctypes.c_longlong(words), 7,
    )  # fmt: skip
    for launch, size in enumerate(sizes.tolist()):
        used = size * 16 // dtype.itemsize
        expected = all_reduce_reference(list(parts[:, launch, :used]))
        for rank in range(ranks):
            assert torch.equal(data[rank, launch, :used], expected), (rank, launch)
            assert torch.equal(data[rank, launch, used:], parts[rank, launch, used:]), "what is no part of it changed"
    for block in range(BLOCKS):
        runs = sum(blocks_of(16 * size, THREADS) > block for size in sizes.tolist())
        assert epochs[:, block].tolist() == [first_epoch + runs] * ranks
        mine = buffers.view(ranks, 2, ranks, BLOCKS, -1)[:, :, :, block]
        stamps = mine >> 32  # in the sender's own place nothing is ever written
        others = torch.cat([stamps[r, :, s].flatten() for r in range(ranks) for s in range(ranks) if r != s])
        assert int(others.min()) >= first_epoch + runs - 5, "what small messages leave untouched was not renewed"


def run_all(protocol: Protocol) -> int:
    """Every order of events; how many states there are."""
    seen: set[State] = set()
    waiting = [protocol.start()]
    ended = 0
    while waiting:
        state = waiting.pop()
        if state in seen:
            continue
        seen.add(state)
        following = list(protocol.moves(state))
        assert following or protocol.is_over(state), "all wait for each other"
        ended += protocol.is_over(state)
        waiting += following
    assert ended
    return len(seen)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (2, 1, 2, 1, 2), (1, 2, 2, 1)])
def test_two_buffers_are_enough_in_every_order(sizes: tuple[int, ...]) -> None:
    assert run_all(Protocol(2, 2, sizes)) > 90


def test_one_buffer_is_not_enough() -> None:
    with pytest.raises(Overwritten):
        run_all(Protocol(2, 1, (1, 1), buffers=1))


@given(st.randoms(use_true_random=False), st.integers(2, 4), st.lists(st.integers(1, 3), min_size=3, max_size=7))
@settings(max_examples=60, deadline=None)
def test_two_buffers_are_enough_for_more_ranks(chance: random.Random, ranks: int, sizes: list[int]) -> None:
    protocol = Protocol(ranks, 3, tuple(sizes))
    state = protocol.start()
    while not protocol.is_over(state):
        following = list(protocol.moves(state))
        assert following, "all wait for each other"
        state = chance.choice(following)


def test_a_launch_of_many_is_renewed_before_stamps_come_again() -> None:
    assert (REFRESH + 1) & REFRESH == 0 and 2 * (REFRESH + 1) < 1 << 31


def test_what_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(module, "fits", lambda x, most_bytes: x.nbytes <= most_bytes)
    monkeypatch.setattr(nvrtc, "kernel", lambda *made_of: lambda *args, **more: launched.append((*args, more)))
    x, epochs = torch.zeros(1024, 9), torch.ones(16, dtype=torch.int32)
    assert module.all_reduce(x, Buffers(1, (100, 200, 300), epochs)) is x
    (grid, threads, args, more) = launched[0]
    assert (grid, threads, more) == ((9, 1, 1), module.THREADS, {"early": True})
    assert args[0] is x and args[1:4] == [9 * 256, 1, 16] and args[4] is epochs
    assert args[5:9] == [Address(200), Address(100), Address(200), Address(300)] and args[9:] == [None] * 5
    with pytest.raises(AssertionError):
        module.all_reduce(torch.zeros(17, 1024), Buffers(0, (100, 200), epochs))


def test_sizes() -> None:
    assert [blocks_of(n) for n in (16, 4096, 14 << 10)] == [1, 1, 4]
    assert buffer_bytes(2, 64) == 2 << 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_what_does_not_fit(dtype: torch.dtype) -> None:
    assert not fits(torch.zeros(16, dtype=dtype), 1 << 20)  # not on a GPU


def test_the_reference_adds_in_float32_in_the_order_of_ranks() -> None:
    parts = [torch.tensor([256.0]), torch.tensor([1.0]), torch.tensor([1.0])]
    assert all_reduce_reference([part.bfloat16() for part in parts]).item() == 258
    tiny = [torch.tensor([1.0]), torch.tensor([2.0**-24]), torch.tensor([2.0**-24])]
    assert all_reduce_reference(tiny).item() == 1.0
    assert all_reduce_reference(tiny[::-1]).item() > 1.0
