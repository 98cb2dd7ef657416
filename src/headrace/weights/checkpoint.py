"""A checkpoint read lazily: every slot of this rank filled from exactly the rows it needs, in bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

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
    filler = _Filler(checkpoint, slots, max((block.num_bytes for block in blocks), default=0))
    # The threads that this rank may compute with bound those that read and convert.
    readers = max(1, min(_MAX_READERS, torch.get_num_threads(), len(blocks)))
    done = 0
    with ThreadPoolExecutor(readers, thread_name_prefix="load") as pool:
        for count in pool.map(filler.fill, blocks):
            done += count
            if progress is not None:
                progress(done, total)


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


def _rows(slot: Slot) -> range:
    """The rows of the checkpoint tensor that a slot takes; a scalar is one row."""
    return range(*slot.source[0].indices(slot.shape[0])) if slot.shape else range(1)


class _Filler:
    """Reads blocks and copies their rows into slots, on as many threads as call it, each with one buffer."""

    def __init__(self, checkpoint: Checkpoint, slots: Mapping[str, Sequence[Slot]], buffer_bytes: int) -> None:
        self._checkpoint, self._slots, self._buffer_bytes = checkpoint, slots, buffer_bytes
        self._local = threading.local()

    def fill(self, block: Block) -> int:
        """Read a block, fill what its rows belong to, and return the bytes of its pieces."""
        raw = self._read(block)
        # The mode allows filling parameters and tensors made under inference mode alike.
        with torch.inference_mode():
            for piece in block.pieces:
                start = piece.offset - block.offset
                self._spread(piece, raw[start : start + piece.num_bytes])
        return sum(piece.num_bytes for piece in block.pieces)

    def _read(self, block: Block) -> torch.Tensor:
        buffer: torch.Tensor | None = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = torch.empty(self._buffer_bytes, dtype=torch.uint8)
        raw = buffer[: block.num_bytes]
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
