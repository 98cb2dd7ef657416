"""Whether bytes that pass hold a number that is none: one such scale would spoil every token and say nothing."""

from __future__ import annotations

import numpy as np
import torch

_FORMATS: dict[str, tuple[type[np.unsignedinteger], int, int]] = {
    # word, its bits without the sign, the exponent's bits: all of these set are an infinity or no number
    "BF16": (np.uint16, 0x7FFF, 0x7F80),
    "F16": (np.uint16, 0x7FFF, 0x7C00),
    "F32": (np.uint32, 0x7FFFFFFF, 0x7F800000),
    "F64": (np.uint64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
}
_VALUES_AT_ONCE = 1 << 16
"""What is worked on stays in the processor's cache."""


def is_watched(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is one whose every value matters to many others: a scale, or a vector (norms, biases)."""
    return "scale" in name.rpartition(".")[2] or len(shape) <= 1


def first_not_finite(raw: torch.Tensor, dtype: str) -> int | None:
    """Index of the first value of `raw` (uint8, one dim) that is infinite or no number; None if there is none.

    dtype: as a safetensors header spells it; whole numbers are always finite.
    """
    if dtype not in _FORMATS:
        return None
    word, magnitude, exponent = _FORMATS[dtype]
    values = np.frombuffer(raw.numpy(), dtype=word)
    for start in range(0, len(values), _VALUES_AT_ONCE):
        sizes = values[start : start + _VALUES_AT_ONCE] & word(magnitude)
        if sizes.max() >= exponent:
            return start + int(np.argmax(sizes >= exponent))
    return None
