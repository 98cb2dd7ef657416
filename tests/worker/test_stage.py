"""Which GPU a rank is on, and one line where there is none for it."""

from __future__ import annotations

import pytest
import torch

from headrace.errors import UserError
from headrace.mesh import Mesh
from headrace.worker.loop import enough_memory
from headrace.worker.stage import usable_gpus

MESH = Mesh(pp=2, tp=2, ep=1, split=(1, 1))


@pytest.mark.parametrize(("available", "count"), [(False, 4), (True, 0), (True, 3)])
def test_too_few_gpus_that_torch_can_use(available: bool, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Device files without a driver that fits torch are such a case."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(UserError, match=f"^--device cuda: torch can use {count if available else 0} .*, 4 are needed"):
        usable_gpus(MESH)


def test_enough_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert usable_gpus(MESH) == 4
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("HEADRACE_SHARE_GPUS", "1")
    assert usable_gpus(MESH) == 2


def test_out_of_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5, 80))
    with (
        pytest.raises(UserError, match="^GPU 1: out of memory, 5 of 80 bytes are free: too much$"),
        enough_memory("too much"),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee documentation")
