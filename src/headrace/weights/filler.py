"""Blocks into slots: bytes are read where they stay if they may, and through a lane where they have to be changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from headrace.errors import CheckpointError
from headrace.weights.codecs import RowCodec
from headrace.weights.finite import first_not_finite, is_watched
from headrace.weights.headers import TensorHeader
from headrace.weights.lanes import Lane, make_lane
from headrace.weights.reads import Block, Piece
from headrace.weights.slots import Slot

Reader = Callable[[Path, int, Sequence[memoryview]], int]
"""`reads.read_into`, or what a test puts in its place."""


class Filler:
    """Reads blocks and fills slots with their rows, on as many threads as call it, each with a lane of its own."""

    def __init__(
        self,
        reader: Reader,
        headers: Mapping[str, TensorHeader],
        codec: Callable[[str], RowCodec],
        slots: Mapping[str, Sequence[Slot]],
        *,
        buffer_bytes: int,
        device: torch.device,
        decoded_by_host: bool,
    ) -> None:
        """buffer_bytes: of the largest block. decoded_by_host: rows cross to the device as values, not as stored."""
        self._reader, self._headers, self._codec, self._slots = reader, headers, codec, slots
        self._buffer_bytes, self._device, self._decoded_by_host = buffer_bytes, device, decoded_by_host
        self._local = threading.local()
        self._lanes: list[Lane] = []

    def fill(self, block: Block) -> int:
        """Read a block, fill what its rows belong to, and return the bytes of its pieces. Raises CheckpointError."""
        # The mode allows filling parameters and tensors made under inference mode alike.
        with torch.inference_mode():
            lane = self._lane()
            buffer = lane.next(block.num_bytes)
            places = [self._place(piece) for piece in block.pieces]
            self._read(block, list(_views(block, places, buffer)))
            for piece, place in zip(block.pieces, places, strict=True):
                self._check(piece, _bytes_of(block, piece, buffer) if place is None else place)
            staged = [piece for piece, place in zip(block.pieces, places, strict=True) if place is None]
            if staged:
                raw = buffer if self._decoded_by_host else lane.move(buffer)
                with lane.copying():
                    for piece in staged:
                        self._spread(piece, _bytes_of(block, piece, raw))
        return sum(piece.num_bytes for piece in block.pieces)

    def hand_over(self) -> None:
        """Order what the caller issues to the device from here on after all that `fill` has returned from."""
        for lane in list(self._lanes):
            lane.hand_over()

    def _lane(self) -> Lane:
        lane: Lane | None = getattr(self._local, "lane", None)
        if lane is None:
            lane = self._local.lane = make_lane(self._buffer_bytes, self._device)
            self._lanes.append(lane)
        return lane

    def _place(self, piece: Piece) -> torch.Tensor | None:
        """The piece's final place as bytes, if it can be read straight into it: whole rows, as stored, for one slot."""
        slots = self._slots[piece.name]
        if len(slots) > 1 or not stays_on_host(self._device):
            return None
        slot, codec = slots[0], self._codec(piece.name)
        wanted = rows_of(slot)
        whole_rows = all(part.indices(size)[:2] == (0, size) for part, size in _inner(slot))
        inside = wanted.start <= piece.rows.start and piece.rows.stop <= wanted.stop
        as_stored = codec.verbatim and codec.dtype == slot.dest.dtype and slot.dest.is_contiguous()
        if not (slot.shape and whole_rows and inside and as_stored):
            return None
        rows = slot.dest.detach()[piece.rows.start - wanted.start : piece.rows.stop - wanted.start]
        return rows.view(-1).view(torch.uint8)

    def _read(self, block: Block, views: Sequence[memoryview]) -> None:
        try:
            count = self._reader(block.file, block.offset, views)
        except OSError as error:
            raise CheckpointError(f"{block.file}: cannot be read: {error.strerror or error}") from None
        if count != block.num_bytes:
            raise CheckpointError(
                f"{block.file}: truncated: ended at byte {block.offset + count}, "
                f"tensor {block.pieces[-1].name} needs {block.offset + block.num_bytes}"
            )

    def _check(self, piece: Piece, raw: torch.Tensor) -> None:
        header = self._headers[piece.name]
        if not is_watched(piece.name, header.shape):
            return
        at = first_not_finite(raw, header.dtype)
        if at is not None:
            at += piece.rows.start * (header.num_values // max(1, header.shape[0] if header.shape else 1))
            raise CheckpointError(f"{header.file}: tensor {piece.name}: value {at} is not a finite number")

    def _spread(self, piece: Piece, raw: torch.Tensor) -> None:
        codec = self._codec(piece.name)
        for start in range(piece.rows.start, piece.rows.stop, codec.rows_at_once):
            stop = min(start + codec.rows_at_once, piece.rows.stop)
            at = (start - piece.rows.start) * codec.row_bytes
            values = codec.decode(raw[at : at + (stop - start) * codec.row_bytes], stop - start)
            for slot in self._slots[piece.name]:
                _copy_rows(slot, values, range(start, stop))


def stays_on_host(device: torch.device) -> bool:
    """Whether a read can fill that device's memory."""
    return device.type == "cpu"


def rows_of(slot: Slot) -> range:
    """The rows of the checkpoint tensor that a slot takes; a scalar is one row."""
    return range(*slot.source[0].indices(slot.shape[0])) if slot.shape else range(1)


def _inner(slot: Slot) -> Iterator[tuple[slice, int]]:
    return zip(slot.source[1:], slot.shape[1:], strict=True)


def _bytes_of(block: Block, piece: Piece, raw: torch.Tensor) -> torch.Tensor:
    start = piece.offset - block.offset
    return raw[start : start + piece.num_bytes]


def _views(block: Block, places: Sequence[torch.Tensor | None], buffer: torch.Tensor) -> Iterator[memoryview]:
    """Where a block's bytes go, in order: places of their own, and the buffer for everything between those."""
    host, done = buffer.numpy().data, 0
    for piece, place in zip(block.pieces, places, strict=True):
        if place is None:
            continue
        start = piece.offset - block.offset
        yield host[done:start]
        yield place.numpy().data
        done = start + piece.num_bytes
    yield host[done : block.num_bytes]


def _copy_rows(slot: Slot, values: torch.Tensor, rows: range) -> None:
    """Copy what `values`, the tensor's rows `rows`, has for the slot."""
    if not slot.shape:
        slot.dest.copy_(values[0])
        return
    wanted = rows_of(slot)
    start, stop = max(wanted.start, rows.start), min(wanted.stop, rows.stop)
    if start < stop:
        part = values[start - rows.start : stop - rows.start][(slice(None), *slot.source[1:])]
        slot.dest[start - wanted.start : stop - wanted.start].copy_(part)
