"""How many decode rows each microbatch has: the same, unless stages differ so much that unequal ones are faster.

Experts make a stage's cost concave in the rows of a microbatch: twice the rows touch less than twice the experts. So
two microbatches of 200 and 56 rows read less than two of 128. In a level pipeline that gains nothing, for the larger
one's trip through all stages sets the pace; where one stage sets it, there is time to spare on the trip.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

StageCosts = Callable[[int], Sequence[float]]
"""From the decode rows of a microbatch to what it costs on each stage, in any unit."""

WORTH = 0.03
"""Share by which unequal microbatches must be faster, by the costs, before they are used."""
NEARLY = 0.01
"""What comes as close to the best is as good: then the least unequal is taken."""
STEPS = 24
"""Sizes that are tried for the largest microbatch."""
ROUNDS = 6
"""Trips after which a pipeline's pace is taken to be steady."""


class Balance(Protocol):
    """Says how decode rows are spread."""

    def sizes(self, num_decoding: int, ways: int) -> Sequence[int] | None:
        """Rows of each of at most `ways` microbatches, largest first; None: level."""
        ...


class Level:
    """The same everywhere, within one."""

    def sizes(self, num_decoding: int, ways: int) -> None:
        """Level."""


class ByCost:
    """By what stages cost: one microbatch larger than the others where that is worth it."""

    def __init__(self, costs: StageCosts) -> None:
        # All are looked at again and again, by neighbouring numbers of rows.
        self._costs = lru_cache(maxsize=1024)(lambda rows: tuple(costs(rows)))
        self._known: dict[tuple[int, int], tuple[int, ...] | None] = {}

    def sizes(self, num_decoding: int, ways: int) -> tuple[int, ...] | None:
        """Rows of each microbatch, largest first; None: level."""
        key = (num_decoding, ways)
        if key not in self._known:
            self._known[key] = self._best(num_decoding, ways)
        return self._known[key]

    def _best(self, num_decoding: int, ways: int) -> tuple[int, ...] | None:
        if ways < 2 or num_decoding < 2 * ways:
            return None
        level = level_sizes(num_decoding, ways)
        most = num_decoding - (ways - 1)
        step = max(1, (most - level[0]) // STEPS)
        tried = [(largest, *level_sizes(num_decoding - largest, ways - 1)) for largest in range(level[0], most, step)]
        periods = [self._period(sizes) for sizes in tried]
        best = min(periods)
        if best > periods[0] * (1 - WORTH):
            return None
        return next(sizes for sizes, period in zip(tried, periods, strict=True) if period <= best * (1 + NEARLY))

    def _period(self, sizes: Sequence[int]) -> float:
        return period([self._costs(rows) for rows in sizes])


def level_sizes(count: int, ways: int) -> tuple[int, ...]:
    """`count` over `ways`, within one, largest first."""
    base, extra = divmod(count, ways)
    return tuple(base + (i < extra) for i in range(ways))


def period(costs: Sequence[Sequence[float]]) -> float:
    """Steady time between two returns of the same microbatch; costs[i][s] is that of microbatch i on stage s.

    Each stage takes them in turn, one at a time; a microbatch comes back to the first stage from the last.
    """
    free = [0.0] * len(costs[0])
    back = [0.0] * len(costs)
    ends = []
    for _ in range(ROUNDS):
        for i, stages in enumerate(costs):
            now = back[i]
            for stage, cost in enumerate(stages):
                now = free[stage] = max(now, free[stage]) + cost
            back[i] = now
        ends.append(back[-1])
    return (ends[-1] - ends[ROUNDS // 2 - 1]) / (ROUNDS - ROUNDS // 2)


def unequal_quota(targets: Sequence[int], num_ready: int, plan_id: int) -> int:
    """How many of the `num_ready` decode rows the next plan takes, so that microbatches become and stay `targets`.

    Each target has its place in the round of plans, whatever is out: after one trip no microbatch is too large, so all
    that one lacks is ready when it comes round again, and after two they are the targets.
    """
    return min(num_ready, targets[plan_id % len(targets)])
