"""Tensor headers: what a checkpoint holds and where, read and checked without reading a weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.errors import CheckpointError
from headrace.weights.source import ModelSource

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MAX_HEADER = 100_000_000
"""The limit of the safetensors format."""

_ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}


# Outside the garbage collector's sight: K2 has 200,000 of these, and they refer to nothing that refers to them.
class TensorHeader(msgspec.Struct, frozen=True, gc=False):
    """One tensor of a checkpoint, under its Hugging Face name."""

    name: str
    dtype: str
    """As the file spells it: BF16, F32, I32; for GGUF the GGML type: Q4_1."""
    shape: tuple[int, ...]
    """Outermost dim first, as Hugging Face has it."""
    file: Path
    offset: int
    """Of its first byte, from the start of the file."""
    num_bytes: int

    @property
    def num_values(self) -> int:
        """The product of its dims."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Headers:
    """Every tensor of a checkpoint by name."""

    tensors: Mapping[str, TensorHeader]


def open_headers(source: ModelSource) -> Headers:
    """Read all headers of a checkpoint.

    Raises CheckpointError for a missing, truncated or unreadable file, an index that does not fit its shards, and
    checkpoints that are pickles only.
    """
    if source.kind == "gguf":
        return Headers(_gguf_headers(source.path))
    try:
        return Headers(_folder_headers(source.path))
    except PermissionError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from None


def _folder_headers(folder: Path) -> Mapping[str, TensorHeader]:
    if (folder / _SINGLE).is_file():
        return file_headers(folder / _SINGLE)
    if (folder / _INDEX).is_file():
        return _sharded_headers(folder)
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder}: only pickled weights ({listed(pickles, 3)}), which are never loaded: convert to safetensors"
        )
    raise CheckpointError(f"{folder}: holds neither {_SINGLE} nor {_INDEX}")


def listed(names: Iterable[str], limit: int = 10) -> str:
    """Names for an error line: at most `limit` of them, then how many more there are."""
    every = list(names)
    text = ", ".join(every[:limit])
    return f"{text} and {len(every) - limit} more" if len(every) > limit else text


class _Entry(msgspec.Struct, gc=False):
    # Defaults let `__metadata__` (text by text) decode as an entry, so that one typed pass reads the whole header.
    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_ENTRIES = msgspec.json.Decoder(dict[str, _Entry])
_INDEXES = msgspec.json.Decoder(_Index)


def _sharded_headers(folder: Path) -> dict[str, TensorHeader]:
    index = folder / _INDEX
    try:
        weight_map = _INDEXES.decode(index.read_bytes()).weight_map
    except OSError as error:
        raise CheckpointError(f"{index}: cannot be read: {error.strerror or error}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{index}: not a weight index: {error}") from None
    shards = sorted(set(weight_map.values()))
    outside = [shard for shard in shards if Path(shard).is_absolute() or ".." in Path(shard).parts]
    if outside:
        raise CheckpointError(f"{index}: names files outside the folder: {listed(outside)}")
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        count = f"{len(missing)} of {len(shards)} shards missing" if len(missing) > 1 else "shard missing"
        raise CheckpointError(f"{folder}: {count}: {listed(missing)}")
    held = {shard: file_headers(folder / shard) for shard in shards}
    lacking = [f"{name} ({shard})" for name, shard in weight_map.items() if name not in held[shard]]
    if lacking:
        raise CheckpointError(f"{index}: names tensors that their shards lack ({len(lacking)}): {listed(lacking)}")
    # A tensor that the index does not name is kept too: whether it belongs is for the model's rules to say.
    tensors = {name: header for headers in held.values() for name, header in headers.items()}
    tensors.update((name, held[shard][name]) for name, shard in weight_map.items())
    return tensors


def file_headers(path: Path) -> dict[str, TensorHeader]:
    """The headers of one safetensors file, in file order of its header. Raises CheckpointError."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > _MAX_HEADER:
                raise CheckpointError(f"{path}: not a safetensors file")
            if 8 + length > size:
                raise CheckpointError(f"{path}: truncated: the header ends at byte {8 + length}, the file has {size}")
            data = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    return parse_header(data, path, size)


def parse_header(data: bytes, path: Path, size: int) -> dict[str, TensorHeader]:
    """The tensors of a safetensors file of so many bytes, from its header alone. Raises CheckpointError."""
    try:
        entries = _ENTRIES.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: the safetensors header is broken: {error}") from None
    entries.pop("__metadata__", None)
    start = 8 + len(data)
    headers = {name: _header(name, entry, path, start) for name, entry in entries.items()}
    _check_layout(headers.values(), path, start, size)
    return headers


def _check_layout(headers: Iterable[TensorHeader], path: Path, start: int, size: int) -> None:
    """The format leaves no room: each byte after the header belongs to one tensor."""
    end = start
    for offset, num_bytes, name in sorted((header.offset, header.num_bytes, header.name) for header in headers):
        if offset != end:
            what = "overlaps the one before it" if offset < end else f"leaves bytes {end} to {offset} to nobody"
            raise CheckpointError(f"{path}: the header is broken: tensor {name} {what}")
        end += num_bytes
    if end > size:
        raise CheckpointError(f"{path}: truncated: its header needs {end} bytes, the file has {size}")
    if end < size:
        raise CheckpointError(f"{path}: its header accounts for {end} bytes, the file has {size}")


def _header(name: str, entry: _Entry, path: Path, start: int) -> TensorHeader:
    begin, end = entry.data_offsets
    num_bytes = end - begin
    item = _ITEM_BYTES.get(entry.dtype)
    if begin < 0 or num_bytes < 0 or (item is not None and num_bytes != item * math.prod(entry.shape)):
        raise CheckpointError(
            f"{path}: the header gives tensor {name} ({entry.dtype} {list(entry.shape)}) "
            f"the bytes {begin} to {end}, which do not fit"
        )
    return TensorHeader(name, entry.dtype, entry.shape, path, start + begin, num_bytes)


def _gguf_headers(path: Path) -> dict[str, TensorHeader]:
    from headrace.weights.gguf_file import read_gguf
    from headrace.weights.gguf_llama import ROPE_FREQS, config_from_gguf, hf_name

    file = read_gguf(path)
    end, last = max(((t.offset + t.num_bytes, t.name) for t in file.tensors.values()), default=(0, ""))
    if end > file.size:
        raise CheckpointError(f"{path}: truncated: tensor {last} ends at byte {end}, the file has {file.size}")
    # Refuses what the names below would not say: another family, and frequencies that the spec does not stand for.
    config_from_gguf(file)
    return {
        hf_name(tensor.name): TensorHeader(
            hf_name(tensor.name), tensor.type, tensor.shape, path, tensor.offset, tensor.num_bytes
        )
        for tensor in file.tensors.values()
        if tensor.name != ROPE_FREQS
    }
