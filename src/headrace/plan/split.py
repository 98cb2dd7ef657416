"""Layers of each stage such that the slowest stage is as fast as can be at a given load, within what memory holds."""

from __future__ import annotations

import numpy as np

from headrace.mesh import FloatArray, Mesh, best_split, run_costs
from headrace.plan.cost import kinds_of, places_of
from headrace.plan.experts import Routing
from headrace.plan.hardware import Machine
from headrace.plan.inventory import embedding, head, layer_matrices
from headrace.plan.load import Load
from headrace.plan.memory import Limits, kv_layer_bytes, room
from headrace.plan.operations import Share
from headrace.spec import ModelSpec


class Splitter:
    """Prices and sizes of runs of layers on the stages of a mesh, whose own split is not looked at."""

    def __init__(self, spec: ModelSpec, mesh: Mesh, machine: Machine, routing: Routing) -> None:
        self._spec, self._mesh, self._machine = spec, mesh, machine
        self._share = Share(spec, mesh.tp, mesh.ep, routing)
        self._kinds, self._of_layer = kinds_of(spec)
        self._places, self._here_GS = places_of(mesh, machine)

    def fastest(self, load: Load, limits: Limits, num_tokens: int) -> tuple[int, ...] | None:
        """The split whose slowest stage takes least at this load; None where none fits.

        A stage fits that has room for its weights, for steps within the limits, and for a KV cache of `num_tokens`.
        """
        times = [self._times(place, load) for place in range(len(self._places))]
        bytes_SE = run_costs([self._layer_bytes(index, num_tokens) for index in range(self._spec.num_layers)])

        def price(stage: int) -> FloatArray:
            ends_s = [first * (stage == 0) + last * (stage == self._mesh.pp - 1) for _, first, last in times]
            here = [place for place in range(len(times)) if self._here_GS[place, stage]]
            cost_SE = np.maximum.reduce([times[place][0] + ends_s[place] for place in here])
            left = room(self._spec, self._mesh, self._machine, stage, limits)
            return np.where(bytes_SE + self._end_bytes(stage) <= left, cost_SE, np.inf)

        return best_split(price, self._mesh.pp)

    def _times(self, place: int, load: Load) -> tuple[FloatArray, float, float]:
        """Seconds of every run of layers [L + 1, L + 1], of the embedding and of the head."""
        share, tp, at = self._share, self._mesh.tp, self._places[place]
        each = [
            at.total_s(share.products(*kind, load.tokens), tp) + at.total_s(share.attention(*kind, load), tp)
            for kind in self._kinds
        ]
        first = at.total_s(share.embedding(load.tokens), tp)
        last = at.total_s(share.head(head(self._spec), load.sampled), tp)
        return run_costs([each[kind] for kind in self._of_layer]), first, last

    def _layer_bytes(self, index: int, num_tokens: int) -> float:
        tp = self._mesh.tp
        weights = sum(matrix.bytes * matrix.share(tp) for matrix in layer_matrices(self._spec, index))
        return weights + num_tokens * kv_layer_bytes(self._spec, tp, index)

    def _end_bytes(self, stage: int) -> float:
        ends = ([embedding(self._spec)] if stage == 0 else []) + ([head(self._spec)] * (stage == self._mesh.pp - 1))
        return sum(matrix.bytes / self._mesh.tp for matrix in ends)
