"""Which sums go through the GPUs' memory, and that all ranks agree when one of them cannot."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from headrace.errors import Fault, UserError
from headrace.layers.axis import Axis
from headrace.worker import one_shot
from headrace.worker.one_shot import OneShot, all_reach, connect_one_shot, most_bytes

CPU = torch.device("cpu")


def reach(pairs: set[Any]) -> Any:
    return lambda one, other: (one.index, other.index) in pairs


@pytest.mark.parametrize(("missing", "expected"), [(None, True), ((2, 0), False)])
def test_every_gpu_must_reach_every_other(
    missing: tuple[int, int] | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs: set[Any] = {(i, j) for i in range(3) for j in range(3) if i != j} - {missing}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", reach(pairs))
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    gpus = [torch.device("cuda", i) for i in range(3)]
    assert all_reach(gpus) is expected
    assert not all_reach([gpus[0], gpus[1], gpus[0]])  # two ranks on one
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert not all_reach(gpus)


def test_what_is_sent_is_bounded() -> None:
    assert [most_bytes(ranks) >> 10 for ranks in (2, 3, 8)] == [1024, 512, 146]


class Told:
    """Says whether a tensor is small, and doubles it."""

    def fits(self, x: torch.Tensor) -> bool:
        return x.numel() <= 4

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)


def test_an_axis_takes_the_small_way_for_what_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    large: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", lambda x, **_: large.append(x) or Done())  # type: ignore[func-returns-value]
    axis = Axis(2, 0, small=Told())
    x, y = torch.ones(4), torch.ones(5)
    assert axis.all_reduce(x) is x and x.tolist() == [2.0] * 4 and not large
    assert axis.all_reduce(y) is y and y.tolist() == [1.0] * 5 and large == [y]


class Done:
    def wait(self, _: object) -> None:
        pass


def connected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: int | None, error: Exception) -> list[Any]:
    """Two ranks in threads; rank `broken` cannot map the other's memory, or has none of its own to give."""

    def allocate(num_bytes: int, device: torch.device, what: str) -> tuple[int, torch.Tensor]:
        if isinstance(error, UserError) and threading.current_thread().name == str(broken):
            raise error
        return 1000 + int(threading.current_thread().name), torch.ones(num_bytes, dtype=torch.uint8)

    def open_handle(text: str, what: str) -> int:
        if threading.current_thread().name == str(broken):
            raise error
        return 10 * int(text)

    monkeypatch.setattr(one_shot, "allocate", allocate)
    monkeypatch.setattr(one_shot, "handle_of", lambda address, what: str(address))
    monkeypatch.setattr(one_shot, "open_handle", open_handle)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    got: list[Any] = ["nothing"] * 2

    def rank(index: int) -> None:
        store = dist.FileStore(str(tmp_path / "store"), 2)
        got[index] = connect_one_shot(store, "tensor ranks of stage 0", 2, index, CPU)

    threads = [threading.Thread(target=rank, args=(index,), name=str(index)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return got


def test_ranks_map_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = connected(tmp_path, monkeypatch, None, Fault(""))
    assert isinstance(one, OneShot) and isinstance(other, OneShot)
    assert one._buffers.addresses == (1000, 10010) and other._buffers.addresses == (10000, 1001)
    assert (one._buffers.rank, other._buffers.rank) == (0, 1)
    assert one._buffers.most_bytes == most_bytes(2) and bool((one._buffers.epochs == 1).all())
    assert not one.fits(torch.zeros(8))  # on a processor


@pytest.mark.parametrize("error", [Fault("sums: CUDA_ERROR_INVALID_DEVICE"), UserError("cuda-bindings are missing")])
@pytest.mark.parametrize("broken", [0, 1])
def test_where_one_rank_cannot_none_does(
    broken: int, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert connected(tmp_path, monkeypatch, broken, error) == [None, None]
    assert [record.message for record in caplog.records] == [f"{error}; NCCL does them"]
