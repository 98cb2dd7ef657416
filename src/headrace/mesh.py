"""Where things run: degrees, axes, and which rank holds which layers, heads and experts. Frozen, pure arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from headrace.config import LayoutConfig
from headrace.errors import UserError
from headrace.spec import DenseSpec, GqaSpec, MlaSpec, ModelSpec, MoeSpec

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Place:
    """One rank's place on one axis."""

    size: int
    index: int

    def share(self, count: int) -> range:
        """Which of `count` equal things this place holds."""
        assert count % self.size == 0, f"{count} things over {self.size} ranks"
        each = count // self.size
        return range(self.index * each, (self.index + 1) * each)


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """`pp` stages of `tp` ranks; rank = stage * tp + tensor index; experts lie whole on `ep` groups of tp / ep."""

    pp: int
    tp: int
    ep: int
    split: tuple[int, ...]
    """Layers of each stage."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole mesh."""
        return self.pp * self.tp

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return sum(self.split)

    @property
    def name(self) -> str:
        """The layout's name on a command line: `pp2`, `pp4ep2`, `tp4`."""
        parts = [f"pp{self.pp}"] if self.pp > 1 or self.tp == 1 else []
        if self.tp > 1 and self.ep != self.tp:
            parts.append(f"tp{self.tp}")
        if self.ep > 1:
            parts.append(f"ep{self.ep}")
        return "".join(parts)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        starts = [0]
        for count in self.split:
            starts.append(starts[-1] + count)
        return tuple(starts)

    def layers_of(self, stage: int) -> range:
        """Global indices of a stage's layers."""
        return range(self._starts[stage], self._starts[stage + 1])

    def stage_of(self, rank: int) -> int:
        """The stage that a rank belongs to."""
        return rank // self.tp

    def ranks_of(self, stage: int) -> range:
        """The ranks of a stage; the first is its leader."""
        return range(stage * self.tp, (stage + 1) * self.tp)

    def is_first(self, rank: int) -> bool:
        """Whether the rank holds the embedding."""
        return self.stage_of(rank) == 0

    def is_last(self, rank: int) -> bool:
        """Whether the rank holds the head."""
        return self.stage_of(rank) == self.pp - 1

    @property
    def sampler(self) -> int:
        """The rank that samples: tensor index 0 of the last stage."""
        return (self.pp - 1) * self.tp

    def tensor(self, rank: int) -> Place:
        """A rank's place among the tensor-parallel ranks of its stage."""
        return Place(self.tp, rank % self.tp)

    def expert(self, rank: int) -> Place:
        """A rank's place among the groups over which whole experts are spread."""
        return Place(self.ep, rank % self.tp // (self.tp // self.ep))

    def expert_slice(self, rank: int) -> Place:
        """A rank's place among the ranks that share one expert, each a slice of its intermediate dim."""
        each = self.tp // self.ep
        return Place(each, rank % each)


def build_mesh(layout: LayoutConfig, spec: ModelSpec) -> Mesh:
    """Resolve and check a layout against a model. Raises UserError naming the flag."""
    if layout.layout is not None:
        raise UserError(f"--layout {layout.layout}: headrace serve chooses; name a layout here")
    if layout.pp > spec.num_layers:
        raise UserError(f"--pp {layout.pp}: the model has only {spec.num_layers} layers")
    split = layout.split
    if split is None:
        costs = [spec.layer_read_bytes(i) for i in range(spec.num_layers)]
        split = level_split(costs, layout.pp, last=spec.head_bytes)
    elif sum(split) != spec.num_layers:
        raise UserError(f"--split adds up to {sum(split)} layers, the model has {spec.num_layers}")
    mesh = Mesh(pp=layout.pp, tp=layout.tp, ep=layout.ep, split=split)
    _check_division(mesh, spec)
    return mesh


def _check_division(mesh: Mesh, spec: ModelSpec) -> None:
    tp, ep, each = mesh.tp, mesh.ep, mesh.tp // mesh.ep
    if ep > 1 and not any(isinstance(layer.mlp, MoeSpec) for layer in spec.layers):
        raise UserError(f"--ep {ep}: the model has no experts")
    for layer in spec.layers:
        attention, mlp = layer.attention, layer.mlp
        if attention.num_heads % tp:
            raise UserError(f"--tp {tp}: does not divide the model's {attention.num_heads} attention heads")
        if isinstance(attention, GqaSpec) and attention.num_kv_heads % tp and tp % attention.num_kv_heads:
            raise UserError(f"--tp {tp}: does not divide the model's {attention.num_kv_heads} KV heads")
        if isinstance(mlp, DenseSpec):
            _check_width(mlp.intermediate, tp, "--tp", "intermediate size", spec, f"layers.{layer.index}.mlp.up_proj")
            continue
        if mlp.num_experts % ep:
            raise UserError(f"--ep {ep}: does not divide the model's {mlp.num_experts} experts")
        _check_width(
            mlp.intermediate, each, "--tp", "expert intermediate size", spec,
            f"layers.{layer.index}.mlp.experts.0.up_proj",
        )  # fmt: skip
        _check_width(
            mlp.shared_intermediate, tp, "--tp", "shared-expert intermediate size", spec,
            f"layers.{layer.index}.mlp.shared_experts.up_proj",
        )  # fmt: skip
    attention = spec.layers[0].attention
    out = attention.num_heads * (attention.v_dim if isinstance(attention, MlaSpec) else attention.head_dim)
    _check_width(out, tp, "--tp", "attention output size", spec, "layers.0.self_attn.o_proj")


def _check_width(width: int, ways: int, flag: str, what: str, spec: ModelSpec, module: str) -> None:
    if width % ways:
        raise UserError(f"{flag} {ways}: does not divide the model's {what} {width}")
    if (
        spec.quant
        and spec.quant.covers(f"{spec.weight_prefix}model.{module}")
        and width // ways % spec.quant.group_size
    ):
        raise UserError(
            f"{flag} {ways}: cuts the model's {what} {width} inside an INT4 group of {spec.quant.group_size}"
        )


def level_split(costs: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Layers of each stage such that the dearest stage costs least; `first` and `last` are added to the end stages."""
    between = run_costs(costs)
    extra = [0.0] * num_stages
    extra[0] += first
    extra[-1] += last
    split = best_split(lambda stage: between + extra[stage] if extra[stage] else between, num_stages)
    assert split is not None
    return split


def run_costs(costs: Sequence[float]) -> FloatArray:
    """What the layers from `start` until before `end` cost together: [L + 1, L + 1] by start and end."""
    before = np.concatenate(([0.0], np.cumsum(costs)))
    return before[None, :] - before[:, None]


def best_split(price: Callable[[int], FloatArray], num_stages: int) -> tuple[int, ...] | None:
    """Layers of each stage such that the dearest stage costs least; None where no split has a finite cost.

    `price` gives a stage's costs as `run_costs` does, infinite where it cannot be. Among the splits with the least
    maximum, the one with the smallest sum of squares (dynamic programme, O(stages * layers^2)).
    """
    # Shapes: S starts, E ends; a stage ends after at least as many layers as there are stages so far.
    peak = squares = np.zeros(1)  # by the layers that stages so far have, from `low` on
    low, starts = 0, []
    for stage in range(num_stages):
        costs = price(stage)
        first_end, after_ends = stage + 1, len(costs) - (num_stages - stage - 1)
        costs_SE = costs[low : low + len(peak), first_end:after_ends]
        has_layers_SE = np.arange(low, low + len(peak))[:, None] < np.arange(first_end, after_ends)
        costs_SE = np.where(has_layers_SE, costs_SE, np.inf)
        peaks_SE = np.maximum(peak[:, None], costs_SE)
        peak = peaks_SE.min(axis=0)
        totals_SE = np.where(peaks_SE <= peak, squares[:, None] + costs_SE * costs_SE, np.inf)
        squares = totals_SE.min(axis=0)
        starts.append(totals_SE.argmin(axis=0) + low)
        low = first_end
    if not np.isfinite(peak[-1]):
        return None
    counts, end = [], low + len(peak) - 1
    for stage in range(num_stages - 1, -1, -1):
        start = int(starts[stage][end - stage - 1])
        counts.append(end - start)
        end = start
    return tuple(reversed(counts))
