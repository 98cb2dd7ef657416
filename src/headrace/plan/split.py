"""Layers of each stage such that the slowest stage is as fast as can be at a given load, within what memory holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.mesh import FloatArray, Mesh, best_split, run_costs
from headrace.plan.cost import kinds_of, places_of
from headrace.plan.experts import Routing
from headrace.plan.hardware import Machine
from headrace.plan.inventory import embedding, head
from headrace.plan.load import Load
from headrace.plan.memory import Limits, kv_layer_bytes, room
from headrace.plan.operations import Share
from headrace.spec import ModelSpec

NEARLY = 0.001
"""Share by which a stage may be slower than the slowest must be, for the sake of a larger KV cache."""


class Splitter:
    """Prices and sizes of runs of layers on the stages of a mesh, whose own split is not looked at."""

    def __init__(
        self, spec: ModelSpec, mesh: Mesh, machine: Machine, routing: Routing, kv_value_bytes: int | None = None
    ) -> None:
        """kv_value_bytes: of a value in the KV cache; None: as activations."""
        self._spec, self._mesh, self._machine = spec, mesh, machine
        self._share = Share(spec, mesh.tp, mesh.ep, routing, kv_value_bytes)
        self._kinds, self._of_layer = kinds_of(spec)
        self._places, self._here_GS = places_of(mesh, machine)

    def fastest(self, load: Load, limits: Limits, num_tokens: int) -> tuple[int, ...] | None:
        """The split whose slowest stage takes least at this load; None where none fits.

        Of splits that are as fast within `NEARLY`, the one whose least KV cache is largest. A stage fits that has room
        for its weights, for steps within the limits, and for a KV cache of `num_tokens`.
        """
        return self.fastest_of([(1.0, load)], limits, num_tokens)

    def fastest_of(
        self, loads: Sequence[tuple[float, Load]], limits: Limits, num_tokens: int
    ) -> tuple[int, ...] | None:
        """The same where steps of several kinds alternate, each with a weight."""
        times = [self._times(place, loads) for place in range(len(self._places))]
        num_layers = range(self._spec.num_layers)
        weights_SE = run_costs([self._layer_weights(index) for index in num_layers])
        kv_SE = run_costs([float(kv_layer_bytes(self._spec, self._mesh.tp, index, limits)) for index in num_layers])

        def left(stage: int) -> FloatArray:
            """Bytes for the KV cache."""
            all_of_it = room(self._spec, self._mesh, self._machine, stage, limits) - self._end_bytes(stage)
            found: FloatArray = all_of_it - weights_SE
            return found

        def price(stage: int) -> FloatArray:
            ends_s = [first * (stage == 0) + last * (stage == self._mesh.pp - 1) for _, first, last in times]
            here = [place for place in range(len(times)) if self._here_GS[place, stage]]
            cost_SE = np.maximum.reduce([times[place][0] + ends_s[place] for place in here])
            return np.where(num_tokens * kv_SE <= left(stage), cost_SE, np.inf)

        fastest = best_split(price, self._mesh.pp)
        if fastest is None or self._mesh.pp == 1:
            return fastest
        ends = np.cumsum((0, *fastest))
        slowest = max(float(price(stage)[ends[stage], ends[stage + 1]]) for stage in range(self._mesh.pp))

        def crowded(stage: int) -> FloatArray:
            """KV bytes a token by what is left for them."""
            left_SE = left(stage)
            fits_SE = (price(stage) <= slowest * (1 + NEARLY)) & (left_SE > 0)
            return np.where(fits_SE, kv_SE / np.where(fits_SE, left_SE, 1.0), np.inf)

        return best_split(crowded, self._mesh.pp)

    def smallest(self, limits: Limits) -> tuple[int, ...] | None:
        """The split whose worst stage has most left beside its weights, whether or not it fits."""
        weights_SE = run_costs([self._layer_weights(index) for index in range(self._spec.num_layers)])
        # The programme takes costs that are not negative.
        most = max(room(self._spec, self._mesh, self._machine, stage, limits) for stage in range(self._mesh.pp))

        def price(stage: int) -> FloatArray:
            taken = most - room(self._spec, self._mesh, self._machine, stage, limits) + self._end_bytes(stage)
            found: FloatArray = weights_SE + taken
            return found

        return best_split(price, self._mesh.pp)

    def _times(self, place: int, loads: Sequence[tuple[float, Load]]) -> tuple[FloatArray, float, float]:
        """Seconds of every run of layers [L + 1, L + 1], of the embedding and of the head."""
        share, tp, at = self._share, self._mesh.tp, self._places[place]
        each, first, last = [0.0] * len(self._kinds), 0.0, 0.0
        for weight, load in loads:
            for index, kind in enumerate(self._kinds):
                each[index] += weight * at.total_s(share.products(*kind, load.tokens), tp)
                each[index] += weight * at.total_s(share.attention(*kind, load), tp)
            first += weight * at.total_s(share.embedding(load.tokens), tp)
            last += weight * at.total_s(share.head(head(self._spec), load.sampled), tp)
        return run_costs([each[kind] for kind in self._of_layer]), first, last

    def _layer_weights(self, index: int) -> float:
        tp = self._mesh.tp
        return sum(matrix.bytes * matrix.share(tp) for matrix in self._kinds[self._of_layer[index]][1])

    def _end_bytes(self, stage: int) -> float:
        ends = ([embedding(self._spec)] if stage == 0 else []) + ([head(self._spec)] * (stage == self._mesh.pp - 1))
        return sum(matrix.bytes / self._mesh.tp for matrix in ends)
