"""Mixture of experts: router, routed experts (whole over the expert axis, sliced over the slice axis), shared ones.

Shapes: T tokens, D hidden, E experts, X local experts, k chosen, I local intermediate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from headrace.kernels.combine import combine
from headrace.kernels.dispatch import ExpertPlan, route_and_plan
from headrace.kernels.expert_products import (
    ExpertWeights,
    block_size,
    expert_down,
    expert_gate_up,
    int4_weights,
    plain_weights,
)
from headrace.kernels.experts import grouped_experts
from headrace.kernels.int4_experts import Fragments
from headrace.kernels.linear import product_float
from headrace.kernels.routing import UniformRouting, route
from headrace.layers.axis import Axis
from headrace.layers.batch import Batch
from headrace.layers.build import Build
from headrace.layers.linear import WORD
from headrace.layers.mlp import Mlp
from headrace.spec import Int4Spec, MoeSpec
from headrace.weights.formats import dequantise
from headrace.weights.slots import Slot

FEW_TOKENS = 8
"""Tokens up to which a step waits for the scores and the routing, not for the shared experts."""
BESIDE_TOKENS = 128
"""Tokens up to which the shared experts run on a stream of their own."""

Shared = Callable[[], torch.Tensor | None]
"""Gives the shared experts' share of the sum."""


class Router(nn.Module):
    """Scores every expert for every token; the same on every rank."""

    def __init__(self, build: Build, moe: MoeSpec, layer: int) -> None:
        super().__init__()
        self.moe = moe
        counter = build.routing_counter
        self.uniform = None if counter is None else UniformRouting(counter, layer)
        self.weight = build.empty(moe.num_experts, build.spec.hidden)
        self.bias = build.empty(moe.num_experts, dtype=torch.float32) if moe.selection_bias else None

    def slots(self, name: str, expert: int | None = None) -> dict[str, Slot]:
        """The score matrix and the selection bias."""
        rows, columns = self.weight.shape
        found = {"weight": Slot(self.weight.data, (slice(0, rows), slice(0, columns)), (rows, columns))}
        if self.bias is not None:
            found["e_score_correction_bias"] = Slot(self.bias.data, (slice(0, rows),), (rows,))
        return found

    def choose(self, scores_TE: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights [T, k] float32, expert ids [T, k]; -1 for a pad)."""
        return route(scores_TE, self.bias, self.moe.top_k, **self._choice(batch))

    def plan(
        self, scores_TE: torch.Tensor, batch: Batch, held: range, block: int
    ) -> tuple[torch.Tensor, torch.Tensor, ExpertPlan]:
        """The same with the plan of the experts in `held`, in one launch where there are few tokens."""
        return route_and_plan(scores_TE, self.bias, self.moe.top_k, held, block, **self._choice(batch))

    def _choice(self, batch: Batch) -> dict[str, Any]:
        """How scores become a choice."""
        moe, softmax = self.moe, self.moe.scoring == "softmax"
        return {
            "softmax": softmax,
            "normalise": moe.normalise,
            "scale": 1.0 if softmax else moe.scale,
            "num_groups": 1 if softmax else moe.num_groups,
            "topk_groups": 1 if softmax else moe.topk_groups,
            "pads": batch.slots if batch.padded else None,
            "uniform": self.uniform,
        }

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Scores, [T, E] float32."""
        if self.moe.scoring == "softmax" and not x_TD.is_cuda:
            # In the model's type, as transformers has it: a wider copy of the weight a step would cost more.
            return linear(x_TD, self.weight).float()
        return product_float(x_TD, self.weight)


class ExpertStack(nn.Module):
    """One product of all local experts: [X, parts * rows, columns], plain or INT4 as stored.

    rows: the local slice of each part's output dim; columns: the local slice of the input dim.
    """

    def __init__(
        self,
        build: Build,
        experts: range,
        parts: tuple[str, ...],
        shape: tuple[int, int],
        rows: range,
        columns: range,
        int4: Int4Spec | None,
    ) -> None:
        super().__init__()
        self.experts, self.parts, self.shape, self.rows, self.columns = experts, parts, shape, rows, columns
        self.int4 = int4
        self._dtype, self._reserve = build.dtype, build.reserve
        self.weights: ExpertWeights | None = None
        """In the form that the device's kernels read; None: the reference multiplies them as they are stored."""
        held, out, width = len(experts), len(parts) * len(rows), len(columns)
        if int4 is None:
            self.weight = build.empty(held, out, width)
        else:
            self.packed = build.empty(held, out, width // WORD, dtype=torch.int32)
            self.scale = build.empty(held, out, width // int4.group_size, dtype=torch.bfloat16)

    def slots(self, name: str, expert: int | None = None) -> dict[str, Slot]:
        """Where one expert's matrix goes; nothing if another rank holds that expert."""
        assert expert is not None
        if expert not in self.experts:
            return {}
        local, count = expert - self.experts.start, len(self.rows)
        first = self.parts.index(name) * count
        here = slice(first, first + count)
        rows = slice(self.rows.start, self.rows.stop)
        out, width = self.shape
        if self.int4 is None:
            columns = slice(self.columns.start, self.columns.stop)
            return {"weight": Slot(self.weight.data[local, here], (rows, columns), (out, width))}

        def cut(by: int) -> slice:
            return slice(self.columns.start // by, self.columns.stop // by)

        group = self.int4.group_size
        return {
            "weight_packed": Slot(self.packed.data[local, here], (rows, cut(WORD)), (out, width // WORD)),
            "weight_scale": Slot(self.scale.data[local, here], (rows, cut(group)), (out, width // group)),
        }

    def finalise(self) -> None:
        """Once loaded, take the form that the device's kernels read, if they can."""
        if self.int4 is None:
            self.weights = plain_weights(self.weight.data)
        else:
            self.weights = int4_weights(self.packed.data, self.scale.data, self._dtype, self._reserve)

    def matrix(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """A local expert's [out, in], where the reference multiplies."""
        if self.int4 is None:
            return self.weight[expert]
        assert not isinstance(self.weights, Fragments)
        return dequantise(self.packed[expert], self.scale[expert], dtype)


class Experts(nn.Module):
    """The routed experts held here. The result is this rank's share of the sum."""

    def __init__(self, build: Build, moe: MoeSpec, int4: Int4Spec | None) -> None:
        super().__init__()
        hidden, width = build.spec.hidden, moe.intermediate
        self.held = build.expert.share(moe.num_experts)
        inner = build.expert_slice.share(width)
        self.gate_up = ExpertStack(build, self.held, ("gate", "up"), (width, hidden), inner, range(hidden), int4)
        self.down = ExpertStack(build, self.held, ("down",), (hidden, width), range(hidden), inner, int4)

    def slots(self, name: str, expert: int | None = None) -> dict[str, Slot]:
        """Where one expert's `gate`, `up` or `down` goes."""
        return (self.down if name == "down" else self.gate_up).slots(name, expert)

    def forward(
        self, x_TD: torch.Tensor, weights_Tk: torch.Tensor, ids_Tk: torch.Tensor, shared: Shared
    ) -> torch.Tensor:
        """[T, D] by the reference, what `shared` gives included."""
        partial = grouped_experts(x_TD, weights_Tk, ids_Tk, self.gate_up, self.down, self.held)
        extra = shared()
        return partial if extra is None else partial.add_(extra)

    def planned(
        self, x_TD: torch.Tensor, weights_Tk: torch.Tensor, ids_Tk: torch.Tensor, plan: ExpertPlan, shared: Shared
    ) -> torch.Tensor:
        """The same by the device's kernels and a plan of these choices; `shared` is called when they are under way."""
        gate_up, down = self.gate_up.weights, self.down.weights
        assert gate_up is not None and down is not None
        y_PD = expert_down(expert_gate_up(x_TD, plan, gate_up), plan, down)
        return combine(y_PD, weights_Tk, ids_Tk, self.held, shared())

    def block(self, pairs_each: float) -> int | None:
        """Most pairs of a plan's block, where an expert has `pairs_each`; None where the reference multiplies."""
        gate_up, down = self.gate_up.weights, self.down.weights
        return None if gate_up is None or down is None else block_size(pairs_each, gate_up, down)


class Replicated:
    """How tokens reach experts when every rank of a stage has every token: nothing moves out, sums come back.

    So what is computed here is known as soon as it is routed, and planned with the routing.

    The seam for attention replicas: an all-to-all would move tokens in `dispatch` and their results in `combine`.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def dispatch(
        self, x_TD: torch.Tensor, weights_Tk: torch.Tensor, ids_Tk: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tokens to compute here, with their choices."""
        return x_TD, weights_Tk, ids_Tk

    def combine(self, partial_TD: torch.Tensor) -> torch.Tensor:
        """The sum of what all ranks computed for these tokens."""
        return self.axis.all_reduce(partial_TD)


class Moe(nn.Module):
    """Router, routed experts and shared experts; one sum over the stage's ranks."""

    def __init__(
        self,
        build: Build,
        layer: int,
        moe: MoeSpec,
        *,
        routed_int4: Int4Spec | None,
        shared_int4: Int4Spec | None = None,
    ) -> None:
        super().__init__()
        self.router = Router(build, moe, layer)
        self.experts = Experts(build, moe, routed_int4)
        self.shared = (
            Mlp(build, moe.shared_intermediate, int4=shared_int4, reduce=False) if moe.shared_intermediate else None
        )
        self.transport = Replicated(build.tensor)
        self._side, self._spare = build.side, build.spare

    def forward(self, x_TD: torch.Tensor, batch: Batch) -> torch.Tensor:
        few = len(x_TD) <= FEW_TOKENS
        shared = None if few else self._start_shared(x_TD, self._side)
        scores = self.router(x_TD)
        if shared is None:
            # Not before the scores: everything waits for them, and beside a larger product they take their time.
            shared = self._start_shared(x_TD, self._spare)
        moe = self.router.moe
        block = self.experts.block(len(x_TD) * moe.top_k / moe.num_experts)
        if block is not None:
            chosen = self.router.plan(scores, batch, self.experts.held, block)
            return self.transport.combine(self.experts.planned(x_TD, *chosen, shared))
        sent, weights, ids = self.transport.dispatch(x_TD, *self.router.choose(scores, batch))
        return self.transport.combine(self.experts(sent, weights, ids, shared))

    def _start_shared(self, x_TD: torch.Tensor, side: torch.cuda.Stream | None) -> Shared:
        """The shared experts' result when it is called for; for few tokens on a GPU they run beside the routed ones.

        Both are streams of weights, and the shared ones fill the gaps of routing, which is all latency.
        """
        experts = self.shared
        if experts is None:
            return _nothing
        if side is None or len(x_TD) > BESIDE_TOKENS:
            return lambda: experts(x_TD)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y_TD = experts(x_TD)

        def join() -> torch.Tensor:
            torch.cuda.current_stream().wait_stream(side)
            return y_TD

        return join


def _nothing() -> None:
    return None
