"""How a plan is sized: decode rows by count, prompt tokens by budget. Pure functions of small numbers."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.schedule.cost import CostCurve


def decode_quota(num_decoding: int, num_ready: int, sizes: Sequence[int], ways: int) -> int:
    """How many of the `num_ready` decode rows the next plan takes, so that microbatches become and stay level.

    num_decoding: all requests that decode: ready, or out with a plan and coming back.
    sizes: how many requests are out with each plan.
    ways: over how many microbatches rows are spread at most.

    Level means m = min(ways, num_decoding) microbatches of `base` or base + 1 rows, `extra` of them the larger. A plan
    is larger only while fewer than `extra` of those in flight are. So once every plan in flight was issued under this
    rule (one trip), those m - 1 or fewer hold at most (m - 1) * base + extra rows: what is ready fills a whole quota,
    and after the second trip all are level, whatever they were before.
    """
    if not num_ready:
        return 0
    base, extra = divmod(num_decoding, min(ways, num_decoding))
    larger = 0
    for size in sizes:
        larger += size > base
    return min(num_ready, base + (larger < extra))


def prompt_budget(num_waiting: int, room: int) -> int:
    """Prompt tokens for a plan with `room` for them when `num_waiting` wait: as few plans as can be, all the same."""
    if not num_waiting or not room:
        return 0
    num_plans = -(-num_waiting // room)
    return -(-num_waiting // num_plans)


def prompt_counts(
    prompts: Sequence[tuple[int, int]], room: int, num_decoding: int, ways: int, curve: CostCurve | None
) -> list[int]:
    """How many tokens of each prompt the next plan takes.

    prompts: (start, tokens to go) of each, in the order of their turns.
    room: the most tokens of all together.
    num_decoding: requests that decode, spread over `ways` microbatches. Where there are any, the prompts of a plan cost
        about what a microbatch does, and more where many are at their prompts and few decode: so many times as there
        are requests for each that decodes. Far into a long prompt that is fewer tokens.
    """
    if curve is None or not num_decoding or not room:
        remaining = [length for _, length in prompts]
        return share_budget(prompt_budget(sum(remaining), room), remaining)
    costs = [curve.cost(start, length) for start, length in prompts]
    most = curve.microbatch(-(-num_decoding // ways)) * (num_decoding + len(prompts)) // num_decoding
    budget = prompt_budget(sum(costs), min(most, curve.token * room))
    shares = share_budget(budget, costs)
    counts = [curve.tokens(start, share) for (start, _), share in zip(prompts, shares, strict=True)]
    counts[0] = max(1, counts[0])
    return counts


def share_budget(budget: int, remaining: Sequence[int]) -> list[int]:
    """Split a plan's prompt tokens (or what they cost) among prompts that have `remaining` to go, oldest first.

    The oldest gets all it needs if that fits, else at least half, so it always advances; the others go shortest first,
    so a short prompt passes a long one within a few plans; what they leave is the oldest's again.
    """
    if sum(remaining) <= budget:
        return list(remaining)
    counts = [0] * len(remaining)
    counts[0] = remaining[0] if remaining[0] <= budget else -(-budget // 2)
    left = budget - counts[0]
    for i in sorted(range(1, len(remaining)), key=remaining.__getitem__):
        counts[i] = min(left, remaining[i])
        left -= counts[i]
    counts[0] += left
    return counts
