"""Weights made in place: every parameter filled, finite through depth, and the same wherever the same part is held."""

from __future__ import annotations

import pytest
import torch

from headrace.config import LayoutConfig
from headrace.layers.build import Build
from headrace.layers.decoder import Decoder
from headrace.layers.moe import ExpertStack
from headrace.mesh import Mesh, build_mesh
from headrace.model_config import spec_from_config
from headrace.models.registry import build_model, rules_of
from headrace.spec import ModelSpec, MoeSpec
from headrace.weights.fill import fill_random
from tests.tiny import TINY, tiny_config


def filled(spec: ModelSpec, mesh: Mesh, rank: int, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    build = Build.of_rank(spec, mesh, rank, max_len=64, dtype=dtype)
    model = build_model(build)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.fill_(float("nan"))
        else:
            parameter.data.zero_()
    fill_random(model, rules_of(spec), spec, seed)
    return model


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize(("pp", "tp", "ep"), [(1, 1, 1), (2, 2, 1), (2, 2, 2)])
def test_every_parameter_of_every_rank_is_filled(name: str, pp: int, tp: int, ep: int) -> None:
    spec = spec_from_config(tiny_config(name))
    if ep > 1 and not any(isinstance(layer.mlp, MoeSpec) for layer in spec.layers):
        return
    mesh = build_mesh(LayoutConfig(pp=pp, tp=tp, ep=ep), spec)
    for rank in range(mesh.num_ranks):
        for key, parameter in filled(spec, mesh, rank).named_parameters():
            assert bool(parameter.float().isfinite().all()), key
            if parameter.dtype == torch.int32:
                assert float((parameter == 0).float().mean()) < 0.01, key


@pytest.mark.parametrize("name", ["deepseek_v3", "llama_bias", "qwen3_moe", "kimi_k2_int4"])
def test_what_ranks_share_is_the_same_and_what_they_split_is_not(name: str) -> None:
    spec = spec_from_config(tiny_config(name))
    mesh = build_mesh(LayoutConfig(tp=2), spec)
    one, other = (dict(filled(spec, mesh, rank).named_parameters()) for rank in (0, 1))
    whole = {key: p.shape for key, p in filled(spec, build_mesh(LayoutConfig(), spec), 0).named_parameters()}
    replicated = ("norm.weight", "router.weight", "router.bias", "attention.down.weight", "out.bias", "mlp.down.bias")
    for key, parameter in one.items():
        if key.endswith(replicated):
            assert parameter.shape == whole[key] and torch.equal(parameter, other[key]), key
        else:
            assert not torch.equal(parameter, other[key]), key


def test_stages_and_expert_ranks_hold_parts_of_one_model() -> None:
    spec = spec_from_config(tiny_config("kimi_k2_int4"))
    whole = filled(spec, build_mesh(LayoutConfig(), spec), 0)
    expected = dict(whole.named_parameters())
    stages = build_mesh(LayoutConfig(pp=2), spec)
    for rank in (0, 1):
        for key, parameter in filled(spec, stages, rank).named_parameters():
            assert torch.equal(parameter, expected[key]), key
    stacks = {key: module for key, module in whole.named_modules() if isinstance(module, ExpertStack)}
    spread = build_mesh(LayoutConfig(ep=2), spec)
    for rank in (0, 1):
        for key, module in filled(spec, spread, rank).named_modules():
            if isinstance(module, ExpertStack):
                held = slice(module.experts.start, module.experts.stop)
                assert torch.equal(module.packed, stacks[key].packed[held]), key
                assert torch.equal(module.scale, stacks[key].scale[held]), key


def test_the_seed_and_the_name_decide() -> None:
    spec = spec_from_config(tiny_config("llama"))
    mesh = build_mesh(LayoutConfig(), spec)
    first, again, other = (dict(filled(spec, mesh, 0, seed=s).named_parameters()) for s in (3, 3, 4))
    for key in first:
        assert torch.equal(first[key], again[key])
        if "norm" not in key:
            assert not torch.equal(first[key], other[key]), key
    assert not torch.equal(first["layers.0.mlp.down.weight"], first["layers.1.mlp.down.weight"])


def test_matrices_keep_the_size_of_what_they_multiply() -> None:
    spec = spec_from_config(tiny_config("kimi_k2_int4"))
    model = filled(spec, build_mesh(LayoutConfig(), spec), 0, dtype=torch.bfloat16)
    x = torch.randn(256, spec.hidden, generator=torch.Generator().manual_seed(0))
    stacks = [module for module in model.modules() if isinstance(module, ExpertStack)]
    for stack in stacks:
        if stack.shape[1] == spec.hidden:
            y = x @ stack.matrix(0, torch.float32).T
            assert 0.8 < float(y.std()) < 1.25
    nibbles = torch.stack([(stacks[0].packed >> shift) & 15 for shift in range(0, 32, 4)])
    counts = torch.bincount(nibbles.flatten(), minlength=16).float() / nibbles.numel()
    assert float((counts - 1 / 16).abs().max()) < 0.01


def test_progress_ends_at_all_bytes() -> None:
    spec = spec_from_config(tiny_config("llama"))
    model = build_model(Build(spec=spec, layers=range(spec.num_layers), max_len=64, dtype=torch.float32))
    seen: list[tuple[int, int]] = []
    fill_random(model, rules_of(spec), spec, progress=lambda done, total: seen.append((done, total)))
    total = sum(p.nbytes for p in model.parameters())
    assert seen[-1] == (total, total) and seen == sorted(seen)
