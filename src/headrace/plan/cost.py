"""What a step costs: a protocol of a few numbers, and the product's own model, a roofline over a stage's operations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headrace.mesh import FloatArray, Mesh
from headrace.plan.experts import Routing
from headrace.plan.hardware import Gpu, Link, Machine
from headrace.plan.inventory import Matrix, head, layer_matrices
from headrace.plan.load import Load
from headrace.plan.operations import AllGather, AllReduce, Operation, Share
from headrace.spec import LayerSpec, ModelSpec

HOP_S = 7e-6
"""What a hop from stage to stage costs beside its link. The trip of one token through two stages on two H200 took 60 us
more than the same layers on one (docs/decisions/019 and 015), 30 a hop; then small messages were pushed by a kernel of
the step, which made the two hops 46 us shorter (024)."""
HOST_S = 0.5e-3
"""From a sampled token, through the engine, to the plan that answers it (the assumption of docs/decisions/017)."""
MOST_CACHED = 100_000


class CostModel(Protocol):
    """What the virtual pipeline asks of hardware. Times are seconds."""

    num_stages: int
    feedback_s: float
    """From a token's sampling on the last stage to its arrival on the first."""
    host_s: float
    """From a result on the last stage, through the engine, to the plan that answers it."""

    def steps_s(self, load: Load) -> FloatArray:
        """[P]: how long each stage computes a microbatch."""
        ...

    def edges_s(self, tokens: int) -> tuple[FloatArray, FloatArray]:
        """For the activations of so many tokens from each stage to the next, [P - 1] each.

        First how long they occupy the link, so that the next ones wait; then how much later they arrive.
        """
        ...


def seconds(operation: Operation | AllReduce | AllGather, gpu: Gpu, link: Link | None, tp: int) -> float:
    """How long one operation takes on a GPU that `link` joins to the stage's other ranks (None: at no cost)."""
    if isinstance(operation, Operation):
        num_bytes = operation.bytes + gpu.again_share * operation.again + max(0.0, operation.moved - gpu.cache_bytes)
        reading, computing = num_bytes / gpu.read_rate, operation.flops / gpu.flops_rate(operation.rate)
        working = max(reading, computing) + (1 - gpu.overlap) * min(reading, computing)
        return working + operation.launches * gpu.launch_s
    if link is None:
        return 0.0
    # What follows a sum cannot be launched early: it waits for other GPUs.
    if isinstance(operation, AllGather):
        # Half of what a sum of as many bytes moves, and no less than the shortest sum.
        return max(link.all_reduce_s(tp, 0), link.all_reduce_s(tp, operation.bytes) / 2) + gpu.launch_s
    return link.all_reduce_s(tp, operation.bytes) + gpu.launch_s


@dataclass(frozen=True)
class Place:
    """What the ranks of some stages are, and what joins those of one stage."""

    gpu: Gpu
    link: Link | None

    def total_s(self, operations: Iterable[Operation | AllReduce | AllGather], tp: int) -> float:
        """One after the other."""
        return sum(seconds(operation, self.gpu, self.link, tp) for operation in operations)


Kind = tuple[LayerSpec, tuple[Matrix, ...]]


def kinds_of(spec: ModelSpec, *, attention_only: bool = False) -> tuple[list[Kind], list[int]]:
    """One layer of each kind, and which kind each layer is of; `attention_only` looks at nothing else of them."""
    found: dict[Hashable, int] = {}
    kinds: list[Kind] = []
    of_layer = []
    for layer in spec.layers:
        matrices = layer_matrices(spec, layer.index)
        key: Hashable = (layer.attention, layer.mlp, matrices)
        if attention_only:
            key = (layer.attention, tuple(matrix for matrix in matrices if matrix.part == "attention"))
        of_layer.append(found.setdefault(key, len(kinds)))
        if of_layer[-1] == len(kinds):
            kinds.append((layer, matrices))
    return kinds, of_layer


def places_of(mesh: Mesh, machine: Machine) -> tuple[list[Place], FloatArray]:
    """The kinds of places that there are, and which stages have ranks on each [G, S]. Layers do not matter here."""
    stages: dict[Place, set[int]] = {}
    for stage in range(mesh.pp):
        ranks = mesh.ranks_of(stage)
        link = machine.between(ranks)
        for rank in ranks:
            stages.setdefault(Place(machine.gpus[rank], link), set()).add(stage)
    here = [[float(stage in where) for stage in range(mesh.pp)] for where in stages.values()]
    return list(stages), np.array(here)


class Roofline:
    """Prices the operations of every stage of a mesh on a machine; layers that are alike are priced once.

    Shapes: G places, S stages, K kinds of layers. Where a stage has several kinds of GPU, it waits for the slowest.
    """

    def __init__(
        self, spec: ModelSpec, mesh: Mesh, machine: Machine, routing: Routing, kv_value_bytes: int | None = None
    ) -> None:
        """kv_value_bytes: of a value in the KV cache; None: as activations."""
        assert len(machine.gpus) == mesh.num_ranks, f"{len(machine.gpus)} GPUs for {mesh.num_ranks} ranks"
        self.num_stages = mesh.pp
        self._share = Share(spec, mesh.tp, mesh.ep, routing, kv_value_bytes)
        self._head = head(spec)
        self._layers, of_layer = kinds_of(spec)
        self._layers_KS = _counts(of_layer, mesh)
        self._attentions, of_attention = kinds_of(spec, attention_only=True)
        self._attentions_KS = _counts(of_attention, mesh)
        self._places, self._here_GS = places_of(mesh, machine)
        self._products: dict[int, FloatArray] = {}
        self._heads: dict[int, FloatArray] = {}
        self._edge_s_per_byte, self._edge_delay_s = _edges(mesh, machine)
        back = machine.between((mesh.ranks_of(mesh.pp - 1)[0], 0))
        self.feedback_s = 0.0 if back is None or mesh.pp == 1 else back.latency_s + HOP_S
        self.host_s = 0.0 if machine.link is None and machine.network is None else HOST_S

    def steps_s(self, load: Load) -> FloatArray:
        total_GS = self._products_s(load.tokens) + self._attention_s(load)
        if load.sampled:
            total_GS[:, -1] += self._head_s(load.sampled)
        slowest: FloatArray = (total_GS * self._here_GS).max(axis=0)
        return slowest

    def parts_s(self, load: Load, stage: int) -> dict[str, float]:
        """A stage's step by part, on the slowest of its places: what each part reads and computes, launches, sums."""
        found = [
            self._parts(at, load, stage) for at, here in zip(self._places, self._here_GS, strict=True) if here[stage]
        ]
        return max(found, key=lambda parts: sum(parts.values()))

    def _parts(self, at: Place, load: Load, stage: int) -> dict[str, float]:
        share, last = self._share, stage == self.num_stages - 1
        each: list[tuple[float, Iterable[Operation | AllReduce | AllGather]]] = []
        for kind, count in zip(self._layers, self._layers_KS[:, stage], strict=True):
            if count:
                each += [(count, share.products(*kind, load.tokens)), (count, share.attention(*kind, load))]
        each += [(1, share.embedding(load.tokens))] if stage == 0 else []
        each += [(1, share.head(self._head, load.sampled))] if last else []
        parts: dict[str, float] = defaultdict(float)
        for count, operations in each:
            for operation in operations:
                spent = count * seconds(operation, at.gpu, at.link, share.tp)
                if isinstance(operation, Operation):
                    launches = count * operation.launches * at.gpu.launch_s
                    parts[operation.part] += spent - launches
                    parts["launches"] += launches
                else:
                    parts["sums"] += spent
        return {part: spent for part, spent in parts.items() if spent}

    def edges_s(self, tokens: int) -> tuple[FloatArray, FloatArray]:
        num_bytes = tokens * self._share.spec.hidden * self._share.value_bytes
        return num_bytes * self._edge_s_per_byte, self._edge_delay_s

    def _products_s(self, tokens: int) -> FloatArray:
        """[G, S]: all that depends on the number of tokens alone."""
        known = self._products.get(tokens)
        if known is None:
            each_GK = self._price(lambda: (self._share.products(*kind, tokens) for kind in self._layers))
            known = each_GK @ self._layers_KS
            known[:, 0] += self._price(lambda: [self._share.embedding(tokens)])[:, 0]
            if len(self._products) < MOST_CACHED:
                self._products[tokens] = known
        return known

    def _attention_s(self, load: Load) -> FloatArray:
        """[G, S]: what depends on contexts."""
        each_GK = self._price(lambda: (self._share.attention(*kind, load) for kind in self._attentions))
        return each_GK @ self._attentions_KS

    def _head_s(self, sampled: int) -> FloatArray:
        """[G]: the head of so many rows."""
        known = self._heads.get(sampled)
        if known is None:
            known = self._heads[sampled] = self._price(lambda: [self._share.head(self._head, sampled)])[:, 0]
        return known

    def _price(self, parts: Callable[[], Iterable[Iterable[Operation | AllReduce | AllGather]]]) -> FloatArray:
        """[G, n]: each part's time at each place."""
        tp = self._share.tp
        return np.array([[place.total_s(part, tp) for part in parts()] for place in self._places])


def _counts(of_layer: Sequence[int], mesh: Mesh) -> FloatArray:
    """How many layers of each kind every stage has [K, S]."""
    counts = np.zeros((max(of_layer) + 1, mesh.pp))
    for stage in range(mesh.pp):
        for index in mesh.layers_of(stage):
            counts[of_layer[index], stage] += 1
    return counts


def _edges(mesh: Mesh, machine: Machine) -> tuple[FloatArray, FloatArray]:
    """[P - 1] each: seconds a byte occupies the link to the next stage, and the delay. Every rank sends to its like."""
    per_byte, delay = np.zeros(mesh.pp - 1), np.zeros(mesh.pp - 1)
    for stage in range(mesh.pp - 1):
        pairs = [(rank, rank + mesh.tp) for rank in mesh.ranks_of(stage)]
        crossing = [pair for pair in pairs if machine.host_of(pair[0]) != machine.host_of(pair[1])]
        link = machine.between(crossing[0] if crossing else pairs[0])
        if link is not None:
            # Ranks of one host share its network.
            per_byte[stage] = max(1, len(crossing)) / link.bandwidth
            delay[stage] = link.latency_s + HOP_S
    return per_byte, delay
