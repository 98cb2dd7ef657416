"""Process groups: every directed edge is a group of its own, created eagerly in one global order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal
from urllib.parse import urlparse

import psutil
import torch
import torch.distributed as dist

from headrace.errors import Fault, PeerLost
from headrace.layers.axis import Axis, library_words
from headrace.mesh import Mesh
from headrace.plan.reserve import ring_depth
from headrace.worker.copy_edge import CopyInlet, CopyOutlet
from headrace.worker.edge import DeviceEdge, Edge, HostEdge
from headrace.worker.one_shot import OneShot, all_reach, connect_one_shot
from headrace.worker.peer_memory import can_reach

OWN_TIMEOUT_FACTOR = 3
"""The library's own deadline, in ours: ours must end first, for its message names the edge."""
TRY_S = 30.0
"""A link's first transfer takes milliseconds, or it does not work."""
EDGE_CTAS = 4
"""Multiprocessors that a transfer between two GPUs may take from the step that computes beside it."""


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
    """Sampled tokens, on ranks of the first stage: from the same tensor index of the last one."""
    feedback_out: Edge | None = None
    """Sampled tokens, on ranks of the last stage."""

    @property
    def held_multiprocessors(self) -> int:
        """What receives that are kernels take of the device while they wait."""
        return sum(1 for edge in (self.previous, self.feedback_in) if isinstance(edge, DeviceEdge))


@dataclass(frozen=True)
class Devices:
    """Where the ranks are, and the most that one plan sends over an edge."""

    of_rank: Sequence[torch.device]
    hidden_bytes: int = 0
    token_bytes: int = 0
    copies: bool = False
    """Edges between GPUs that can write to each other's memory are copies; the others, and all if False, are NCCL's."""
    one_shot: bool = False
    """Small sums of a stage whose GPUs all reach each other go through their memory; the others are NCCL's."""


def connect(
    mesh: Mesh, rank: int, store_url: str, timeout_s: float, max_in_flight: int, devices: Devices | None = None
) -> Comm:
    """Join all ranks; every rank calls this at the same time. Raises PeerLost if they do not come together.

    devices: None for ranks that compute on processors.
    """
    if mesh.num_ranks == 1:
        return Comm(Axis(), Axis(name="expert"), Axis(name="expert slice"))
    own = timedelta(seconds=timeout_s * OWN_TIMEOUT_FACTOR)
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", _loopback())
    try:
        store = _store(store_url, mesh.num_ranks, rank)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=mesh.num_ranks, timeout=own)
        devices = devices or Devices([torch.device("cpu")] * mesh.num_ranks)
        return _Connector(mesh, rank, timeout_s, own, ring_depth(max_in_flight), devices, store).connect()
    except RuntimeError as error:
        if isinstance(error, Fault):
            raise
        words = library_words(error, timeout_s * OWN_TIMEOUT_FACTOR)
        raise PeerLost(f"rank {rank}: the {mesh.num_ranks} ranks did not come together: {words}") from error


@dataclass
class _Connector:
    mesh: Mesh
    rank: int
    timeout_s: float
    own: timedelta
    depth: int
    devices: Devices
    store: dist.Store
    _edges: list[tuple[Edge, bool]] = field(default_factory=list)
    """This rank's edges in the global order, and whether it is the source."""

    def connect(self) -> Comm:
        """Make every group: all ranks make all of them, in this order, members or not, as the library asks."""
        mesh, rank = self.mesh, self.rank
        tensor_group = None
        for stage in range(mesh.pp):
            if mesh.tp > 1:
                group = self._group(list(mesh.ranks_of(stage)), edge=False)
                if mesh.stage_of(rank) == stage:
                    tensor_group = group
        name = f"tensor ranks of stage {mesh.stage_of(rank)}"
        one_shot = self._one_shot(name)
        previous = following = feedback_in = feedback_out = None
        for source in range(mesh.num_ranks - mesh.tp):
            edge = self._edge(source, source + mesh.tp, "activations")
            if edge is not None and rank == source:
                following = edge
            elif edge is not None:
                previous = edge
        for index in range(mesh.tp if mesh.pp > 1 else 0):
            edge = self._edge(mesh.sampler + index, index, "sampled tokens")
            if edge is not None and rank == index:
                feedback_in = edge
            elif edge is not None:
                feedback_out = edge
        axis = Axis.at(mesh.tensor(rank), tensor_group, name, self.timeout_s, one_shot)
        self._warm(axis)
        if one_shot is not None:
            one_shot.try_out(min(self.timeout_s, TRY_S))
        return Comm(
            axis,
            Axis.at(mesh.expert(rank), None, "expert"),
            Axis.at(mesh.expert_slice(rank), None, "expert slice"),
            previous,
            following,
            feedback_in,
            feedback_out,
        )

    @property
    def device(self) -> torch.device:
        """This rank's."""
        return self.devices.of_rank[self.rank]

    def _group(self, ranks: list[int], *, edge: bool) -> dist.ProcessGroup:
        if self.device.type == "cpu":
            return dist.new_group(ranks, timeout=self.own)
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=edge)
        options._timeout = self.own
        if edge:
            options.config.max_ctas = EDGE_CTAS
        return dist.new_group(ranks, timeout=self.own, backend="nccl", pg_options=options)

    def _one_shot(self, name: str) -> OneShot | None:
        ranks = self.mesh.ranks_of(self.mesh.stage_of(self.rank))
        if not (self.devices.one_shot and len(ranks) > 1 and all_reach([self.devices.of_rank[r] for r in ranks])):
            return None
        return connect_one_shot(self.store, name, len(ranks), self.mesh.tensor(self.rank).index, self.device)

    def _edge(self, source: int, target: int, what: Literal["activations", "sampled tokens"]) -> Edge | None:
        stage, of_rank = self.mesh.stage_of, self.devices.of_rank
        copies = self.devices.copies and can_reach(of_rank[source], of_rank[target])
        group = None if copies else self._group([source, target], edge=True)
        if self.rank not in (source, target):
            return None
        name = f"{what} from rank {source} (stage {stage(source)}) to rank {target} (stage {stage(target)})"
        peer = target if self.rank == source else source
        edge: Edge
        if group is None:
            num_bytes = self.devices.hidden_bytes if what == "activations" else self.devices.token_bytes
            end = CopyOutlet if self.rank == source else CopyInlet
            edge = end(self.store, f"edge {source} {target} {what}", name, num_bytes, self.depth, self.device)
        elif self.device.type == "cpu":
            edge = HostEdge(group, peer, name, self.timeout_s, self.depth)
        else:
            edge = DeviceEdge(group, peer, name, self.timeout_s, self.device)
        self._edges.append((edge, self.rank == source))
        return edge

    def _warm(self, tensor: Axis) -> None:
        """NCCL makes a communicator at its first use: here, in the global order, not in the middle of a step.

        And what does not work is found here, with the edge's name.
        """
        if self.device.type == "cpu":
            return
        one = torch.zeros(1, dtype=torch.int64, device=self.device)
        tensor.all_reduce(one)
        for edge, is_source in self._edges:
            if is_source:
                edge.send(-1, one)
            else:
                edge.receive(-1, (1,), torch.int64, self.device).wait()
            torch.cuda.synchronize(self.device)


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
