"""Qwen3-MoE: Qwen3's attention, and experts without a shared one in all layers but those the config names dense."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from headrace.layers.attention import GqaAttention
from headrace.layers.build import Build
from headrace.layers.decoder import Decoder, DecoderLayer
from headrace.layers.mlp import Mlp
from headrace.layers.moe import Moe
from headrace.spec import DenseSpec, GqaSpec, LayerSpec, ModelSpec
from headrace.weights.rules import Rule, is_dense, is_moe, linear


def build(build: Build) -> Decoder:
    """One stage."""
    return Decoder(build, _layer)


def _layer(build: Build, layer: LayerSpec) -> DecoderLayer:
    assert isinstance(layer.attention, GqaSpec)
    here = f"layers.{layer.index}"
    attention = GqaAttention(
        build,
        layer.index,
        layer.attention,
        build.int4(*(f"{here}.self_attn.{x}_proj" for x in "qkv")),
        build.int4(f"{here}.self_attn.o_proj"),
    )
    projections = ("gate_proj", "up_proj", "down_proj")
    mlp: nn.Module
    if isinstance(layer.mlp, DenseSpec):
        mlp = Mlp(build, layer.mlp.intermediate, int4=build.int4(*(f"{here}.mlp.{x}" for x in projections)))
    else:
        routed = build.int4(*(f"{here}.mlp.experts.0.{x}" for x in projections))
        mlp = Moe(build, layer.index, layer.mlp, routed_int4=routed)
    return DecoderLayer(build, attention, mlp)


def rules(spec: ModelSpec) -> Sequence[Rule]:
    """The published names."""
    layer = spec.layers[0]
    assert isinstance(layer.attention, GqaSpec)
    at, to = "model.layers.{i}", "layers.{i}"
    bias, out_bias = layer.attention.qkv_bias, layer.attention.out_bias
    return (
        Rule("model.embed_tokens", "embedding"),
        Rule("model.embed_tokens" if spec.tied else "lm_head", "head"),
        Rule("model.norm", "norm"),
        Rule(f"{at}.input_layernorm", f"{to}.input_norm"),
        Rule(f"{at}.post_attention_layernorm", f"{to}.post_norm"),
        *(linear(f"{at}.self_attn.{x}_proj", f"{to}.attention.qkv", x, bias=bias) for x in "qkv"),
        Rule(f"{at}.self_attn.q_norm", f"{to}.attention.q_norm"),
        Rule(f"{at}.self_attn.k_norm", f"{to}.attention.k_norm"),
        linear(f"{at}.self_attn.o_proj", f"{to}.attention.out", "out", bias=out_bias),
        linear(f"{at}.mlp.gate_proj", f"{to}.mlp.gate_up", "gate", when=is_dense),
        linear(f"{at}.mlp.up_proj", f"{to}.mlp.gate_up", "up", when=is_dense),
        linear(f"{at}.mlp.down_proj", f"{to}.mlp.down", "down", when=is_dense),
        Rule(f"{at}.mlp.gate", f"{to}.mlp.router", when=is_moe),
        *(
            linear(f"{at}.mlp.experts.{{e}}.{x}_proj", f"{to}.mlp.experts", x, when=is_moe)
            for x in ("gate", "up", "down")
        ),
    )
