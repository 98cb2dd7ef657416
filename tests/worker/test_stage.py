"""Which GPU a rank is on, one line where there is none for it, and layers finalised while others load."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch

from headrace.errors import UserError
from headrace.layers.build import Build
from headrace.layers.decoder import Decoder
from headrace.mesh import Mesh
from headrace.models.registry import build_model, rules_of
from headrace.weights import checkpoint as checkpoint_module
from headrace.weights.checkpoint import Checkpoint, load
from headrace.weights.reads import Block, Want, plan_reads, read_into
from headrace.weights.rules import bind
from headrace.weights.source import ModelSource, read_spec
from headrace.worker.loop import enough_memory
from headrace.worker.stage import load_model, usable_gpus
from tests.tiny import write_tiny

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


def test_layers_take_their_final_form_while_others_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ModelSource("folder", write_tiny(tmp_path / "m", "kimi_k25_int4", tokenizer=False), "m")
    spec = read_spec(source)
    events: list[str] = []
    blocks: list[Block] = []
    begun, one_is_final = itertools.count(1), threading.Event()

    def plan(wants: Iterable[Want]) -> list[Block]:
        blocks[:] = plan_reads(wants, 4096)
        return blocks

    def reader(file: Path, offset: int, views: Sequence[memoryview]) -> int:
        # Readers may be as far ahead as they like, so the last block is held back.
        if next(begun) == len(blocks):
            one_is_final.wait(20)
        events.append("read")
        return read_into(file, offset, views)

    monkeypatch.setattr(checkpoint_module, "plan_reads", plan)
    whole = Decoder.finalise_layer

    def noted(self: Decoder, index: int) -> None:
        events.append(f"layer {index}")
        one_is_final.set()
        whole(self, index)

    def build() -> Decoder:
        return build_model(Build(spec=spec, layers=range(spec.num_layers), max_len=8, dtype=torch.float32))

    models = build(), build()
    checkpoint = Checkpoint(source, spec)
    load(checkpoint, bind(models[1], rules_of(spec), spec, checkpoint.tensors))
    models[1].finalise()
    monkeypatch.setattr(Decoder, "finalise_layer", noted)
    load_model(models[0], Checkpoint(source, spec, reader=reader))
    models[0].finalise()
    assert [event for event in events if event != "read"] == [f"layer {i}" for i in range(spec.num_layers)]
    assert "read" in events[events.index("layer 0") :], "finalised only when all was read"
    one, other = (dict(model.named_parameters()) for model in models)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
