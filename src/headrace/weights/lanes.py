"""A reader thread's memory: what blocks are read into, and how their bytes get to the device that the slots are on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

PINNED_BUFFERS = 2
"""Of each reader that loads to a GPU: one is read into while the other is copied away."""


class Lane(Protocol):
    """One reader thread's memory: where blocks are read into and where their rows are copied from."""

    def next(self, num_bytes: int) -> torch.Tensor:
        """Host bytes that may be overwritten."""
        ...

    def move(self, raw: torch.Tensor) -> torch.Tensor:
        """The bytes that `next` gave, filled by now, where the slots are."""
        ...

    def copying(self) -> AbstractContextManager[object]:
        """The context in which slots are filled from what `move` gave."""
        ...

    def hand_over(self) -> None:
        """Order what is issued to the device from here on after all that was filled through this lane."""
        ...


class HostLane:
    """One buffer, from which slots are filled at once."""

    def __init__(self, num_bytes: int) -> None:
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8)

    def next(self, num_bytes: int) -> torch.Tensor:
        return self._buffer[:num_bytes]

    def move(self, raw: torch.Tensor) -> torch.Tensor:
        return raw

    def copying(self) -> AbstractContextManager[object]:
        return nullcontext()

    def hand_over(self) -> None:
        """Nothing is ever under way."""


class Copied(Protocol):
    """A copy that was started."""

    def synchronize(self) -> object:
        """Wait until it is done."""
        ...


class CopyStream(Protocol):
    """A queue of work on a device."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Host memory that the device can copy from by itself."""
        ...

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Device memory."""
        ...

    def copy(self, there: torch.Tensor, host: torch.Tensor) -> Copied:
        """Start a copy to the device."""
        ...

    def issuing(self) -> AbstractContextManager[object]:
        """The context in which work goes to this queue."""
        ...

    def hand_over(self) -> None:
        """Have the queue that the caller issues to wait for this one; the host goes on."""
        ...


class DeviceLane:
    """Pinned buffers read into in turn, and one on the device: a block crosses whole, its rows are spread there.

    All device work of a lane is in one queue, whose order makes reuse of the device's buffer safe; a pinned one is
    reused once its copy is done.
    """

    def __init__(self, num_bytes: int, stream: CopyStream) -> None:
        self._stream = stream
        self._pinned = [stream.pinned(num_bytes) for _ in range(PINNED_BUFFERS)]
        self._copied: list[Copied | None] = [None] * PINNED_BUFFERS
        self._there = stream.empty(num_bytes)
        self._turn = -1

    def next(self, num_bytes: int) -> torch.Tensor:
        self._turn = (self._turn + 1) % PINNED_BUFFERS
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        return self._pinned[self._turn][:num_bytes]

    def move(self, raw: torch.Tensor) -> torch.Tensor:
        there = self._there[: len(raw)]
        self._copied[self._turn] = self._stream.copy(there, raw)
        return there

    def copying(self) -> AbstractContextManager[object]:
        return self._stream.issuing()

    def hand_over(self) -> None:
        self._stream.hand_over()


class CudaStream:
    """A `CopyStream` of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # The slots' memory may still be written to by what made it.
        self._stream.wait_stream(torch.cuda.default_stream(device))

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def empty(self, num_bytes: int) -> torch.Tensor:
        with self.issuing():
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def copy(self, there: torch.Tensor, host: torch.Tensor) -> Copied:
        with self.issuing():
            there.copy_(host, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return event

    def issuing(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def hand_over(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def make_lane(num_bytes: int, device: torch.device) -> Lane:
    """A lane for blocks of at most `num_bytes` on their way to `device`."""
    return HostLane(num_bytes) if device.type == "cpu" else DeviceLane(num_bytes, CudaStream(device))
