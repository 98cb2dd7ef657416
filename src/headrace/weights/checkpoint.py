"""A checkpoint read lazily: every slot of this rank filled from exactly the rows it needs, in bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch

from headrace.errors import CheckpointError
from headrace.spec import ModelSpec
from headrace.weights.codecs import RowCodec, codec_for
from headrace.weights.headers import TensorHeader, listed, open_headers
from headrace.weights.reads import Block, Piece, Want, merge, plan_reads, read_into
from headrace.weights.slots import Slot
from headrace.weights.source import ModelSource

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""
Reader = Callable[[Path, int, memoryview], int]
"""`reads.read_into`, or what a test puts in its place."""

_MAX_READERS = 4
"""Blocks in flight at most: enough to keep a drive busy."""
_PINNED_BUFFERS = 2
"""Of each reader that loads to a GPU: one is read into while the other is copied away."""


class Checkpoint:
    """The tensors of a model source, by their Hugging Face names. Opening it reads headers only."""

    def __init__(self, source: ModelSource, spec: ModelSpec, *, reader: Reader = read_into) -> None:
        self.source, self.spec, self.reader = source, spec, reader
        self._codecs: dict[str, RowCodec] = {}

    @cached_property
    def tensors(self) -> Mapping[str, TensorHeader]:
        """Headers by name. Raises CheckpointError."""
        return open_headers(self.source).tensors

    def codec(self, name: str) -> RowCodec:
        """How that tensor's rows are decoded. Raises CheckpointError for a type that cannot be."""
        codec = self._codecs.get(name)
        if codec is None:
            codec = self._codecs[name] = codec_for(self.tensors[name], self.source, self.spec)
        return codec

    def read(self, name: str, source: tuple[slice, ...] | None = None) -> torch.Tensor:
        """A tensor, or the part `source` of it (one slice a dim), in its stored dtype; float32 where it is quantised.

        Raises CheckpointError if it is missing or cannot be read.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.source.path}: tensor {name} is missing")
        shape = self.tensors[name].shape
        parts = tuple(slice(0, size) for size in shape) if source is None else source
        sizes = [len(range(*part.indices(size))) for part, size in zip(parts, shape, strict=True)]
        dest = torch.empty(sizes, dtype=self.codec(name).dtype)
        load(self, {name: [Slot(dest, parts, shape)]})
        return dest


def load(checkpoint: Checkpoint, slots: Mapping[str, Sequence[Slot]], progress: Progress | None = None) -> None:
    """Fill every slot; `slots` maps a tensor's name to the places that want (parts of) it.

    Names, shapes and types are all checked before the first byte is read. Then each file is read in offset order, in
    blocks of a few MiB, each byte once however many slots share it; a slot of some columns costs its whole rows.
    Raises CheckpointError listing the tensors at fault.
    """
    check_slots(checkpoint, slots)
    blocks = plan_reads(_wants(checkpoint, slots))
    total = sum(piece.num_bytes for block in blocks for piece in block.pieces)
    device = _device_of(slots)
    filler = _Filler(checkpoint, slots, max((block.num_bytes for block in blocks), default=0), device)
    # On a processor the threads that this rank may compute with bound those that read and convert; where a GPU
    # converts, its rank has one thread to compute with and the drive still wants several readers.
    threads = torch.get_num_threads() if device.type == "cpu" else _MAX_READERS
    readers = max(1, min(_MAX_READERS, threads, len(blocks)))
    done = 0
    try:
        with ThreadPoolExecutor(readers, thread_name_prefix="load") as pool:
            for count in pool.map(filler.fill, blocks):
                done += count
                if progress is not None:
                    progress(done, total)
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the last copies are still under way, and the buffers go now


def check_slots(checkpoint: Checkpoint, slots: Mapping[str, Sequence[Slot]]) -> None:
    """Raise one CheckpointError that lists what is missing, of another shape or of a type that does not fit."""
    missing, wrong = [], []
    for name, places in slots.items():
        header = checkpoint.tensors.get(name)
        if header is None:
            missing.append(name)
            continue
        shapes = {slot.shape for slot in places} - {header.shape}
        if shapes:
            wrong.append(f"{name} has shape {list(header.shape)}, the model needs {list(shapes.pop())}")
            continue
        try:
            stored = checkpoint.codec(name).dtype
        except CheckpointError as error:
            wrong.append(str(error))
            continue
        unfit = [slot.dest.dtype for slot in places if not _fits(stored, slot.dest.dtype)]
        if unfit:
            wrong.append(f"{name} is stored as {header.dtype}, the model needs {str(unfit[0]).removeprefix('torch.')}")
    problems = []
    if missing:
        problems.append(f"{_count(missing, 'missing')}: {listed(missing)}")
    if wrong:
        problems.append(f"{_count(wrong, 'unusable')}: {listed(wrong)}")
    if problems:
        raise CheckpointError(f"{checkpoint.source.path}: {'; '.join(problems)}")


def _count(names: Sequence[str], what: str) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} {what}"


def _fits(stored: torch.dtype, dest: torch.dtype) -> bool:
    """Floats convert into each other; whole numbers stay what they are."""
    return stored == dest or (stored.is_floating_point and dest.is_floating_point)


def _wants(checkpoint: Checkpoint, slots: Mapping[str, Sequence[Slot]]) -> Iterable[Want]:
    for name, places in slots.items():
        header, codec = checkpoint.tensors[name], checkpoint.codec(name)
        rows = merge((_rows(slot) for slot in places if slot.dest.numel()), codec.unit)
        yield Want(name, header.file, header.offset, codec.row_bytes, codec.unit, rows)


def _device_of(slots: Mapping[str, Sequence[Slot]]) -> torch.device:
    """The one device that all slots are on."""
    devices = {slot.dest.device for places in slots.values() for slot in places}
    assert len(devices) <= 1, f"slots on several devices: {devices}"
    return devices.pop() if devices else torch.device("cpu")


def _rows(slot: Slot) -> range:
    """The rows of the checkpoint tensor that a slot takes; a scalar is one row."""
    return range(*slot.source[0].indices(slot.shape[0])) if slot.shape else range(1)


class _Lane(Protocol):
    """One reader thread's memory: where blocks are read into and where their rows are copied from."""

    def next(self, num_bytes: int) -> torch.Tensor:
        """Host bytes that may be overwritten."""
        ...

    def move(self, raw: torch.Tensor) -> torch.Tensor:
        """The bytes that `next` gave, filled by now, where the slots are."""
        ...

    def copying(self) -> AbstractContextManager[object]:
        """The context in which slots are filled from what `move` gave."""
        ...


class _HostLane:
    """One buffer, from which slots are filled at once."""

    def __init__(self, num_bytes: int) -> None:
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8)

    def next(self, num_bytes: int) -> torch.Tensor:
        return self._buffer[:num_bytes]

    def move(self, raw: torch.Tensor) -> torch.Tensor:
        return raw

    def copying(self) -> AbstractContextManager[object]:
        return nullcontext()


class _CudaLane:
    """Pinned buffers read into in turn, and one on the device: a block crosses whole, its rows are spread there.

    All device work of a lane is on its own stream, so that order there makes reuse of the device's buffer safe; a
    pinned one is reused once the event that follows its copy has passed.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # The slots' memory may still be written to by what made it.
        self._stream.wait_stream(torch.cuda.default_stream(device))
        self._pinned = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(_PINNED_BUFFERS)]
        self._copied: list[torch.cuda.Event | None] = [None] * _PINNED_BUFFERS
        with self.copying():
            self._there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._turn = -1

    def next(self, num_bytes: int) -> torch.Tensor:
        self._turn = (self._turn + 1) % _PINNED_BUFFERS
        event = self._copied[self._turn]
        if event is not None:
            event.synchronize()
        return self._pinned[self._turn][:num_bytes]

    def move(self, raw: torch.Tensor) -> torch.Tensor:
        with self.copying():
            there = self._there[: len(raw)].copy_(raw, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        self._copied[self._turn] = event
        return there

    def copying(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)


class _Filler:
    """Reads blocks and copies their rows into slots, on as many threads as call it, each with a lane of its own."""

    def __init__(
        self, checkpoint: Checkpoint, slots: Mapping[str, Sequence[Slot]], buffer_bytes: int, device: torch.device
    ) -> None:
        self._checkpoint, self._slots, self._buffer_bytes, self._device = checkpoint, slots, buffer_bytes, device
        self._local = threading.local()

    def fill(self, block: Block) -> int:
        """Read a block, fill what its rows belong to, and return the bytes of its pieces."""
        # The mode allows filling parameters and tensors made under inference mode alike.
        with torch.inference_mode():
            lane = self._lane()
            host = self._read(block, lane)
            # GGUF's types are decoded by the processor, and cross decoded; everything else crosses as it is stored.
            raw = host if self._checkpoint.source.kind == "gguf" else lane.move(host)
            with lane.copying():
                for piece in block.pieces:
                    start = piece.offset - block.offset
                    self._spread(piece, raw[start : start + piece.num_bytes])
        return sum(piece.num_bytes for piece in block.pieces)

    def _lane(self) -> _Lane:
        lane: _Lane | None = getattr(self._local, "lane", None)
        if lane is None:
            size, device = self._buffer_bytes, self._device
            lane = self._local.lane = _HostLane(size) if device.type == "cpu" else _CudaLane(size, device)
        return lane

    def _read(self, block: Block, lane: _Lane) -> torch.Tensor:
        raw = lane.next(block.num_bytes)
        try:
            count = self._checkpoint.reader(block.file, block.offset, raw.numpy().data)
        except OSError as error:
            raise CheckpointError(f"{block.file}: cannot be read: {error.strerror or error}") from None
        if count != block.num_bytes:
            raise CheckpointError(
                f"{block.file}: truncated: ended at byte {block.offset + count}, "
                f"tensor {block.pieces[-1].name} needs {block.offset + block.num_bytes}"
            )
        return raw

    def _spread(self, piece: Piece, raw: torch.Tensor) -> None:
        codec = self._checkpoint.codec(piece.name)
        for start in range(piece.rows.start, piece.rows.stop, codec.rows_at_once):
            stop = min(start + codec.rows_at_once, piece.rows.stop)
            at = (start - piece.rows.start) * codec.row_bytes
            values = codec.decode(raw[at : at + (stop - start) * codec.row_bytes], stop - start)
            for slot in self._slots[piece.name]:
                _copy_rows(slot, values, range(start, stop))


def _copy_rows(slot: Slot, values: torch.Tensor, rows: range) -> None:
    """Copy what `values`, the tensor's rows `rows`, has for the slot."""
    if not slot.shape:
        slot.dest.copy_(values[0])
        return
    wanted = _rows(slot)
    start, stop = max(wanted.start, rows.start), min(wanted.stop, rows.stop)
    if start < stop:
        part = values[start - rows.start : stop - rows.start][(slice(None), *slot.source[1:])]
        slot.dest[start - wanted.start : stop - wanted.start].copy_(part)
