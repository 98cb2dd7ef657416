"""One rank of the tests of small sums: `python -m tests.gpu.all_reduce_ranks SCENARIO RANK RANKS STORE`."""

from __future__ import annotations

import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from headrace.kernels.all_reduce import all_reduce_reference
from headrace.kernels.few_tokens import choose_tiles, product
from headrace.kernels.norm import rms_norm
from headrace.layers.axis import Axis
from headrace.mesh import Mesh
from headrace.worker.comm import Devices, connect
from headrace.worker.one_shot import OneShot, most_bytes

BF16 = torch.bfloat16
REPLAYS = 10_000


def gathered(axis: Axis, x: torch.Tensor) -> list[torch.Tensor]:
    """What every rank has, on every rank."""
    parts = [torch.empty_like(x) for _ in range(axis.size)]
    dist.all_gather(parts, x, group=axis.group)
    return parts


def sums(axis: Axis) -> None:
    """Against float64, and the same bits on all ranks; what does not fit is NCCL's."""
    most = most_bytes(axis.size)
    for dtype, bound in ((BF16, 5e-3), (torch.float32, 1e-6)):
        sizes = (8, 4096, 136, 7168, 4 * 7168, most // dtype.itemsize, 7168, 12, most // dtype.itemsize + 8)
        for n, count in enumerate(sizes):
            x = torch.randn(count, device="cuda").to(dtype)
            parts = gathered(axis, x)
            assert axis.small is not None and axis.small.fits(x) == (n < 7), count
            assert axis.all_reduce(x) is x
            expected = torch.stack(parts).double().sum(0)
            error = float((x.double() - expected).norm() / expected.norm())
            assert error < bound, (dtype, count, error)
            same = gathered(axis, x.view(torch.uint8))
            assert all(torch.equal(one, same[0]) for one in same), (dtype, count)
            assert n >= 7 or torch.equal(x, all_reduce_reference(parts)), (dtype, count)


def replays(axis: Axis) -> None:
    """Ten thousand replays of sums of several sizes, each of new numbers, ranks out of step; every value is checked."""
    step = torch.zeros(1, dtype=torch.int64, device="cuda")
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
    cases = [(7168, BF16), (8, torch.float32), (most_bytes(axis.size) // 2, BF16), (2000, torch.float32)]
    places = {count: torch.arange(count, device="cuda") for count, _ in cases}

    def numbers(count: int, rank: int) -> torch.Tensor:
        return (places[count] * 7 + step * 13 + rank * 5) % 31  # sums of eight are whole in bfloat16 too

    def run() -> None:
        step.add_(1)
        for count, dtype in cases:
            got = axis.all_reduce(numbers(count, axis.index).to(dtype))
            expected = torch.stack([numbers(count, rank) for rank in range(axis.size)]).sum(0)
            wrong.add_((got.long() != expected).sum())

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    chance, common = random.Random(axis.index), random.Random(0)
    for _ in range(REPLAYS):
        if chance.random() < 0.02:
            torch.cuda._sleep(chance.randrange(500_000))
        graph.replay()
        if common.random() < 0.001:
            run()  # and at once, between replays: all ranks sum equally often
    torch.cuda.synchronize()
    assert int(step) > REPLAYS
    assert int(wrong) == 0, f"{int(wrong)} values are wrong"


def chain(axis: Axis) -> None:
    """Behind kernels that let it start early, and before others: a graph gives what each kernel gives alone."""
    torch.manual_seed(axis.index)
    tokens, width = 4, 1024
    assert choose_tiles(tokens, width, width)
    weights = [torch.randn(width, width, device="cuda", dtype=BF16) * width**-0.5 for _ in range(8)]
    norm = torch.ones(width, device="cuda", dtype=BF16)
    x = torch.zeros(tokens, width, device="cuda", dtype=BF16)

    def run(between: Callable[[], object]) -> torch.Tensor:
        h = x
        for weight in weights:
            between()
            h = product(h, weight, None)
            between()
            h = axis.all_reduce(h)
            between()
            h = rms_norm(h, norm, 1e-6)
        return h

    run(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        got = run(lambda: None)
    for seed in range(50):
        torch.manual_seed(seed)
        x.normal_()
        expected = run(torch.cuda.synchronize).clone()
        for _ in range(5):
            got.zero_()
            graph.replay()
            assert torch.equal(got, expected), seed
    assert all(torch.equal(one, got) for one in gathered(axis, got))


def time_one(axis: Axis) -> None:
    """14 KiB in a graph, beside NCCL; printed, never judged."""
    x = torch.zeros(7168, device="cuda", dtype=BF16)
    for name, one in (("one shot", axis), ("NCCL", replace(axis, small=None))):
        one.all_reduce(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(100):
                one.all_reduce(x)
        graph.replay()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(20):
            graph.replay()
        end.record()
        end.synchronize()
        print(f"{name}: {begin.elapsed_time(end) / 2:.1f} us for 14 KiB")


def death(axis: Axis) -> None:
    """A peer that goes leaves a kernel waiting; the host sees it, and its process ends at once all the same."""
    x = torch.zeros(7168, device="cuda", dtype=BF16)
    axis.all_reduce(x)
    torch.cuda.synchronize()
    dist.barrier()
    if axis.index:
        time.sleep(0.5)  # the other end has left the barrier by then
        os._exit(0)
    try:
        axis.all_reduce(x)
        done = torch.cuda.Event()
        done.record()
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline and not done.query():
            time.sleep(0.01)
        print("done" if done.query() else "waits")
    except RuntimeError as error:  # the driver may also say that the memory has gone
        print(f"waits no more: {error}")
    sys.stdout.flush()
    os._exit(0)


SCENARIOS = {"sums": sums, "replays": replays, "chain": chain, "time_one": time_one}


def main() -> None:
    wanted, rank, ranks, store = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.cuda.set_device(rank)
    torch.zeros(1, device="cuda")
    devices = Devices([torch.device("cuda", r) for r in range(ranks)], one_shot=True)
    axis = connect(Mesh(pp=1, tp=ranks, ep=1, split=(1,)), rank, f"file://{store}", 60.0, 2, devices).tensor
    assert isinstance(axis.small, OneShot), "the GPUs do not reach each other's memory"
    if wanted == "death":
        death(axis)
    for name, scenario in SCENARIOS.items():
        started = time.monotonic()
        scenario(axis)
        torch.cuda.synchronize()
        print(f"{name}: right, {time.monotonic() - started:.1f} s", flush=True)
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)  # whatever still waits on the device
