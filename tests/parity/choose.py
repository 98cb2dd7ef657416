"""Chooses the cases of `matrix.PAIRWISE` by annealing: `python -m tests.parity.choose [SECONDS]`, for a new family."""

from __future__ import annotations

import functools
import math
import operator
import random
import sys
import time
from collections.abc import Iterable

from tests.parity.matrix import Case, combinations, pairs_of
from tests.tiny import TINY

SERVERS = 3
"""A family: one, two and more stages are as many."""
MISSING = 4.0
"""What a pair that does not occur costs."""
WARM = 0.8
"""How much worse the next set may be, at first."""


def cost(case: Case) -> float:
    """Roughly how long a processor is busy: starting a rank takes one; the other processes, and each rank's steps."""
    steps = {1: 0.6, 7: 0.4, 64: 0.2}[case.chunk] + 0.4 * (case.pressure == "tight") + 0.2 * (case.load == 40)
    return 0.6 + case.pp * (1 if case.ranks == "tp1" else 2) * (1 + steps)


def choose(seconds: float) -> list[Case]:
    """The cheapest cases found that have every pair between them."""
    source = random.Random(0)
    cases = {family: list(combinations([family])) for family in TINY}
    numbers: dict[object, int] = {}
    pairs = {c: _mask(numbers.setdefault(p, len(numbers)) for p in pairs_of(c)) for f in TINY for c in cases[f]}
    chosen = [source.choice(cases[family]) for family in TINY for _ in range(SERVERS)]
    now = best = math.inf
    found: list[Case] = []
    started = time.monotonic()
    while (spent := (time.monotonic() - started) / seconds) < 1:
        at = source.randrange(len(chosen))
        before, chosen[at] = chosen[at], source.choice(cases[chosen[at].family])
        there = functools.reduce(operator.or_, (pairs[case] for case in chosen))
        missing = len(numbers) - there.bit_count()
        then = sum(map(cost, chosen)) + MISSING * missing
        if then <= now or source.random() < math.exp((now - then) / (WARM * (1 - spent) + 1e-9)):
            now = then
            if not missing and now < best:
                best, found = now, list(chosen)
        else:
            chosen[at] = before
    assert found, "more seconds"
    return sorted(found, key=lambda case: -cost(case))


def _mask(bits: Iterable[int]) -> int:
    return functools.reduce(operator.or_, (1 << bit for bit in bits))


if __name__ == "__main__":
    for case in choose(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0):
        print(f'    "{case.name}",')
