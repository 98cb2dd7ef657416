"""A draw of each row's token on the device, from what top-k, top-p and min-p leave; or the best token.

Nothing here waits for the device. Shapes: R rows, V vocabulary, N chunks of a row; logits bf16 or float32.
A weight is exp((logit - best logit) / temperature): 1 at the best token, and its float32 bits order as integers.
"""

from __future__ import annotations

import torch

from headrace.kernels.argmax import CHUNK, argmax, argmax_reference, best_of_row, find_peaks
from headrace.kernels.jit import jit, tl, triton

__all__ = ["argmax", "launch_sample", "sample", "sample_reference"]

ROOM = 8192
"""Heaviest weights that are gathered apart, so that the search for cuts seldom reads the whole vocabulary."""
_TILE = 8192
"""Weights that one pass of a row's program takes at a time."""


def sample(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    noise_R: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens int64 [R], sound bool [R]): a draw by noise in [0, 1); the best token where the temperature is 0.

    top_k (0: all), top_p and min_p always cut at a value, so ties stay together; min_p is relative to the best token;
    top-p counts the mass that the other two leave. The distribution is inverted in vocabulary order. An unsound row
    gets its best token.
    """
    if logits_RV.is_cuda:
        return launch_sample(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, noise_R)
    return sample_reference(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, noise_R)


def sample_reference(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    noise_R: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in PyTorch, by a sort of each row."""
    best, is_sound = argmax_reference(logits_RV)
    sound = is_sound.bool()
    logits = torch.where(sound.unsqueeze(-1), logits_RV.float(), 0.0)
    heat = torch.where(temperature_R > 0, temperature_R, 1.0).unsqueeze(-1)
    weights = ((logits - logits.amax(-1, keepdim=True)) / heat).exp()
    weights = torch.where(weights >= min_p_R.unsqueeze(-1), weights, 0.0)
    ranked = weights.sort(-1, descending=True).values
    last = torch.where(top_k_R > 0, top_k_R, ranked.shape[-1]).clamp(max=ranked.shape[-1]).long() - 1
    weights = torch.where(weights >= ranked.gather(-1, last.unsqueeze(-1)), weights, 0.0)
    mass = weights.sort(-1, descending=True).values.cumsum(-1, dtype=torch.float64)
    needed = (mass < top_p_R.double().unsqueeze(-1) * mass[:, -1:]).sum(-1, keepdim=True)
    cut = ranked.gather(-1, needed.clamp(max=ranked.shape[-1] - 1))
    weights = torch.where((weights >= cut) | (top_p_R >= 1).unsqueeze(-1), weights, 0.0)
    mass = weights.cumsum(-1, dtype=torch.float64)
    target = noise_R.double().unsqueeze(-1) * mass[:, -1:]
    drawn = torch.searchsorted(mass, target, right=True).squeeze(-1)
    drawn = torch.where(drawn < mass.shape[-1], drawn, best)
    return torch.where((temperature_R > 0) & sound, drawn, best), sound


@jit
def _level_bits(level):  # type: ignore[no-untyped-def]
    """Levels 0 to 6 are weights of 2^-4, 2^-8 .. 2^-28 and more, level 7 all but zero: their least bits."""
    return tl.where(level == 7, 1, (123 - 4 * level) << 23)


@jit
def _weigh_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, weight_ptr, count_ptr, value_ptr, index_ptr, nan_ptr, temperature_ptr, min_p_ptr, token_ptr, sound_ptr,
    stride, V, parts, STRIDE: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The weights of one chunk of a row, zero where min-p excludes, and how many of them reach each level.

    The first chunk's program notes the row's best token.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    peak, best, sound = best_of_row(value_ptr, index_ptr, nan_ptr, row, parts, PARTS)
    if chunk == 0:
        tl.store(token_ptr + row, best.to(tl.int64))
        tl.store(sound_ptr + row, sound)
    temperature = tl.load(temperature_ptr + row)
    if temperature <= 0.0:
        return
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * stride + token, mask=token < V, other=float("-inf")).to(tl.float32)
    peak = tl.where(sound, peak, 0.0)
    x = tl.where(sound, x, float("-inf"))
    weight = tl.exp((x - peak) / temperature)
    weight = tl.where(weight >= tl.load(min_p_ptr + row), weight, 0.0)
    tl.store(weight_ptr + row * STRIDE + token, weight, mask=token < PADDED)
    level = tl.arange(0, 8)
    reached = weight.to(tl.int32, bitcast=True)[:, None] >= _level_bits(level)[None, :]
    tl.store(count_ptr + (row * tl.num_programs(1) + chunk) * 8 + level, tl.sum(reached.to(tl.int32), 0))


@jit
def _gathered(  # type: ignore[no-untyped-def]
    count_ptr, row, chunk, chunks, CHUNKS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """What of a row is gathered: (level or -1, how many, how many in chunks before `chunk`, how many above zero)."""
    level = tl.arange(0, 8)
    each = tl.arange(0, CHUNKS)
    where = count_ptr + (row * chunks + each[:, None]) * 8 + level[None, :]
    counts = tl.load(where, mask=(each < chunks)[:, None], other=0)
    totals = tl.sum(counts, 0)
    # The lowest level whose weights have room; counts grow from level to level.
    lowest = tl.sum((totals <= ROOM).to(tl.int32), 0) - 1
    total = tl.sum(tl.where(level == lowest, totals, 0), 0)
    earlier = tl.sum(tl.where(each[:, None] < chunk, counts, 0), 0)
    return lowest, total, tl.sum(tl.where(level == lowest, earlier, 0), 0), tl.max(totals, 0)


@jit
def _gather_kernel(  # type: ignore[no-untyped-def]
    weight_ptr, count_ptr, source_ptr, temperature_ptr, chunks, STRIDE: tl.constexpr, PADDED: tl.constexpr,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The heaviest weights of one chunk go behind the row's weights, in order, and their tokens to `source`."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if tl.load(temperature_ptr + row) <= 0.0:
        return
    level, _, before, _ = _gathered(count_ptr, row, chunk, chunks, CHUNKS, ROOM)
    if level < 0:
        return
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    weight = tl.load(weight_ptr + row * STRIDE + token, mask=token < PADDED, other=0.0)
    heavy = weight.to(tl.int32, bitcast=True) >= _level_bits(level)
    place = before + tl.cumsum(heavy.to(tl.int32), 0) - 1
    tl.store(weight_ptr + row * STRIDE + PADDED + place, weight, mask=heavy)
    tl.store(source_ptr + row * ROOM + place, token, mask=heavy)


@jit
def _survey(weight_ptr, bound, length, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of weights whose bits reach `bound`: how many, their mass, the least of them; and the most of those below."""
    count = tl.zeros([TILE], tl.int32)
    mass = tl.zeros([TILE], tl.float32)
    least = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    most = tl.full([TILE], -1, tl.int32)
    first = length * 0
    while first < length:
        token = first + tl.arange(0, TILE)
        weight = tl.load(weight_ptr + token, mask=token < length, other=0.0)
        bits = weight.to(tl.int32, bitcast=True)
        reached = bits >= bound
        count += reached.to(tl.int32)
        mass += tl.where(reached, weight, 0.0)
        least = tl.minimum(least, tl.where(reached, bits, 0x7FFFFFFF))
        most = tl.maximum(most, tl.where(reached, -1, bits))
        first += TILE
    return tl.sum(count, 0), tl.sum(mass, 0), tl.min(least, 0), tl.max(most, 0)


@jit
def _cut(  # type: ignore[no-untyped-def]
    weight_ptr, low, need_count, need_mass, length, TILE: tl.constexpr,
):  # fmt: skip
    """The largest bits from `low` on at which still `need_count` weights and `need_mass` are reached.

    Halves the range of bits; each survey moves the ends to weights that occur, so a few surveys are enough.
    """
    high = low * 0 + 0x3F800001  # past 1.0, which nothing exceeds
    while high - low > 1:
        middle = low + (high - low) // 2
        count, mass, least, most = _survey(weight_ptr, middle, length, TILE)
        enough = (count >= need_count) & (mass >= need_mass) & (count > 0)
        low = tl.where(enough, least, low)
        high = tl.where(enough, high, tl.maximum(most + 1, low + 1))
    return low


@jit
def _tile_mass(weight_ptr, first, cut, length, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Mass of the weights of one tile whose bits reach `cut`."""
    token = first + tl.arange(0, TILE)
    weight = tl.load(weight_ptr + token, mask=token < length, other=0.0)
    return tl.sum(tl.where(weight.to(tl.int32, bitcast=True) >= cut, weight, 0.0), 0).to(tl.float64)


@jit
def _draw(weight_ptr, cut, noise, length, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first place at which the mass of weights whose bits reach `cut` passes the noise's share of it; or -1."""
    total = tl.zeros([], tl.float64)
    first = length * 0
    while first < length:
        total += _tile_mass(weight_ptr, first, cut, length, TILE)
        first += TILE
    target = noise * total
    # The same sums again, so that the tile that passes the target is surely met.
    passed = tl.zeros([], tl.float64)
    first = length * 0
    found = length * 0
    while (first < length) & (found == 0):
        here = _tile_mass(weight_ptr, first, cut, length, TILE)
        found = (passed + here > target).to(tl.int32)
        passed = tl.where(found == 1, passed, passed + here)
        first = tl.where(found == 1, first, first + TILE)
    place = tl.arange(0, TILE)
    weight = tl.load(weight_ptr + first + place, mask=first + place < length, other=0.0)
    reached = weight.to(tl.int32, bitcast=True) >= cut
    running = tl.cumsum(tl.where(reached, weight, 0.0).to(tl.float64), 0) + passed
    hit = tl.min(tl.where(reached & (running > target), place, TILE), 0)
    # Rounded otherwise, the running sum may end just below the tile's: then it is the last token.
    hit = tl.where(hit == TILE, tl.max(tl.where(reached, place, -1), 0), hit)
    return tl.where((found == 1) & (hit >= 0), first + hit, -1)


@jit
def _draw_kernel(  # type: ignore[no-untyped-def]
    weight_ptr, count_ptr, source_ptr, temperature_ptr, top_k_ptr, top_p_ptr, noise_ptr, token_ptr, chunks,
    STRIDE: tl.constexpr, PADDED: tl.constexpr, CHUNKS: tl.constexpr, ROOM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One row a program: its cuts, then its draw."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(temperature_ptr + row) <= 0.0:
        return
    weight_ptr += row * STRIDE
    top_k = tl.load(top_k_ptr + row).to(tl.int32)
    top_p = tl.load(top_p_ptr + row)
    level, heavy, _, kept = _gathered(count_ptr, row, 0, chunks, CHUNKS, ROOM)
    cut = heavy * 0 + 1  # a weight of zero is never kept
    # The gathered weights are enough if both cuts lie among them.
    mass = tl.zeros([], tl.float32)
    enough = heavy == kept
    if (top_k <= 0) & (top_p < 1.0):
        _, mass, _, _ = _survey(weight_ptr, cut, PADDED + cut * 0, TILE)
        if level >= 0:
            _, heavy_mass, _, _ = _survey(weight_ptr + PADDED, cut, heavy, TILE)
            enough = enough | (heavy_mass >= top_p * mass)
    else:
        enough = enough | ((top_k > 0) & (top_k <= heavy))
    gathered = (enough & (level >= 0)).to(tl.int32)
    weight_ptr += gathered * PADDED
    length = tl.where(gathered == 1, heavy, PADDED)
    if (top_k > 0) & (top_k < kept):
        cut = _cut(weight_ptr, cut, top_k, mass, length, TILE)
    if top_p < 1.0:
        if top_k > 0:
            _, mass, _, _ = _survey(weight_ptr, cut, length, TILE)
        cut = _cut(weight_ptr, cut, 0, top_p * mass, length, TILE)
    place = _draw(weight_ptr, cut, tl.load(noise_ptr + row).to(tl.float64), length, TILE)
    if place >= 0:
        token = tl.load(source_ptr + row * ROOM + place, mask=gathered == 1, other=0)
        tl.store(token_ptr + row, tl.where(gathered == 1, token, place).to(tl.int64))


def _check(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    noise_R: torch.Tensor,
) -> None:
    for knob in (temperature_R, top_k_R, top_p_R, min_p_R, noise_R):
        assert knob.shape == (logits_RV.shape[0],) and knob.is_contiguous(), (knob.shape, logits_RV.shape)
    assert temperature_R.dtype == top_p_R.dtype == min_p_R.dtype == torch.float32, temperature_R.dtype
    assert not top_k_R.is_floating_point() and noise_R.is_floating_point(), (top_k_R.dtype, noise_R.dtype)


def launch_sample(
    logits_RV: torch.Tensor,
    temperature_R: torch.Tensor,
    top_k_R: torch.Tensor,
    top_p_R: torch.Tensor,
    min_p_R: torch.Tensor,
    noise_R: torch.Tensor,
    chunk: int = CHUNK,
    tile: int = _TILE,
    room: int = ROOM,
    num_warps: int = 16,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The Triton kernels, four launches: each row's best, its weights, the heaviest of them, its cuts and draw."""
    _check(logits_RV, temperature_R, top_k_R, top_p_R, min_p_R, noise_R)
    rows, vocab = logits_RV.shape
    device = logits_RV.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    sound = torch.empty(rows, dtype=torch.bool, device=device)
    if not rows:
        return tokens, sound
    peaks = find_peaks(logits_RV, chunk)
    chunks = triton.cdiv(vocab, chunk)
    padded = chunks * chunk
    sizes = {"STRIDE": padded + room, "PADDED": padded}
    weights = torch.empty(rows, padded + room, dtype=torch.float32, device=device)
    counts = torch.empty(rows, chunks, 8, dtype=torch.int32, device=device)
    source = torch.empty(rows, room, dtype=torch.int32, device=device)
    _weigh_kernel[(rows, chunks)](
        logits_RV,
        weights,
        counts,
        peaks.value,
        peaks.index,
        peaks.nans,
        temperature_R,
        min_p_R,
        tokens,
        sound,
        logits_RV.stride(0),
        vocab,
        peaks.parts,
        PARTS=triton.next_power_of_2(peaks.parts),
        CHUNK=chunk,
        num_warps=4,
        **sizes,
    )
    sizes |= {"CHUNKS": triton.next_power_of_2(chunks), "ROOM": room}
    _gather_kernel[(rows, chunks)](weights, counts, source, temperature_R, chunks, CHUNK=chunk, num_warps=4, **sizes)
    _draw_kernel[(rows,)](
        weights,
        counts,
        source,
        temperature_R,
        top_k_R,
        top_p_R,
        noise_R,
        tokens,
        chunks,
        TILE=tile,
        num_warps=num_warps,
        **sizes,
    )
    return tokens, sound
