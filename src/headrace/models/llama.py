"""Llama, and models that are Llama by another name (SmolLM2)."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.layers.attention import GqaAttention
from headrace.layers.build import Build
from headrace.layers.decoder import Decoder, DecoderLayer
from headrace.layers.mlp import Mlp
from headrace.spec import DenseSpec, GqaSpec, LayerSpec, ModelSpec
from headrace.weights.rules import Rule, linear


def build(build: Build) -> Decoder:
    """One stage."""
    return Decoder(build, _layer)


def _layer(build: Build, layer: LayerSpec) -> DecoderLayer:
    assert isinstance(layer.attention, GqaSpec) and isinstance(layer.mlp, DenseSpec)
    here = f"layers.{layer.index}"
    attention = GqaAttention(
        build,
        layer.index,
        layer.attention,
        build.int4(*(f"{here}.self_attn.{x}_proj" for x in "qkv")),
        build.int4(f"{here}.self_attn.o_proj"),
    )
    int4 = build.int4(*(f"{here}.mlp.{x}_proj" for x in ("gate", "up", "down")))
    return DecoderLayer(build, attention, Mlp(build, layer.mlp.intermediate, bias=layer.mlp.bias, int4=int4))


def rules(spec: ModelSpec) -> Sequence[Rule]:
    """The published names."""
    layer = spec.layers[0]
    assert isinstance(layer.attention, GqaSpec) and isinstance(layer.mlp, DenseSpec)
    at, to = "model.layers.{i}", "layers.{i}"
    bias, out_bias, mlp_bias = layer.attention.qkv_bias, layer.attention.out_bias, layer.mlp.bias
    return (
        Rule("model.embed_tokens", "embedding"),
        Rule("model.embed_tokens" if spec.tied else "lm_head", "head"),
        Rule("model.norm", "norm"),
        Rule(f"{at}.input_layernorm", f"{to}.input_norm"),
        Rule(f"{at}.post_attention_layernorm", f"{to}.post_norm"),
        *(linear(f"{at}.self_attn.{x}_proj", f"{to}.attention.qkv", x, bias=bias) for x in "qkv"),
        linear(f"{at}.self_attn.o_proj", f"{to}.attention.out", "out", bias=out_bias),
        linear(f"{at}.mlp.gate_proj", f"{to}.mlp.gate_up", "gate", bias=mlp_bias),
        linear(f"{at}.mlp.up_proj", f"{to}.mlp.gate_up", "up", bias=mlp_bias),
        linear(f"{at}.mlp.down_proj", f"{to}.mlp.down", "down", bias=mlp_bias),
    )
