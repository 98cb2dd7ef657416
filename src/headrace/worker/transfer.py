"""Arrays to the device and tensors back without waiting: through pinned memory, in the order of the current stream."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def upload(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array on the device; on a CPU a view of it."""
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    return torch.empty_like(host, device=device).copy_(stage(host), non_blocking=True)


def stage(host: torch.Tensor) -> torch.Tensor:
    """A pinned copy. PyTorch hands its memory out again only when the copies from it have ended."""
    return torch.empty_like(host, pin_memory=True).copy_(host)


def download(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in host memory, valid once the current stream has come to here; a CPU's tensor itself."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
