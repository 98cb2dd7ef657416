"""`python -m tests.soak [--minutes 10] [--out FILE]`: exit code 0 where nothing leaked and no token was wrong."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from headrace.text.tokenizer import load_tokenizer
from headrace.weights.source import resolve
from tests.parity.server import Server, metric, names_of, served
from tests.soak.answers import LONGEST_ANSWER, greedy_requests, sampled_requests
from tests.soak.clients import LONG_PROMPT, Crowd, Tally
from tests.tiny import VOCAB, load_reference, write_tiny

NUM_PARTS = 6
"""Load and silence take turns so often; memory is looked at in the silences. The first part warms everything up."""
GROWTH = 8 << 20
"""Bytes by which a process may be larger after the last part than after the first."""
SILENCE_S = 20.0
MAX_LEN = LONG_PROMPT + LONGEST_ANSWER
KV_TOKENS = MAX_LEN + 60
"""Of all requests together: too few for all clients at once, so that some are put back."""
TOKEN_BYTES = 2 * 2 * 16 * 3 * 4
"""Keys and values, two heads of sixteen, three layers a stage, float32."""


def main() -> int:
    """Run it, print a summary, and say by the exit code whether all held."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="file for the summary, as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-soak-") as scratch:
        summary = soak(Path(scratch), args.minutes, args.seed)
    text = json.dumps(summary, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
    print("soak:", "; ".join(summary["problems"]) or "nothing leaked, every token was right", file=sys.stderr)
    return 1 if summary["problems"] else 0


def soak(scratch: Path, minutes: float, seed: int) -> dict[str, Any]:
    """The summary; `problems` is empty where all held."""
    folder = write_tiny(scratch / "model", "llama_tied", seed=seed, max_position_embeddings=2048)
    reference = load_reference(folder, scratch / "plain")
    requests = [*greedy_requests(reference, seed), *sampled_requests(reference, seed)]
    names = names_of(load_tokenizer(resolve(str(folder), say=lambda _: None)), VOCAB)
    tally, looks = Tally(), list[dict[str, Any]]()
    flags = ["--pp", "2", "--device", "cpu", "--dtype", "float32", "--page-size", "16", "--chunk", "128"]
    flags += ["--run-ahead", "1", "--max-running", "16", "--max-len", str(MAX_LEN)]
    flags += ["--kv-memory", str(KV_TOKENS * TOKEN_BYTES)]
    with served(str(folder), *flags, stderr=scratch / "log") as server:
        processes = processes_of(server)
        crowd = Crowd(server.url, requests, names, tally)
        for part in range(NUM_PARTS):
            asyncio.run(crowd.run(60 * minutes / NUM_PARTS, seed + 1000 * part))
            for problem in settle(server):
                tally.problem(f"after part {part}: {problem}")
            looks.append(look(processes))
        preemptions = metric(server, "headrace:num_preemptions_total")
        generated = metric(server, "headrace:generation_tokens_total")
        hits = metric(server, "headrace:prefix_cache_hits_total")
    _, alive = psutil.wait_procs(list(processes.values()), timeout=10)
    for process in alive:
        tally.problem(f"pid {process.pid} is still there")
    for problem in [*leaks(looks), *([] if preemptions else ["no request was ever put back: pages were not scarce"])]:
        tally.problem(problem)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "minutes": minutes,
        "flags": " ".join(flags),
        "requests": dict(sorted(tally.done.items())),
        "tokens_compared": tally.tokens,
        "tokens_generated": int(generated),
        "prompt_tokens_from_cache": int(hits),
        "preemptions": int(preemptions),
        "after_each_part": {
            who: {what: [one[who][what] for one in looks] for what in looks[0][who]} for who in looks[0]
        },
        "problems": tally.problems,
    }


def processes_of(server: Server) -> dict[str, psutil.Process]:
    """The service's processes by a short name."""
    found = {"supervisor": psutil.Process(server.process.pid)}
    for child in found["supervisor"].children(recursive=True):
        command = child.cmdline()
        rank = f" {command[command.index('--rank') + 1]}" if "--rank" in command else ""
        found[command[command.index("-m") + 1].removeprefix("headrace.") + rank] = child
    assert found.keys() == {"supervisor", "engine", "worker 0", "worker 1", "api"}, found
    return found


def settle(server: Server) -> list[str]:
    """Wait until nothing runs; what is left that should not be."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    deadline = time.monotonic() + SILENCE_S
    while left := {name: value for name in names if (value := metric(server, f"headrace:{name}"))}:
        if time.monotonic() > deadline:
            return [f"{name} is {value:g} though nobody asks" for name, value in left.items()]
        time.sleep(0.1)
    return []


def look(processes: dict[str, psutil.Process]) -> dict[str, Any]:
    """Resident bytes, open descriptors and threads by process."""
    return {
        who: {
            "resident_mib": round(process.memory_info().rss / 2**20, 2),
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
        }
        for who, process in processes.items()
    }


def leaks(looks: Sequence[dict[str, Any]]) -> list[str]:
    """What has grown between the end of the first part and that of the last."""
    found = []
    for who, first in looks[0].items():
        last = looks[-1][who]
        grown = last["resident_mib"] - first["resident_mib"]
        if grown > GROWTH / 2**20:
            found.append(f"{who} has grown by {grown:.1f} MiB")
        for what in ("descriptors", "threads"):
            if last[what] > first[what]:
                found.append(f"{who} has {last[what]} {what}, {first[what]} before")
    return found


if __name__ == "__main__":
    sys.exit(main())
