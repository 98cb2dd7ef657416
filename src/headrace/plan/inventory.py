"""What a model's layers are made of: every matrix, its bytes as stored, and over how many ranks it can be spread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from headrace.spec import DTYPE_BYTES, DenseSpec, GqaSpec, LayerSpec, MlaSpec, ModelSpec

Part = Literal["attention", "dense", "router", "experts", "shared", "norm", "embedding", "head"]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix, or for experts all of one layer's matrices of that name."""

    part: Part
    name: str
    params: int
    bytes: float
    """As stored: INT4 has a scale of two bytes for each group."""
    width: int
    """Values that a token puts in and takes out (of an expert, that one pair does)."""
    ways: int | None = None
    """Over how many tensor-parallel ranks it can be spread at most; None: any number that the mesh allows."""

    def share(self, tp: int) -> float:
        """Of its bytes and products, what each of `tp` ranks has."""
        return 1 / (tp if self.ways is None else min(tp, self.ways))


def layer_matrices(spec: ModelSpec, index: int) -> tuple[Matrix, ...]:
    """All of one layer."""
    layer = spec.layers[index]
    attention = layer.attention
    of_attention = (
        _latent(spec, index, attention) if isinstance(attention, MlaSpec) else _grouped(spec, index, attention)
    )
    found = (*of_attention, *_mlp(spec, layer), _norms(spec, layer))
    return tuple(_as_stored(spec, index, matrix) for matrix in found) if spec.scales else found


def _as_stored(spec: ModelSpec, index: int | None, matrix: Matrix) -> Matrix:
    """With the bytes that the checkpoint's headers say."""
    scale = spec.scale_of.get((index, matrix.part), 1.0)
    return matrix if scale == 1.0 else replace(matrix, bytes=matrix.bytes * scale)


def embedding(spec: ModelSpec) -> Matrix:
    """The embedding: read a row a token."""
    params = spec.vocab_size * spec.hidden
    found = Matrix("embedding", "embedding", params, params * DTYPE_BYTES[spec.dtype], spec.hidden)
    return _as_stored(spec, None, found)


def head(spec: ModelSpec) -> Matrix:
    """The head with the norm before it."""
    params = spec.vocab_size * spec.hidden + spec.hidden
    found = Matrix("head", "head", params, params * DTYPE_BYTES[spec.dtype], spec.hidden + spec.vocab_size)
    return _as_stored(spec, None, found)


def stage_matrices(
    spec: ModelSpec, tp: int, layers: range, *, first: bool, last: bool
) -> Iterator[tuple[Matrix, float]]:
    """All that a stage holds, and of each what every rank has. A tied head is a copy, unless one stage is both ends."""
    for index in layers:
        for matrix in layer_matrices(spec, index):
            yield matrix, matrix.share(tp)
    if first:
        yield embedding(spec), 1 / tp
    if last and not (first and spec.tied):
        yield head(spec), 1 / tp


def rank_bytes(spec: ModelSpec, tp: int, layers: range, *, first: bool, last: bool) -> float:
    """Bytes of weights that each rank of a stage holds."""
    return sum(matrix.bytes * share for matrix, share in stage_matrices(spec, tp, layers, first=first, last=last))


def _matrix(
    spec: ModelSpec, part: Part, linear: str | None, name: str, shape: tuple[int, int], *, ways: int | None = None,
    count: int = 1, extra: int = 0,
) -> Matrix:  # fmt: skip
    """`count` equal matrices, Linears of that name or none; no other is quantised, nor are `extra` values."""
    size, params = DTYPE_BYTES[spec.dtype], shape[0] * shape[1]
    each = float(params * size)
    if linear is not None and spec.quant is not None and spec.quant.covers(f"{spec.weight_prefix}model.{linear}"):
        each = params * (0.5 + 2 / spec.quant.group_size)
    return Matrix(part, name, count * (params + extra), count * (each + extra * size), sum(shape), ways)


def _latent(spec: ModelSpec, index: int, attention: MlaSpec) -> tuple[Matrix, ...]:
    at, hidden, heads = f"layers.{index}.self_attn", spec.hidden, attention.num_heads
    rank, q_rank, q_out = attention.kv_lora_rank, attention.q_lora_rank, heads * attention.qk_dim
    if q_rank is None:
        query: tuple[Matrix, ...] = (_matrix(spec, "attention", f"{at}.q_proj", "q", (q_out, hidden)),)
    else:
        query = (
            _matrix(spec, "attention", f"{at}.q_a_proj", "q_a", (q_rank, hidden), ways=1, extra=q_rank),
            _matrix(spec, "attention", f"{at}.q_b_proj", "q_b", (q_out, q_rank)),
        )
    kv_out = heads * (attention.nope_dim + attention.v_dim)
    return (
        *query,
        _matrix(
            spec, "attention", f"{at}.kv_a_proj_with_mqa", "kv_a", (rank + attention.rope_dim, hidden), ways=1,
            extra=rank,
        ),
        _matrix(spec, "attention", f"{at}.kv_b_proj", "kv_b", (kv_out, rank)),
        _matrix(spec, "attention", f"{at}.o_proj", "out", (hidden, heads * attention.v_dim)),
    )  # fmt: skip


def _grouped(spec: ModelSpec, index: int, attention: GqaSpec) -> tuple[Matrix, ...]:
    at, hidden, dim = f"layers.{index}.self_attn", spec.hidden, attention.head_dim
    q_out, kv_out = attention.num_heads * dim, attention.num_kv_heads * dim
    q_bias, kv_bias = (q_out, kv_out) if attention.qkv_bias else (0, 0)
    ways = attention.num_kv_heads
    return (
        _matrix(spec, "attention", f"{at}.q_proj", "q", (q_out, hidden), extra=q_bias),
        _matrix(spec, "attention", f"{at}.k_proj", "k", (kv_out, hidden), ways=ways, extra=kv_bias),
        _matrix(spec, "attention", f"{at}.v_proj", "v", (kv_out, hidden), ways=ways, extra=kv_bias),
        _matrix(spec, "attention", f"{at}.o_proj", "out", (hidden, q_out)),
        *(_sum_bias(spec, "attention") if attention.out_bias else ()),
    )


def _mlp(spec: ModelSpec, layer: LayerSpec) -> tuple[Matrix, ...]:
    at, hidden, mlp = f"layers.{layer.index}.mlp", spec.hidden, layer.mlp
    if isinstance(mlp, DenseSpec):
        return _swiglu(spec, "dense", at, mlp.intermediate, bias=mlp.bias)
    router = _matrix(
        spec, "router", None, "router", (mlp.num_experts, hidden), ways=1,
        extra=mlp.num_experts if mlp.selection_bias else 0,
    )  # fmt: skip
    routed = _swiglu(spec, "experts", f"{at}.experts.0", mlp.intermediate, count=mlp.num_experts)
    shared = mlp.shared_intermediate
    return (router, *routed, *(_swiglu(spec, "shared", f"{at}.shared_experts", shared) if shared else ()))


def _swiglu(
    spec: ModelSpec, part: Part, at: str, width: int, *, count: int = 1, bias: bool = False
) -> tuple[Matrix, ...]:
    hidden = spec.hidden
    up, down = (2 * width, hidden), (hidden, width)
    return (
        _matrix(spec, part, f"{at}.up_proj", "gate_up", up, count=count, extra=2 * width if bias else 0),
        _matrix(spec, part, f"{at}.down_proj", "down", down, count=count),
        *(_sum_bias(spec, part) if bias else ()),
    )


def _sum_bias(spec: ModelSpec, part: Part) -> tuple[Matrix, ...]:
    """The bias of a product whose inputs are spread: it is added to the sum, and every rank has all of it."""
    return (Matrix(part, "bias", spec.hidden, spec.hidden * DTYPE_BYTES[spec.dtype], spec.hidden, ways=1),)


def _norms(spec: ModelSpec, layer: LayerSpec) -> Matrix:
    params = 2 * spec.hidden
    if isinstance(layer.attention, GqaSpec) and layer.attention.qk_norm:
        params += 2 * layer.attention.head_dim
    return Matrix("norm", "norms", params, params * DTYPE_BYTES[spec.dtype], 6 * spec.hidden, ways=1)
