"""Configs as they are published, in both spellings, become the right spec; what cannot be served is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UnsupportedModel
from headrace.model_config import spec_from_config
from headrace.spec import DenseSpec, GqaSpec, MlaSpec, MoeSpec

CONFIGS = Path(__file__).parent / "data" / "configs"


def published(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((CONFIGS / name / "config.json").read_text())
    return config


def test_kimi_k25_is_the_text_model_in_its_wrapper() -> None:
    spec = spec_from_config(published("kimi-k2.5"))
    attention, moe = spec.layers[1].attention, spec.layers[1].mlp
    assert (spec.family, spec.num_layers, spec.hidden, spec.vocab_size) == ("deepseek_v3", 61, 7168, 163840)
    assert isinstance(attention, MlaSpec) and isinstance(moe, MoeSpec)
    assert (attention.q_lora_rank, attention.kv_lora_rank, attention.kv_values()) == (1536, 512, 576)
    assert (moe.num_experts, moe.top_k, moe.scoring, moe.scale, moe.selection_bias) == (384, 8, "sigmoid", 2.827, True)
    assert moe.shared_intermediate == 2048
    assert [isinstance(layer.mlp, DenseSpec) for layer in spec.layers[:3]] == [True, False, False]
    assert (spec.rope.kind, spec.rope.factor, spec.rope.beta_fast, spec.rope.interleaved) == ("yarn", 64.0, 32.0, True)
    assert spec.rope.attention_factor == 1.0  # mscale and mscale_all_dim cancel out
    assert attention.scale == pytest.approx(192**-0.5 * (0.1 * 4.1588830833596715 + 1) ** 2)
    assert spec.weight_prefix == "language_model." and spec.multimodal
    assert any("vision" in note for note in spec.notes)


def test_only_the_routed_experts_of_k2_are_int4() -> None:
    spec = spec_from_config(published("kimi-k2.5"))
    assert spec.quant is not None and spec.quant.group_size == 32
    layer = "language_model.model.layers.7"
    assert spec.quant.covers(f"{layer}.mlp.experts.383.down_proj")
    for module in ("self_attn.o_proj", "self_attn.kv_b_proj", "mlp.shared_experts.up_proj", "mlp.gate_proj"):
        assert not spec.quant.covers(f"{layer}.{module}"), module
    assert not spec.quant.covers("lm_head")


def test_bytes_of_k2_are_those_of_the_published_checkpoint() -> None:
    spec = spec_from_config(published("kimi-k2.5"))
    assert spec.layer_bytes(1) == pytest.approx(9.81e9, rel=1e-3)
    assert spec.layer_bytes(0) == pytest.approx(0.995e9, rel=1e-3)
    assert spec.head_bytes == pytest.approx(2.349e9, rel=1e-3)
    total = sum(spec.layer_bytes(i) for i in range(61)) + 2 * spec.head_bytes
    assert total == pytest.approx(594e9, rel=2e-3)


def test_qwen3_moe() -> None:
    spec = spec_from_config(published("qwen3-30b-a3b"))
    attention, moe = spec.layers[0].attention, spec.layers[0].mlp
    assert isinstance(attention, GqaSpec) and isinstance(moe, MoeSpec)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.qk_norm) == (32, 4, 128, True)
    assert (moe.num_experts, moe.top_k, moe.scoring, moe.shared_intermediate) == (128, 8, "softmax", 0)


def test_qwen3_moe_dense_layers() -> None:
    config = published("qwen3-30b-a3b") | {"mlp_only_layers": [3], "decoder_sparse_step": 2, "num_hidden_layers": 6}
    kinds = [type(layer.mlp).__name__ for layer in spec_from_config(config).layers]
    assert kinds == ["DenseSpec", "MoeSpec", "DenseSpec", "DenseSpec", "DenseSpec", "MoeSpec"]


def test_mtp_layers_are_ignored_and_said_so() -> None:
    config = published("deepseek-v3")
    del config["quantization_config"]
    spec = spec_from_config(config)
    assert spec.num_layers == 61
    assert any("MTP" in note and "61" in note for note in spec.notes)
    import re

    assert any(re.fullmatch(p, "model.layers.61.mlp.experts.3.up_proj.weight") for p in spec.ignored)
    assert not any(re.fullmatch(p, "model.layers.60.mlp.experts.3.up_proj.weight") for p in spec.ignored)


def test_both_spellings_are_one() -> None:
    old = published("k2-slice")
    new = {k: v for k, v in old.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    new["dtype"] = old["torch_dtype"]
    scaling = {k: v for k, v in old["rope_scaling"].items() if k != "type"}
    new["rope_parameters"] = scaling | {"rope_type": old["rope_scaling"]["type"], "rope_theta": old["rope_theta"]}
    assert spec_from_config(new) == spec_from_config(old)


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("deepseek-v3", {}, "FP8"),
        ("qwen3-30b-a3b", {"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ("qwen3-30b-a3b", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen3-30b-a3b", {"use_sliding_window": True}, "sliding"),
        ("qwen3-30b-a3b", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("qwen3-30b-a3b", {"quantization_config": {"quant_method": "awq"}}, "awq"),
        ("k2-slice", {"topk_method": "greedy"}, "greedy"),
        ("kimi-k2.5", {"text_config": None}, "text_config"),
    ],
)
def test_what_is_not_supported_is_named(name: str, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(UnsupportedModel, match=word):
        spec_from_config(published(name) | changes)


def test_missing_field_is_named() -> None:
    config = published("qwen3-30b-a3b")
    del config["hidden_size"]
    with pytest.raises(UnsupportedModel, match="hidden_size"):
        spec_from_config(config)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"num_bits": 8}, "num_bits"),
        ({"symmetric": False}, "symmetric"),
        ({"actorder": "group"}, "actorder"),
        ({"group_size": 12}, "group_size"),
    ],
)
def test_other_int4_schemes_are_refused(changes: dict[str, Any], word: str) -> None:
    config = published("k2-slice")
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= changes
    with pytest.raises(UnsupportedModel, match=word):
        spec_from_config(config)


def test_ignore_entries_may_leave_out_the_wrappers_prefix() -> None:
    config = published("kimi-k2.5")
    config["text_config"]["quantization_config"]["ignore"] += ["model.layers.3.mlp.experts.0.up_proj"]
    quant = spec_from_config(config).quant
    assert quant is not None
    assert not quant.covers("language_model.model.layers.3.mlp.experts.0.up_proj")
    assert quant.covers("language_model.model.layers.3.mlp.experts.1.up_proj")


@pytest.mark.parametrize("layers", [0, -1, 10**9, "61", None])
def test_a_nonsense_layer_count_is_refused(layers: object) -> None:
    with pytest.raises(UnsupportedModel, match="num_hidden_layers"):
        spec_from_config(published("qwen3-30b-a3b") | {"num_hidden_layers": layers})


@pytest.mark.parametrize(
    "changes",
    [
        {"eos_token_id": "</s>"},
        {"rms_norm_eps": "x"},
        {"rope_scaling": "yarn"},
        {"num_attention_heads": 0},
        {"quantization_config": "fp8"},
        {"architectures": [["x"]]},
        {"vocab_size": "288"},
        {"hidden_size": None},
    ],
)
def test_a_broken_field_is_one_line(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        spec_from_config(published("qwen3-30b-a3b") | changes)
    assert "\n" not in str(caught.value)
