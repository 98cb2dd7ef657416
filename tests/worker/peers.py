"""One rank of a small test of edges and axes, started by exec: `python -m tests.worker.peers SCENARIO RANK STORE`."""

from __future__ import annotations

import sys
import time

import torch

from headrace.errors import PeerLost
from headrace.mesh import Mesh
from headrace.worker.comm import Comm, connect

CPU = torch.device("cpu")
PP2 = Mesh(pp=2, tp=1, ep=1, split=(1, 1))
PP2TP2 = Mesh(pp=2, tp=2, ep=1, split=(1, 1))


def flood(comm: Comm, rank: int) -> None:
    """Send far more than may be under way, dropping each tensor at once; the memory is handed out again and filled."""
    for plan in range(300):
        if comm.next is not None:
            comm.next.send(plan, torch.full((1 + plan % 50, 64), float(plan)))
            torch.full((1 + plan % 50, 64), -1.0)  # takes freed memory, were it freed too early
        else:
            assert comm.previous is not None
            got = comm.previous.receive(plan, (1 + plan % 50, 64), torch.float32, CPU).wait()
            assert bool((got == plan).all()), f"plan {plan}: {got.unique().tolist()}"
    if comm.next is not None:
        sys.stdin.read()  # the last sends are still under way


def both_ways(comm: Comm, rank: int) -> None:
    """Receives posted far ahead in one direction do not block sends in the other."""
    ahead = []
    if comm.next is not None:
        assert comm.feedback_in is not None
        ahead = [comm.feedback_in.receive(plan, (3,), torch.int64, CPU) for plan in range(20)]
        for plan in range(20):
            comm.next.send(plan, torch.full((4,), float(plan)))
        assert [int(one.wait()[0]) for one in ahead] == list(range(20))
    else:
        assert comm.previous is not None
        for plan in range(20):
            value = comm.previous.receive(plan, (4,), torch.float32, CPU).wait()[0]
            assert comm.feedback_out is not None
            comm.feedback_out.send(plan, torch.full((3,), int(value), dtype=torch.int64))


def silence(comm: Comm, rank: int) -> None:
    """A receive that nobody answers ends at its deadline and says what it waited for."""
    if comm.previous is not None:
        try:
            comm.previous.receive(7, (1,), torch.float32, CPU).wait()
        except PeerLost as error:
            print(error)
    sys.stdin.read()  # the other end must live until then


def death(comm: Comm, rank: int) -> None:
    """A receive whose sender dies ends and says what it waited for."""
    if comm.previous is not None:
        try:
            comm.previous.receive(3, (1,), torch.float32, CPU).wait()
        except PeerLost as error:
            print(error)


def sums(comm: Comm, rank: int) -> None:
    """Collectives stay within their stage."""
    x = comm.tensor.all_reduce(torch.tensor([float(rank)]))
    assert x.item() == (1.0 if rank < 2 else 5.0)
    told = comm.tensor.broadcast(torch.tensor([float(rank)]))
    assert told.item() == rank // 2 * 2
    gathered = comm.tensor.all_gather(torch.tensor([[float(rank)], [10.0 + rank]]))
    first = rank // 2 * 2
    assert gathered.tolist() == [[first, first + 1.0], [10.0 + first, 11.0 + first]]


SCENARIOS = {"flood": flood, "both_ways": both_ways, "silence": silence, "death": death, "sums": sums}

if __name__ == "__main__":
    scenario, rank, store = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    mesh = PP2TP2 if scenario == "sums" else PP2
    started = time.monotonic()
    SCENARIOS[scenario](connect(mesh, rank, store, 0.5 if scenario == "silence" else 30.0, 2), rank)
