"""The sum of a small tensor over the GPUs of a tensor group, in one launch: each writes into the others' memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.kernels import nvrtc
from headrace.kernels.nvrtc import Address, Argument

SOURCE = Path(__file__).with_suffix(".cu")
MAX_RANKS = 8
VECTOR = 16
"""Bytes of the tensor that a thread has."""
THREADS = 256
"""Of a block: 14 KiB, a token of 7168 values, go through four multiprocessors."""
REFRESH = (1 << 20) - 1
"""Launches, less one, between those that renew what small messages leave untouched."""
_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Buffers:
    """One rank's view of what the ranks of a group send each other through. All of them have the same shape."""

    rank: int
    addresses: tuple[int, ...]
    """Of each rank's buffer, its own too, as this process sees them; zero at first."""
    epochs: torch.Tensor
    """int32, one a block, of this rank alone; 1 at first."""
    threads: int = THREADS

    @property
    def most_bytes(self) -> int:
        """The largest tensor that fits."""
        return self.epochs.numel() * self.threads * VECTOR


def blocks_of(num_bytes: int, threads: int = THREADS) -> int:
    """Blocks for a tensor of so many bytes."""
    return -(-num_bytes // (threads * VECTOR))


def buffer_bytes(ranks: int, blocks: int, threads: int = THREADS) -> int:
    """Of a rank's buffer: two of them in turn, a place for every rank, half of each word its stamp."""
    return 2 * ranks * blocks * threads * 2 * VECTOR


def fits(x: torch.Tensor, most_bytes: int) -> bool:
    """Whether the kernel takes it. The same answer on all ranks: allocations begin at multiples of `VECTOR`."""
    return (
        x.is_cuda
        and x.dtype in _DTYPES
        and x.nbytes <= most_bytes
        and x.numel() % 8 == 0
        and x.is_contiguous()
        and x.data_ptr() % VECTOR == 0
    )


def all_reduce(x: torch.Tensor, buffers: Buffers) -> torch.Tensor:
    """Replace x by the sum of all ranks' x, added in float32 in the order of ranks: the same bits on every rank.

    All ranks launch it in the same order, each always in one stream (or in streams that wait for each other).
    """
    assert fits(x, buffers.most_bytes), (x.shape, x.dtype, x.stride(), x.device)
    assert 2 <= len(buffers.addresses) <= MAX_RANKS and buffers.epochs.dtype == torch.int32
    macros = nvrtc.defined(
        RANKS=len(buffers.addresses), THREADS=buffers.threads, FLOAT=int(x.dtype == torch.float32), REFRESH=REFRESH
    )
    addresses = [Address(address) for address in buffers.addresses]
    args: list[Argument] = [x, x.nbytes // VECTOR, buffers.rank, buffers.epochs.numel(), buffers.epochs]
    args += [addresses[buffers.rank], *addresses, *[None] * (MAX_RANKS - len(addresses))]
    function = nvrtc.kernel(SOURCE, "all_reduce", macros, x.device.index)
    function((blocks_of(x.nbytes, buffers.threads), 1, 1), buffers.threads, args, early=True)
    return x


def all_reduce_reference(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """What every rank then has, from what each of them had."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)
