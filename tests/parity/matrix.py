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
LOADS = (9, 40)
PAIRWISE = (
    "kimi_k2_int4-pp4ep2-uneven-chunk64-page16-tight-9",
    "qwen3_moe-pp3tp2-uneven-chunk1-page1-roomy-9",
    "deepseek_v3_plain_q-pp4tp2-uneven-chunk64-page1-roomy-9",
    "deepseek_v3-pp3ep2-level-chunk7-page16-roomy-9",
    "kimi_k25_int4-pp2ep2-uneven-chunk7-page16-tight-9",
    "llama_tied-pp4tp1-level-chunk1-page1-roomy-9",
    "llama_bias-pp4tp1-level-chunk7-page1-roomy-40",
    "llama-pp3tp1-uneven-chunk7-page16-tight-9",
    "kimi_k25_int4-pp3tp1-uneven-chunk1-page1-roomy-40",
    "llama-pp2tp2-level-chunk64-page1-roomy-9",
    "qwen3-pp3tp1-uneven-chunk7-page1-roomy-9",
    "llama_yarn-pp1tp2-level-chunk1-page1-roomy-40",
    "llama_yarn-pp2tp1-uneven-chunk7-page16-tight-9",
    "qwen3-pp2tp1-uneven-chunk1-page16-roomy-40",
    "qwen3_moe-pp1ep2-level-chunk7-page1-tight-9",
    "deepseek_v3-pp2tp1-uneven-chunk1-page1-roomy-40",
    "deepseek_v3_plain_q-pp1ep2-level-chunk1-page1-roomy-40",
    "deepseek_v3_plain_q-pp2tp1-level-chunk7-page16-tight-9",
    "kimi_k2_int4-pp2tp1-uneven-chunk1-page1-roomy-40",
    "llama_yarn-pp3tp1-level-chunk64-page16-roomy-9",
    "llama_tied-pp1tp2-level-chunk7-page1-roomy-40",
    "llama_tied-pp2tp1-uneven-chunk64-page16-tight-9",
    "llama_bias-pp1tp2-level-chunk64-page16-tight-9",
    "llama_bias-pp2tp1-uneven-chunk1-page16-roomy-9",
    "qwen3-pp1tp2-level-chunk64-page1-tight-9",
    "deepseek_v3-pp1tp2-level-chunk64-page16-tight-9",
    "qwen3_moe-pp2tp1-level-chunk64-page16-roomy-40",
    "kimi_k2_int4-pp1tp2-level-chunk7-page1-roomy-9",
    "kimi_k25_int4-pp1tp2-level-chunk64-page1-roomy-40",
    "llama-pp1tp1-level-chunk1-page16-roomy-40",
)
"""Found by `tests.parity.choose`; dear ones first, so that two processes end at the same time."""


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
    """Concurrent requests, after one that has the server to itself."""

    @property
    def name(self) -> str:
        """For test ids."""
        return (
            f"{self.family}-pp{self.pp}{self.ranks}-{self.split}-chunk{self.chunk}-page{self.page_size}"
            f"-{self.pressure}-{self.load}"
        )

    @property
    def run_ahead(self) -> int:
        """Plans ahead of results, 0 to 2: by the name, from a start with which every value of the others meets all."""
        return zlib.crc32(self.name.encode(), 73) % 3

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


def possible(case: Case) -> bool:
    """Whether the combination makes sense."""
    if case.split == "uneven" and case.pp == 1:
        return False
    if case.pressure == "tight" and (case.load != 9 or case.chunk == 1):
        # Forty would take their turns for minutes, and with chunks of one token a second request only starts when the
        # first has ended.
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
    """A small set in which every possible pair of factor values occurs, dear ones first."""
    named = {case.name: case for case in combinations()}
    return [named[name] for name in PAIRWISE]


def pairs_of(case: Case) -> set[tuple[tuple[str, object], ...]]:
    """The pairs of factor values that a case has."""
    return _tuples(case, 2)


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
