"""Sums over ranks (all-reduces) by size, in the way that the engine sums: the same axis, in a graph on GPUs."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from headrace.errors import Fault
from headrace.layers.axis import Axis
from headrace.mesh import Mesh
from headrace.worker.comm import Devices, connect

SIZES = tuple(1 << shift for shift in (10, 13, 14, 16, 18, 20, 21, 24))
"""Bytes: a row of a small model to a chunk of a large one."""
HOST_SIZES = SIZES[:-1]
NUM_SAMPLES = 5


def measure(
    gpus: bool, one_shot: bool, effort: float, timeout_s: float, *, rank: int, ranks: int, store: str
) -> dict[str, Any]:
    """`sums`: pairs of bytes and seconds; `nccl` too where small sums go another way. The same on every rank."""
    devices = None
    device = torch.device("cpu")
    if gpus:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        devices = Devices([torch.device("cuda", index) for index in range(ranks)], one_shot=one_shot)
    mesh = Mesh(pp=1, tp=ranks, ep=1, split=(1,))
    axis = connect(mesh, rank, f"file://{store}", timeout_s, 2, devices).tensor
    _check(axis, device)
    sizes = SIZES if gpus else HOST_SIZES
    found: dict[str, Any] = {"sums": [(size, _sum_s(axis, size, effort, device)) for size in sizes]}
    if axis.small is not None:
        plain = replace(axis, small=None)
        found["nccl"] = [(size, _sum_s(plain, size, effort, device)) for size in sizes]
    return found


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _check(axis: Axis, device: torch.device) -> None:
    for count in (512, 1 << 20):
        x = torch.full((count,), axis.index + 1.0, device=device, dtype=_dtype(device))
        axis.all_reduce(x)
        if not bool((x == axis.size * (axis.size + 1) / 2).all()):
            raise Fault(f"a sum over {axis.size} ranks comes out wrong")


def _sum_s(axis: Axis, size: int, effort: float, device: torch.device) -> float:
    """The number of calls follows from the size alone: every rank has to make as many."""
    calls = max(2, int(effort * (20 if size <= 1 << 20 else 6)))
    dtype = _dtype(device)
    x = torch.zeros(size // dtype.itemsize, dtype=dtype, device=device)
    if device.type == "cpu":
        return statistics.median(_timed(axis, x, calls) for _ in range(NUM_SAMPLES))
    axis.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            axis.all_reduce(x)
    graph.replay()
    samples = []
    for _ in range(NUM_SAMPLES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(float(begin.elapsed_time(end)) / 1e3 / calls)
    return statistics.median(samples)


def _timed(axis: Axis, x: torch.Tensor, calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        axis.all_reduce(x)
    return (time.perf_counter() - started) / calls
