"""Which (token, choice) pairs each local expert computes, cut into blocks: what the expert products walk over.

Shapes: T tokens, E experts, k chosen, P = T * k pairs, X local experts, B the most blocks that P pairs can need.
A pair is named by its index token * k + choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.kernels import nvrtc
from headrace.kernels.nvrtc import Argument
from headrace.kernels.routing import MAX_EXPERTS, MAX_TOP_K, UniformRouting, route

SOURCE = Path(__file__).with_suffix(".cu")
FUSED_TOKENS = 128
"""Up to so many tokens routing and planning are one launch."""
_NARROW_PAIRS = 1 << 16
"""From so many pairs on the sort counts in 32 bits."""
_SMEM = 96 << 10
"""Shared memory that every device since Ampere gives one block."""


@dataclass(frozen=True)
class ExpertPlan:
    """Pairs of the held experts sorted by expert, and blocks of at most `block` of them, each of one expert.

    Only the first num_blocks entries of the block arrays, and the rows they name, mean anything.
    """

    rows: torch.Tensor
    """int32 [P]: pairs, by local expert and then by index."""
    block_expert: torch.Tensor
    """int32 [B]: local expert; never falls."""
    block_first: torch.Tensor
    """int32 [B]: where the block starts in rows."""
    block_count: torch.Tensor
    """int32 [B]: 1 to `block`."""
    num_blocks: torch.Tensor
    """int32 [1] on the device."""
    block: int

    @property
    def max_blocks(self) -> int:
        """Blocks to launch for; fixed by shapes."""
        return self.block_expert.numel()


def max_blocks(num_pairs: int, num_experts: int, block: int) -> int:
    """The most blocks that pairs can need: every expert but for whole blocks has one pair."""
    used = min(num_pairs, num_experts)
    return used + (num_pairs - used) // block


def plan_experts(ids_Tk: torch.Tensor, held: range, block: int) -> ExpertPlan:
    """The plan for experts `held` (global ids); pairs of other experts and of id -1 are left out."""
    assert ids_Tk.dim() == 2 and not ids_Tk.is_floating_point(), (ids_Tk.shape, ids_Tk.dtype)
    assert 1 <= len(held) <= MAX_EXPERTS and held.step == 1 and block >= 1, (held, block)
    if not ids_Tk.is_cuda:
        return plan_reference(ids_Tk, held, block)
    ids = ids_Tk.to(torch.int32).contiguous()
    plan = _empty_plan(ids.numel(), len(held), block, ids.device)
    # More warps shorten the sort of many pairs; few pairs fill few.
    wide = int(ids.numel() >= _NARROW_PAIRS)
    warps = 32 if _smem(32, len(held), wide) <= _SMEM else 16
    function = nvrtc.kernel(SOURCE, "plan", nvrtc.defined(WARPS=warps, WIDE=wide), ids.device.index)
    args: list[Argument] = [ids, ids.numel(), held.start, len(held), block, *_tensors(plan)]
    function((1, 1, 1), warps * 32, args, _smem(warps, len(held), wide), early=True)
    return plan


def plan_reference(ids_Tk: torch.Tensor, held: range, block: int) -> ExpertPlan:
    """The same in PyTorch, read by the host; what means nothing is -1, and 0 in block_count."""
    local = ids_Tk.flatten().long() - held.start
    local = torch.where((local >= 0) & (local < len(held)), local, len(held))
    order = local.argsort(stable=True)
    counts = torch.bincount(local, minlength=len(held) + 1)[:-1]
    rows = torch.where(local[order] < len(held), order, -1).int()
    blocks = [
        (expert, first + done, min(block, count - done))
        for expert, (first, count) in enumerate(zip((counts.cumsum(0) - counts).tolist(), counts.tolist(), strict=True))
        for done in range(0, count, block)
    ]
    unused = max_blocks(rows.numel(), len(held), block) - len(blocks)
    table = torch.tensor(blocks + [(-1, -1, 0)] * unused, dtype=torch.int32).reshape(-1, 3).to(ids_Tk.device)
    expert, first, count = (table[:, i].contiguous() for i in range(3))
    return ExpertPlan(rows, expert, first, count, torch.tensor([len(blocks)], dtype=torch.int32).to(rows.device), block)


def route_and_plan(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    top_k: int,
    held: range,
    block: int,
    *,
    softmax: bool,
    normalise: bool,
    scale: float = 1.0,
    num_groups: int = 1,
    topk_groups: int = 1,
    pads: torch.Tensor | None = None,
    uniform: UniformRouting | None = None,
) -> tuple[torch.Tensor, torch.Tensor, ExpertPlan]:
    """Weights [T, k], ids [T, k] and the plan; on CUDA one launch for few tokens of a router without groups."""
    num_tokens = logits_TE.shape[0]
    # A draw ignores groups.
    flat = num_groups == 1 or uniform is not None
    if logits_TE.is_cuda and flat and 0 < num_tokens <= FUSED_TOKENS:
        return _launch_route_plan(
            logits_TE, bias_E, top_k, held, block, softmax, normalise, scale, pads=pads, uniform=uniform
        )
    weights, ids = route(
        logits_TE,
        bias_E,
        top_k,
        softmax=softmax,
        normalise=normalise,
        scale=scale,
        num_groups=num_groups,
        topk_groups=topk_groups,
        pads=pads,
        uniform=uniform,
    )
    return weights, ids, plan_experts(ids, held, block)


def _launch_route_plan(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    top_k: int,
    held: range,
    block: int,
    softmax: bool,
    normalise: bool,
    scale: float,
    *,
    pads: torch.Tensor | None,
    uniform: UniformRouting | None,
    warps: int = 16,
) -> tuple[torch.Tensor, torch.Tensor, ExpertPlan]:
    num_tokens, num_experts = logits_TE.shape
    assert logits_TE.dtype == torch.float32 and logits_TE.is_contiguous(), (logits_TE.dtype, logits_TE.stride())
    assert 1 <= top_k <= min(MAX_TOP_K, num_experts) and num_experts <= MAX_EXPERTS, (top_k, num_experts)
    assert bias_E is None or (
        bias_E.shape == (num_experts,) and bias_E.dtype == torch.float32 and bias_E.is_contiguous()
    )
    assert pads is None or (pads.shape == (num_tokens,) and pads.dtype == torch.int64 and pads.is_contiguous())
    assert uniform is None or uniform.counter.dtype == torch.int64
    assert 1 <= len(held) <= MAX_EXPERTS and held.step == 1 and block >= 1, (held, block)
    device = logits_TE.device
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=device)
    ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device=device)
    plan = _empty_plan(ids.numel(), len(held), block, device)
    macros = nvrtc.defined(
        WARPS=warps, WIDE=0, EXPERTS=num_experts, TOP_K=top_k, SOFTMAX=int(softmax), NORMALISE=int(normalise)
    )
    counter, layer = (None, 0) if uniform is None else (uniform.counter, uniform.layer)
    args: list[Argument] = [logits_TE, bias_E, pads, counter, layer, float(scale), num_tokens, weights, ids]
    args += [held.start, len(held), block, *_tensors(plan)]
    function = nvrtc.kernel(SOURCE, "route_plan", macros, device.index)
    function((-(-num_tokens // warps), 1, 1), warps * 32, args, _smem(warps, len(held), 0), early=True)
    return weights, ids, plan


def _smem(warps: int, num_experts: int, wide: int) -> int:
    """Bytes of the scan's totals, the first rows, and the counters."""
    return 32 * 8 + num_experts * 4 + warps * num_experts * (4 if wide else 2)


def _empty_plan(num_pairs: int, num_experts: int, block: int, device: torch.device) -> ExpertPlan:
    """One allocation, cut at multiples of 16 bytes."""
    num_blocks = max_blocks(num_pairs, num_experts, block)
    sizes = [num_pairs, num_blocks, num_blocks, num_blocks, 1]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // 4) * 4)
    whole = torch.empty(starts[-1], dtype=torch.int32, device=device)
    rows, expert, first, count, number = (
        whole[start : start + size] for start, size in zip(starts[:-1], sizes, strict=True)
    )
    return ExpertPlan(rows, expert, first, count, number, block)


def _tensors(plan: ExpertPlan) -> list[torch.Tensor]:
    return [plan.rows, plan.block_expert, plan.block_first, plan.block_count, plan.num_blocks]
