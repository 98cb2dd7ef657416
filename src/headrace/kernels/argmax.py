"""The best token of every row of logits, in two launches that never wait for the device.

Shapes: R rows, V vocabulary; logits bf16 or float32. A span is the part of a row that one program reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.jit import await_inputs, jit, launch_options, let_next_start, tl, triton

CHUNK = 2048


@dataclass(frozen=True)
class Peaks:
    """The best of each span of each row, [R, spans] each."""

    value: torch.Tensor
    """float32"""
    index: torch.Tensor
    """int32: its lowest token; 2^31 - 1 where the span holds nothing above -inf."""
    nans: torch.Tensor
    """int32: whether the span holds a NaN."""

    @property
    def parts(self) -> int:
        """Spans of a row."""
        return self.value.shape[1]


def argmax(logits_RV: torch.Tensor) -> torch.Tensor:
    """[2, R] int64: the lowest id of the largest logit, on a GPU that of the largest number; and whether it is sound.

    A row is sound (1) unless it holds a NaN or +inf, or nothing but -inf (a ban). Both in one tensor, for the host to
    fetch at once and look when it likes.
    """
    if logits_RV.is_cuda:
        return launch_argmax(logits_RV)
    # Each pass over a large vocabulary takes a part of a step here: the reference has six.
    peak, token = logits_RV.max(-1)
    return torch.stack((token, peak.isfinite().long()))


def argmax_reference(logits_RV: torch.Tensor) -> torch.Tensor:
    """The same in PyTorch; NaN counts as -inf."""
    sound = ~logits_RV.isnan().any(-1) & logits_RV.amax(-1).isfinite()
    logits = logits_RV.masked_fill(logits_RV.isnan(), float("-inf"))
    is_best = logits == logits.amax(-1, keepdim=True)
    return torch.stack((is_best.int().argmax(-1), sound.long()))


@jit
def _peak_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, value_ptr, index_ptr, nan_ptr, stride, V, SPAN: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The best of one span of a row, its lowest id, and whether the span holds a NaN."""
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    best = tl.full([CHUNK], float("-inf"), tl.float32)
    where = tl.zeros([CHUNK], tl.int32)
    nans = tl.zeros([CHUNK], tl.int32)
    for first in range(0, SPAN, CHUNK):
        token = part * SPAN + first + tl.arange(0, CHUNK)
        x = tl.load(logits_ptr + row * stride + token, mask=token < V, other=float("-inf")).to(tl.float32)
        nans |= (x != x).to(tl.int32)
        where = tl.where(x > best, token, where)  # a NaN is not greater than anything
        best = tl.where(x > best, x, best)
    let_next_start(PDL)
    peak = tl.max(best, 0)
    out = row * tl.num_programs(1) + part
    tl.store(value_ptr + out, peak)
    tl.store(index_ptr + out, tl.min(tl.where((best == peak) & (best > float("-inf")), where, 0x7FFFFFFF), 0))
    tl.store(nan_ptr + out, tl.max(nans, 0))


@jit
def best_of_row(  # type: ignore[no-untyped-def]
    value_ptr, index_ptr, nan_ptr, row, parts, PARTS: tl.constexpr,
):  # fmt: skip
    """(best logit, its lowest id, whether the row is sound) from the row's spans."""
    part = tl.arange(0, PARTS)
    real = part < parts
    value = tl.load(value_ptr + row * parts + part, mask=real, other=float("-inf"))
    index = tl.load(index_ptr + row * parts + part, mask=real, other=0x7FFFFFFF)
    nans = tl.max(tl.load(nan_ptr + row * parts + part, mask=real, other=0), 0)
    peak = tl.max(value, 0)
    token = tl.min(tl.where(value == peak, index, 0x7FFFFFFF), 0)
    token = tl.where(token == 0x7FFFFFFF, 0, token)
    sound = (nans == 0) & (peak > float("-inf")) & (peak < float("inf"))
    return peak, token, sound


@jit
def _best_kernel(  # type: ignore[no-untyped-def]
    value_ptr, index_ptr, nan_ptr, best_ptr, parts, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    _, token, sound = best_of_row(value_ptr, index_ptr, nan_ptr, row, parts, PARTS)
    tl.store(best_ptr + row, token.to(tl.int64))
    tl.store(best_ptr + tl.num_programs(0) + row, sound.to(tl.int64))


def find_peaks(logits_RV: torch.Tensor, chunk: int) -> Peaks:
    """The best of every span of every row; enough spans to fill a device when rows are few."""
    rows, vocab = logits_RV.shape
    assert logits_RV.dtype in (torch.bfloat16, torch.float32) and logits_RV.stride(1) == 1, logits_RV.dtype
    assert rows and vocab < 2**30
    chunks = triton.cdiv(vocab, chunk)
    # By powers of two: every span is a kernel of its own.
    span = chunk << max(0, (chunks * rows // 2048).bit_length() - 1)
    parts = triton.cdiv(vocab, span)
    device = logits_RV.device
    value = torch.empty(rows, parts, dtype=torch.float32, device=device)
    index, nans = (torch.empty(rows, parts, dtype=torch.int32, device=device) for _ in range(2))
    _peak_kernel[(rows, parts)](
        logits_RV, value, index, nans, logits_RV.stride(0), vocab, SPAN=span, CHUNK=chunk, num_warps=4,
        **launch_options(device),
    )  # fmt: skip
    return Peaks(value, index, nans)


def launch_argmax(logits_RV: torch.Tensor, chunk: int = CHUNK) -> torch.Tensor:
    """The Triton kernels, two launches."""
    rows = logits_RV.shape[0]
    best_2R = torch.empty(2, rows, dtype=torch.int64, device=logits_RV.device)
    if rows:
        peaks = find_peaks(logits_RV, chunk)
        _best_kernel[(rows,)](
            peaks.value,
            peaks.index,
            peaks.nans,
            best_2R,
            peaks.parts,
            PARTS=triton.next_power_of_2(peaks.parts),
            num_warps=1,
            **launch_options(best_2R.device),
        )
    return best_2R
