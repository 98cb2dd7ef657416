"""Device memory that other processes of this host map: an edge's ring, the buffers of a sum."""

from __future__ import annotations

import os
from typing import Any

import torch

from headrace.kernels.driver import check, driver


def can_reach(device: torch.device, peer: torch.device) -> bool:
    """Whether one GPU of this host can write to the other's memory, and nobody has forbidden it."""
    if os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0"):
        return False
    assert device.index is not None and peer.index is not None
    return device.index != peer.index and torch.cuda.can_device_access_peer(device, peer)


class _Memory:
    """Device memory as PyTorch and NumPy see foreign memory."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def allocate(num_bytes: int, device: torch.device, what: str) -> tuple[int, torch.Tensor]:
    """Memory for others to map, for as long as the process lives: its address, and itself as bytes.

    Raises Fault naming `what`, like the others here.
    """
    # Not from PyTorch's pool: what is mapped elsewhere must be an allocation of its own.
    address = int(check(driver().cuMemAlloc(num_bytes), what))
    return address, torch.as_tensor(_Memory(address, num_bytes), device=device)


def handle_of(address: int, what: str) -> str:
    """What another process opens it by."""
    return bytes(check(driver().cuIpcGetMemHandle(address), what).reserved).hex()


def open_handle(text: str, what: str) -> int:
    """The address, in this process, of another one's memory."""
    api: Any = driver()
    handle = api.CUipcMemHandle()
    handle.reserved = bytes.fromhex(text)
    flag = api.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    return int(check(api.cuIpcOpenMemHandle(handle, flag.value), what))
