"""Mesh and directory to the command of every process: engine, one worker a rank, HTTP."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from headrace.channel import join_url
from headrace.mesh import Mesh

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, kw_only=True)
class Command:
    """One process to start: `argv` gets `--report-fd N` appended."""

    who: str
    """Its name in everything the user reads: "engine", "http", "worker rank 1 (stage 1)"."""
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the parent."""
    stop_order: int = 0
    """A clean stop ends the processes of a lower number first: requests drain before what computes them goes."""
    device: str = ""
    """What it computes on, where that is its own."""


def worker_name(mesh: Mesh, rank: int) -> str:
    """How a worker is called in messages."""
    return f"worker rank {rank} (stage {mesh.stage_of(rank)})"


def engine_commands(
    directory: Path,
    mesh: Mesh,
    *,
    http: bool,
    transport: Literal["ipc", "tcp"] = "ipc",
    env: Mapping[str, str] | None = None,
    devices: Sequence[str] = (),
    on_terminal: bool = False,
) -> list[Command]:
    """The processes of one engine whose configuration lies in `directory`, in the order in which they start.

    `env` is added to every process's environment. Workers get an even share of the cores each, unless the environment
    already says `OMP_NUM_THREADS`. `devices` names each rank's, where it has one. With `on_terminal` they are
    told that what they write ends up on one: their own standard error is a pipe.
    """
    shared = dict(env or {})
    place = ("--dir", str(directory))
    join = join_url(directory, transport, "workers")
    commands = [
        Command(who="engine", argv=(*python_module("headrace.engine"), *place), env=shared | _threads(1), stop_order=1),
    ]
    place_of_rank = (*place, "--on-terminal") if on_terminal else place
    ranks_env = shared | rank_environment(mesh.num_ranks)
    commands += [
        Command(
            who=worker_name(mesh, rank),
            argv=(*python_module("headrace.worker"), "--join", join, "--rank", str(rank), *place_of_rank),
            env=ranks_env,
            stop_order=2,
            device=devices[rank] if devices else "",
        )
        for rank in range(mesh.num_ranks)
    ]
    if http:
        commands.append(Command(who="http", argv=(*python_module("headrace.api"), *place), env=shared | _threads(1)))
    return commands


def num_cores() -> int:
    """Cores this process may use: its affinity, its control group's quota, and no hyper-threads."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False)
    quota = _cpu_quota()
    return max(1, min(cores, physical or cores, quota or cores))


def _cpu_quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> int | None:
    try:
        limit, period = path.read_text().split()
        return None if limit == "max" else max(1, int(limit) // int(period))
    except (OSError, ValueError):
        return None


def python_module(module: str) -> tuple[str, ...]:
    """The command that runs a module as this interpreter would."""
    # -P: a file of the current folder must not stand in for a library.
    return (sys.executable, "-P", "-m", module)


def rank_environment(num_ranks: int) -> dict[str, str]:
    """What a process that computes runs under, where so many do: nothing that the environment says already."""
    return _threads(max(1, num_cores() // num_ranks)) | _yielding() | _queues()


def _threads(count: int) -> dict[str, str]:
    # A user who set one of them, even for a single run, means it.
    return {name: str(count) for name in THREAD_VARIABLES if name not in os.environ}


def _yielding() -> dict[str, str]:
    """A thread that waits for its siblings spins for a moment (some 2 ms), then sleeps.

    Left to itself the OpenMP library spins ten times as long, and so keeps off its core the very thread it waits for as
    soon as anything else runs there, be it our own HTTP process.
    """
    return {} if {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys() else {"GOMP_SPINCOUNT": "30000"}


def _queues() -> dict[str, str]:
    """CUDA and NCCL for ranks whose streams wait for each other.

    Enough hardware queues that no two streams share one: a step's kernels would stand behind a receive that waits for
    the peer, which may wait for the step. Graphs' sums are small, and not worth registering their buffers with peers.
    """
    wanted = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "NCCL_GRAPH_REGISTER": "0"}
    return {name: value for name, value in wanted.items() if name not in os.environ}
