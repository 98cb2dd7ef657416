"""Host to GPU and back, and what the link runs at meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import torch

from headrace.probe.link import pcie_link
from headrace.probe.timing import device_of, seconds_of

NUM_BYTES = 256 << 20


def measure(gpu: int, budget_s: float) -> dict[str, Any]:
    """`to_gpu` and `from_gpu` in bytes a second, from page-locked memory, and `link` under load (see `PcieLink`)."""
    device = device_of(gpu)
    found: Any = torch.cuda.get_device_properties(gpu)
    host = torch.ones(NUM_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(NUM_BYTES, dtype=torch.uint8, device=device)
    to_s = seconds_of(lambda: there.copy_(host, non_blocking=True), budget_s / 2, device)
    from_s = seconds_of(lambda: host.copy_(there, non_blocking=True), budget_s / 2, device)
    # Links save power: only one that has something to carry shows what it can.
    stop = threading.Event()
    carrier = threading.Thread(target=_carry, args=(there, host, stop), daemon=True)
    carrier.start()
    link = pcie_link(f"GPU-{found.uuid}")
    stop.set()
    carrier.join()
    rates: dict[str, Any] = {"to_gpu": NUM_BYTES / to_s, "from_gpu": NUM_BYTES / from_s}
    return rates | {"link": None if link is None else msgspec.structs.asdict(link)}


def _carry(there: torch.Tensor, host: torch.Tensor, stop: threading.Event) -> None:
    torch.cuda.set_device(there.device)
    while not stop.is_set():
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
