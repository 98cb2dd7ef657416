"""Ranks, stages, shares and splits: pure arithmetic, checked for every layout."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config import LayoutConfig
from headrace.errors import UserError
from headrace.mesh import Mesh, best_split, build_mesh, level_split, run_costs
from headrace.model_config import spec_from_config

CONFIGS = Path(__file__).parent / "data" / "configs"
K25 = spec_from_config(json.loads((CONFIGS / "kimi-k2.5" / "config.json").read_text()))
QWEN = spec_from_config(json.loads((CONFIGS / "qwen3-30b-a3b" / "config.json").read_text()))


@pytest.mark.parametrize(("pp", "tp", "ep"), [(1, 1, 1), (2, 1, 1), (4, 2, 1), (4, 2, 2), (2, 4, 4), (1, 8, 2)])
def test_every_layer_and_expert_has_exactly_its_ranks(pp: int, tp: int, ep: int) -> None:
    mesh = build_mesh(LayoutConfig(pp=pp, tp=tp, ep=ep), K25)
    assert [i for s in range(pp) for i in mesh.layers_of(s)] == list(range(61))
    assert [r for s in range(pp) for r in mesh.ranks_of(s)] == list(range(mesh.num_ranks))
    for stage in range(pp):
        held: dict[int, set[int]] = {}
        for rank in mesh.ranks_of(stage):
            assert mesh.stage_of(rank) == stage
            for expert in mesh.expert(rank).share(384):
                held.setdefault(expert, set()).add(mesh.expert_slice(rank).index)
        # Each expert whole on one group, and every slice of it exactly once there.
        assert sorted(held) == list(range(384))
        assert all(slices == set(range(tp // ep)) for slices in held.values())


def test_k2_over_eight_stages_is_split_by_cost() -> None:
    # At one token a step the head is worth almost five MoE layers, and layer 0, which is dense, two.
    assert build_mesh(LayoutConfig(pp=8), K25).split == (7, 8, 8, 8, 8, 9, 9, 4)


@pytest.mark.parametrize(
    ("layout", "flag"),
    [
        (LayoutConfig(pp=62), "--pp"),
        (LayoutConfig(tp=3), "--tp"),
        (LayoutConfig(tp=128), "--tp"),
        (LayoutConfig(pp=2, split=(30, 30)), "--split"),
    ],
)
def test_a_layout_that_cannot_be_names_its_flag(layout: LayoutConfig, flag: str) -> None:
    with pytest.raises(UserError, match=flag):
        build_mesh(layout, K25)


def test_flags_that_contradict() -> None:
    for wrong, flag in (
        ({"pp": 0}, "--pp"),
        ({"tp": 4, "ep": 3}, "--ep"),
        ({"pp": 2, "split": (1, 2, 3)}, "--split"),
        ({"pp": 2, "split": (61, 0)}, "--split"),
    ):
        with pytest.raises(UserError, match=flag):
            LayoutConfig(**wrong)


def test_ep_alone_implies_tp() -> None:
    assert (LayoutConfig(ep=4).tp, LayoutConfig(ep=4, tp=8).tp) == (4, 8)


def test_ep_without_experts_is_refused() -> None:
    dense = spec_from_config(
        {
            "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 512,
        }
    )  # fmt: skip
    with pytest.raises(UserError, match="no experts"):
        build_mesh(LayoutConfig(ep=2), dense)


def test_kv_heads_are_replicated_when_there_are_fewer_than_ranks() -> None:
    assert build_mesh(LayoutConfig(tp=8), QWEN).tp == 8  # 4 KV heads: each on two ranks


def test_int4_groups_are_not_cut() -> None:
    config = json.loads((CONFIGS / "k2-slice" / "config.json").read_text()) | {"moe_intermediate_size": 48}
    with pytest.raises(UserError, match="group"):
        build_mesh(LayoutConfig(tp=2), spec_from_config(config))


@pytest.mark.parametrize(
    ("mesh", "name"),
    [
        (Mesh(pp=2, tp=1, ep=1, split=(1, 1)), "pp2"),
        (Mesh(pp=4, tp=2, ep=2, split=(1, 1, 1, 1)), "pp4ep2"),
        (Mesh(pp=1, tp=4, ep=1, split=(4,)), "tp4"),
        (Mesh(pp=1, tp=1, ep=1, split=(4,)), "pp1"),
    ],
)
def test_names(mesh: Mesh, name: str) -> None:
    assert mesh.name == name


@given(
    costs=st.lists(st.integers(1, 20), min_size=1, max_size=9),
    data=st.data(),
    first=st.integers(0, 30),
    last=st.integers(0, 30),
)
def test_level_split_is_the_best_there_is(costs: list[int], data: st.DataObject, first: int, last: int) -> None:
    stages = data.draw(st.integers(1, len(costs)))

    def peak(split: tuple[int, ...]) -> float:
        bounds = [0, *itertools.accumulate(split)]
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
        sums[0] += first
        sums[-1] += last
        return max(sums)

    split = level_split(costs, stages, first=first, last=last)
    assert len(split) == stages and sum(split) == len(costs) and min(split) >= 1
    every = [
        tuple(b - a for a, b in itertools.pairwise((0, *cuts, len(costs))))
        for cuts in itertools.combinations(range(1, len(costs)), stages - 1)
    ]
    assert peak(split) == min(peak(one) for one in every)


def test_a_split_keeps_within_what_cannot_be() -> None:
    costs = run_costs([1.0, 1.0, 1.0, 1.0])
    limited = np.where(costs > 1, np.inf, costs)  # the second of three stages has room for one layer

    def price(stage: int) -> npt.NDArray[np.float64]:
        return limited if stage == 1 else costs

    assert best_split(price, 3) in ((1, 1, 2), (2, 1, 1))
    assert best_split(price, 2) == (3, 1)
    assert best_split(lambda stage: limited, 3) is None


def test_a_stage_may_be_dearer_than_another() -> None:
    costs = run_costs([1.0] * 9)
    assert best_split(lambda stage: costs * (2 if stage == 0 else 1), 2) == (3, 6)
