"""Edges by copy: the sender writes into the receiver's memory, and no multiprocessor waits for anything.

The receiver owns a ring of buffers and a counter, both mapped into the sender's process. A send writes into the next
buffer and then to the counter: a short kernel in the step's own stream for what a decode step sends, the copy engine in
a stream beside it for more; a receive is a wait of the stream for that write, which the device's front end
does. A posted NCCL receive is a kernel: it holds a multiprocessor until its peer sends.

Nothing says when a buffer is free, because the engine's window does: a ring has more buffers than there are plans in
flight, and what comes over this edge for one plan has been used before the plan a whole ring later is issued.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from headrace.kernels.driver import check, driver
from headrace.kernels.push import can_push, push
from headrace.worker.peer_memory import allocate, handle_of, open_handle

ALIGN = 512
COUNTER_BYTES = 512


class CopyReceive:
    """What a plan's receive will find in its buffer."""

    def __init__(self, edge: CopyInlet, count: int, tensor: torch.Tensor) -> None:
        self._edge, self._count, self._tensor = edge, count, tensor
        self._passed: torch.cuda.Event | None = None

    def wait(self) -> torch.Tensor:
        """The tensor, valid for what the current stream does from here on."""
        self._edge.wait_for(self._count)
        self._passed = torch.cuda.Event()
        self._passed.record()
        return self._tensor

    def is_done(self) -> bool:
        """Whether the stream that waited has found it."""
        return self._passed is not None and self._passed.query()


class CopyInlet:
    """The receiving end."""

    stream = None
    posts_ahead = True

    def __init__(
        self, store: dist.Store, key: str, name: str, num_bytes: int, depth: int, device: torch.device
    ) -> None:
        self.name = name
        self._api, self._depth, self._device = driver(), depth, device
        self._slot_bytes = -(-num_bytes // ALIGN) * ALIGN
        self._address, self._memory = allocate(COUNTER_BYTES + depth * self._slot_bytes, device, _what(name))
        self._memory[:COUNTER_BYTES].zero_()
        torch.cuda.synchronize(device)
        store.set(key, handle_of(self._address, _what(name)))
        self._count = 0

    def send(self, plan_id: int, tensor: torch.Tensor, *, lent: bool = False) -> None:
        """Not from this end."""
        raise AssertionError(f"{self.name}: sent to by its receiver")

    def receive(self, plan_id: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> CopyReceive:
        """Say what the next buffer holds."""
        start = COUNTER_BYTES + self._count % self._depth * self._slot_bytes
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        assert num_bytes <= self._slot_bytes, f"{self.name}: {num_bytes} bytes in a buffer of {self._slot_bytes}"
        self._count += 1
        tensor = self._memory[start : start + num_bytes].view(dtype).view(*shape)
        return CopyReceive(self, self._count, tensor)

    def wait_for(self, count: int) -> None:
        """Hold the current stream until so many tensors have come."""
        stream = torch.cuda.current_stream().cuda_stream
        at_least = self._api.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ.value
        _check(self._api.cuStreamWaitValue32(stream, self._address, count, at_least), self.name)


class CopyOutlet:
    """The sending end."""

    posts_ahead = True

    def __init__(
        self, store: dist.Store, key: str, name: str, num_bytes: int, depth: int, device: torch.device
    ) -> None:
        self.name = name
        self._api, self._depth = driver(), depth
        self._slot_bytes = -(-num_bytes // ALIGN) * ALIGN
        self._address = open_handle(store.get(key).decode(), _what(name))
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._count = 0
        self._copying = False
        """Whether a copy was issued after the last push."""

    @property
    def stream(self) -> torch.cuda.Stream:
        """In whose order the last send ends."""
        return self._stream if self._copying else torch.cuda.current_stream()

    def send(self, plan_id: int, tensor: torch.Tensor, *, lent: bool = False) -> None:
        """Send what the current stream has made of the tensor by now."""
        api, stream = self._api, self._stream
        assert tensor.is_contiguous() and tensor.nbytes <= self._slot_bytes, f"{self.name}: {tuple(tensor.shape)}"
        target = self._address + COUNTER_BYTES + self._count % self._depth * self._slot_bytes
        self._count += 1
        if can_push(tensor):
            # Both ways write the same counter, so what the other stream still has to write must come first.
            if self._copying:
                torch.cuda.current_stream().wait_stream(stream)
                self._copying = False
            push(tensor, target, self._address, self._count)
            return
        tensor = tensor.clone() if lent else tensor
        self._copying = True
        stream.wait_stream(torch.cuda.current_stream())
        if tensor.nbytes:
            _check(api.cuMemcpyAsync(target, tensor.data_ptr(), tensor.nbytes, stream.cuda_stream), self.name)
        _check(api.cuStreamWriteValue32(stream.cuda_stream, self._address, self._count, 0), self.name)
        tensor.record_stream(stream)

    def receive(self, plan_id: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> CopyReceive:
        """Not from this end."""
        raise AssertionError(f"{self.name}: received from by its sender")


def _check(answer: tuple[Any, ...], edge: str) -> Any:
    """The value of a driver's call. Raises Fault naming the edge and the driver's error."""
    return check(answer, _what(edge))


def _what(edge: str) -> str:
    return f"{edge}, by copy (--edges nccl does without)"
