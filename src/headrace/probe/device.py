"""What a GPU is, or the processor: its name and sizes, which nothing has to be measured for."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import psutil
import torch

from headrace.probe.timing import device_of
from headrace.supervise.launch import num_cores

_CPUINFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def measure(gpu: int | None) -> dict[str, Any]:
    """`name`, `memory_bytes`, `cache_bytes` (the last before memory), `uuid` of a GPU, `cores` of the processor."""
    if gpu is None:
        memory = psutil.virtual_memory().total
        return {"name": processor_name(), "memory_bytes": memory, "cache_bytes": last_cache(), "cores": num_cores()}
    torch.zeros(1, device=device_of(gpu))  # a GPU that cannot even do that is found here
    found: Any = torch.cuda.get_device_properties(gpu)
    return {
        "name": found.name,
        "memory_bytes": int(found.total_memory),
        "cache_bytes": int(found.L2_cache_size),
        "uuid": f"GPU-{found.uuid}",
    }


def processor_name(cpuinfo: Path = _CPUINFO) -> str:
    """As its maker calls it."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def last_cache(caches: Path = _CACHES) -> int:
    """Bytes of the largest cache of a core; 0 where the system does not say."""
    sizes = [0]
    for size in caches.glob("index*/size"):
        text = size.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) << 10)
    return max(sizes)
