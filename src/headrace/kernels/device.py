"""What a CUDA device has, asked once: kernels choose their tiles and grids by it."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch


class Limits(NamedTuple):
    """Of one device."""

    capability: tuple[int, int]
    smem: int
    """Bytes of shared memory that one block may have."""
    multiprocessors: int


def limits(device: torch.device | int) -> Limits:
    """Of a CUDA device or its index; of the current one where a device has none."""
    index = device if isinstance(device, int) else device.index
    return _limits(torch.cuda.current_device() if index is None else index)


@cache
def _limits(index: int) -> Limits:
    properties: Any = torch.cuda.get_device_properties(index)
    return Limits(
        (int(properties.major), int(properties.minor)),
        int(properties.shared_memory_per_block_optin),
        int(properties.multi_processor_count),
    )
