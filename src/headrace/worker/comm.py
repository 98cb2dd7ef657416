"""Process groups and edges: every directed edge is a group of its own, created eagerly in one global order.

A receive is posted only for a plan the worker holds, and its deadline starts then. A sent tensor is kept until its send
is complete.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlparse

import psutil
import torch
import torch.distributed as dist

from headrace.errors import PeerLost
from headrace.layers.axis import Axis, library_words
from headrace.mesh import Mesh

OWN_TIMEOUT_FACTOR = 3
"""The library's own deadline, in ours: ours must end first, for its message names the edge."""


class Receive:
    """A posted receive."""

    def __init__(self, edge: Edge, plan_id: int, tensor: torch.Tensor) -> None:
        self._edge, self._plan_id, self._tensor = edge, plan_id, tensor
        self._posted_s = time.monotonic()
        with edge.naming(plan_id):
            self._work = dist.irecv(tensor, src=edge.peer, group=edge.group)

    def wait(self) -> torch.Tensor:
        """The tensor, once it is there. Raises PeerLost naming rank, edge and plan."""
        # Several are posted at once, and what comes before this one takes its time too.
        start = max(self._posted_s, self._edge.last_received_s)
        left = max(0.001, start + self._edge.timeout_s - time.monotonic())
        with self._edge.naming(self._plan_id):
            assert self._work is not None
            self._work.wait(timedelta(seconds=left))
        self._edge.last_received_s = time.monotonic()
        return self._tensor


class Edge:
    """One direction between two ranks."""

    def __init__(self, group: dist.ProcessGroup, peer: int, name: str, timeout_s: float, depth: int) -> None:
        self.group, self.peer, self.name, self.timeout_s, self.depth = group, peer, name, timeout_s, depth
        self.last_received_s = 0.0
        self._sent: deque[tuple[int, dist.Work, torch.Tensor]] = deque()

    def send(self, plan_id: int, tensor: torch.Tensor) -> None:
        """Start sending; returns at once unless `depth` earlier sends are still under way."""
        while len(self._sent) >= self.depth:
            oldest, work, _ = self._sent.popleft()
            with self.naming(oldest):
                work.wait(timedelta(seconds=self.timeout_s))
        with self.naming(plan_id):
            started = dist.isend(tensor, dst=self.peer, group=self.group)
            assert started is not None
        self._sent.append((plan_id, started, tensor))

    def receive(self, plan_id: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Receive:
        """Post a receive."""
        return Receive(self, plan_id, torch.empty(*shape, dtype=dtype, device=device))

    def naming(self, plan_id: int) -> _Naming:
        """A context in which the library's errors become one line that names this edge."""
        return _Naming(self, plan_id)


@dataclass(frozen=True)
class _Naming:
    edge: Edge
    plan_id: int

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, PeerLost):
            return
        problem = library_words(error, self.edge.timeout_s)
        raise PeerLost(f"{self.edge.name}, plan {self.plan_id}: {problem}") from error


@dataclass(frozen=True)
class Comm:
    """A rank's connections."""

    tensor: Axis
    expert: Axis
    expert_slice: Axis
    previous: Edge | None = None
    """Hidden states from the stage before."""
    next: Edge | None = None
    """Hidden states to the stage after."""
    feedback_in: Edge | None = None
    """Sampled tokens, on ranks of the first stage that do not sample."""
    feedback_out: tuple[Edge, ...] = ()
    """Sampled tokens, on the rank that samples."""


def connect(mesh: Mesh, rank: int, store_url: str, timeout_s: float, max_in_flight: int) -> Comm:
    """Join all ranks; every rank calls this at the same time. Raises PeerLost if they do not come together."""
    tensor, expert, piece = mesh.tensor(rank), mesh.expert(rank), mesh.expert_slice(rank)
    if mesh.num_ranks == 1:
        return Comm(Axis(), Axis(name="expert"), Axis(name="expert slice"))
    own = timedelta(seconds=timeout_s * OWN_TIMEOUT_FACTOR)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
    try:
        dist.init_process_group(
            "gloo", store=_store(store_url, mesh.num_ranks, rank), rank=rank, world_size=mesh.num_ranks, timeout=own
        )
    except RuntimeError as error:
        words = library_words(error, timeout_s * OWN_TIMEOUT_FACTOR)
        raise PeerLost(f"rank {rank}: the {mesh.num_ranks} ranks did not come together: {words}") from error

    # Every rank creates every group, in this order, members or not: that is what the library asks for.
    tensor_group = None
    for stage in range(mesh.pp):
        if mesh.tp > 1:
            group = dist.new_group(list(mesh.ranks_of(stage)), timeout=own)
            if mesh.stage_of(rank) == stage:
                tensor_group = group
    # One more than the plans that can be in flight, so that a send never waits while its plan is in the window.
    make = _EdgeMaker(mesh, rank, timeout_s, own, depth=max_in_flight + 1)
    previous = following = feedback_in = None
    feedback_out = []
    for source in range(mesh.num_ranks - mesh.tp):
        edge = make(source, source + mesh.tp, "activations")
        if edge is not None and rank == source:
            following = edge
        elif edge is not None:
            previous = edge
    for target in mesh.ranks_of(0):
        if target == mesh.sampler:
            continue
        edge = make(mesh.sampler, target, "sampled tokens")
        if edge is not None and rank == target:
            feedback_in = edge
        elif edge is not None:
            feedback_out.append(edge)
    return Comm(
        Axis.at(tensor, tensor_group, f"tensor ranks of stage {mesh.stage_of(rank)}", timeout_s),
        Axis.at(expert, None, "expert"),
        Axis.at(piece, None, "expert slice"),
        previous,
        following,
        feedback_in,
        tuple(feedback_out),
    )


@dataclass(frozen=True)
class _EdgeMaker:
    mesh: Mesh
    rank: int
    timeout_s: float
    own: timedelta
    depth: int

    def __call__(self, source: int, target: int, what: str) -> Edge | None:
        group = dist.new_group([source, target], timeout=self.own)
        if self.rank not in (source, target):
            return None
        stage = self.mesh.stage_of
        name = f"{what} from rank {source} (stage {stage(source)}) to rank {target} (stage {stage(target)})"
        return Edge(group, target if self.rank == source else source, name, self.timeout_s, self.depth)


def _store(url: str, num_ranks: int, rank: int) -> dist.Store:
    parts = urlparse(url)
    if parts.scheme == "file":
        return dist.FileStore(parts.path, num_ranks)
    assert parts.scheme == "tcp" and parts.hostname and parts.port, url
    return dist.TCPStore(parts.hostname, parts.port, num_ranks, is_master=rank == 0)


def _loopback() -> str:
    """The loopback interface's name; by itself the library asks the host's name, which need not resolve."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    return "lo"
