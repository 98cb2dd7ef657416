"""What a rank's memory holds, part by part: weights, what a step needs beside them, and the KV cache in the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.errors import UserError
from headrace.mesh import Mesh
from headrace.plan.hardware import GIB, MIB, Machine
from headrace.plan.inventory import Part, stage_matrices
from headrace.plan.reserve import (
    EXPAND_MOST,
    GRAPH_BYTES,
    KV_MOST,
    KV_SHARE,
    LOGIT_COPIES,
    MARGIN,
    ladder,
    plans_in_window,
    ring_depth,
)
from headrace.spec import DTYPE_BYTES, LayerSpec, MlaSpec, ModelSpec, MoeSpec

RUNTIME_BYTES = int(2.1 * GIB)
"""Context, libraries' workspaces, compiled kernels and what the allocator cannot use: what two H200 had in use beside
everything that is counted here, within 0.3 GiB in nine layouts (docs/decisions/028)."""
CPU_RUNTIME_BYTES = int(0.3 * GIB)
"""Of a rank on a processor: Python, torch and its libraries."""
CONTEXT_BYTES = int(0.5 * GIB)
"""The part of it that no run goes without."""
COMMUNICATOR_BYTES = 224 * MIB
"""Of an NCCL communicator on each of its GPUs: two of them took 0.45 GiB there."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one step may hold and how many may be under way."""

    chunk: int
    max_running: int
    run_ahead: int = 2
    graphs: bool = True
    """Whether decode steps are captured."""
    on_cpu: bool = False
    """Whether ranks share a host's memory, of which the KV cache takes a part and no library holds much."""
    kv_value_bytes: int | None = None
    """Of a value in the KV cache; None: as activations."""
    count_unused: bool = False
    """Whether what headrace does not load is counted all the same, as for an engine that does."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes on each rank of one stage, on its smallest GPU."""

    gpu_bytes: int
    weights: Mapping[Part, float]
    """As stored; a repack for kernels is in place."""
    graphs: float
    activations: float
    """The largest chunk's."""
    logits: float
    communication: float
    """Rings and windows of edges, communicators."""
    runtime: float
    spare: float
    """Left alone."""
    unused: Mapping[str, float]
    """What other engines load beside the language model, by name."""
    counts_unused: bool
    kv_token_bytes: int
    """What a token takes in the KV cache, over all layers of the stage."""

    @property
    def weight_bytes(self) -> float:
        """All kinds together."""
        return sum(self.weights.values())

    @property
    def steps_bytes(self) -> float:
        """What steps need beside weights and cache."""
        return self.graphs + self.activations + self.logits + self.communication + self.runtime

    @property
    def needed_bytes(self) -> float:
        """Everything but the KV cache, the spare included."""
        unused = sum(self.unused.values()) if self.counts_unused else 0.0
        return self.weight_bytes + unused + self.steps_bytes + self.spare

    @property
    def kv_bytes(self) -> float:
        """What is left for the KV cache; negative by as much as the stage does not fit."""
        return self.gpu_bytes - self.needed_bytes

    @property
    def kv_tokens(self) -> int:
        """What this stage's KV cache holds."""
        return max(0, int(self.kv_bytes // self.kv_token_bytes))

    @property
    def least_bytes(self) -> float:
        """What is needed even if nothing is left alone and no library takes more than it must."""
        return self.needed_bytes - self.spare - self.runtime + CONTEXT_BYTES


def stage_memory(spec: ModelSpec, mesh: Mesh, machine: Machine, stage: int, limits: Limits) -> StageMemory:
    """Of one stage of a layout whose split is known."""
    layers, last = mesh.layers_of(stage), stage == mesh.pp - 1
    weights: dict[Part, float] = defaultdict(float)
    for matrix, share in stage_matrices(spec, mesh.tp, layers, first=stage == 0, last=last):
        weights[matrix.part] += matrix.bytes * share
    gpu_bytes = min(machine.gpus[rank].memory_bytes for rank in mesh.ranks_of(stage))
    beside = _beside(spec, mesh, machine, stage, limits)
    spare = gpu_bytes * MARGIN
    if limits.on_cpu:
        cache = min(KV_MOST, mesh.num_ranks * gpu_bytes * KV_SHARE) / mesh.num_ranks
        spare = max(spare, gpu_bytes - sum(weights.values()) - sum(beside.values()) - cache)
    return StageMemory(
        gpu_bytes=gpu_bytes,
        weights=weights,
        **beside,
        spare=spare,
        unused=_unused(spec, mesh, stage),
        counts_unused=limits.count_unused,
        kv_token_bytes=sum(kv_layer_bytes(spec, mesh.tp, index, limits) for index in layers),
    )


def _unused(spec: ModelSpec, mesh: Mesh, stage: int) -> dict[str, float]:
    """A next-token layer is on the last stage and spread like the others; a vision tower on every rank of the first."""
    return {
        extra.name: extra.bytes / mesh.tp if extra.last else extra.bytes
        for extra in spec.extras
        if stage == (mesh.pp - 1 if extra.last else 0)
    }


def _beside(spec: ModelSpec, mesh: Mesh, machine: Machine, stage: int, limits: Limits) -> dict[str, float]:
    """What a step needs beside weights and cache; the mesh's split is not looked at."""
    last = stage == mesh.pp - 1
    return {
        "graphs": _graph_bytes(spec, mesh, limits, last=last),
        "activations": step_bytes(spec, mesh, limits.chunk, expanded=EXPAND_MOST),
        "logits": float(limits.max_running * spec.vocab_size * 4 * LOGIT_COPIES) if last else 0.0,
        "communication": _communication_bytes(spec, mesh, machine, stage, limits),
        "runtime": CPU_RUNTIME_BYTES if limits.on_cpu else RUNTIME_BYTES,
    }


def weight_bytes(spec: ModelSpec, mesh: Mesh, stage: int) -> float:
    """Of each rank of a stage."""
    layers, last = mesh.layers_of(stage), stage == mesh.pp - 1
    return sum(m.bytes * share for m, share in stage_matrices(spec, mesh.tp, layers, first=stage == 0, last=last))


def kv_layer_bytes(spec: ModelSpec, tp: int, index: int, limits: Limits | None = None) -> int:
    """What a token takes in a rank's KV cache of one layer."""
    value_bytes = limits.kv_value_bytes if limits is not None else None
    return spec.layers[index].attention.kv_values(tp) * (value_bytes or DTYPE_BYTES[spec.dtype])


def step_bytes(spec: ModelSpec, mesh: Mesh, tokens: int, *, expanded: int = 0) -> float:
    """Activations of a step of so many tokens at its fullest moment, keys and values of `expanded` latents included."""
    hidden = 4 * tokens * spec.hidden  # the residual and what is added to it, before and after its norm
    inner = max(_layer_values(spec, mesh, layer, tokens, expanded) for layer in _kinds(spec))
    return (hidden + inner) * DTYPE_BYTES[spec.dtype]


def _kinds(spec: ModelSpec) -> Sequence[LayerSpec]:
    """One layer of each kind."""
    return list({(layer.attention, layer.mlp): layer for layer in spec.layers}.values())


def _layer_values(spec: ModelSpec, mesh: Mesh, layer: LayerSpec, tokens: int, expanded: int) -> float:
    """Values inside a layer: queries and what becomes of them, or the routed pairs, whichever are more."""
    attention, mlp = layer.attention, layer.mlp
    heads = attention.num_heads / mesh.tp
    if isinstance(attention, MlaSpec):
        inner = tokens * heads * (2 * attention.qk_dim + attention.v_dim)
        inner += expanded * heads * (attention.nope_dim + attention.v_dim)
    else:
        inner = 4 * tokens * heads * attention.head_dim
    if isinstance(mlp, MoeSpec):
        shared = 3 * tokens * mlp.shared_intermediate / mesh.tp
        return max(inner, shared + tokens * mlp.top_k * (mlp.intermediate * mesh.ep / mesh.tp + spec.hidden))
    return max(inner, 3 * tokens * mlp.intermediate / mesh.tp)


def _graph_bytes(spec: ModelSpec, mesh: Mesh, limits: Limits, *, last: bool) -> float:
    """One pool for all sizes, as large as the largest needs, and what the driver keeps for each."""
    if not limits.graphs:
        return 0.0
    sizes = ladder(limits.max_running)
    logits = sizes[-1] * spec.vocab_size * (DTYPE_BYTES[spec.dtype] + 4) if last else 0
    return len(sizes) * GRAPH_BYTES + step_bytes(spec, mesh, sizes[-1]) + logits


def _communication_bytes(spec: ModelSpec, mesh: Mesh, machine: Machine, stage: int, limits: Limits) -> float:
    """Edges write into a ring in the receiver, or go by a communicator and stay in memory while in the window."""
    sent = limits.chunk * spec.hidden * DTYPE_BYTES[spec.dtype]
    window = plans_in_window(mesh.pp, limits.run_ahead)
    total = COMMUNICATOR_BYTES if mesh.tp > 1 and not limits.on_cpu else 0
    if stage < mesh.pp - 1:
        total += window * sent
    if stage > 0:
        total += ring_depth(window) * sent
    if mesh.pp > 1 and not limits.on_cpu:
        near = {stage, max(0, stage - 1), min(mesh.pp - 1, stage + 1)}
        hosts = {machine.host_of(rank) for other in near for rank in mesh.ranks_of(other)}
        total += 2 * COMMUNICATOR_BYTES if len(hosts) > 1 or not machine.reaches else 0
    return float(total)


def resident_bytes(memory: StageMemory, spec: ModelSpec, mesh: Mesh, stage: int, limits: Limits, tokens: int) -> float:
    """In use once ready, as a driver counts it: with a cache of `tokens`, after a warm-up of one chunk."""
    sent = limits.chunk * spec.hidden * DTYPE_BYTES[spec.dtype]
    # A ring is there at once; what is sent stays from plan to plan, and there was one.
    communication = memory.communication
    if stage < mesh.pp - 1:
        communication -= plans_in_window(mesh.pp, limits.run_ahead) * sent
    cache = tokens * memory.kv_token_bytes
    worked = step_bytes(spec, mesh, limits.chunk, expanded=limits.chunk)
    return memory.weight_bytes + cache + memory.graphs + worked + communication + memory.runtime


def room(spec: ModelSpec, mesh: Mesh, machine: Machine, stage: int, limits: Limits) -> float:
    """Bytes for weights and KV cache on the smallest GPU of a stage. The mesh's split is not looked at."""
    gpu_bytes = min(machine.gpus[rank].memory_bytes for rank in mesh.ranks_of(stage))
    unused = sum(_unused(spec, mesh, stage).values()) if limits.count_unused else 0.0
    return gpu_bytes * (1 - MARGIN) - unused - sum(_beside(spec, mesh, machine, stage, limits).values())


def kv_tokens(spec: ModelSpec, mesh: Mesh, machine: Machine, limits: Limits) -> tuple[int, ...]:
    """Tokens that each stage's KV cache holds; the least is everyone's. Raises UserError where weights do not fit."""
    found = []
    for stage in range(mesh.pp):
        memory = stage_memory(spec, mesh, machine, stage, limits)
        if memory.kv_tokens < 2:
            left = memory.gpu_bytes - memory.steps_bytes - memory.spare
            raise UserError(
                f"stage {stage} ({len(mesh.layers_of(stage))} layers) does not fit: "
                f"{memory.weight_bytes / GIB:.1f} GiB of weights on each GPU, which has room for "
                f"{max(0.0, left) / GIB:.1f} GiB beside what steps of "
                f"{limits.chunk} tokens need: more --pp or --tp, another --split, or --kv-memory to ask what if it did"
            )
        found.append(memory.kv_tokens)
    return tuple(found)
