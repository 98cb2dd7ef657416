"""What is in this machine, asked without torch: GPUs by the driver's own tool, cores and memory."""

from __future__ import annotations

import os
import subprocess

import psutil

from headrace.plan.machines import Here
from headrace.supervise.devices import num_gpus
from headrace.supervise.launch import num_cores

TIMEOUT_S = 4.0


def look() -> Here:
    """GPUs that this process may use, cores and memory of the host."""
    gpus = visible(_nvidia_smi(), os.environ.get("CUDA_VISIBLE_DEVICES")) if num_gpus() else []
    return Here(gpus=gpus, cores=num_cores(), memory_bytes=psutil.virtual_memory().total)


def visible(gpus: list[tuple[str, int]], chosen: str | None) -> list[tuple[str, int]]:
    """Those of CUDA_VISIBLE_DEVICES that are numbers; all where it is unset or names them otherwise."""
    entries = [] if chosen is None else [entry.strip() for entry in chosen.split(",")]
    if not entries or not all(entry.isdigit() and int(entry) < len(gpus) for entry in entries):
        return gpus
    return [gpus[int(entry)] for entry in entries]


def _nvidia_smi() -> list[tuple[str, int]]:
    command = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return parse(done.stdout)


def parse(text: str) -> list[tuple[str, int]]:
    """Names and bytes from lines of a name and MiB."""
    found = []
    for line in text.splitlines():
        name, _, mib = line.rpartition(",")
        if name and mib.strip().isdigit():
            found.append((name.strip(), int(mib) << 20))
    return found
