"""Slots get exactly their part of a tensor, each byte is read once, and faults are found before the first byte."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from headrace.errors import CheckpointError
from headrace.model_config import spec_from_config
from headrace.weights import checkpoint as checkpoint_module
from headrace.weights.checkpoint import Checkpoint, load
from headrace.weights.reads import plan_reads, read_into
from headrace.weights.slots import Slot
from headrace.weights.source import ModelSource, read_spec
from tests.tiny import tiny_config, write_tiny

SPEC = spec_from_config(tiny_config("llama"))


class Recorder:
    """Reads as usual and remembers what was asked for, on which thread, and where in memory it went."""

    def __init__(self) -> None:
        self.reads: list[tuple[Path, int, int]] = []
        self.places: dict[int, set[int]] = {}
        """First and last address by thread."""
        self._lock = threading.Lock()

    def __call__(self, file: Path, offset: int, views: Sequence[memoryview]) -> int:
        with self._lock:
            self.reads.append((file, offset, sum(len(view) for view in views)))
            used = [torch.frombuffer(view, dtype=torch.uint8) for view in views if len(view)]
            self.places.setdefault(threading.get_ident(), set()).update(bytes_.data_ptr() for bytes_ in used)
        return read_into(file, offset, views)

    @property
    def num_bytes(self) -> int:
        return sum(size for _, _, size in self.reads)


def saved(folder: Path, tensors: Mapping[str, torch.Tensor], reader: Recorder | None = None) -> Checkpoint:
    save_file(dict(tensors), folder / "model.safetensors")
    return Checkpoint(ModelSource("folder", folder, "m"), SPEC, reader=reader or read_into)


def whole(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Slot:
    dest = torch.empty(tensor.shape, dtype=dtype or tensor.dtype)
    return Slot(dest, tuple(slice(0, size) for size in tensor.shape), tuple(tensor.shape))


def opened(folder: Path) -> Checkpoint:
    source = ModelSource("folder", folder, "m")
    return Checkpoint(source, read_spec(source))


@pytest.mark.parametrize("max_shard_bytes", [None, 150_000])
@pytest.mark.parametrize("name", ["llama_bias", "kimi_k25_int4"])
def test_whole_checkpoint_is_what_the_library_reads(tmp_path: Path, name: str, max_shard_bytes: int | None) -> None:
    folder = write_tiny(tmp_path / "m", name, dtype="bfloat16", max_shard_bytes=max_shard_bytes)
    stored: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    slots = {name: [whole(tensor)] for name, tensor in stored.items()}
    seen: list[tuple[int, int]] = []
    load(opened(folder), slots, lambda done, total: seen.append((done, total)))
    for name, tensor in stored.items():
        assert torch.equal(slots[name][0].dest, tensor), name
    total = sum(tensor.nbytes for tensor in stored.values())
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)


@st.composite
def parts(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple[slice, ...]:
    out = []
    for size in shape:
        start = draw(st.integers(0, size))
        out.append(slice(start, draw(st.integers(start, size))))
    return tuple(out)


SHAPES = {"vector": (37,), "matrix": (24, 10), "cube": (6, 5, 4), "one": (1,), "empty": (0, 3)}
STORED = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(dtype)
    for i, (name, shape) in enumerate(SHAPES.items())
    for dtype in ((torch.bfloat16, torch.float32, torch.float16)[i % 3],)
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_any_parts_of_any_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    block_bytes = data.draw(st.sampled_from([1, 7, 64, 1000]))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "plan_reads", lambda wants: plan_reads(wants, block_bytes))
        recorder = Recorder()
        checkpoint = saved(tmp_path, STORED, recorder)
        slots: dict[str, list[Slot]] = {}
        for name in data.draw(st.lists(st.sampled_from(sorted(SHAPES)), unique=True)):
            slots[name] = []
            for source in data.draw(st.lists(parts(SHAPES[name]), max_size=3)):
                want = STORED[name][source]
                strided = torch.full((*want.shape, 2), torch.nan)[..., data.draw(st.integers(0, 1))]
                slots[name].append(Slot(strided, source, SHAPES[name]))
        load(checkpoint, slots)
    for name, places in slots.items():
        for slot in places:
            assert torch.equal(slot.dest, STORED[name][slot.source].float()), (name, slot.source)
    spans = sorted((offset, size) for _, offset, size in recorder.reads)
    assert all(a + size <= b for (a, size), (b, _) in pairwise(spans)), "bytes were read twice"
    largest_row = max((math.prod(t.shape[1:]) * t.element_size() for t in STORED.values()), default=0)
    assert all(size <= max(block_bytes, largest_row) for _, size in spans)


def test_tensor_of_two_slots_is_read_once(tmp_path: Path) -> None:
    recorder = Recorder()
    weight = torch.randn(50, 8)
    checkpoint = saved(tmp_path, {"embedding": weight, "other": torch.randn(50, 8)}, recorder)
    halves = [Slot(torch.empty(25, 8), (slice(25, 50), slice(0, 8)), (50, 8)) for _ in range(2)]
    load(checkpoint, {"embedding": halves})
    assert torch.equal(halves[0].dest, weight[25:])
    assert torch.equal(halves[1].dest, weight[25:])
    assert recorder.num_bytes == weight[25:].nbytes


def test_memory_is_a_few_buffers_however_large_the_tensors(tmp_path: Path) -> None:
    recorder = Recorder()
    large = torch.arange(6 << 20, dtype=torch.float32).view(-1, 1024)
    checkpoint = saved(tmp_path, {"large": large, "more": large + 1}, recorder)
    slots = {"large": [whole(large, torch.bfloat16)], "more": [whole(large, torch.float16)]}
    load(checkpoint, slots)
    assert torch.equal(slots["large"][0].dest, large.bfloat16())
    assert torch.equal(slots["more"][0].dest, (large + 1).half())
    assert recorder.num_bytes == 2 * large.nbytes
    assert max(size for _, _, size in recorder.reads) <= 8 << 20
    assert len(recorder.reads) == 6
    assert len(recorder.places) <= 4
    assert all(len(buffers) == 1 for buffers in recorder.places.values())


def test_rows_that_stay_as_stored_are_read_where_they_stay(tmp_path: Path) -> None:
    recorder = Recorder()
    tensors = {name: torch.randn(64, 8) for name in ("a", "b", "cast", "columns", "tied")}
    checkpoint = saved(tmp_path, tensors, recorder)
    stack = torch.empty(2, 32, 8)
    rows = (slice(16, 48), slice(0, 8))
    slots = {
        "a": [Slot(stack[0], rows, (64, 8))],
        "b": [Slot(stack[1], rows, (64, 8))],
        "cast": [whole(tensors["cast"], torch.bfloat16)],
        "columns": [Slot(torch.empty(64, 4), (slice(0, 64), slice(0, 4)), (64, 8))],
        "tied": [whole(tensors["tied"]), whole(tensors["tied"])],
    }
    load(checkpoint, slots)
    for name, places in slots.items():
        for slot in places:
            assert torch.equal(slot.dest, tensors[name][slot.source].to(slot.dest.dtype)), name
    read_to = set().union(*recorder.places.values())
    assert {stack[0].data_ptr(), stack[1].data_ptr()} <= read_to
    kept = [slot.dest.data_ptr() for name in ("cast", "columns", "tied") for slot in slots[name]]
    assert not read_to & set(kept)


def test_a_tensor_is_told_when_all_of_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_module, "plan_reads", lambda wants: plan_reads(wants, 64))
    tensors = {name: torch.randn(16, 8) for name in ("a", "b", "c")}
    slots = {name: [whole(tensor)] for name, tensor in tensors.items()}
    slots["none"] = [Slot(torch.empty(0, 8), (slice(0, 0), slice(0, 8)), (16, 8))]
    checkpoint = saved(tmp_path, tensors | {"none": torch.ones(16, 8)})
    told: list[str] = []

    def finished(name: str) -> None:
        told.append(name)
        if name in tensors:
            assert torch.equal(slots[name][0].dest, tensors[name])

    load(checkpoint, slots, finished=finished)
    assert told == ["none", "a", "b", "c"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32])
def test_scale_that_is_no_number_is_named(tmp_path: Path, dtype: torch.dtype, kept: torch.dtype, bad: float) -> None:
    scale = torch.ones(40, 6, dtype=dtype)
    scale[33, 4] = bad
    tensors = {"mlp.weight_packed": torch.full((40, 2), -1, dtype=torch.int32), "mlp.weight_scale": scale}
    slots = {name: [whole(t, kept if t.is_floating_point() else None)] for name, t in tensors.items()}
    message = r"^\S+model\.safetensors: tensor mlp\.weight_scale: value 202 is not a finite number$"
    with pytest.raises(CheckpointError, match=message):
        load(saved(tmp_path, tensors), slots)


def test_part_of_a_tensor_costs_its_rows_only(tmp_path: Path) -> None:
    recorder = Recorder()
    weight = torch.randn(4096, 16)
    checkpoint = saved(tmp_path, {"weight": weight}, recorder)
    got = checkpoint.read("weight", (slice(1000, 1010), slice(4, 8)))
    assert torch.equal(got, weight[1000:1010, 4:8])
    assert recorder.num_bytes == 10 * 16 * 4


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.int8, torch.int16, torch.bool])
def test_whole_numbers_stay_exact(tmp_path: Path, dtype: torch.dtype) -> None:
    words = torch.randint(-(2**31), 2**31, (12, 9)).to(dtype)
    checkpoint = saved(tmp_path, {"words": words})
    assert torch.equal(checkpoint.read("words"), words)
    assert checkpoint.read("words").dtype == dtype


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dest", [torch.float32, torch.float16, torch.bfloat16])
def test_floats_are_cast_to_what_is_kept(tmp_path: Path, stored: torch.dtype, dest: torch.dtype) -> None:
    weight = torch.randn(5, 7).to(stored)
    slot = whole(weight, dest)
    load(saved(tmp_path, {"weight": weight}), {"weight": [slot]})
    assert torch.equal(slot.dest, weight.to(dest))


def test_scalar_is_one_row(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, {"scale": torch.tensor(2.5)})
    assert torch.equal(checkpoint.read("scale"), torch.tensor(2.5))


def test_parameters_and_inference_tensors_can_be_filled(tmp_path: Path) -> None:
    weight = torch.randn(3, 4)
    with torch.inference_mode():
        frozen = torch.empty(3, 4)
    parameter = torch.nn.Parameter(torch.empty(3, 4))
    places = [Slot(dest, (slice(0, 3), slice(0, 4)), (3, 4)) for dest in (frozen, parameter)]
    load(saved(tmp_path, {"weight": weight}), {"weight": places})
    assert torch.equal(frozen, weight)
    assert torch.equal(parameter.detach(), weight)


def test_tensors_need_not_be_aligned(tmp_path: Path) -> None:
    values = torch.randn(6)
    entries = {
        "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "floats": {"dtype": "F32", "shape": [6], "data_offsets": [1, 25]},
    }
    header = json.dumps(entries).encode()
    raw = len(header).to_bytes(8, "little") + header + b"\7" + values.numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(raw)
    checkpoint = Checkpoint(ModelSource("folder", tmp_path, "m"), SPEC)
    byte, floats = whole(torch.empty(1, dtype=torch.uint8)), whole(values)
    load(checkpoint, {"byte": [byte], "floats": [floats]})
    assert torch.equal(floats.dest, values)
    assert byte.dest.item() == 7


def test_every_fault_is_listed_before_a_byte_is_read(tmp_path: Path) -> None:
    recorder = Recorder()
    checkpoint = saved(
        tmp_path, {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.int32), "c": torch.zeros(1)}, recorder
    )
    slots = {
        "a": [whole(torch.empty(3, 2))],
        "b": [whole(torch.empty(4), torch.bfloat16)],
        "c": [whole(torch.empty(1))],
        "x": [whole(torch.empty(1))],
        "y": [whole(torch.empty(1))],
    }
    with pytest.raises(CheckpointError) as caught:
        load(checkpoint, slots)
    assert str(caught.value) == (
        f"{tmp_path}: 2 tensors missing: x, y; 2 tensors unusable: a has shape [2, 3], the model needs [3, 2], "
        "b is stored as I32, the model needs bfloat16"
    )
    assert not recorder.reads


def test_long_lists_of_faults_are_cut(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, {"a": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"40 tensors missing: t0, t1, .*t9 and 30 more$"):
        load(checkpoint, {f"t{i}": [whole(torch.empty(1))] for i in range(40)})


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F4"])
def test_type_that_cannot_be_read_is_named(tmp_path: Path, dtype: str) -> None:
    header = f'{{"a":{{"dtype":"{dtype}","shape":[4],"data_offsets":[0,4]}}}}'.encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"1234")
    with pytest.raises(CheckpointError, match=f"tensor a is stored as {dtype}, which is not supported"):
        load(Checkpoint(ModelSource("folder", tmp_path, "m"), SPEC), {"a": [whole(torch.empty(4))]})


def test_missing_tensor_read_alone_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tensor b is missing"):
        saved(tmp_path, {"a": torch.zeros(1)}).read("b")


def test_file_that_shrinks_after_it_was_opened_is_an_error(tmp_path: Path) -> None:
    weight = torch.randn(100, 10)
    checkpoint = saved(tmp_path, {"weight": weight})
    assert "weight" in checkpoint.tensors
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as handle:
        handle.truncate(2000)
    with pytest.raises(CheckpointError, match=r"truncated: ended at byte 2000, tensor weight needs \d+$"):
        load(checkpoint, {"weight": [whole(weight)]})


def test_file_that_vanishes_after_it_was_opened_is_an_error(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, {"weight": torch.zeros(4)})
    assert "weight" in checkpoint.tensors
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        checkpoint.read("weight")


def test_nothing_to_load_is_nothing_read(tmp_path: Path) -> None:
    recorder = Recorder()
    load(saved(tmp_path, {"weight": torch.zeros(4)}, recorder), {})
    assert not recorder.reads
