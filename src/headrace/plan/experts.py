"""How many experts a step touches: expected numbers of distinct experts and of token-expert pairs, on the fullest rank.

A decode step reads each expert that any of its tokens chose, once; where whole experts are spread over ranks, all wait
for the rank that has most of them.
"""

from __future__ import annotations

from functools import lru_cache
from math import log, sqrt
from typing import Protocol

import numpy as np

from headrace.mesh import FloatArray
from headrace.spec import MoeSpec

SKEW = 0.5
"""Exponent of the power law of popularity under which published times of a K2 layer with power-law routing, 8 to 256
tokens on RTX PRO 6000, are nearest to the bytes that it reads."""


class Routing(Protocol):
    """Who chooses which experts."""

    def distinct(self, moe: MoeSpec, tokens: int, ranks: int) -> float:
        """Expected distinct experts of `tokens` tokens on the fullest of `ranks` ranks, which hold as many each."""
        ...

    def pairs(self, moe: MoeSpec, tokens: int, ranks: int) -> float:
        """Expected pairs of a token and an expert on the fullest rank."""
        ...

    def blocks(self, moe: MoeSpec, tokens: int, size: int) -> float:
        """Expected blocks of at most `size` pairs for each distinct expert: 1 where no expert has more."""
        ...


class Uniform:
    """Every token draws its experts afresh, all equally likely: E (1 - (1 - k/E)^b) of E on one rank."""

    def distinct(self, moe: MoeSpec, tokens: int, ranks: int) -> float:
        return _uniform(moe.num_experts, moe.top_k, tokens, ranks)

    def pairs(self, moe: MoeSpec, tokens: int, ranks: int) -> float:
        """The mean, and the largest of so many deviations of a binomial."""
        total, share = tokens * moe.top_k, 1 / ranks
        above = sqrt(2 * log(ranks) * total * share * (1 - share))
        return min(total, total * share + above)

    def blocks(self, moe: MoeSpec, tokens: int, size: int) -> float:
        return _blocks(moe.num_experts, moe.top_k, 0.0, tokens, size)


class Skewed:
    """Experts are as popular as a power law says, those of a rank being any; a token never draws one twice."""

    def __init__(self, exponent: float = SKEW) -> None:
        self.exponent = exponent

    def distinct(self, moe: MoeSpec, tokens: int, ranks: int) -> float:
        touched = 1 - (1 - _popularity(moe.num_experts, moe.top_k, self.exponent)) ** tokens
        if ranks == 1:
            return float(touched.sum())
        all_ranks = [_at_most(chances) for chances in touched.reshape(ranks, -1)]
        return _expected_maximum(np.prod(all_ranks, axis=0))

    def pairs(self, moe: MoeSpec, tokens: int, ranks: int) -> float:
        chosen = _popularity(moe.num_experts, moe.top_k, self.exponent).reshape(ranks, -1)
        return float(tokens * chosen.sum(axis=1).max())

    def blocks(self, moe: MoeSpec, tokens: int, size: int) -> float:
        return _blocks(moe.num_experts, moe.top_k, self.exponent, tokens, size)


@lru_cache(maxsize=8192)
def _uniform(num_experts: int, top_k: int, tokens: int, ranks: int) -> float:
    touched = 1 - (1 - top_k / num_experts) ** tokens
    if ranks == 1:
        return num_experts * touched
    one = _at_most(np.full(num_experts // ranks, touched))
    return _expected_maximum(one**ranks)


@lru_cache(maxsize=8192)
def _blocks(num_experts: int, top_k: int, exponent: float, tokens: int, size: int) -> float:
    """Of a binomial number of pairs an expert: the chances of more than 0, size, 2 size, ..., by that of more than 0.

    An exponent of 0 makes all experts alike.
    """
    chances = _popularity(num_experts, top_k, exponent) if exponent else np.array([top_k / num_experts])
    chances = np.minimum(chances, 1 - 1e-9)
    exactly, at_most = (1 - chances) ** tokens, np.zeros_like(chances)
    touched, blocks = 1 - exactly, np.zeros_like(chances)
    for pairs in range(tokens):
        at_most = at_most + exactly
        if pairs % size == 0:
            blocks += np.maximum(0.0, 1 - at_most)
        exactly = exactly * (tokens - pairs) / (pairs + 1) * chances / (1 - chances)
    return float(blocks.sum() / touched.sum())


def _at_most(chances: FloatArray) -> FloatArray:
    """[N + 1]: the chance that at most 0, 1, ... N of N experts are touched, each with its own chance.

    As if independently, which they are not: a token draws exactly k. Even so the fullest of 2 to 8 ranks of K2's 384
    experts comes out within 1% of the exact expectation at a single token, and nearer with more.
    """
    counts = np.ones(1)
    for chance in chances:
        counts = np.convolve(counts, (1 - chance, chance))
    chance_at_most: FloatArray = np.minimum(1.0, counts.cumsum())
    return chance_at_most


def _expected_maximum(at_most: FloatArray) -> float:
    """From the chances that the maximum is at most 0, 1, ... N."""
    return float((1 - at_most[:-1]).sum())


@lru_cache(maxsize=64)
def _popularity(num_experts: int, top_k: int, exponent: float) -> FloatArray:
    """[E]: the chance that a token has each expert among its k.

    Drawing k without repeats by weight is the same as letting each expert ring after a time that is exponential in its
    weight, and taking the first k: so expert e is among them with 1 - exp(-w_e t), t such that k rang (Efraimidis and
    Spirakis 2006, https://doi.org/10.1016/j.ipl.2005.11.003). Which ids are popular is drawn once, always the same.
    """
    weights = np.arange(1, num_experts + 1) ** -exponent
    low, high = 0.0, 1.0
    while (1 - np.exp(-weights * high)).sum() < top_k * (1 - 1e-9):
        high *= 2
        if high > 1e12:  # all experts are chosen
            return np.ones(num_experts)
    for _ in range(100):
        middle = (low + high) / 2
        if (1 - np.exp(-weights * middle)).sum() < top_k:
            low = middle
        else:
            high = middle
    chances: FloatArray = 1 - np.exp(-weights * high)
    return np.random.default_rng(0).permutation(chances)
