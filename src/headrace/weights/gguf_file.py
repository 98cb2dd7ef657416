"""The GGUF container: its metadata and where its tensors lie, without reading a weight.

The `gguf` package's own reader makes a numpy view of every string of the vocabulary, seconds for 50,000 tokens, and
every process of a server reads this header. This one skips the arrays that nobody asked for; types and their sizes
come from the package.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from headrace.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SMALL_ARRAY = 1024
"""Arrays up to so many items are always read: per-layer values, lists of languages."""
_SKIPPED = object()

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SCALARS: dict[int, str] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}


class GgufTensor(NamedTuple):
    """Where a tensor lies. `shape` is outermost dim first, `offset` counts from the start of the file."""

    name: str
    type: str
    """Name of its GGML type: F32, Q8_0, Q4_K."""
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file says about itself."""

    path: Path
    metadata: Mapping[str, Any]
    """Long arrays are there only if they were asked for."""
    tensors: Mapping[str, GgufTensor]
    size: int
    """Bytes of the file."""


def read_gguf(path: Path, arrays: Collection[str] = ()) -> GgufFile:
    """Read metadata and tensor headers; `arrays` names the long arrays wanted (`tokenizer.ggml.tokens`, say).

    Raises CheckpointError for a file that is not GGUF, cut short or broken.
    """
    try:
        size = path.stat().st_size
        if size < 24:
            raise CheckpointError(f"{path}: not a GGUF file (only {size} bytes)")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data, arrays)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (struct.error, UnicodeDecodeError, OverflowError, MemoryError):
        raise CheckpointError(f"{path}: the GGUF header is broken or cut short") from None


def _parse(path: Path, data: mmap.mmap, arrays: Collection[str]) -> GgufFile:
    if data[:4] != _MAGIC:
        raise CheckpointError(f"{path}: not a GGUF file")
    (version,) = _U32.unpack_from(data, 4)
    if version not in _VERSIONS:
        raise CheckpointError(f"{path}: GGUF version {version} is not supported; versions {_VERSIONS} are")
    cursor = _Cursor(data, 8)
    num_tensors, num_fields = cursor.u64(), cursor.u64()
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.text()
        value = cursor.value(cursor.u32(), wanted=key in arrays)
        if value is not _SKIPPED:
            metadata[key] = value
    found = [_tensor(cursor, path) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise CheckpointError(f"{path}: general.alignment {alignment!r} is not a positive number")
    start = -(-cursor.at // alignment) * alignment
    tensors = {tensor.name: tensor._replace(offset=start + tensor.offset) for tensor in found}
    return GgufFile(path, metadata, tensors, len(data))


def _tensor(cursor: _Cursor, path: Path) -> GgufTensor:
    name = cursor.text()
    # GGUF writes the innermost dim first.
    dims = tuple(reversed([cursor.u64() for _ in range(cursor.u32())]))
    code, offset = cursor.u32(), cursor.u64()
    try:
        kind = GGMLQuantizationType(code)
        block, block_bytes = GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise CheckpointError(f"{path}: tensor {name} has the unknown type {code}") from None
    if dims and dims[-1] % block:
        raise CheckpointError(f"{path}: tensor {name} has rows of {dims[-1]}, {kind.name} needs multiples of {block}")
    count = 1
    for dim in dims:
        count *= dim
    return GgufTensor(name, kind.name, dims, offset, count // block * block_bytes)


class _Cursor:
    """A place in the header that moves on with what is read."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data, self.at = data, at

    def u32(self) -> int:
        (value,) = _U32.unpack_from(self.data, self.at)
        self.at += 4
        return int(value)

    def u64(self) -> int:
        (value,) = _U64.unpack_from(self.data, self.at)
        self.at += 8
        return int(value)

    def text(self) -> str:
        size = self.u64()
        raw = self.data[self.at : self.at + size]
        if len(raw) != size:
            raise struct.error("text ends after the file")
        self.at += size
        return raw.decode("utf-8")

    def value(self, kind: int, *, wanted: bool) -> Any:
        """Read one value; a long array that is not wanted is passed over and gives `_SKIPPED`."""
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind != GGUFValueType.ARRAY:
            return self._scalars(kind, 1)[0]
        item, count = self.u32(), self.u64()
        if wanted or count <= _SMALL_ARRAY:
            return self._array(item, count)
        self._skip(item, count)
        return _SKIPPED

    def _array(self, item: int, count: int) -> list[Any]:
        if item == GGUFValueType.STRING:
            return [self.text() for _ in range(count)]
        if item == GGUFValueType.ARRAY:
            return [self.value(item, wanted=True) for _ in range(count)]
        return list(self._scalars(item, count))

    def _skip(self, item: int, count: int) -> None:
        if item == GGUFValueType.STRING:
            at, data, size_at = self.at, self.data, _U64.unpack_from
            for _ in range(count):
                at += 8 + size_at(data, at)[0]
            self.at = at
        elif item == GGUFValueType.ARRAY:
            for _ in range(count):
                self._skip(self.u32(), self.u64())
        else:
            self.at += count * struct.calcsize("<" + self._code(item))
            if self.at > len(self.data):
                raise struct.error("array ends after the file")

    def _scalars(self, kind: int, count: int) -> tuple[Any, ...]:
        code = self._code(kind)
        if count * struct.calcsize("<" + code) > len(self.data) - self.at:
            raise struct.error("value ends after the file")
        values = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += count * struct.calcsize("<" + code)
        return values

    @staticmethod
    def _code(kind: int) -> str:
        code = _SCALARS.get(kind)
        if code is None:
            raise struct.error(f"unknown value type {kind}")
        return code
