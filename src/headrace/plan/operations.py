"""The operations of a layer and of the two ends on the busiest rank of a stage: bytes, operations, launches, sums.

What is fused and what is replicated is as `layers/` and `kernels/` have it. Launches are those of a decode step; a
prompt's many small ones beside its large products do not show.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.plan.experts import Routing
from headrace.plan.hardware import Rate
from headrace.plan.inventory import Matrix, Part
from headrace.plan.load import Load
from headrace.plan.reserve import EXPAND_MOST, EXPAND_PAIRS, FEW_PAIRS
from headrace.spec import DTYPE_BYTES, LayerSpec, MlaSpec, ModelSpec, MoeSpec

LAUNCHES = {
    "q": 1, "k": 0, "v": 0,  # one product
    "q_a": 1, "kv_a": 0,  # one product
    "q_b": 1, "kv_b": 2,  # queries into the latent space, values out of it
    "out": 1, "gate_up": 1, "down": 1, "bias": 0, "norms": 2,
    "router": 2,  # scores; choice and plan
}  # fmt: skip
"""By matrix; shared experts run beside the routed ones and have one of their two at most on the way."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Something a rank computes: as long as its bytes or its operations take, whichever is more, and its launches."""

    part: Part
    bytes: float
    """Weights and cache that it reads, which come from memory."""
    moved: float = 0.0
    """Activations that it reads and writes, which stay in the GPU's cache as far as they fit."""
    flops: float = 0.0
    rate: Rate = "dense"
    """Which of the GPU's rates bounds `flops`."""
    launches: int = 0
    again: float = 0.0
    """Weights that it unpacks once more, for another block of tokens."""


@dataclass(frozen=True, slots=True)
class AllReduce:
    """A sum over a stage's tensor-parallel ranks."""

    bytes: float


@dataclass(frozen=True, slots=True)
class AllGather:
    """What each of a stage's tensor-parallel ranks has of `bytes` goes to all of them."""

    bytes: float


@dataclass(frozen=True)
class Share:
    """How a stage is spread: `tp` ranks, experts whole on `ep` groups of them, chosen as `routing` has it."""

    spec: ModelSpec
    tp: int
    ep: int
    routing: Routing
    kv_value_bytes: int | None = None
    """Of a value in the KV cache; None: as activations."""

    @property
    def value_bytes(self) -> int:
        """Of an activation."""
        return DTYPE_BYTES[self.spec.dtype]

    def products(self, layer: LayerSpec, matrices: tuple[Matrix, ...], tokens: int) -> Iterator[Operation | AllReduce]:
        """All of a layer that depends on the number of tokens alone."""
        experts = [matrix for matrix in matrices if matrix.part == "experts"]
        for matrix in matrices:
            if matrix.name != "kv_b" and matrix.part != "experts":
                yield self._product(matrix, tokens)
        if experts:
            assert isinstance(layer.mlp, MoeSpec)
            yield from self._experts(layer.mlp, experts, tokens)
        for _ in range(2 if self.tp > 1 else 0):
            yield AllReduce(tokens * self.spec.hidden * self.value_bytes)

    def attention(self, layer: LayerSpec, matrices: tuple[Matrix, ...], load: Load) -> Iterator[Operation]:
        """What depends on the rows' contexts: the latents' up-projection, cache reads, scores and values."""
        attention = layer.attention
        kept = attention.kv_values(self.tp) * (self.kv_value_bytes or self.value_bytes)
        heads = attention.num_heads / self.tp
        if isinstance(attention, MlaSpec):
            decode_dims = chunk_dims = 2 * attention.kv_lora_rank + attention.rope_dim
            expands = 0 < load.chunk_context <= EXPAND_MOST and load.chunk_pairs >= EXPAND_PAIRS * load.chunk_context
            positions = load.tokens
            if expands:
                chunk_dims = attention.qk_dim + attention.v_dim
                positions = load.decodes + load.chunk_context
            (kv_b,) = (matrix for matrix in matrices if matrix.name == "kv_b")
            yield self._product(kv_b, positions)
        else:
            decode_dims = chunk_dims = 2 * attention.head_dim
        yield Operation(
            "attention",
            load.context * kept,
            flops=2 * heads * decode_dims * load.context,
            rate="attention",
            launches=3,
        )
        if load.chunk_context:
            yield Operation(
                "attention",
                load.chunk_context * kept,
                flops=2 * heads * chunk_dims * load.chunk_pairs,
                rate="attention",
                launches=2,
            )

    def embedding(self, tokens: int) -> Iterator[Operation | AllReduce]:
        """The rows of the embedding, on the first stage."""
        moved = tokens * self.spec.hidden * self.value_bytes
        yield Operation("embedding", moved, moved, launches=1)
        if self.tp > 1:
            yield AllReduce(moved)

    def head(self, head: Matrix, sampled: int) -> Iterator[Operation | AllGather]:
        """Logits and choice of so many rows, on the last stage; none at all where none samples."""
        if not sampled:
            return
        logits = sampled * self.spec.vocab_size * self.value_bytes
        yield self._product(head, sampled)
        yield Operation("head", 0.0, 2 * logits, launches=3)
        if self.tp > 1:
            yield AllGather(logits)

    def _product(self, matrix: Matrix, tokens: int) -> Operation:
        share = matrix.share(self.tp)
        moved = tokens * matrix.width * self.value_bytes
        if matrix.part == "norm":
            return Operation("norm", matrix.bytes, moved, launches=LAUNCHES["norms"])
        launches = LAUNCHES.get(matrix.name, 1)
        if matrix.part == "shared":
            launches = int(matrix.name == "gate_up")
        return Operation(
            matrix.part, share * matrix.bytes, share * moved, 2 * tokens * share * matrix.params, "dense", launches
        )

    def _again(self, moe: MoeSpec, tokens: int) -> float:
        """How often more than once an expert's INT4 weights are unpacked: they are with every block of its pairs.

        Plain weights come from the cache then. With more pairs than the product for few tokens is for, another one has
        larger blocks; its times follow bytes that shrink so.
        """
        if self.spec.quant is None:
            return 0.0
        most = FEW_PAIRS * moe.num_experts // moe.top_k
        blocks = self.routing.blocks(moe, min(tokens, most), FEW_PAIRS)
        return (blocks - 1) * min(1.0, most / tokens)

    def _experts(self, moe: MoeSpec, matrices: list[Matrix], tokens: int) -> Iterator[Operation]:
        """Routed products on the rank that has most, and the weighted sum of what they give."""
        slices, size = self.tp // self.ep, self.value_bytes
        distinct = self.routing.distinct(moe, tokens, self.ep)
        again = distinct * self._again(moe, tokens)
        pairs = self.routing.pairs(moe, tokens, self.ep)
        for matrix in matrices:
            weights = matrix.bytes / moe.num_experts * distinct / slices
            moved = pairs * self.spec.hidden + pairs * (matrix.width - self.spec.hidden) / slices
            flops = 2 * pairs * matrix.params / moe.num_experts / slices
            more = matrix.bytes / moe.num_experts * again / slices
            yield Operation("experts", weights, moved * size, flops, "experts", LAUNCHES[matrix.name], more)
        yield Operation("experts", 0.0, (pairs + tokens) * self.spec.hidden * size, launches=1)
