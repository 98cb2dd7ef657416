"""A pinned buffer is read into again only when its copy is done, and there are a fixed number of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headrace.model_config import spec_from_config
from headrace.weights import checkpoint as checkpoint_module
from headrace.weights import filler as filler_module
from headrace.weights.checkpoint import Checkpoint, load
from headrace.weights.lanes import PINNED_BUFFERS, DeviceLane, Lane
from headrace.weights.reads import plan_reads, read_into
from headrace.weights.slots import Slot
from headrace.weights.source import ModelSource
from tests.tiny import tiny_config


@dataclass(eq=False)
class Copy:
    """A copy that counts as under way until somebody waits for it, or for one that was queued later."""

    stream: FakeStream
    there: torch.Tensor
    host: torch.Tensor

    def synchronize(self) -> None:
        while self in self.stream.queue:
            copy = self.stream.queue.pop(0)
            if self.stream.late:
                copy.there.copy_(copy.host)


@dataclass(eq=False)
class FakeStream:
    """A device's queue of copies. `late`: bytes cross only when something waits for them."""

    late: bool = True
    queue: list[Copy] = field(default_factory=list)
    pinned_bytes: list[int] = field(default_factory=list)
    handed_over: int = 0

    def pinned(self, num_bytes: int) -> torch.Tensor:
        self.pinned_bytes.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    def empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, there: torch.Tensor, host: torch.Tensor) -> Copy:
        if not self.late:
            there.copy_(host)
        self.queue.append(Copy(self, there, host))
        return self.queue[-1]

    def issuing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def hand_over(self) -> None:
        self.handed_over += 1


def test_no_buffer_is_given_out_while_its_copy_is_under_way() -> None:
    stream = FakeStream()
    lane = DeviceLane(64, stream)
    for turn in range(7):
        raw = lane.next(64 - turn)
        assert all(copy.host.data_ptr() != raw.data_ptr() for copy in stream.queue)
        assert len(stream.queue) < PINNED_BUFFERS
        raw.fill_(turn)
        there = lane.move(raw)
        assert len(there) == 64 - turn
        stream.queue[-1].synchronize()
        assert there.tolist() == [turn] * (64 - turn)
    assert stream.pinned_bytes == [64] * PINNED_BUFFERS


def test_later_blocks_are_read_while_earlier_ones_cross() -> None:
    stream = FakeStream()
    lane = DeviceLane(8, stream)
    for turn in range(PINNED_BUFFERS):
        lane.move(lane.next(8).fill_(turn))
    assert len(stream.queue) == PINNED_BUFFERS, "somebody waited"
    lane.next(8)
    assert len(stream.queue) == PINNED_BUFFERS - 1, "the oldest copy, and no other, was waited for"


def test_a_model_loads_through_the_ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"t{i}": torch.randn(20 + i, 6) for i in range(9)}
    save_file(tensors, tmp_path / "model.safetensors")
    streams: list[FakeStream] = []

    def make(num_bytes: int, device: torch.device) -> Lane:
        streams.append(FakeStream(late=False))
        return DeviceLane(num_bytes, streams[-1])

    def reader(file: Path, offset: int, views: Sequence[memoryview]) -> int:
        into = {torch.frombuffer(view, dtype=torch.uint8).data_ptr() for view in views}
        crossing = {copy.host.data_ptr() for stream in streams for copy in stream.queue}
        assert not into & crossing, "read into a buffer that is being copied"
        return read_into(file, offset, views)

    monkeypatch.setattr(filler_module, "make_lane", make)
    monkeypatch.setattr(filler_module, "stays_on_host", lambda device: False)
    monkeypatch.setattr(checkpoint_module, "plan_reads", lambda wants: plan_reads(wants, 200))
    checkpoint = Checkpoint(ModelSource("folder", tmp_path, "m"), spec_from_config(tiny_config("llama")), reader=reader)
    slots = {
        name: [Slot(torch.empty(len(t) - i, 5).bfloat16(), (slice(i, len(t)), slice(1, 6)), tuple(t.shape))]
        for i, (name, t) in enumerate(tensors.items())
    }
    handed: list[int] = []
    load(checkpoint, slots, finished=lambda _: handed.append(sum(stream.handed_over for stream in streams)))
    for name, (slot,) in slots.items():
        assert torch.equal(slot.dest, tensors[name][slot.source].bfloat16()), name
    assert 1 <= len(streams) <= 4
    assert all(stream.pinned_bytes == [stream.pinned_bytes[0]] * PINNED_BUFFERS for stream in streams)
    assert handed[0] > 0 and len(handed) == len(tensors), "what follows is ordered after the copies"
