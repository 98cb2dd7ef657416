"""A small message written into another GPU's memory by a kernel, and the counter that tells its owner."""

from __future__ import annotations

from pathlib import Path

import torch

from headrace.kernels import nvrtc
from headrace.kernels.nvrtc import Address

SOURCE = Path(__file__).with_name("push.cu")
MOST_BYTES = 128 << 10
"""Of a message: one block writes it, and more is faster by the copy engine."""
THREADS = 1024


def can_push(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a message for `push`."""
    return 0 < tensor.nbytes <= MOST_BYTES and tensor.nbytes % 4 == 0 and tensor.data_ptr() % 16 == 0


def push(tensor: torch.Tensor, target: int, counter: int, value: int) -> None:
    """Copy a tensor to the address `target`, a multiple of 16, then write `value` to the uint32 at `counter`.

    Both addresses are of memory that the tensor's device can write to. In the current stream; who polls the counter, or
    whose stream waits for it, finds the whole message.
    """
    assert tensor.is_cuda and tensor.is_contiguous() and can_push(tensor) and not target % 16 and not counter % 4
    launch = nvrtc.kernel(SOURCE, "push", (), tensor.device.index)
    launch((1, 1, 1), THREADS, (tensor, Address(target), Address(counter), value, tensor.nbytes // 4))
