"""What a model's rows cost, from its sizes."""

from __future__ import annotations

from pathlib import Path

from headrace.model_config import spec_from_config
from headrace.plan.curve import LEAST_SHARE, PRODUCTS_PER_BYTE, cost_curve
from headrace.weights.source import read_spec, resolve
from tests.tiny import tiny_config

CONFIGS = Path(__file__).parents[1] / "data" / "configs"


def test_a_dense_model_by_hand() -> None:
    curve = cost_curve(spec_from_config(tiny_config("llama")), "cuda", 64)
    layer = 64 * (4 + 2 + 2) * 16 + 4 * 16 * 64 + 3 * 64 * 128 + 2 * 64
    assert curve.token == 6 * layer
    assert curve.pair == 6 * 4 * (16 + 16)
    assert curve.step == 4 * curve.token * PRODUCTS_PER_BYTE["cuda"]


def test_a_token_passes_few_of_the_experts_whose_weights_are_all_read() -> None:
    spec = read_spec(resolve(str(CONFIGS / "k2-slice"), say=lambda _: None))
    curve = cost_curve(spec, "cuda", 8192)
    # Eight and one shared of 384 experts of 3 x 7168 x 2048 in seven layers, INT4 and scales, and what is beside them.
    experts = 3 * 7168 * 2048
    assert 7 * 9 * experts < curve.token < 7 * 9 * experts + 8 * 2.5e8
    assert 1800 < curve.step / curve.token < 2600
    assert curve.pair == 8 * 64 * (192 + 128)


def test_no_chunk_costs_less_than_a_share_of_the_largest() -> None:
    spec = spec_from_config(tiny_config("qwen3"))
    small, large = (cost_curve(spec, "cpu", chunk) for chunk in (64, 4096))
    assert small.step == small.token * 4 * PRODUCTS_PER_BYTE["cpu"]
    assert large.step == large.token * 4096 // LEAST_SHARE
