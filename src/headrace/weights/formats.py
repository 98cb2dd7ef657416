"""INT4 as compressed-tensors' pack-quantized format stores it: symmetric, groups along the input dim, no zero points.

Shapes: a weight is [..., out, in]; packed int32 [..., out, in/8], eight nibbles a word, lowest nibble = lowest column,
stored value = weight + 8; scales bf16 [..., out, in/group].
"""

from __future__ import annotations

import torch

_OFFSET = 8
_PER_WORD = 8
# compressed-tensors divides the largest magnitude by half the range of 16 values, not by 7.
_HALF_RANGE = 7.5


def pack_int4(q: torch.Tensor) -> torch.Tensor:
    """int8 [..., out, in] with values -8..7 → int32 [..., out, in/8]; `in` must be a multiple of 8."""
    assert q.dtype == torch.int8 and q.shape[-1] % _PER_WORD == 0, f"{q.dtype} {tuple(q.shape)}"
    nibbles = (q + _OFFSET).view(torch.uint8)
    # Little-endian words: byte k of a word holds its columns 2k (low nibble) and 2k + 1.
    return (nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).view(torch.int32)


def unpack_int4(packed: torch.Tensor, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    """int32 [..., out, in/8] → `dtype` [..., out, in] with values -8..7."""
    assert packed.dtype == torch.int32, packed.dtype
    pairs = packed.contiguous().view(torch.uint8)
    q = torch.stack((pairs & 15, pairs >> 4), dim=-1).view(torch.int8) - _OFFSET
    return q.view(*packed.shape[:-1], packed.shape[-1] * _PER_WORD).to(dtype)


def quantise(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight [..., out, in] → (packed int32, scale bf16), each group of columns scaled by its largest magnitude."""
    groups = weight.float().reshape(*weight.shape[:-1], -1, group)
    scale = (groups.abs().amax(dim=-1) / _HALF_RANGE).to(torch.bfloat16)
    # A group of zeros keeps a scale that can be divided by.
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    q = (groups / scale.float().unsqueeze(-1)).round().clamp(-8, 7).to(torch.int8)
    return pack_int4(q.flatten(-2)), scale


def dequantise(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(packed int32 [..., out, in/8], scale [..., out, in/group]) → `dtype` [..., out, in], rounded once."""
    assert dtype.is_floating_point, dtype
    # In place: unpacking has just made it, and a second matrix of that size would cost as much as the product.
    groups = unpack_int4(packed, dtype).view(*scale.shape, -1)
    return groups.mul_(scale.to(dtype).unsqueeze(-1)).flatten(-2)
