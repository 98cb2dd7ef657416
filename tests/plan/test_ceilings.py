"""What K2 in INT4 could do at most on eight GPUs of 1.792 TB/s, through the scheduler and virtual stages.

Tables as they were computed by hand from bytes and expected experts, uniform routing, nothing charged for links. The
period of a pipeline is max(sum of t(b), P max t(b)) over its microbatches b.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from headrace.mesh import FloatArray, Mesh
from headrace.plan.arrivals import Ask, Open
from headrace.plan.cost import CostModel, Roofline, kinds_of
from headrace.plan.experts import Uniform
from headrace.plan.inventory import head
from headrace.plan.load import Load
from headrace.plan.memory import Limits
from headrace.plan.operations import Operation, Share
from headrace.plan.pipeline import Pipeline
from headrace.plan.split import Splitter
from headrace.plan.virtual import VirtualEngine
from headrace.schedule import SchedulerConfig
from headrace.step import StepPlan, pack
from tests.plan.specs import BARE, K2, bare

NUM_GPUS = 8
WARM_TOKENS, TOKENS = 12, 40
LAYOUTS = {"pp8": (8, 1, 1), "pp4ep2": (4, 2, 2), "pp2ep4": (2, 4, 4), "ep8": (1, 8, 8), "tp8": (1, 8, 1)}


@dataclass
class Ideal:
    """Every byte of weights divided by the number of GPUs, and nothing else: no layout reaches this."""

    num_stages: int
    feedback_s: float = 0.0
    host_s: float = 0.0

    def __post_init__(self) -> None:
        self._share = Share(K2, 1, 1, Uniform())
        self._kinds, self._of_layer = kinds_of(K2)
        self._known: dict[int, float] = {}

    def steps_s(self, load: Load) -> FloatArray:
        if load.tokens not in self._known:
            self._known[load.tokens] = self._bytes(load.tokens) / NUM_GPUS / BARE.bandwidth
        return np.full(self.num_stages, self._known[load.tokens])

    def edges_s(self, tokens: int) -> tuple[FloatArray, FloatArray]:
        return np.zeros(self.num_stages - 1), np.zeros(self.num_stages - 1)

    def _bytes(self, tokens: int) -> float:
        load = Load.decode(tokens, 0)
        each = [
            sum(
                operation.bytes
                for operations in (self._share.products(*kind, tokens), self._share.attention(*kind, load))
                for operation in operations
                if isinstance(operation, Operation)
            )
            for kind in self._kinds
        ]
        return sum(each[kind] for kind in self._of_layer) + head(K2).bytes


def decode_rate(cost: CostModel, num_requests: int) -> float:
    """Tokens a second of so many requests that came at once, from their twelfth token on."""
    config = SchedulerConfig(
        num_stages=cost.num_stages,
        max_running=256,
        chunk=8192,
        page_size=16,
        num_pages=10_000,
        max_len=64,
        run_ahead=2,
    )
    engine = VirtualEngine(config, cost)
    engine.run(Open([Ask(0.0, 1, TOKENS)] * num_requests))
    assert all(len(record.token_times_s) == TOKENS for record in engine.records)
    periods = [
        (record.token_times_s[-1] - record.token_times_s[WARM_TOKENS]) / (TOKENS - 1 - WARM_TOKENS)
        for record in engine.records
    ]
    return num_requests / float(np.mean(periods))


@pytest.mark.parametrize(
    ("num_requests", "rates"),
    [
        (1, (54, 109, 217, 435)),
        (8, (435, 642, 853, 1047)),
        (32, (853, 1047, 1244, 1525)),
        (128, (1244, 1525, 2069, 3316)),
    ],
)
def test_every_byte_divided_by_eight(num_requests: int, rates: tuple[int, ...]) -> None:
    found = [decode_rate(Ideal(num_stages), num_requests) for num_stages in (8, 4, 2, 1)]
    assert found == pytest.approx(rates, rel=0.03)


def product_rate(layout: str, num_requests: int, split: tuple[int, ...] | None) -> float:
    """By the product's own model, with the best split there is where none is given."""
    pp, tp, ep = LAYOUTS[layout]
    mesh = Mesh(pp=pp, tp=tp, ep=ep, split=split or (0,) * pp)
    if split is None:
        rows = -(-num_requests // min(pp, num_requests))
        splitter = Splitter(K2, mesh, bare(mesh), Uniform())
        best = splitter.fastest(Load.decode(rows, 20), Limits(chunk=8192, max_running=256), 2)
        assert best is not None
        mesh = Mesh(pp=pp, tp=tp, ep=ep, split=best)
    return decode_rate(Roofline(K2, mesh, bare(mesh), Uniform()), num_requests)


PP8_SPLITS = {
    **dict.fromkeys((1, 8), (7, 8, 8, 8, 8, 9, 9, 4)),
    **dict.fromkeys((16, 32), (8, 8, 8, 8, 8, 8, 8, 5)),
    128: (8, 8, 8, 8, 8, 7, 7, 7),
}


@pytest.mark.parametrize(
    ("num_requests", "rates"),
    [
        (1, (54, 94, 148, 215, 299)),
        (8, (403, 551, 632, 673, 921)),
        (16, (617, 740, 823, 914, 1151)),
        (32, (842, 924, 1042, 1219, 1452)),
        (64, (1012, 1127, 1362, 1802, 2001)),
        (128, (1188, 1432, 1918, 3087, 3229)),
        (256, (1446, 1986, 3190, 6048, 6074)),
    ],
)
def test_whole_layers_replicated_projections_and_the_fullest_rank(num_requests: int, rates: tuple[int, ...]) -> None:
    splits = {"pp8": PP8_SPLITS.get(num_requests)}
    found = [product_rate(layout, num_requests, splits.get(layout)) for layout in LAYOUTS]
    assert found == pytest.approx(rates, rel=0.03)


def pinned_rate(sizes: list[int]) -> float:
    """Microbatches that never change: each is sent again as soon as it is back, on the eight stages of the ideal."""
    pipeline = Pipeline(Ideal(8), sum(sizes))
    members, first = [], 0
    for size in sizes:
        members.append(range(first, first + size))
        first += size
    trips = 30
    num_sent = 0

    def send(microbatch: int, now_s: float) -> None:
        nonlocal num_sent
        rows = [value for slot in members[microbatch] for value in (slot, num_sent // len(sizes), 1, 1)]
        pipeline.send(StepPlan(num_sent, pack(rows)), now_s)
        num_sent += 1

    for microbatch in range(len(sizes)):
        send(microbatch, 0.0)
    ends = []
    while pipeline.results:
        now_s, result = pipeline.results.popleft()
        ends.append(now_s)
        if num_sent < trips * len(sizes):
            send(result.plan_id % len(sizes), now_s)
    warm = 10 * len(sizes)
    return sum(sizes) * (trips - 10) / (ends[-1] - ends[warm - 1])


@pytest.mark.parametrize(
    ("sizes", "rate"),
    [
        ([4] * 8, 853),
        ([5, 5, 5, 5, 3, 3, 3, 3], 734),
        ([8] * 4, 523),
        ([16, 16], 311),
        ([32], 191),
        ([2] * 16, 642),
    ],
    ids=str,
)
def test_pinned_microbatches(sizes: list[int], rate: float) -> None:
    assert pinned_rate(sizes) == pytest.approx(rate, rel=0.03)
