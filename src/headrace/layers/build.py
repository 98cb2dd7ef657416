"""What a stage's modules are built from: the spec, the layers that are local, and an axis for each role."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from headrace.errors import UnsupportedModel
from headrace.layers.axis import Axis
from headrace.mesh import Mesh
from headrace.spec import Int4Spec, ModelSpec


@dataclass(frozen=True, kw_only=True)
class Build:
    """Passed to every constructor; holds no rank."""

    spec: ModelSpec
    layers: range
    """Global indices of the layers to build."""
    first: bool = True
    """Whether the embedding is built."""
    last: bool = True
    """Whether the final norm and the head are built."""
    max_len: int
    """Positions that the rotary tables must reach."""
    dtype: torch.dtype
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    tensor: Axis = field(default_factory=Axis)
    """Heads, dense intermediate dims, vocabulary."""
    expert: Axis = field(default_factory=Axis)
    """Whole experts."""
    expert_slice: Axis = field(default_factory=Axis)
    """The intermediate dim of one expert."""
    routing_counter: torch.Tensor | None = None
    """[1] int64, steps so far: experts are drawn afresh for each; None: the router chooses."""
    side: torch.cuda.Stream | None = None
    """A GPU's second stream, for what can run beside the rest of a layer, and goes first where both wait."""
    spare: torch.cuda.Stream | None = None
    """Another, for what comes last where both wait."""
    reserve: int = 0
    """A GPU's multiprocessors that something else may hold at any time."""

    @classmethod
    def of_rank(
        cls,
        spec: ModelSpec,
        mesh: Mesh,
        rank: int,
        *,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> Build:
        """What a rank of the mesh builds, with its place on every axis and, so far, nobody else there."""
        return cls(
            spec=spec,
            layers=mesh.layers_of(mesh.stage_of(rank)),
            first=mesh.is_first(rank),
            last=mesh.is_last(rank),
            max_len=max_len,
            dtype=dtype,
            device=torch.device(device),
            tensor=Axis.at(mesh.tensor(rank), None, "tensor"),
            expert=Axis.at(mesh.expert(rank), None, "expert"),
            expert_slice=Axis.at(mesh.expert_slice(rank), None, "slice"),
        )

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
        """A parameter to be filled by the loader."""
        tensor = torch.empty(*shape, dtype=dtype or self.dtype, device=self.device)
        return torch.nn.Parameter(tensor, requires_grad=False)

    def int4(self, *modules: str) -> Int4Spec | None:
        """How the checkpoint stores these modules (names without prefix), which are fused and so must agree."""
        quant = self.spec.quant
        if quant is None:
            return None
        covered = {quant.covers(f"{self.spec.weight_prefix}model.{module}") for module in modules}
        if len(covered) > 1:
            raise UnsupportedModel(f"INT4 for only some of {', '.join(modules)} is not supported: they are one product")
        return quant if covered == {True} else None
