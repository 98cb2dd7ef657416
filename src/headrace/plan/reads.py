"""Weight bytes that a decode step reads: each byte once a step and stage, experts as uniform routing touches them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from headrace.mesh import Mesh
from headrace.plan.experts import Uniform
from headrace.plan.inventory import head, layer_matrices
from headrace.schedule.balance import ByCost
from headrace.spec import ModelSpec, MoeSpec


@dataclass(frozen=True)
class StageReads:
    """What the fullest rank of one stage reads for a microbatch of decode rows."""

    fixed: float
    """Bytes whatever the rows are."""
    experts: tuple[tuple[MoeSpec, float], ...]
    """Kinds of expert layers, with the bytes of a rank's part of one expert over all layers of that kind."""
    ranks: int
    """Over which whole experts are spread."""

    @classmethod
    def of(cls, spec: ModelSpec, mesh: Mesh, stage: int) -> StageReads:
        """From the model and the layout; the head is on the last stage."""
        fixed = head(spec).bytes / mesh.tp if stage == mesh.pp - 1 else 0.0
        experts: dict[MoeSpec, float] = defaultdict(float)
        for layer in mesh.layers_of(stage):
            for matrix in layer_matrices(spec, layer):
                mlp = spec.layers[layer].mlp
                if matrix.part == "experts" and isinstance(mlp, MoeSpec):
                    experts[mlp] += matrix.bytes / mlp.num_experts / (mesh.tp // mesh.ep)
                else:
                    fixed += matrix.bytes * matrix.share(mesh.tp)
        return cls(fixed, tuple(experts.items()), mesh.ep)

    def bytes(self, tokens: int) -> float:
        """For so many rows."""
        routing = Uniform()
        return self.fixed + sum(each * routing.distinct(moe, tokens, self.ranks) for moe, each in self.experts)


def decode_balance(spec: ModelSpec, mesh: Mesh) -> ByCost:
    """How decode rows are spread by what stages read: it is what decode steps take their time for."""
    reads = [StageReads.of(spec, mesh, stage) for stage in range(mesh.pp)]
    return ByCost(lambda rows: [stage.bytes(rows) for stage in reads])
