"""A checkpoint read lazily: every slot of this rank filled from exactly the rows it needs, in bounded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import torch

from headrace.errors import CheckpointError
from headrace.spec import ModelSpec
from headrace.weights.codecs import RowCodec, codec_for
from headrace.weights.filler import Filler, Reader, rows_of
from headrace.weights.headers import TensorHeader, listed, open_headers
from headrace.weights.reads import Block, Want, merge, plan_reads, read_into
from headrace.weights.slots import Slot
from headrace.weights.source import ModelSource

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""
Finished = Callable[[str], None]
"""Told a tensor's name once all of it that is wanted is in place."""

_MAX_READERS = 4
"""Blocks in flight at most: enough to keep a drive busy, also where a rank has one thread to compute with."""


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


def load(
    checkpoint: Checkpoint,
    slots: Mapping[str, Sequence[Slot]],
    progress: Progress | None = None,
    finished: Finished | None = None,
) -> None:
    """Fill every slot; `slots` maps a tensor's name to the places that want (parts of) it.

    Names, shapes and types are all checked before the first byte is read. Then each file is read in offset order, in
    blocks of a few MiB, each byte once however many slots share it; a slot of some columns costs its whole rows. Both
    callbacks are called on this thread, `finished` once a tensor; work it issues to the device comes after that
    tensor's copies, and further blocks are read meanwhile.
    Raises CheckpointError listing the tensors at fault, or naming the first that holds a scale that is not finite.
    """
    check_slots(checkpoint, slots)
    blocks = planned(checkpoint, slots)
    total = sum(piece.num_bytes for block in blocks for piece in block.pieces)
    device = _device_of(slots)
    filler = Filler(
        checkpoint.reader,
        checkpoint.tensors,
        checkpoint.codec,
        slots,
        buffer_bytes=max((block.num_bytes for block in blocks), default=0),
        device=device,
        # GGUF's types are decoded by the processor, and cross decoded; everything else crosses as it is stored.
        decoded_by_host=checkpoint.source.kind == "gguf",
    )
    readers = max(1, min(_MAX_READERS, len(blocks)))
    pending = Counter(piece.name for block in blocks for piece in block.pieces)
    done = 0
    if finished is not None:
        for name in slots:
            if name not in pending:
                finished(name)
    try:
        with ThreadPoolExecutor(readers, thread_name_prefix="load") as pool:
            for block, count in zip(blocks, pool.map(filler.fill, blocks), strict=True):
                done += count
                if progress is not None:
                    progress(done, total)
                if finished is not None:
                    _tell(block, pending, filler, finished)
    finally:
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the last copies are still under way, and the buffers go now


def planned(checkpoint: Checkpoint, slots: Mapping[str, Sequence[Slot]]) -> list[Block]:
    """The reads that fill these slots, which `check_slots` has passed, in order."""
    return plan_reads(_wants(checkpoint, slots))


def _tell(block: Block, pending: Counter[str], filler: Filler, finished: Finished) -> None:
    pending.subtract(piece.name for piece in block.pieces)
    complete = [piece.name for piece in block.pieces if not pending[piece.name]]
    if complete:
        filler.hand_over()
    for name in complete:
        finished(name)


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
        rows = merge((rows_of(slot) for slot in places if slot.dest.numel()), codec.unit)
        yield Want(name, header.file, header.offset, codec.row_bytes, codec.unit, rows)


def _device_of(slots: Mapping[str, Sequence[Slot]]) -> torch.device:
    """The one device that all slots are on."""
    devices = {slot.dest.device for places in slots.values() for slot in places}
    assert len(devices) <= 1, f"slots on several devices: {devices}"
    return devices.pop() if devices else torch.device("cpu")
