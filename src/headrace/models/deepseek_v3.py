"""DeepSeek-V3 and Kimi-K2: latent attention, sigmoid-routed experts beside a shared one, leading dense layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from headrace.layers.attention import MlaAttention
from headrace.layers.build import Build
from headrace.layers.decoder import Decoder, DecoderLayer
from headrace.layers.mlp import Mlp
from headrace.layers.moe import Moe
from headrace.spec import DenseSpec, LayerSpec, MlaSpec, ModelSpec, MoeSpec
from headrace.weights.rules import Rule, is_dense, is_moe, linear

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def build(build: Build) -> Decoder:
    """One stage."""
    return Decoder(build, _layer)


def _layer(build: Build, layer: LayerSpec) -> DecoderLayer:
    assert isinstance(layer.attention, MlaSpec)
    here = f"layers.{layer.index}"
    first = "q_proj" if layer.attention.q_lora_rank is None else "q_a_proj"
    attention = MlaAttention(
        build,
        layer.index,
        layer.attention,
        in_int4=build.int4(f"{here}.self_attn.{first}", f"{here}.self_attn.kv_a_proj_with_mqa"),
        q_int4=build.int4(f"{here}.self_attn.q_b_proj"),
        kv_int4=build.int4(f"{here}.self_attn.kv_b_proj"),
        out_int4=build.int4(f"{here}.self_attn.o_proj"),
    )
    return DecoderLayer(build, attention, _mlp(build, layer.index, layer.mlp, here))


def _mlp(build: Build, layer: int, mlp: DenseSpec | MoeSpec, here: str) -> nn.Module:
    if isinstance(mlp, DenseSpec):
        return Mlp(build, mlp.intermediate, int4=build.int4(*(f"{here}.mlp.{x}" for x in PROJECTIONS)))
    return Moe(
        build,
        layer,
        mlp,
        routed_int4=build.int4(*(f"{here}.mlp.experts.0.{x}" for x in PROJECTIONS)),
        shared_int4=build.int4(*(f"{here}.mlp.shared_experts.{x}" for x in PROJECTIONS)),
    )


def rules(spec: ModelSpec) -> Sequence[Rule]:
    """The published names."""
    layer = spec.layers[0]
    assert isinstance(layer.attention, MlaSpec)
    at, to = "model.layers.{i}", "layers.{i}"
    if layer.attention.q_lora_rank is None:
        query: tuple[Rule, ...] = (linear(f"{at}.self_attn.q_proj", f"{to}.attention.down", "q"),)
    else:
        query = (
            linear(f"{at}.self_attn.q_a_proj", f"{to}.attention.down", "q_a"),
            Rule(f"{at}.self_attn.q_a_layernorm", f"{to}.attention.q_norm"),
            linear(f"{at}.self_attn.q_b_proj", f"{to}.attention.q_up", "q_b"),
        )
    moe = next((x.mlp for x in spec.layers if isinstance(x.mlp, MoeSpec)), None)
    shared = ("gate_up", "gate"), ("gate_up", "up"), ("down", "down")
    return (
        Rule("model.embed_tokens", "embedding"),
        Rule("model.embed_tokens" if spec.tied else "lm_head", "head"),
        Rule("model.norm", "norm"),
        Rule(f"{at}.input_layernorm", f"{to}.input_norm"),
        Rule(f"{at}.post_attention_layernorm", f"{to}.post_norm"),
        *query,
        linear(f"{at}.self_attn.kv_a_proj_with_mqa", f"{to}.attention.down", "kv_a"),
        Rule(f"{at}.self_attn.kv_a_layernorm", f"{to}.attention.kv_norm"),
        linear(f"{at}.self_attn.kv_b_proj", f"{to}.attention.kv_up", "kv_b"),
        linear(f"{at}.self_attn.o_proj", f"{to}.attention.out", "out"),
        *(linear(f"{at}.mlp.{part}_proj", f"{to}.mlp.{module}", part, when=is_dense) for module, part in shared),
        Rule(f"{at}.mlp.gate", f"{to}.mlp.router", suffixes=("weight", "e_score_correction_bias"), when=is_moe),
        *(
            linear(f"{at}.mlp.experts.{{e}}.{x}_proj", f"{to}.mlp.experts", x, when=is_moe)
            for x in ("gate", "up", "down")
        ),
        *(
            linear(f"{at}.mlp.shared_experts.{part}_proj", f"{to}.mlp.shared.{module}", part, when=is_moe)
            for module, part in shared
            if moe is not None and moe.shared_intermediate
        ),
    )
