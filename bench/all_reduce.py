"""Small sums over GPUs: one launch through their memory beside NCCL, both from CUDA graphs, by size.

`python -m bench.gpu all_reduce` starts a process a GPU. A graph holds the same sum many times over, so that a time is
that of one sum behind another. The variant without a name is the one that is shipped, up to the size where it is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from bench.gpu_timing import machine

from headrace.mesh import Mesh
from headrace.worker.comm import Devices, connect
from headrace.worker.one_shot import connect_one_shot, most_bytes

ROOT = Path(__file__).parents[1]
KIB = (14, 28, 56, 112, 224, 256, 512, 1024)
"""14 KiB are a token of 7168 bfloat16 values."""
THREADS = {"t128": 128, "": 256, "t512": 512}
IN_GRAPH, REPLAYS, NUM_SAMPLES = 50, 10, 9
DEADLINE_S = 100.0

Sum = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Time:
    """Of one sum: the median, and (slowest - fastest) / median."""

    us: float
    spread: float


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu all_reduce", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="GPUs (%(default)s)")
    parser.add_argument("--kib", default=",".join(map(str, KIB)), help="sizes (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="append the times as JSON lines")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    sizes = [int(kib) << 10 for kib in options.kib.split(",")]
    if options.rank is not None:
        _measure(options.rank, options.ranks, options.store, sizes, options.out)
        return 0
    if not torch.cuda.is_available() or torch.cuda.device_count() < options.ranks:
        print(f"--ranks {options.ranks}: there are not so many GPUs here", file=sys.stderr)
        return 2
    return _start(options.ranks, list(sys.argv[1:] if arguments is None else arguments))


def _start(ranks: int, arguments: list[str]) -> int:
    env = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "NCCL_GRAPH_REGISTER": "0"}  # as workers have them
    with tempfile.TemporaryDirectory() as folder:
        base = [sys.executable, "-m", "bench.all_reduce", *arguments, "--store", str(Path(folder) / "store")]
        processes = [subprocess.Popen([*base, "--rank", str(rank)], env=env, cwd=ROOT) for rank in range(ranks)]
        try:
            return max(abs(process.wait(DEADLINE_S)) for process in processes)
        except subprocess.TimeoutExpired:
            print(f"nothing within {DEADLINE_S:g} s", file=sys.stderr)
            return 1
        finally:
            for process in processes:
                process.kill()


def _measure(rank: int, ranks: int, path: Path, sizes: Sequence[int], out: Path | None) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    devices = Devices([torch.device("cuda", r) for r in range(ranks)])
    nccl = connect(Mesh(pp=1, tp=ranks, ep=1, split=(1,)), rank, f"file://{path}", 60.0, 2, devices).tensor
    store = dist.FileStore(f"{path}-one-shot", ranks)
    forms: dict[str, Sum] = {"nccl": nccl.all_reduce}
    for name, threads in THREADS.items():
        one_shot = connect_one_shot(store, f"group {name}", ranks, rank, device, max(sizes), threads)
        if one_shot is None:
            sys.exit("the GPUs here do not map each other's memory")
        one_shot.try_out(60.0)
        forms[name] = one_shot
    if rank == 0:
        print(f"{ranks} x {torch.cuda.get_device_name()}, shipped up to {most_bytes(ranks) >> 10} KiB", flush=True)
    for size in sizes:
        times = {name: _time(form, size, device) for name, form in forms.items()}
        if rank:
            continue
        words = ", ".join(f"{name or 'shipped'} {time.us:.1f} (±{time.spread:.0%})" for name, time in times.items())
        print(f"{size >> 10:5} KiB, us: {words}", flush=True)
        if out is not None:
            _append(out, ranks, size, times)
    torch.cuda.synchronize()
    sys.stdout.flush()
    os._exit(0)  # the communicators of a peer that has gone are not waited for


def _append(out: Path, ranks: int, size: int, times: dict[str, Time]) -> None:
    head = machine().record()
    with out.open("a") as file:
        for name, time in times.items():
            row = {"kernel": "all_reduce", "ranks": ranks, "bytes": size, "variant": name}
            file.write(json.dumps(head | row | {"us": time.us, "spread": time.spread}) + "\n")


def _time(form: Sum, size: int, device: torch.device) -> Time:
    x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        form(x)  # loads modules, which a capture must not
    stream.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(IN_GRAPH):
            form(x)
    samples = []
    for _ in range(NUM_SAMPLES + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            begin.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
        end.synchronize()
        samples.append(float(begin.elapsed_time(end)) * 1e3 / (IN_GRAPH * REPLAYS))
    samples = samples[1:]
    middle = statistics.median(samples)
    return Time(middle, (max(samples) - min(samples)) / middle)


if __name__ == "__main__":
    sys.exit(main())
