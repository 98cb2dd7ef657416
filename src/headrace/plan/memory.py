"""What a rank's memory holds: weights, what a step needs beside them, and the KV cache in the rest."""

from __future__ import annotations

from headrace.errors import UserError
from headrace.mesh import Mesh
from headrace.plan.hardware import GIB, Machine
from headrace.plan.inventory import rank_bytes
from headrace.plan.operations import EXPAND_MOST
from headrace.spec import DTYPE_BYTES, LayerSpec, MlaSpec, ModelSpec, MoeSpec

SPARE_SHARE = 0.02
"""Of a GPU's memory, left free (as the workers do)."""
RUNTIME_BYTES = int(1.5 * GIB)
"""Context, communicators, compiled kernels and graphs."""


def weight_bytes(spec: ModelSpec, mesh: Mesh, stage: int) -> float:
    """Of each rank of a stage."""
    layers = mesh.layers_of(stage)
    return rank_bytes(spec, mesh.tp, layers, first=stage == 0, last=stage == mesh.pp - 1)


def kv_layer_bytes(spec: ModelSpec, tp: int, index: int) -> int:
    """What a token takes in a rank's KV cache of one layer."""
    return spec.layers[index].attention.kv_values(tp) * DTYPE_BYTES[spec.dtype]


def working_bytes(spec: ModelSpec, mesh: Mesh, chunk: int, num_rows: int) -> float:
    """What the largest step holds at its fullest moment, beside weights and cache."""
    size = DTYPE_BYTES[spec.dtype]
    hidden = 4 * chunk * spec.hidden
    logits = 3 * num_rows * spec.vocab_size  # in float32, and once as they come
    return (hidden + logits + max(_layer_values(spec, mesh, layer, chunk) for layer in spec.layers)) * size


def _layer_values(spec: ModelSpec, mesh: Mesh, layer: LayerSpec, chunk: int) -> float:
    """Values inside a layer: queries and what becomes of them, or the routed pairs, whichever are more."""
    attention, mlp = layer.attention, layer.mlp
    heads = attention.num_heads / mesh.tp
    if isinstance(attention, MlaSpec):
        inner = chunk * heads * (attention.qk_dim + attention.v_dim)
        inner += EXPAND_MOST * heads * (attention.nope_dim + attention.v_dim)
    else:
        inner = 3 * chunk * heads * attention.head_dim
    if isinstance(mlp, MoeSpec):
        pairs = chunk * mlp.top_k
        return max(inner, pairs * (3 * mlp.intermediate * mesh.ep / mesh.tp + spec.hidden))
    return max(inner, 3 * chunk * mlp.intermediate / mesh.tp)


def room(spec: ModelSpec, mesh: Mesh, machine: Machine, stage: int, *, chunk: int, num_rows: int) -> float:
    """Bytes for weights and KV cache on the smallest GPU of a stage, whose steps have `chunk` tokens at most."""
    memory = min(machine.gpus[rank].memory_bytes for rank in mesh.ranks_of(stage))
    return memory * (1 - SPARE_SHARE) - RUNTIME_BYTES - working_bytes(spec, mesh, chunk, num_rows)


def kv_tokens(spec: ModelSpec, mesh: Mesh, machine: Machine, *, chunk: int, num_rows: int) -> tuple[int, ...]:
    """Tokens that each stage's KV cache holds; the least is everyone's. Raises UserError where weights do not fit."""
    found = []
    for stage in range(mesh.pp):
        weights = weight_bytes(spec, mesh, stage)
        left = room(spec, mesh, machine, stage, chunk=chunk, num_rows=num_rows)
        each = sum(kv_layer_bytes(spec, mesh.tp, index) for index in mesh.layers_of(stage))
        tokens = int((left - weights) // each)
        if tokens < 2:
            raise UserError(
                f"stage {stage} ({len(mesh.layers_of(stage))} layers) does not fit: {weights / GIB:.1f} GiB of weights "
                f"on each GPU, which has room for {max(0.0, left) / GIB:.1f} GiB beside what steps of {chunk} tokens "
                "need: more --pp or --tp, another --split, or --kv-memory to ask what if it did"
            )
        found.append(tokens)
    return tuple(found)
