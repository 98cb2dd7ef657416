"""Rotary tables against transformers' own, every scaling, out to far positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.kernels.rotary import deinterleave, rotate
from headrace.layers.rotary import inverse_frequencies
from headrace.model_config import spec_from_config
from tests.tiny import tiny_config

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64},
    "yarn of K2.5": {
        "rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "yarn of K2": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
        "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "yarn, not truncated": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = tiny_config("llama") | {"rope_scaling": SCALINGS[name] or None, "max_position_embeddings": 2048}
    rope = spec_from_config(config).rope
    reference = LlamaConfig(**config)
    if name == "default":
        expected = 1.0 / (10000.0 ** (torch.arange(0, 16, 2).float() / 16))
        factor = 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[rope.kind](reference, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(rope), expected, rtol=1e-6, atol=0)
    assert rope.attention_factor == pytest.approx(factor)


def test_rotation_turns_pairs_and_keeps_lengths() -> None:
    x = torch.randn(5, 3, 8)
    angles = torch.rand(5, 1, 4)
    cos, sin = torch.cat((angles.cos(),) * 2, -1), torch.cat((angles.sin(),) * 2, -1)
    turned = rotate(x, cos, sin)
    for i in range(4):
        a, b = x[..., i], x[..., i + 4]
        torch.testing.assert_close(turned[..., i], a * angles[..., i].cos() - b * angles[..., i].sin())
        torch.testing.assert_close(turned[..., i + 4], b * angles[..., i].cos() + a * angles[..., i].sin())


def test_deinterleave() -> None:
    x = torch.arange(8.0)[None, None]
    assert deinterleave(x)[0, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
