"""Small sums over a tensor group through the GPUs' memory; buffers found, mapped and tried before anything is loaded.

Nothing here is ever freed or unmapped: a peer may still write, and the end of the process does it without waiting.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from headrace.errors import Fault, PeerLost, UserError
from headrace.kernels import all_reduce
from headrace.kernels.all_reduce import Buffers
from headrace.worker.peer_memory import allocate, can_reach, handle_of, open_handle

log = logging.getLogger(__name__)

MOST_BYTES, MOST_SENT = 1 << 20, 1 << 20
"""Of a tensor, and times the ranks that it is sent to: above, NCCL is taken."""
ALIGN = 2 << 20
"""Of an allocation that nothing else shares."""
WITHOUT = "(--all-reduce nccl does without)"
TRIED = 5
"""Sums of a trial: both buffers are used twice."""


def most_bytes(ranks: int) -> int:
    """The largest tensor that goes this way in a group of so many."""
    return min(MOST_BYTES, MOST_SENT // (ranks - 1))


def all_reach(devices: Sequence[torch.device]) -> bool:
    """Whether every one of these GPUs can write to every other's memory. The same answer on every rank."""
    return len(devices) <= all_reduce.MAX_RANKS and all(
        can_reach(one, other) for i, one in enumerate(devices) for j, other in enumerate(devices) if i != j
    )


class OneShot:
    """Sums of what is small enough, in place, in the current stream's order."""

    def __init__(self, buffers: Buffers, name: str) -> None:
        self._buffers, self._name = buffers, name

    def fits(self, x: torch.Tensor) -> bool:
        """Whether x goes this way: the same answer on all ranks."""
        return all_reduce.fits(x, self._buffers.most_bytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the group, in place."""
        return all_reduce.all_reduce(x, self._buffers)

    def try_out(self, timeout_s: float) -> None:
        """Sum what is known. All ranks call this at the same time. Raises Fault where it comes out wrong, or never.

        There are machines whose GPUs say that they reach each other's memory, and lose what is written there.
        """
        ranks, device = len(self._buffers.addresses), self._buffers.epochs.device
        count = self._buffers.most_bytes // torch.bfloat16.itemsize
        # Sevenths are rounded differently in another order, or in another type.
        pattern = torch.arange(count, device=device) % 1021 / 7
        parts = [(pattern * (rank + 1)).bfloat16() for rank in range(ranks)]
        expected = all_reduce.all_reduce_reference(parts)
        sums = [parts[self._buffers.rank].clone() for _ in range(TRIED)]
        for x in sums:
            self(x)
        done = torch.cuda.Event()
        done.record()
        started = time.monotonic()
        while not done.query():
            if time.monotonic() - started > timeout_s:
                raise PeerLost(f"{self._name}: nothing within {timeout_s:g} s (--timeout) {WITHOUT}")
            time.sleep(0.001)
        if not all(torch.equal(x, expected) for x in sums):
            raise Fault(f"{self._name}: what a GPU wrote to another's memory did not arrive {WITHOUT}")


def connect_one_shot(
    store: dist.Store,
    name: str,
    ranks: int,
    index: int,
    device: torch.device,
    most: int | None = None,
    threads: int = all_reduce.THREADS,
) -> OneShot | None:
    """This rank's part of a group, or None on all of them where a rank could not map another's memory.

    All ranks call this at the same time. name: the group's, the same on all, and no other's. most: bytes of the largest
    tensor, by default as `most_bytes` has it.
    """
    what = f"sums of the {name} through the GPUs' memory"
    blocks = all_reduce.blocks_of(most or most_bytes(ranks), threads)
    problem = ""
    addresses: list[int] = []
    try:
        size = -(-all_reduce.buffer_bytes(ranks, blocks, threads) // ALIGN) * ALIGN
        own, memory = allocate(size, device, what)
        memory.zero_()
        torch.cuda.synchronize(device)
        handle = handle_of(own, what)
    except (Fault, UserError) as error:
        handle, problem = "", str(error)
    store.set(f"{name} {index} buffer", handle)
    for peer in range(ranks):
        text = store.get(f"{name} {peer} buffer").decode()
        try:
            if text and not problem:
                addresses.append(own if peer == index else open_handle(text, what))
        except Fault as error:
            problem = str(error)
    store.set(f"{name} {index} problem", problem or "none")
    told = [store.get(f"{name} {peer} problem").decode() for peer in range(ranks)]
    if set(told) != {"none"}:
        if index == 0:
            log.warning("%s; NCCL does them", next(text for text in told if text != "none"))
        return None
    epochs = torch.ones(blocks, dtype=torch.int32, device=device)
    return OneShot(Buffers(index, tuple(addresses), epochs, threads), what)
