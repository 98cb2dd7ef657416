"""Which experts a token goes to, and with what weights.

Shapes: T tokens, E experts, k chosen; logits_TE float32 -> (weights_Tk float32, ids_Tk int64, on CUDA int32).
G groups of S experts each, padded to powers of two inside the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headrace.kernels.jit import jit, tl, triton

MAX_TOP_K = 16
MAX_EXPERTS = 1024


@dataclass
class UniformRouting:
    """Forced uniform choices, for measurements of weights that no router was trained with."""

    counter: torch.Tensor
    """int64 [1] on the device; advanced by the runner each step, so that a graph's replays differ."""
    layer: int


def route(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    top_k: int,
    *,
    softmax: bool,
    normalise: bool,
    scale: float = 1.0,
    num_groups: int = 1,
    topk_groups: int = 1,
    pads: torch.Tensor | None = None,
    uniform: UniformRouting | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """By `route_softmax`, which knows no bias and no groups, or by `route_sigmoid`."""
    if softmax:
        weights, ids = route_softmax(logits_TE, top_k, normalise=normalise, pads=pads, uniform=uniform)
        return weights if scale == 1.0 else weights * scale, ids
    return route_sigmoid(
        logits_TE,
        bias_E,
        top_k,
        num_groups=num_groups,
        topk_groups=topk_groups,
        normalise=normalise,
        scale=scale,
        pads=pads,
        uniform=uniform,
    )


def route_softmax(
    logits_TE: torch.Tensor,
    top_k: int,
    *,
    normalise: bool,
    pads: torch.Tensor | None = None,
    uniform: UniformRouting | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts, then the best k (Qwen3-MoE). Tokens whose `pads` is negative choose -1, weight 0."""
    if logits_TE.is_cuda:
        return launch_route(
            logits_TE, None, top_k, softmax=True, normalise=normalise, scale=1.0, pads=pads, uniform=uniform
        )
    probs = logits_TE.softmax(-1, dtype=torch.float32)
    if uniform is None:
        weights, ids = probs.topk(top_k, dim=-1)
    else:
        ids = uniform_ids(logits_TE, top_k, uniform)
        weights = probs.gather(-1, ids)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return without_pads(weights, ids, pads)


def route_sigmoid(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    top_k: int,
    *,
    num_groups: int,
    topk_groups: int,
    normalise: bool,
    scale: float,
    pads: torch.Tensor | None = None,
    uniform: UniformRouting | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sigmoid scores; a bias and groups choose, the unbiased scores weigh (DeepSeek-V3, `noaux_tc`).

    A group's score is the sum of its two best biased scores; experts outside the best `topk_groups` are never chosen.
    Tokens whose `pads` is negative choose -1, weight 0.
    """
    if logits_TE.is_cuda:
        return launch_route(
            logits_TE,
            bias_E,
            top_k,
            softmax=False,
            num_groups=num_groups,
            topk_groups=topk_groups,
            normalise=normalise,
            scale=scale,
            pads=pads,
            uniform=uniform,
        )
    scores = logits_TE.sigmoid()
    if uniform is None:
        choice = scores if bias_E is None else scores + bias_E
        if num_groups > 1:
            grouped = choice.unflatten(-1, (num_groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(topk_groups, dim=-1).indices
            closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, False)
            choice = grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(-2)
        ids = choice.topk(top_k, dim=-1).indices
    else:
        ids = uniform_ids(logits_TE, top_k, uniform)
    weights = scores.gather(-1, ids)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return without_pads(weights * scale, ids, pads)


def uniform_ids(logits_TE: torch.Tensor, top_k: int, uniform: UniformRouting) -> torch.Tensor:
    """k distinct experts a token, each as likely as any other; the same for the same counter and layer."""
    seed = int(uniform.counter) * 4096 + uniform.layer
    noise = torch.rand(logits_TE.shape, generator=torch.Generator().manual_seed(seed))
    return noise.topk(top_k, dim=-1).indices.to(logits_TE.device)


def without_pads(
    weights_Tk: torch.Tensor, ids_Tk: torch.Tensor, pads: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight 0 and id -1 where `pads` is negative."""
    if pads is None:
        return weights_Tk, ids_Tk
    pad = (pads < 0).unsqueeze(-1)
    return weights_Tk.masked_fill(pad, 0.0), ids_Tk.masked_fill(pad, -1)


@jit
def _ordered(  # type: ignore[no-untyped-def]
    x,
):  # fmt: skip
    """The float32 bits as an integer with the same order; NaN above all."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit
def _grouped_keys(  # type: ignore[no-untyped-def]
    row_ptr, bias_ptr, E, BIASED: tl.constexpr, GROUPS: tl.constexpr, OPEN: tl.constexpr, G: tl.constexpr,
    S: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """[G * S] sort keys: score above, expert below so that the lowest id wins a tie; closed experts at the bottom."""
    size = E // GROUPS
    group = tl.arange(0, G)
    place = tl.arange(0, S)
    expert = group[:, None] * size + place[None, :]
    real = (group[:, None] < GROUPS) & (place[None, :] < size)
    choice = tl.load(row_ptr + expert, mask=real, other=float("-inf"))
    if not SOFTMAX:  # softmax keeps the order of its inputs
        choice = 1.0 / (1.0 + tl.exp(-choice))
        if BIASED:
            choice += tl.load(bias_ptr + expert, mask=real, other=0.0)
    bottom = tl.full([], -(2**63), tl.int64)
    low = (G * S - place[None, :] - group[:, None] * size).to(tl.int64)
    keys = tl.where(real, (_ordered(choice).to(tl.int64) << 32) | low, bottom)
    if GROUPS > 1:
        first = tl.max(keys, 1)
        rest = tl.max(tl.where(keys == first[:, None], bottom, keys), 1)
        total = _float(first) + _float(rest)
        group_keys = (_ordered(total).to(tl.int64) << 32) | (G - group).to(tl.int64)
        group_keys = tl.where(group < GROUPS, group_keys, bottom)
        opened = group < 0
        for _ in tl.static_range(OPEN):
            best = tl.max(group_keys, 0)
            opened = opened | (group_keys == best)
            group_keys = tl.where(group_keys == best, bottom, group_keys)
        keys = tl.where(opened[:, None], keys, bottom)
    return tl.reshape(keys, [G * S])


@jit
def _float(  # type: ignore[no-untyped-def]
    key,
):  # fmt: skip
    """The float32 that the upper half of a key orders by."""
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@jit
def _random_keys(  # type: ignore[no-untyped-def]
    counter, layer, token, E, N: tl.constexpr,
):  # fmt: skip
    """[N] sort keys of fresh random numbers, one an expert."""
    # One Philox call makes four numbers; quarter q of the experts takes the q-th.
    quarter = tl.arange(0, N // 4)
    zero = quarter * 0
    a, b, c, d = tl.philox(counter, quarter.to(tl.uint32), (zero + token).to(tl.uint32),
                           (zero + layer).to(tl.uint32), zero.to(tl.uint32))  # fmt: skip
    word = tl.join(tl.join(a, b), tl.join(c, d))  # [N / 4, 2, 2]
    half = tl.arange(0, 2)
    index = quarter[:, None, None] * 4 + half[None, :, None] * 2 + half[None, None, :]
    keys = (word.to(tl.int64) << 16) | (N - index).to(tl.int64)
    return tl.reshape(tl.where(index < E, keys, -1), [N])


@jit
def _route_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, bias_ptr, pads_ptr, counter_ptr, weights_ptr, ids_ptr, E, layer, scale, K: tl.constexpr,
    K_PAD: tl.constexpr, G: tl.constexpr, S: tl.constexpr, GROUPS: tl.constexpr, OPEN: tl.constexpr,
    SOFTMAX: tl.constexpr, BIASED: tl.constexpr, NORMALISE: tl.constexpr, PADS: tl.constexpr,
    UNIFORM: tl.constexpr,
):  # fmt: skip
    """One token a program."""
    token = tl.program_id(0)
    row_ptr = logits_ptr + token.to(tl.int64) * E
    N: tl.constexpr = G * S
    LOW: tl.constexpr = 0xFFFF if UNIFORM else 0xFFFFFFFF  # where a key holds its expert
    if UNIFORM:
        keys = _random_keys(tl.load(counter_ptr), layer, token, E, N)
    else:
        keys = _grouped_keys(row_ptr, bias_ptr, E, BIASED, GROUPS, OPEN, G, S, SOFTMAX)
    place = tl.arange(0, K_PAD)
    chosen = tl.zeros([K_PAD], tl.int64)
    for j in tl.static_range(K):
        best = tl.max(keys, 0)
        chosen = tl.where(place == j, N - (best & LOW), chosen)
        keys = tl.where(keys == best, -(2**63), keys)
    ids = chosen.to(tl.int32)
    real = place < K
    logit = tl.load(row_ptr + ids, mask=real, other=0.0)
    if SOFTMAX:
        expert = tl.arange(0, N)
        row = tl.load(row_ptr + expert, mask=expert < E, other=float("-inf"))
        peak = tl.max(row, 0)
        weights = tl.exp(logit - peak) / tl.sum(tl.exp(row - peak), 0)
    else:
        weights = 1.0 / (1.0 + tl.exp(-logit))
    weights = tl.where(real, weights, 0.0)
    if NORMALISE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    weights *= scale
    if PADS:
        pad = tl.load(pads_ptr + token) < 0
        ids = tl.where(pad, -1, ids)
        weights = tl.where(pad, 0.0, weights)
    out = token.to(tl.int64) * K + place
    tl.store(weights_ptr + out, weights, mask=real)
    tl.store(ids_ptr + out, ids, mask=real)


def launch_route(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    top_k: int,
    *,
    softmax: bool,
    normalise: bool,
    scale: float,
    num_groups: int = 1,
    topk_groups: int = 1,
    pads: torch.Tensor | None = None,
    uniform: UniformRouting | None = None,
    num_warps: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The Triton kernel: (weights [T, k] float32, ids [T, k] int32), best first."""
    num_tokens, num_experts = logits_TE.shape
    assert logits_TE.dtype == torch.float32 and logits_TE.is_contiguous(), (logits_TE.dtype, logits_TE.stride())
    assert 1 <= top_k <= MAX_TOP_K and top_k <= num_experts <= MAX_EXPERTS, (top_k, num_experts)
    assert num_experts % num_groups == 0 and 1 <= topk_groups <= num_groups, (num_experts, num_groups, topk_groups)
    size = num_experts // num_groups
    assert uniform is not None or num_groups == 1 or (size >= 2 and topk_groups * size >= top_k), (size, topk_groups)
    assert bias_E is None or (
        bias_E.shape == (num_experts,) and bias_E.dtype == torch.float32 and bias_E.is_contiguous()
    )
    assert pads is None or (pads.shape == (num_tokens,) and pads.dtype == torch.int64 and pads.is_contiguous())
    assert uniform is None or uniform.counter.dtype == torch.int64
    if uniform is not None:
        num_groups, topk_groups, size = 1, 1, max(4, num_experts)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits_TE.device)
    ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits_TE.device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logits_TE,
            bias_E,
            pads,
            None if uniform is None else uniform.counter,
            weights,
            ids,
            num_experts,
            0 if uniform is None else uniform.layer,
            scale,
            K=top_k,
            K_PAD=triton.next_power_of_2(top_k),
            G=triton.next_power_of_2(num_groups),
            S=triton.next_power_of_2(size),
            GROUPS=num_groups,
            OPEN=topk_groups,
            SOFTMAX=softmax,
            BIASED=bias_E is not None,
            NORMALISE=normalise,
            PADS=pads is not None,
            UNIFORM=uniform is not None,
            num_warps=num_warps,
        )
    return weights, ids
