"""Which combinations of model, layout and scheduling are compared with the reference.

Every family in every layout is the whole of it; a part that covers every pair of factor values runs with the tests.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields

from tests.tiny import TINY, tiny_config

RANKS = ("tp1", "tp2", "ep2")
CHUNKS = (1, 7, 64)
PAGE_SIZES = (1, 16)
PRESSURES = ("roomy", "tight")
LOADS = (1, 9, 40)


@dataclass(frozen=True)
class Case:
    """One server to start and ask."""

    family: str
    pp: int
    ranks: str
    split: str
    chunk: int
    page_size: int
    pressure: str
    """`tight`: so few pages that requests are pre-empted."""
    load: int
    """Concurrent requests."""

    @property
    def name(self) -> str:
        """For test ids."""
        return (
            f"{self.family}-pp{self.pp}{self.ranks}-{self.split}-chunk{self.chunk}-page{self.page_size}"
            f"-{self.pressure}-{self.load}"
        )

    @property
    def run_ahead(self) -> int:
        """Plans ahead of results, 0 to 2: by the name, so that every value of the others meets several."""
        return zlib.crc32(self.name.encode()) % 3

    @property
    def num_layers(self) -> int:
        """Layers of the tiny model."""
        config = tiny_config(self.family)
        layers: int = config.get("text_config", config)["num_hidden_layers"]
        return layers

    @property
    def flags(self) -> list[str]:
        """Layout and scheduling flags of `headrace serve`, the KV cache's size apart."""
        flags = ["--pp", str(self.pp), "--chunk", str(self.chunk), "--page-size", str(self.page_size)]
        if self.ranks != "tp1":
            flags += [f"--{self.ranks[:2]}", "2"]
        if self.split == "uneven":
            # One layer on the first stage, then as many as are left over on the second.
            counts = [1] * self.pp
            counts[1] += self.num_layers - self.pp
            flags += ["--split", ",".join(map(str, counts))]
        return flags

    @property
    def cost(self) -> int:
        """Roughly what starting it costs: processes, and more steps with small chunks."""
        return self.pp * (1 if self.ranks == "tp1" else 2) + 2 + (2 if self.chunk == 1 else 0)


def possible(case: Case) -> bool:
    """Whether the combination makes sense."""
    if case.split == "uneven" and case.pp == 1:
        return False
    if case.pressure == "tight" and (case.load != 9 or case.chunk == 1):
        # One alone is never pre-empted, forty would take their turns for minutes, and with chunks of one token a second
        # request only starts when the first has ended.
        return False
    moe = "n_routed_experts" in str(tiny_config(case.family)) or "num_experts" in tiny_config(case.family)
    return case.ranks != "ep2" or moe


def combinations(families: Iterable[str] = TINY) -> Iterator[Case]:
    """All there are."""
    for values in itertools.product(
        families, (1, 2, 3, 4), RANKS, ("level", "uneven"), CHUNKS, PAGE_SIZES, PRESSURES, LOADS
    ):
        case = Case(*values)
        if possible(case):
            yield case


def whole() -> list[Case]:
    """Every family in every layout, level and uneven; chunk, page size, pressure and load go round."""
    source = random.Random(0)
    layouts: dict[tuple[object, ...], list[Case]] = {}
    for case in combinations():
        layouts.setdefault((case.family, case.pp, case.ranks, case.split), []).append(case)
    uncovered = _pairs_of(itertools.chain.from_iterable(layouts.values()), strength=3)
    chosen = []
    for cases in layouts.values():
        best = max(source.sample(cases, min(12, len(cases))), key=lambda c: len(_tuples(c, 3) & uncovered))
        uncovered -= _tuples(best, 3)
        chosen.append(best)
    return chosen


def pairwise() -> list[Case]:
    """A small set in which every possible pair of factor values occurs, cheap cases preferred."""
    source = random.Random(0)
    every = list(combinations())
    uncovered = _pairs_of(every, strength=2)
    chosen = []
    while uncovered:
        case = max(source.sample(every, 400), key=lambda c: len(_tuples(c, 2) & uncovered) / c.cost)
        if not _tuples(case, 2) & uncovered:
            case = next(c for c in every if _tuples(c, 2) & uncovered)
        uncovered -= _tuples(case, 2)
        chosen.append(case)
    return sorted(chosen, key=lambda c: c.name)


def _tuples(case: Case, strength: int) -> set[tuple[tuple[str, object], ...]]:
    values = [(f.name, getattr(case, f.name)) for f in fields(case)]
    # A family meets three stages or four, whichever is cheaper with the rest; every other factor meets both.
    shallow = [("pp", min(case.pp, 3)) if name == "pp" else (name, value) for name, value in values]
    with_family = (t for t in itertools.combinations(shallow, strength) if t[0][0] == "family")
    without = (t for t in itertools.combinations(values, strength) if t[0][0] != "family")
    return {*with_family, *without}


def _pairs_of(cases: Iterable[Case], strength: int) -> set[tuple[tuple[str, object], ...]]:
    found: set[tuple[tuple[str, object], ...]] = set()
    for case in cases:
        found |= _tuples(case, strength)
    return found
