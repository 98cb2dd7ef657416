"""What a model is: layers and their kinds, dims, experts, bytes. Read once from its config (`model_config`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding over `dim` dims of a head."""

    theta: float
    dim: int
    kind: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Scale of cos and sin (yarn)."""
    truncate: bool = True
    """Whether yarn's correction range is rounded to whole dims."""
    interleaved: bool = False
    """Pairs are neighbours (2i, 2i+1), not halves (i, i + dim/2)."""


@dataclass(frozen=True, kw_only=True)
class GqaSpec:
    """Grouped-query attention; `num_kv_heads == num_heads` is plain multi-head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False

    @property
    def scale(self) -> float:
        """Softmax scale."""
        return float(self.head_dim**-0.5)

    def kv_values(self, tp: int = 1) -> int:
        """Values a token adds to one rank's KV cache in one layer."""
        return 2 * max(1, self.num_kv_heads // tp) * self.head_dim


@dataclass(frozen=True, kw_only=True)
class MlaSpec:
    """Multi-head latent attention: one latent row a token, shared by all heads."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    """Softmax scale, yarn's mscale included."""

    @property
    def qk_dim(self) -> int:
        """Dims of a query or key head."""
        return self.nope_dim + self.rope_dim

    def kv_values(self, tp: int = 1) -> int:
        """Values a token adds to one rank's KV cache in one layer; tensor parallelism replicates the latent."""
        return self.kv_lora_rank + self.rope_dim


@dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """A SwiGLU MLP."""

    intermediate: int
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """Routed experts, and shared ones that every token passes."""

    num_experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int = 0
    """Width of all shared experts together."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    num_groups: int = 1
    topk_groups: int = 1
    normalise: bool = True
    scale: float = 1.0
    selection_bias: bool = False
    """`e_score_correction_bias`: chooses experts, never weighs them."""


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One decoder layer."""

    index: int
    attention: GqaSpec | MlaSpec
    mlp: DenseSpec | MoeSpec


@dataclass(frozen=True, kw_only=True)
class Int4Spec:
    """compressed-tensors pack-quantized: symmetric, groups along the input dim, no zero points."""

    group_size: int
    ignore: tuple[str, ...] = ()
    """Module names, or `re:` and a regular expression that matches a name from its start."""
    prefix: str = ""
    """A wrapper's; entries may name modules with it or without."""

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(entry[3:]) for entry in self.ignore if entry.startswith("re:"))

    def covers(self, module: str) -> bool:
        """Whether the Linear of that checkpoint name is stored as INT4."""
        names = {module, module.removeprefix(self.prefix)}
        if not names.isdisjoint(self.ignore):
            return False
        return not any(pattern.match(name) for pattern in self._patterns for name in names)


@dataclass(frozen=True)
class Extra:
    """Something that a checkpoint holds beside the language model and headrace does not load."""

    name: str
    bytes: float
    last: bool
    """On the last stage, over its ranks; else on every rank of the first."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A language model: layers and their kinds, dims, experts, bytes."""

    family: str
    """Key of the model registry: llama, qwen3, qwen3_moe, deepseek_v3."""
    hidden: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    rope: RopeSpec
    norm_eps: float
    tied: bool
    max_positions: int
    dtype: Dtype
    quant: Int4Spec | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    weight_prefix: str = ""
    """What stands before the language model's tensor names in the checkpoint."""
    ignored: tuple[str, ...] = ()
    """Regular expressions (full match) of tensor names that a checkpoint may hold and that are not used."""
    notes: tuple[str, ...] = ()
    """What the user should be told about how the model is served."""
    multimodal: bool = False
    """The checkpoint has a vision part that is not served."""
    extras: tuple[Extra, ...] = field(default=(), compare=False)
    """What the config, or the checkpoint's headers, have beside the language model."""
    scales: tuple[tuple[int | None, str, float], ...] = field(default=(), compare=False)
    """Bytes by those that the config makes, by layer (None: an end) and part, where headers were read."""
    architecture: str = field(default="", compare=False)

    @cached_property
    def scale_of(self) -> Mapping[tuple[int | None, str], float]:
        """`scales` by layer and part; what is not there is as the config makes it."""
        return {(layer, part): scale for layer, part, scale in self.scales}

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    def layer_params(self, index: int) -> int:
        """Parameters of a layer."""
        layer, h = self.layers[index], self.hidden
        return _attention_params(layer.attention, h) + _mlp_params(layer.mlp, h) + 2 * h

    def layer_bytes(self, index: int) -> int:
        """Bytes of a layer as stored."""
        mlp, size = self.layers[index].mlp, DTYPE_BYTES[self.dtype]
        total = self.layer_params(index) * size
        if self.quant is None:
            return total
        attention = _attention_params(self.layers[index].attention, self.hidden)
        prefix = f"{self.weight_prefix}model.layers.{index}"
        per_param = 0.5 + 2 / self.quant.group_size
        saved = 0.0
        if self.quant.covers(f"{prefix}.self_attn.o_proj"):
            saved += attention * (size - per_param)
        if isinstance(mlp, MoeSpec):
            routed = mlp.num_experts * 3 * self.hidden * mlp.intermediate
            if self.quant.covers(f"{prefix}.mlp.experts.0.up_proj"):
                saved += routed * (size - per_param)
        elif self.quant.covers(f"{prefix}.mlp.up_proj"):
            saved += 3 * self.hidden * mlp.intermediate * (size - per_param)
        return int(total - saved)

    @property
    def head_bytes(self) -> int:
        """Bytes of the language-model head (or of the embedding)."""
        return self.vocab_size * self.hidden * DTYPE_BYTES[self.dtype]

    def layer_read_bytes(self, index: int) -> int:
        """Bytes that one token's decode reads of a layer: the price of a layer when a stage is memory-bound."""
        mlp = self.layers[index].mlp
        if not isinstance(mlp, MoeSpec):
            return self.layer_bytes(index)
        routed = mlp.num_experts * 3 * self.hidden * mlp.intermediate
        share = routed / self.layer_params(index) if self.quant is None else None
        if share is None:
            assert self.quant is not None
            prefix = f"{self.weight_prefix}model.layers.{index}.mlp.experts.0.up_proj"
            per_param = 0.5 + 2 / self.quant.group_size if self.quant.covers(prefix) else DTYPE_BYTES[self.dtype]
            routed_bytes = routed * per_param
        else:
            routed_bytes = self.layer_bytes(index) * share
        return int(self.layer_bytes(index) - routed_bytes * (1 - mlp.top_k / mlp.num_experts))


def _attention_params(attention: GqaSpec | MlaSpec, hidden: int) -> int:
    if isinstance(attention, GqaSpec):
        q, kv = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
        params = hidden * (q + 2 * kv) + q * hidden
        params += (q + 2 * kv if attention.qkv_bias else 0) + (hidden if attention.out_bias else 0)
        return params + (2 * attention.head_dim if attention.qk_norm else 0)
    heads, rank = attention.num_heads, attention.kv_lora_rank
    if attention.q_lora_rank is None:
        params = hidden * heads * attention.qk_dim
    else:
        params = attention.q_lora_rank * (hidden + heads * attention.qk_dim + 1)
    params += hidden * (rank + attention.rope_dim) + rank
    return params + rank * heads * (attention.nope_dim + attention.v_dim) + heads * attention.v_dim * hidden


def _mlp_params(mlp: DenseSpec | MoeSpec, hidden: int) -> int:
    if isinstance(mlp, DenseSpec):
        return 3 * hidden * mlp.intermediate + ((2 * mlp.intermediate + hidden) if mlp.bias else 0)
    params = 3 * hidden * (mlp.num_experts * mlp.intermediate + mlp.shared_intermediate)
    return params + hidden * mlp.num_experts + (mlp.num_experts if mlp.selection_bias else 0)
