"""What a prompt's row costs beside decode rows, without a clock."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt


@dataclass(frozen=True, kw_only=True)
class CostCurve:
    """Costs in units of any size, integers so that every machine plans the same."""

    token: int
    """Of a token's products with weights."""
    pair: int
    """Of a token's attention to one position."""
    step: int
    """Of a plan with few rows, whatever they are: weights are read."""

    def cost(self, start: int, count: int) -> int:
        """Of `count` tokens from position `start` on."""
        return self.token * count + self.pair * (count * start + count * (count + 1) // 2)

    def tokens(self, start: int, cost: int) -> int:
        """The most tokens from position `start` on that cost no more than `cost`."""
        if not self.pair:
            return cost // self.token
        # pair n^2 + b n = 2 cost
        b = 2 * self.token + self.pair * (2 * start + 1)
        return (isqrt(b * b + 8 * self.pair * cost) - b) // (2 * self.pair)

    def microbatch(self, num_decodes: int) -> int:
        """Of a plan of so many decode rows."""
        return self.step + self.token * num_decodes
