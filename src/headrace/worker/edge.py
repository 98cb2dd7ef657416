"""Edges: one direction between two ranks, through host memory or from device to device.

A receive is posted only for a plan the worker holds, and its deadline starts then. A sent tensor is kept until its send
is complete.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from headrace.errors import PeerLost
from headrace.layers.axis import library_words


class Receive(Protocol):
    """A posted receive."""

    def wait(self) -> torch.Tensor:
        """The tensor, once it is there: in the host's time, or in that of the device's current stream."""
        ...

    def is_done(self) -> bool:
        """Whether it is there."""
        ...


class Edge(Protocol):
    """One direction between two ranks."""

    name: str
    """For messages."""
    posts_ahead: bool
    """Whether a receive may be posted before all that its sender needs of this rank has been issued.

    One that is a kernel may not: whatever makes the host wait for the device would then wait for the sender, and the
    sender for us.
    """

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """In whose order its sends end, where a device does them."""
        ...

    def send(self, plan_id: int, tensor: torch.Tensor, *, lent: bool = False) -> None:
        """Start sending. The tensor is not written to afterwards unless it is `lent`: then by the current stream."""
        ...

    def receive(self, plan_id: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Receive:
        """Post a receive."""
        ...


class HostReceive:
    """A posted receive whose wait takes the host's time."""

    def __init__(self, edge: HostEdge, plan_id: int, tensor: torch.Tensor) -> None:
        self._edge, self._plan_id, self._tensor = edge, plan_id, tensor
        self._posted_s = time.monotonic()
        with Naming(edge.name, plan_id, edge.timeout_s):
            self._work = dist.irecv(tensor, src=edge.peer, group=edge.group)

    def wait(self) -> torch.Tensor:
        """The tensor, once it is there. Raises PeerLost naming rank, edge and plan."""
        # Several are posted at once, and what comes before this one takes its time too.
        start = max(self._posted_s, self._edge.last_received_s)
        left = max(0.001, start + self._edge.timeout_s - time.monotonic())
        with Naming(self._edge.name, self._plan_id, self._edge.timeout_s):
            assert self._work is not None
            self._work.wait(timedelta(seconds=left))
        self._edge.last_received_s = time.monotonic()
        return self._tensor

    def is_done(self) -> bool:
        """Whether it is there."""
        return self._work is None or self._work.is_completed()


class HostEdge:
    """Tensors in host memory, over the library's sockets."""

    stream = None
    posts_ahead = True

    def __init__(self, group: dist.ProcessGroup, peer: int, name: str, timeout_s: float, depth: int) -> None:
        self.group, self.peer, self.name, self.timeout_s, self.depth = group, peer, name, timeout_s, depth
        self.last_received_s = 0.0
        self._sent: deque[tuple[int, dist.Work, torch.Tensor]] = deque()

    def send(self, plan_id: int, tensor: torch.Tensor, *, lent: bool = False) -> None:
        """Start sending; returns at once unless `depth` earlier sends are still under way."""
        assert not lent
        while len(self._sent) >= self.depth:
            oldest, work, _ = self._sent.popleft()
            with Naming(self.name, oldest, self.timeout_s):
                work.wait(timedelta(seconds=self.timeout_s))
        with Naming(self.name, plan_id, self.timeout_s):
            started = dist.isend(tensor, dst=self.peer, group=self.group)
            assert started is not None
        self._sent.append((plan_id, started, tensor))

    def receive(self, plan_id: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> HostReceive:
        """Post a receive."""
        return HostReceive(self, plan_id, torch.empty(*shape, dtype=dtype, device=device))


class DeviceReceive:
    """A posted receive on the edge's own stream; its wait takes the current stream's time, none of the host's."""

    def __init__(self, tensor: torch.Tensor, work: dist.Work) -> None:
        self._tensor, self._work = tensor, work

    def wait(self) -> torch.Tensor:
        """The tensor, valid for what the current stream does from here on."""
        self._work.wait()
        self._tensor.record_stream(torch.cuda.current_stream())
        return self._tensor

    def is_done(self) -> bool:
        """Whether it is there."""
        return self._work.is_completed()


class DeviceEdge:
    """Tensors in GPU memory, by NCCL. Nothing here blocks the host, so deadlines are the runner's to watch."""

    posts_ahead = False

    def __init__(self, group: dist.ProcessGroup, peer: int, name: str, timeout_s: float, device: torch.device) -> None:
        self.group, self.peer, self.name, self.timeout_s = group, peer, name, timeout_s
        # The library orders an operation behind all that its caller's stream was given: called on the compute stream, a
        # receive would not be posted before the steps already queued there have ended.
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def send(self, plan_id: int, tensor: torch.Tensor, *, lent: bool = False) -> None:
        """Send what the current stream has made of the tensor by now."""
        tensor = tensor.clone() if lent else tensor
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), Naming(self.name, plan_id, self.timeout_s):
            work = dist.isend(tensor, dst=self.peer, group=self.group)
            assert work is not None
            # The library sends in a stream of its own: now what comes after in ours comes after the send.
            work.wait()
        self._sent.append((work, tensor))

    def receive(self, plan_id: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> DeviceReceive:
        """Post a receive."""
        with torch.cuda.stream(self.stream), Naming(self.name, plan_id, self.timeout_s):
            tensor = torch.empty(*shape, dtype=dtype, device=device)
            work = dist.irecv(tensor, src=self.peer, group=self.group)
        assert work is not None
        return DeviceReceive(tensor, work)


@dataclass(frozen=True)
class Naming:
    """A context in which the library's errors become one line that names an edge and a plan."""

    edge: str
    plan_id: int
    timeout_s: float

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, PeerLost):
            return
        problem = library_words(error, self.timeout_s)
        raise PeerLost(f"{self.edge}, plan {self.plan_id}: {problem}") from error
