"""How the bytes of rows become a tensor: plain dtypes as they are, GGML types dequantised, q and k rows un-permuted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from headrace.errors import CheckpointError
from headrace.spec import ModelSpec
from headrace.weights.gguf_llama import permuted_heads
from headrace.weights.headers import TensorHeader
from headrace.weights.source import ModelSource

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DEQUANTISED_VALUES = 1 << 20
"""Values dequantised at once: 1 MiB of float32, which stays in the processor's cache until it is copied away."""
_LONG_ROW = 8192
"""Values of the rows that `gguf` is shown: it works on 16 at a time, which is slow for a small model's short rows."""


@dataclass(frozen=True)
class RowCodec:
    """Turns rows of one stored tensor into a tensor [rows, *rest]."""

    dtype: torch.dtype
    """Of what `decode` gives."""
    row_bytes: int
    unit: int
    """Rows that only decode together."""
    rows_at_once: int
    """A multiple of `unit`: most rows to decode in one call, so that what it allocates stays small."""
    decode: Callable[[torch.Tensor, int], torch.Tensor]
    """(bytes, number of rows) → tensor; it may share the bytes' memory."""
    verbatim: bool
    """Whether what `decode` gives lies in memory as it does in the file."""


def codec_for(header: TensorHeader, source: ModelSource, spec: ModelSpec) -> RowCodec:
    """The codec of a tensor; a scalar counts as one row. Raises CheckpointError for a type that cannot be read."""
    shape = header.shape or (1,)
    row_bytes = header.num_bytes // max(1, shape[0])
    dtype = _DTYPES.get(header.dtype)
    heads = permuted_heads(header.name, spec) if source.kind == "gguf" else None
    unit = 1 if heads is None else shape[0] // heads
    if heads is not None and shape[0] != heads * unit:
        raise CheckpointError(f"tensor {header.name}: {shape[0]} rows do not divide into {heads} heads")
    if dtype is not None:
        return RowCodec(dtype, row_bytes, unit, max(1, shape[0]), _plain(dtype, shape[1:], unit), unit == 1)
    if source.kind != "gguf" or not _can_dequantise(header.dtype):
        raise CheckpointError(f"tensor {header.name} is stored as {header.dtype}, which is not supported")
    per_unit = unit * int(np.prod(shape[1:]))
    at_once = max(1, _DEQUANTISED_VALUES // max(1, per_unit)) * unit
    return RowCodec(torch.float32, row_bytes, unit, at_once, _dequantising(header.dtype, shape[1:], unit), False)


def _plain(dtype: torch.dtype, rest: tuple[int, ...], unit: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
    def decode(raw: torch.Tensor, rows: int) -> torch.Tensor:
        # A safetensors writer need not align tensors; a view needs it.
        aligned = raw if raw.data_ptr() % dtype.itemsize == 0 else raw.clone()
        return _unpermute(aligned.view(dtype).view(rows, *rest), unit)

    return decode


def _dequantising(type_name: str, rest: tuple[int, ...], unit: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[type_name]
    width = max(1, int(np.prod(rest)))

    def decode(raw: torch.Tensor, rows: int) -> torch.Tensor:
        joined = max(1, _LONG_ROW // width)
        while rows % joined:
            joined -= 1
        values = dequantize(raw.view(rows // joined, -1).numpy(), kind)
        return _unpermute(torch.from_numpy(values).view(rows, *rest), unit)

    return decode


def _unpermute(tensor: torch.Tensor, unit: int) -> torch.Tensor:
    """Rows of whole heads, from rotary pairs as neighbours to pairs half a head apart; nothing to do for unit 1."""
    if unit == 1:
        return tensor
    rows, rest = tensor.shape[0], tensor.shape[1:]
    return tensor.view(rows // unit, unit // 2, 2, *rest).transpose(1, 2).reshape(rows, *rest)


@cache
def _can_dequantise(type_name: str) -> bool:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    # The package has no list of what it dequantises: one block of zeros tells.
    kind = GGMLQuantizationType[type_name]
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True
