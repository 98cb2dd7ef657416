"""Weight bytes that a decode step reads: each byte once a step and stage, experts as uniform routing touches them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from headrace.mesh import Mesh
from headrace.spec import DTYPE_BYTES, MlaSpec, ModelSpec, MoeSpec

NUM_DRAWS = 64
"""Random routings from which the fullest rank's expected experts are taken."""


@dataclass(frozen=True)
class StageReads:
    """What the fullest rank of one stage reads for a microbatch of decode rows."""

    fixed: float
    """Bytes whatever the rows are."""
    experts: tuple[tuple[int, int, float], ...]
    """(routed experts, chosen by a token, bytes of this rank's part of one expert over all layers that are so)."""
    ranks: int
    """Over which whole experts are spread."""

    @classmethod
    def of(cls, spec: ModelSpec, mesh: Mesh, stage: int) -> StageReads:
        """From the model and the layout; the head is on the last stage."""
        fixed = spec.head_bytes / mesh.tp if stage == mesh.pp - 1 else 0.0
        experts: dict[tuple[int, int], float] = defaultdict(float)
        for layer in mesh.layers_of(stage):
            attention, mlp, size = spec.layers[layer].attention, spec.layers[layer].mlp, DTYPE_BYTES[spec.dtype]
            replicated = routed = 0.0
            if isinstance(attention, MlaSpec):
                columns = attention.kv_lora_rank + attention.rope_dim + (attention.q_lora_rank or 0)
                replicated += spec.hidden * columns * size
            if isinstance(mlp, MoeSpec):
                replicated += spec.hidden * mlp.num_experts * size
                # One token's decode leaves out the share of experts that it does not choose.
                unread = spec.layer_bytes(layer) - spec.layer_read_bytes(layer)
                routed = unread / (1 - mlp.top_k / mlp.num_experts)
                experts[mlp.num_experts, mlp.top_k] += routed / mlp.num_experts / (mesh.tp // mesh.ep)
            fixed += replicated + (spec.layer_bytes(layer) - routed - replicated) / mesh.tp
        return cls(fixed, tuple((*kind, each) for kind, each in experts.items()), mesh.ep)

    def bytes(self, tokens: int) -> float:
        """For so many rows."""
        return self.fixed + sum(
            each * distinct_experts(count, top_k, tokens, self.ranks) for count, top_k, each in self.experts
        )


def stage_bytes(spec: ModelSpec, mesh: Mesh, stage: int, tokens: int) -> float:
    """Weight bytes that the fullest rank of a stage reads for one microbatch of so many decode rows."""
    return StageReads.of(spec, mesh, stage).bytes(tokens)


@lru_cache(maxsize=4096)
def distinct_experts(num_experts: int, top_k: int, tokens: int, ranks: int) -> float:
    """Expected distinct experts that so many tokens touch, on the fullest of `ranks` ranks that share them."""
    if ranks == 1:
        return num_experts * (1 - (1 - top_k / num_experts) ** tokens)
    source = np.random.default_rng(0)
    most = []
    for _ in range(NUM_DRAWS):
        chosen = source.random((tokens, num_experts)).argpartition(top_k, axis=1)[:, :top_k]
        owners = np.unique(chosen) // (num_experts // ranks)
        most.append(np.bincount(owners, minlength=ranks).max())
    return float(np.mean(most))
