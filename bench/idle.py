"""What a service costs when nobody asks, and whether its memory stays flat: `python bench/idle.py [MODEL] [flags]`.

Starts `headrace serve`, looks at every process's CPU time while nothing is asked, sends many small requests and
compares resident memory before and after. Exits with 1 where an idle process takes 5% of a core, or where one grew by
more than a few MB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil

MOST_IDLE = 0.05
"""CPU seconds a second."""
MOST_GROWTH_MB = 4.0
"""Of resident memory over all requests: what allocators still take after the first ones."""


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--first", type=int, default=200, help="requests before memory is looked at first")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4, help="output tokens of a request")
    parser.add_argument("--idle", type=float, default=10.0, metavar="SECONDS", help="how long nothing is asked")
    options, flags = parser.parse_known_args()
    model = [options.model] if options.model else []
    serve = [sys.executable, "-m", "headrace", "serve", *model, "--port", "0", "--json-ready", *flags]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        try:
            line = service.stdout.readline()
            if not line:
                return service.wait()
            return measure(json.loads(line)["url"], processes(service.pid), options)
        finally:
            service.terminate()


def processes(pid: int) -> dict[str, psutil.Process]:
    """Of a service, by what they are."""
    found = {"serve": psutil.Process(pid)}
    for child in found["serve"].children(recursive=True):
        command = child.cmdline()
        module = next(word.removeprefix("headrace.") for word in command if word.startswith("headrace."))
        found[f"rank {command[command.index('--rank') + 1]}" if module == "worker" else module] = child
    return found


def measure(url: str, of: dict[str, psutil.Process], options: argparse.Namespace) -> int:
    """Print the table; whether all is well, as an exit code."""
    send(url, options.first, options)
    before, fresh = memory_mb(of), idle(of, options.idle)
    spent_s = send(url, options.requests, options)
    after, idle_after = memory_mb(of), idle(of, options.idle)
    print(f"{options.requests} requests of {options.tokens} tokens in {spent_s:.1f} s, {options.clients} at once")
    print(f"{'process':<8} {'MB before':>9} {'MB after':>9} {'grew MB':>8} {'idle CPU before':>16} {'after':>7}")
    well = True
    for name in of:
        grew = after[name] - before[name]
        well &= grew <= MOST_GROWTH_MB and max(fresh[name], idle_after[name]) < MOST_IDLE
        print(
            f"{name:<8} {before[name]:>9.1f} {after[name]:>9.1f} {grew:>8.2f} {fresh[name]:>16.2%} "
            f"{idle_after[name]:>7.2%}"
        )
    return 0 if well else 1


def send(url: str, count: int, options: argparse.Namespace) -> float:
    """So many requests, a few at once; seconds."""
    started = time.monotonic()
    with (
        httpx.Client(base_url=url, timeout=120, trust_env=False) as client,
        ThreadPoolExecutor(options.clients) as threads,
    ):

        def one(index: int) -> None:
            body = {"prompt": f"{index} rivers", "max_tokens": options.tokens, "ignore_eos": True}
            client.post("/v1/completions", json=body).raise_for_status()

        list(threads.map(one, range(count)))
    return time.monotonic() - started


def memory_mb(of: dict[str, psutil.Process]) -> dict[str, float]:
    """Resident memory of each process."""
    return {name: process.memory_info().rss / 1e6 for name, process in of.items()}


def idle(of: dict[str, psutil.Process], seconds: float) -> dict[str, float]:
    """CPU seconds of each process a second, while nobody asks."""
    time.sleep(1)  # what the last request left to do
    before, started = {name: cpu_s(process) for name, process in of.items()}, time.monotonic()
    time.sleep(seconds)
    spent = time.monotonic() - started
    return {name: (cpu_s(process) - before[name]) / spent for name, process in of.items()}


def cpu_s(process: psutil.Process) -> float:
    """CPU time since it started, its own alone."""
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    sys.exit(main())
