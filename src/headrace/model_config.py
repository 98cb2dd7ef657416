"""config.json files, as transformers 4 or 5 writes them, read into a `ModelSpec`; what cannot be served is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.errors import UnsupportedModel
from headrace.spec import (
    DTYPE_BYTES,
    DenseSpec,
    Extra,
    GqaSpec,
    Int4Spec,
    LayerSpec,
    MlaSpec,
    ModelSpec,
    MoeSpec,
    RopeSpec,
)

Config = Mapping[str, Any]

_ROTARY_BUFFER = r"(?:.*\.)?rotary_emb\.inv_freq"


MAX_LAYERS = 1000
"""More is a broken config, and would fill the memory before anything is refused."""


def spec_from_config(config: Config) -> ModelSpec:
    """Read a config.json as transformers 4 or 5 writes it.

    Raises UnsupportedModel, naming what, for anything the engine would get wrong or cannot do.
    """
    names = config.get("architectures") or []
    architecture = names[0] if names else str(config.get("model_type", ""))
    reader = _READERS.get(architecture) if isinstance(architecture, str) else None
    if reader is None:
        raise UnsupportedModel(
            f"architecture {architecture or 'not named'!r} is not supported; supported: {', '.join(sorted(_READERS))}"
        )
    layers = config.get("num_hidden_layers", 1)
    if not isinstance(layers, int) or not 1 <= layers <= MAX_LAYERS:
        raise UnsupportedModel(f"config.json: num_hidden_layers {layers!r}; 1 to {MAX_LAYERS} are supported")
    try:
        return reader(config, architecture)
    except KeyError as error:
        raise UnsupportedModel(f"config.json: field {error} is missing ({architecture})") from None
    except UnsupportedModel:
        raise
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise UnsupportedModel(
            f"config.json: a field has a value of the wrong type ({architecture}): {error}"
        ) from None


def _llama(config: Config, architecture: str) -> ModelSpec:
    heads = config["num_attention_heads"]
    attention = GqaSpec(
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        qkv_bias=bool(config.get("attention_bias", False)),
        out_bias=bool(config.get("attention_bias", False)),
    )
    _refuse_window(config)
    mlp = DenseSpec(intermediate=config["intermediate_size"], bias=bool(config.get("mlp_bias", False)))
    layers = tuple(LayerSpec(index=i, attention=attention, mlp=mlp) for i in range(config["num_hidden_layers"]))
    return _finish(config, architecture, "llama", layers, _rope(config, attention.head_dim))


def _qwen3(config: Config, architecture: str) -> ModelSpec:
    attention = _qwen3_attention(config)
    mlp = DenseSpec(intermediate=config["intermediate_size"])
    layers = tuple(LayerSpec(index=i, attention=attention, mlp=mlp) for i in range(config["num_hidden_layers"]))
    return _finish(config, architecture, "qwen3", layers, _rope(config, attention.head_dim))


def _qwen3_moe(config: Config, architecture: str) -> ModelSpec:
    attention = _qwen3_attention(config)
    dense = DenseSpec(intermediate=config["intermediate_size"])
    moe = MoeSpec(
        num_experts=config.get("num_experts") or config["num_local_experts"],
        top_k=config["num_experts_per_tok"],
        intermediate=config["moe_intermediate_size"],
        normalise=bool(config.get("norm_topk_prob", False)),
    )
    step, dense_only = config.get("decoder_sparse_step", 1), set(config.get("mlp_only_layers") or [])
    layers = tuple(
        LayerSpec(index=i, attention=attention, mlp=moe if i not in dense_only and (i + 1) % step == 0 else dense)
        for i in range(config["num_hidden_layers"])
    )
    return _finish(config, architecture, "qwen3_moe", layers, _rope(config, attention.head_dim))


def _qwen3_attention(config: Config) -> GqaSpec:
    _refuse_window(config)
    heads, bias = config["num_attention_heads"], bool(config.get("attention_bias", False))
    return GqaSpec(
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
    )


def _deepseek_v3(config: Config, architecture: str) -> ModelSpec:
    rope = _rope(config, config["qk_rope_head_dim"], interleaved=bool(config.get("rope_interleave", True)))
    scale = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5
    scaling = _rope_fields(config)
    if rope.kind == "yarn" and scaling.get("mscale_all_dim"):
        scale *= _yarn_mscale(rope.factor, float(scaling["mscale_all_dim"])) ** 2
    if config.get("attention_bias"):
        raise UnsupportedModel("config.json: attention_bias with MLA is not supported")
    attention = MlaSpec(
        num_heads=config["num_attention_heads"],
        q_lora_rank=config.get("q_lora_rank"),
        kv_lora_rank=config["kv_lora_rank"],
        nope_dim=config["qk_nope_head_dim"],
        rope_dim=config["qk_rope_head_dim"],
        v_dim=config["v_head_dim"],
        scale=scale,
    )
    method, scoring = config.get("topk_method", "noaux_tc"), config.get("scoring_func", "sigmoid")
    if (method, scoring) != ("noaux_tc", "sigmoid"):
        raise UnsupportedModel(f"config.json: routing {scoring}/{method} is not supported; only sigmoid/noaux_tc is")
    dense = DenseSpec(intermediate=config["intermediate_size"])
    moe = MoeSpec(
        num_experts=config["n_routed_experts"],
        top_k=config["num_experts_per_tok"],
        intermediate=config["moe_intermediate_size"],
        shared_intermediate=(config.get("n_shared_experts") or 0) * config["moe_intermediate_size"],
        scoring="sigmoid",
        num_groups=config.get("n_group") or 1,
        topk_groups=config.get("topk_group") or 1,
        normalise=bool(config.get("norm_topk_prob", True)),
        scale=float(config.get("routed_scaling_factor", 1.0)),
        selection_bias=True,
    )
    if moe.num_experts % moe.num_groups:
        raise UnsupportedModel(f"config.json: n_group {moe.num_groups} does not divide {moe.num_experts} experts")
    frequency = config.get("moe_layer_freq", 1)
    layers = tuple(
        LayerSpec(
            index=i,
            attention=attention,
            mlp=moe if i >= config.get("first_k_dense_replace", 0) and i % frequency == 0 else dense,
        )
        for i in range(config["num_hidden_layers"])
    )
    spec = _finish(config, architecture, "deepseek_v3", layers, rope)
    mtp = int(config.get("num_nextn_predict_layers") or 0)
    if not mtp:
        return spec
    first = spec.num_layers
    indices = "|".join(str(i) for i in range(first, first + mtp))
    # A layer of its own with its norms and the product of two, and copies of embedding and head, as published.
    hidden, size = spec.hidden, DTYPE_BYTES[spec.dtype]
    each = spec.layer_bytes(first - 1) + (2 * hidden * hidden + 3 * hidden) * size + 2 * spec.head_bytes
    return replace(
        spec,
        extras=(Extra("next-token (MTP)", float(mtp * each), last=True),),
        ignored=(*spec.ignored, rf"model\.layers\.(?:{indices})\..*"),
        notes=(*spec.notes, f"next-token (MTP) layer {', '.join(indices.split('|'))} ignored: not used yet"),
    )


def _kimi_k25(config: Config, architecture: str) -> ModelSpec:
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise UnsupportedModel(f"config.json: text_config is missing ({architecture})")
    merged = {**text, "architectures": text.get("architectures") or ["DeepseekV3ForCausalLM"]}
    for key in ("dtype", "torch_dtype", "quantization_config", "eos_token_id", "bos_token_id"):
        if merged.get(key) is None and config.get(key) is not None:
            merged[key] = config[key]
    inner = spec_from_config(merged)
    return replace(
        inner,
        weight_prefix="language_model.",
        quant=replace(inner.quant, prefix="language_model.") if inner.quant else None,
        ignored=(
            *(rf"language_model\.{pattern}" for pattern in inner.ignored),
            r"(?:vision_tower|mm_projector|multi_modal_projector)\..*",
        ),
        notes=(*inner.notes, "vision weights skipped: images are not served"),
        extras=(*inner.extras, *_vision(config, inner)),
        multimodal=True,
        architecture=architecture,
    )


def _vision(config: Config, text: ModelSpec) -> tuple[Extra, ...]:
    """The tower and its projector: attention and a two-product MLP a layer, patches, places, a merger of four."""
    vision = config.get("vision_config") or {}
    if not {"vt_hidden_size", "vt_intermediate_size", "vt_num_hidden_layers"} <= vision.keys():
        return ()
    width, inner = vision["vt_hidden_size"], vision["vt_intermediate_size"]
    layer = width * (4 * width + 2 * inner) + 9 * width + inner
    patch = 3 * vision.get("patch_size", 14) ** 2 + 1
    places = vision.get("init_pos_emb_height", 64) * vision.get("init_pos_emb_width", 64)
    merged = 4 * width
    projector = merged * (merged + text.hidden) + merged + text.hidden + 2 * width
    params = vision["vt_num_hidden_layers"] * layer + width * (patch + places + 2) + projector
    return (Extra("vision", float(params * DTYPE_BYTES[text.dtype]), last=False),)


_READERS = {
    "LlamaForCausalLM": _llama,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "DeepseekV3ForCausalLM": _deepseek_v3,
    "KimiK2ForCausalLM": _deepseek_v3,
    "KimiK25ForConditionalGeneration": _kimi_k25,
}


def _finish(config: Config, architecture: str, family: str, layers: tuple[LayerSpec, ...], rope: RopeSpec) -> ModelSpec:
    for field in ("hidden_size", "vocab_size", "max_position_embeddings", "num_attention_heads"):
        if not isinstance(config[field], int) or config[field] < 1:
            raise UnsupportedModel(f"config.json: {field} {config[field]!r} is not a positive whole number")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"config.json: hidden_act {activation!r} is not supported; only 'silu' is")
    tied = bool(config.get("tie_word_embeddings", False))
    eos = config.get("eos_token_id")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModel(f"config.json: dtype {dtype!r} is not supported; use {', '.join(DTYPE_BYTES)}")
    return ModelSpec(
        family=family,
        hidden=config["hidden_size"],
        vocab_size=config["vocab_size"],
        layers=layers,
        rope=rope,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=tied,
        max_positions=config["max_position_embeddings"],
        dtype=dtype,  # type: ignore[arg-type]  # checked just above
        quant=_quant(config.get("quantization_config") or config.get("compression_config")),
        bos_id=config.get("bos_token_id"),
        eos_ids=() if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (int(eos),),
        ignored=(_ROTARY_BUFFER, *((r"lm_head\.weight",) if tied else ())),
        architecture=architecture,
    )


def _refuse_window(config: Config) -> None:
    kinds = set(config.get("layer_types") or []) - {"full_attention"}
    if config.get("use_sliding_window") or kinds:
        raise UnsupportedModel("config.json: sliding-window attention is not supported")


def _quant(config: Any) -> Int4Spec | None:
    if not config:
        return None
    method = config.get("quant_method")
    if method == "fp8":
        raise UnsupportedModel("quantization_config: FP8 checkpoints are not supported yet; use a bf16 or INT4 one")
    if method != "compressed-tensors" or config.get("format") != "pack-quantized":
        named = f"{method}/{config['format']}" if config.get("format") else str(method)
        raise UnsupportedModel(
            f"quantization_config: {named} is not supported; only compressed-tensors/pack-quantized INT4 is"
        )
    groups = config.get("config_groups") or {}
    if len(groups) != 1:
        raise UnsupportedModel(f"quantization_config: {len(groups)} config_groups; exactly one is supported")
    (group,) = groups.values()
    weights = group.get("weights") or {}
    wanted = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    for key, value in wanted.items():
        if weights.get(key) != value:
            raise UnsupportedModel(
                f"quantization_config: weights.{key} {weights.get(key)!r}; only {value!r} is supported"
            )
    if weights.get("actorder"):
        raise UnsupportedModel("quantization_config: weights.actorder is not supported")
    if list(group.get("targets") or []) != ["Linear"]:
        raise UnsupportedModel(f"quantization_config: targets {group.get('targets')}; only ['Linear'] is supported")
    if group.get("input_activations") or group.get("output_activations") or config.get("kv_cache_scheme"):
        raise UnsupportedModel("quantization_config: only weights may be quantised, activations and KV cache may not")
    size = weights.get("group_size")
    if not isinstance(size, int) or size < 8 or size % 8:
        raise UnsupportedModel(f"quantization_config: weights.group_size {size!r}; a multiple of 8 is supported")
    return Int4Spec(group_size=size, ignore=tuple(config.get("ignore") or ()))


def _rope_fields(config: Config) -> Config:
    """The rope fields in one mapping, whichever spelling the config uses."""
    new = config.get("rope_parameters")
    if new:
        return dict(new)
    old = dict(config.get("rope_scaling") or {})
    old.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    return old


def _rope(config: Config, dim: int, *, interleaved: bool = False) -> RopeSpec:
    fields = _rope_fields(config)
    kind = fields.get("rope_type") or fields.get("type") or "default"
    theta = float(fields.get("rope_theta") or config.get("rope_theta") or 10000.0)
    partial = float(fields.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    if partial != 1.0 and "qk_rope_head_dim" not in config:
        raise UnsupportedModel(f"config.json: partial_rotary_factor {partial} is not supported")
    base = RopeSpec(theta=theta, dim=dim, interleaved=interleaved)
    if kind == "default":
        return base
    if kind not in ("linear", "llama3", "yarn"):
        raise UnsupportedModel(f"config.json: rope type {kind!r} is not supported; use default, linear, llama3 or yarn")
    factor = float(fields["factor"])
    original = int(fields.get("original_max_position_embeddings") or config["max_position_embeddings"])
    if kind == "linear":
        return replace(base, kind="linear", factor=factor)
    if kind == "llama3":
        return replace(
            base,
            kind="llama3",
            factor=factor,
            original_max=original,
            low_freq_factor=float(fields["low_freq_factor"]),
            high_freq_factor=float(fields["high_freq_factor"]),
        )
    attention_factor = fields.get("attention_factor")
    mscale, mscale_all = fields.get("mscale"), fields.get("mscale_all_dim")
    if attention_factor is None:
        if mscale and mscale_all:
            attention_factor = _yarn_mscale(factor, float(mscale)) / _yarn_mscale(factor, float(mscale_all))
        else:
            attention_factor = _yarn_mscale(factor, 1.0)
    return replace(
        base,
        kind="yarn",
        factor=factor,
        original_max=original,
        beta_fast=float(fields.get("beta_fast") or 32.0),
        beta_slow=float(fields.get("beta_slow") or 1.0),
        attention_factor=float(attention_factor),
        truncate=bool(fields.get("truncate", True)),
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    """Magnitude correction of YaRN (https://arxiv.org/abs/2309.00071)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
