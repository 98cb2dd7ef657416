"""Times device work with CUDA events over graph replays; the device's ceilings; what a record says of the machine."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]

SAMPLE_MS = 4.0
"""Each sample lasts about this long, so that an event's resolution does not show."""
NUM_SAMPLES = 9
MOST_REPLAYS = 200


@dataclass(frozen=True)
class Ceilings:
    """What this device reaches: the floors of all cells are taken from these."""

    bytes_per_s: float
    """A large device-to-device copy, bytes read plus bytes written."""
    flops_per_s: float
    """A bf16 product of 8192 x 8192 x 8192 on random data."""

    def floor_s(self, num_bytes: float, flops: float) -> float:
        """The larger of the two times that cannot be beaten."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


@dataclass(frozen=True)
class Timing:
    """One call's time."""

    us: float
    """Median over the samples."""
    spread: float
    """(slowest - fastest) / median."""
    graph: bool
    """Whether a graph was replayed; else the calls were launched one by one."""
    note: str = ""
    """Why there is no graph."""


def time_calls(calls: Sequence[Callable[[], object]]) -> Timing:
    """Time of one of `calls`, which do the same work on different inputs; all run in turn, in one graph if they can."""
    assert calls
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compile, load modules, fill allocator pools
            call()
    stream.synchronize()
    run, graph, note = _graph_of(calls, stream)
    samples = _samples(run, stream)
    each = [sample * 1e3 / len(calls) for sample in samples]
    middle = statistics.median(each)
    return Timing(middle, (max(each) - min(each)) / middle, graph, note)


def _graph_of(
    calls: Sequence[Callable[[], object]], stream: torch.cuda.Stream
) -> tuple[Callable[[], object], bool, str]:
    def plain() -> None:
        for call in calls:
            call()

    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            plain()
    # Whatever a capture trips over: the calls are then launched as they are, and the record says so.
    except Exception as error:
        torch.cuda.synchronize()
        return plain, False, one_line(error)
    return graph.replay, True, ""


def _samples(run: Callable[[], object], stream: torch.cuda.Stream) -> list[float]:
    """Milliseconds of one `run`, by sample."""

    def measure(count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            begin.record()
            for _ in range(count):
                run()
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / count

    measure(1)
    count = max(1, min(MOST_REPLAYS, round(SAMPLE_MS / max(measure(2), 1e-3))))
    return [measure(count) for _ in range(NUM_SAMPLES)]


def measure_ceilings(device: torch.device) -> Ceilings:
    """Copy bandwidth and bf16 product rate, here and now."""
    size, n = 2 << 30, 8192
    _product_us(n, device)  # an idle device clocks low
    copy_us = _copy_us(size, device)
    product_us = _product_us(n, device)
    torch.cuda.empty_cache()
    return Ceilings(2 * size / (copy_us * 1e-6), 2 * n**3 / (product_us * 1e-6))


def _copy_us(size: int, device: torch.device) -> float:
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    dest = torch.empty_like(source)
    # Launched, not captured: a graph's copy goes to the copy engine, which is slower than what kernels can do.
    return _median_us(lambda: dest.copy_(source))


def _median_us(call: Callable[[], object]) -> float:
    call()
    stream = torch.cuda.current_stream()
    return statistics.median(_samples(call, stream)) * 1e3


def _product_us(n: int, device: torch.device) -> float:
    a, b, out = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(3))
    return time_calls([lambda: torch.mm(a, b, out=out)]).us


def one_line(error: BaseException) -> str:
    """An error's kind and first line."""
    text = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {text}"[:160]


@dataclass(frozen=True)
class Machine:
    """Where and with what something was measured; a part of every record."""

    machine: str
    gpu: str
    num_gpus: int
    driver: str
    torch: str
    triton: str
    commit: str
    date: str

    def record(self) -> dict[str, Any]:
        """As fields of a JSON line."""
        return asdict(self)


def machine() -> Machine:
    """This machine; where there is no GPU, the name of one is cpu."""
    # The driver is asked, not torch: this process must not take memory on the GPUs that others are measured on.
    names = list(filter(None, _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").split("\n")))
    try:
        import triton

        triton_version = str(triton.__version__)
    except ImportError:
        triton_version = ""
    return Machine(
        machine=platform.node(),
        gpu=names[0] if names else "cpu",
        num_gpus=len(names),
        driver=_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        torch=torch.__version__,
        triton=triton_version,
        commit=os.environ.get("HEADRACE_COMMIT") or _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
        date=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
    )


def gpu_memory() -> list[int]:
    """Bytes in use on each GPU, as the driver counts them; empty where it cannot be asked."""
    lines = _output("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits").split()
    return [int(line) << 20 for line in lines if line.isdigit()]


def _output(*command: str) -> str:
    """What a program prints, or nothing where it cannot run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
