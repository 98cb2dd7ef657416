"""The tensors of a published checkpoint of every family, enumerated from its config alone.

Written without the models' name tables, so that checkpoints made from it test those tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from headrace.errors import UnsupportedModel

Config = Mapping[str, Any]
Kind = Literal[
    "linear", "head", "embedding", "router", "norm", "bias", "selection_bias", "int4_packed", "int4_scale", "int4_shape"
]


class PublishedTensor(NamedTuple):
    """One tensor: its published name, shape and what it is."""

    name: str
    shape: tuple[int, ...]
    kind: Kind
    linear_shape: tuple[int, ...] = ()
    """[out, in] of the Linear that an INT4 tensor is a part of."""


class _Int4(NamedTuple):
    group: int
    ignore: tuple[str, ...]

    def covers(self, module: str) -> bool:
        for entry in self.ignore:
            if entry == module or (entry.startswith("re:") and re.match(entry[3:], module)):
                return False
        return True


def tensor_shapes(config: Config) -> Iterable[PublishedTensor]:
    """Every tensor of the checkpoint, layer by layer. Raises UnsupportedModel for a family it does not know."""
    architecture = (config.get("architectures") or [None])[0]
    if architecture == "KimiK25ForConditionalGeneration":
        text = {**config["text_config"]}
        if "quantization_config" in config:
            text.setdefault("quantization_config", config["quantization_config"])
        for tensor in _language_model(text, _deepseek_layer):
            yield tensor._replace(name=f"language_model.{tensor.name}")
        yield from _vision(text["hidden_size"])
        return
    layer = {
        "LlamaForCausalLM": _llama_layer,
        "Qwen3ForCausalLM": _llama_layer,
        "Qwen3MoeForCausalLM": _llama_layer,
        "DeepseekV3ForCausalLM": _deepseek_layer,
        "KimiK2ForCausalLM": _deepseek_layer,
    }.get(str(architecture))
    if layer is None:
        raise UnsupportedModel(f"no random checkpoint is made for architecture {architecture!r}")
    yield from _language_model(config, layer)


def _language_model(config: Config, layer: Any) -> Iterator[PublishedTensor]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    int4 = _int4(config)
    yield PublishedTensor("model.embed_tokens.weight", (vocab, hidden), "embedding")
    num_layers = config["num_hidden_layers"]
    for i in range(num_layers):
        yield from layer(config, i, int4)
    yield from _norm("model.norm", hidden)
    if not config.get("tie_word_embeddings", False):
        yield from _linear("lm_head", hidden, vocab, int4, kind="head")
    for i in range(num_layers, num_layers + int(config.get("num_nextn_predict_layers") or 0)):
        yield from _next_token_layer(config, i, layer, int4)


def _int4(config: Config) -> _Int4 | None:
    quant = config.get("quantization_config")
    if not quant:
        return None
    if quant.get("format") != "pack-quantized":
        raise UnsupportedModel(f"no random checkpoint is made for quantization_config {quant.get('quant_method')!r}")
    (group,) = quant["config_groups"].values()
    return _Int4(group["weights"]["group_size"], tuple(quant.get("ignore") or ()))


def _linear(
    module: str, inputs: int, outputs: int, int4: _Int4 | None, *, bias: bool = False, kind: Kind = "linear"
) -> Iterator[PublishedTensor]:
    if int4 is not None and int4.covers(module):
        whole = (outputs, inputs)
        yield PublishedTensor(f"{module}.weight_packed", (outputs, inputs // 8), "int4_packed", whole)
        yield PublishedTensor(f"{module}.weight_scale", (outputs, inputs // int4.group), "int4_scale", whole)
        yield PublishedTensor(f"{module}.weight_shape", (2,), "int4_shape", whole)
    else:
        yield PublishedTensor(f"{module}.weight", (outputs, inputs), kind)
    if bias:
        yield PublishedTensor(f"{module}.bias", (outputs,), "bias")


def _norm(module: str, width: int) -> Iterator[PublishedTensor]:
    yield PublishedTensor(f"{module}.weight", (width,), "norm")


def _swiglu(
    module: str, hidden: int, width: int, int4: _Int4 | None, *, bias: bool = False
) -> Iterator[PublishedTensor]:
    yield from _linear(f"{module}.gate_proj", hidden, width, int4, bias=bias)
    yield from _linear(f"{module}.up_proj", hidden, width, int4, bias=bias)
    yield from _linear(f"{module}.down_proj", width, hidden, int4, bias=bias)


def _llama_layer(config: Config, i: int, int4: _Int4 | None) -> Iterator[PublishedTensor]:
    """Llama, and Qwen3 with its per-head norms and, in some layers, experts."""
    at, hidden, heads = f"model.layers.{i}", config["hidden_size"], config["num_attention_heads"]
    qwen3 = config["architectures"][0].startswith("Qwen3")
    dim = config.get("head_dim") or hidden // heads
    kv = (config.get("num_key_value_heads") or heads) * dim
    bias = bool(config.get("attention_bias"))
    yield from _norm(f"{at}.input_layernorm", hidden)
    for name, inputs, outputs in (
        ("q_proj", hidden, heads * dim),
        ("k_proj", hidden, kv),
        ("v_proj", hidden, kv),
        ("o_proj", heads * dim, hidden),
    ):
        yield from _linear(f"{at}.self_attn.{name}", inputs, outputs, int4, bias=bias)
    if qwen3:
        yield from _norm(f"{at}.self_attn.q_norm", dim)
        yield from _norm(f"{at}.self_attn.k_norm", dim)
    yield from _norm(f"{at}.post_attention_layernorm", hidden)
    sparse = (
        "num_experts" in config
        and i not in (config.get("mlp_only_layers") or [])
        and (i + 1) % config.get("decoder_sparse_step", 1) == 0
    )
    if not sparse:
        yield from _swiglu(f"{at}.mlp", hidden, config["intermediate_size"], int4, bias=bool(config.get("mlp_bias")))
        return
    yield PublishedTensor(f"{at}.mlp.gate.weight", (config["num_experts"], hidden), "router")
    for expert in range(config["num_experts"]):
        yield from _swiglu(f"{at}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"], int4)


def _deepseek_layer(config: Config, i: int, int4: _Int4 | None) -> Iterator[PublishedTensor]:
    at, hidden = f"model.layers.{i}", config["hidden_size"]
    yield from _norm(f"{at}.input_layernorm", hidden)
    yield from _latent_attention(config, f"{at}.self_attn", int4)
    yield from _norm(f"{at}.post_attention_layernorm", hidden)
    if i < config.get("first_k_dense_replace", 0) or i % config.get("moe_layer_freq", 1):
        yield from _swiglu(f"{at}.mlp", hidden, config["intermediate_size"], int4)
        return
    experts, width = config["n_routed_experts"], config["moe_intermediate_size"]
    yield PublishedTensor(f"{at}.mlp.gate.weight", (experts, hidden), "router")
    yield PublishedTensor(f"{at}.mlp.gate.e_score_correction_bias", (experts,), "selection_bias")
    for expert in range(experts):
        yield from _swiglu(f"{at}.mlp.experts.{expert}", hidden, width, int4)
    if config.get("n_shared_experts"):
        yield from _swiglu(f"{at}.mlp.shared_experts", hidden, config["n_shared_experts"] * width, int4)


def _latent_attention(config: Config, at: str, int4: _Int4 | None) -> Iterator[PublishedTensor]:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, v_dim = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    q_rank = config.get("q_lora_rank")
    if q_rank is None:
        yield from _linear(f"{at}.q_proj", hidden, heads * (nope + rope), int4)
    else:
        yield from _linear(f"{at}.q_a_proj", hidden, q_rank, int4)
        yield from _norm(f"{at}.q_a_layernorm", q_rank)
        yield from _linear(f"{at}.q_b_proj", q_rank, heads * (nope + rope), int4)
    yield from _linear(f"{at}.kv_a_proj_with_mqa", hidden, rank + rope, int4)
    yield from _norm(f"{at}.kv_a_layernorm", rank)
    yield from _linear(f"{at}.kv_b_proj", rank, heads * (nope + v_dim), int4)
    yield from _linear(f"{at}.o_proj", heads * v_dim, hidden, int4)


def _next_token_layer(config: Config, i: int, layer: Any, int4: _Int4 | None) -> Iterator[PublishedTensor]:
    at, hidden, vocab = f"model.layers.{i}", config["hidden_size"], config["vocab_size"]
    yield from layer(config, i, int4)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        yield from _norm(f"{at}.{norm}", hidden)
    yield PublishedTensor(f"{at}.eh_proj.weight", (hidden, 2 * hidden), "linear")
    yield PublishedTensor(f"{at}.embed_tokens.weight", (vocab, hidden), "embedding")
    yield PublishedTensor(f"{at}.shared_head.head.weight", (vocab, hidden), "head")


def _vision(hidden: int) -> Iterator[PublishedTensor]:
    """A few of a vision tower's tensors, small: they are there to be skipped."""
    yield PublishedTensor("vision_tower.patch_embed.proj.weight", (32, 3, 14, 14), "linear")
    yield PublishedTensor("vision_tower.patch_embed.proj.bias", (32,), "bias")
    yield PublishedTensor("vision_tower.patch_embed.pos_emb.weight", (4, 4, 32), "linear")
    yield PublishedTensor("vision_tower.encoder.blocks.0.norm0.weight", (32,), "norm")
    yield PublishedTensor("vision_tower.encoder.blocks.0.wqkv.weight", (96, 32), "linear")
    yield PublishedTensor("vision_tower.encoder.blocks.0.wqkv.bias", (96,), "bias")
    yield PublishedTensor("mm_projector.pre_norm.weight", (32,), "norm")
    yield PublishedTensor("mm_projector.proj.0.weight", (128, 128), "linear")
    yield PublishedTensor("mm_projector.proj.2.weight", (hidden, 128), "linear")
