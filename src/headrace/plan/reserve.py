"""What a rank on a GPU keeps beside weights and cache: the sizes that workers go by, where a plan can price them."""

from __future__ import annotations

from bisect import bisect_left

MARGIN = 0.02
"""Share of a GPU's memory left alone: fragments, and what the driver and the libraries take later."""
KV_SHARE, KV_MOST = 0.25, 4 << 30
"""On a CPU the KV cache gets a quarter of the memory that is free, shared by the host's ranks, and 4 GiB at most."""
LOGIT_COPIES = 4
"""float32 copies of a step's logits that sampling may hold at once."""
GRAPH_BYTES = 16 << 20
"""What the driver keeps for one more graph of a stage, beside the memory that all graphs share."""
LADDER = (1, 2, 4, 6, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)
"""Rows of the graphs that are captured."""
EXPAND_MOST = 32768
"""Positions whose keys and values are held at once for one layer: 1 GiB with 64 heads of 128 and 128 dims."""
FEW_PAIRS = 8
"""Pairs of a block of the INT4 product for few tokens: an expert with more is unpacked once for each block.
It serves up to as many pairs an expert on average."""
EXPAND_PAIRS = 256
"""Pairs of a query and a position for each position from which on it pays; half of that would be even."""


def ladder(most: int) -> tuple[int, ...]:
    """Sizes to capture for plans of up to `most` rows: the last holds them all, up to the ladder's end."""
    most = min(most, LADDER[-1])
    return LADDER[: bisect_left(LADDER, most) + 1]


def plans_in_window(num_stages: int, run_ahead: int) -> int:
    """Plans that may be in flight: what they send and receive stays in memory until their results are known."""
    return num_stages + run_ahead


def ring_depth(max_in_flight: int) -> int:
    """Buffers of an edge: one more than the plans in flight, so that a send never waits while its plan is."""
    return max_in_flight + 1
