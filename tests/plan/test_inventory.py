"""What a plan counts is what a checkpoint stores and what a rank's modules hold."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
import torch

from headrace.config import LayoutConfig
from headrace.layers.build import Build
from headrace.mesh import Mesh, build_mesh
from headrace.model_config import spec_from_config
from headrace.models.registry import build_model
from headrace.plan.inventory import embedding, head, layer_matrices, rank_bytes
from headrace.spec import ModelSpec
from headrace.weights.published import tensor_shapes
from tests.plan.specs import CONFIGS, K2, QWEN, SLICE
from tests.tiny import TINY, tiny_config

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("spec", [K2, SLICE, QWEN], ids=lambda spec: spec.architecture)
def test_a_layers_matrices_are_its_parameters_and_bytes(spec: ModelSpec) -> None:
    for index in (0, 1, spec.num_layers - 1):
        matrices = layer_matrices(spec, index)
        assert sum(matrix.params for matrix in matrices) == spec.layer_params(index)
        assert sum(matrix.bytes for matrix in matrices) == spec.layer_bytes(index)


def test_k2_is_553_gib() -> None:
    total = rank_bytes(K2, 1, range(61), first=True, last=True)
    assert total / 2**30 == pytest.approx(553, rel=0.005)
    assert embedding(K2).bytes == pytest.approx(2.349e9, rel=1e-3)
    assert head(K2).bytes == pytest.approx(2.349e9, rel=1e-3)


def test_every_byte_of_the_published_checkpoint_is_counted() -> None:
    config = json.loads((CONFIGS / "k2-slice" / "config.json").read_text())
    size = {"int4_packed": 4, "int4_shape": 0}
    stored: dict[str, int] = defaultdict(int)
    for tensor in tensor_shapes(config):
        count = 1
        for dim in tensor.shape:
            count *= dim
        stored[tensor.name.split(".layers.")[-1].split(".")[0]] += count * size.get(tensor.kind, 2)
    for index in range(SLICE.num_layers):
        assert sum(matrix.bytes for matrix in layer_matrices(SLICE, index)) == stored[str(index)]


def built_bytes(spec: ModelSpec, mesh: Mesh, rank: int) -> int:
    """Of the modules that a worker makes for a rank, on no device."""
    build = Build.of_rank(spec, mesh, rank, max_len=64, dtype=DTYPES[spec.dtype], device="meta")
    return sum(parameter.nbytes for parameter in build_model(build).parameters())


@pytest.mark.parametrize(("pp", "tp", "ep"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (1, 4, 1), (2, 2, 2)])
@pytest.mark.parametrize("name", TINY)
def test_a_ranks_bytes_are_those_of_its_modules(name: str, pp: int, tp: int, ep: int) -> None:
    spec = spec_from_config(tiny_config(name))
    if ep > 1 and not any(hasattr(layer.mlp, "num_experts") for layer in spec.layers):
        ep = 1
    if spec.quant is not None:
        tp = min(tp, 2)  # more would cut groups
    mesh = build_mesh(LayoutConfig(pp=pp, tp=tp, ep=ep), spec)
    for rank in range(mesh.num_ranks):
        stage = mesh.stage_of(rank)
        counted = rank_bytes(spec, tp, mesh.layers_of(stage), first=stage == 0, last=stage == pp - 1)
        # A vocabulary that the ranks do not divide is padded.
        assert counted == pytest.approx(built_bytes(spec, mesh, rank), rel=1e-3)


@pytest.mark.parametrize(("pp", "tp", "ep"), [(1, 8, 1), (2, 4, 4), (8, 1, 1)])
def test_the_same_of_k2s_slice(pp: int, tp: int, ep: int) -> None:
    mesh = build_mesh(LayoutConfig(pp=pp, tp=tp, ep=ep), SLICE)
    for stage in (0, pp - 1):
        counted = rank_bytes(SLICE, tp, mesh.layers_of(stage), first=stage == 0, last=stage == pp - 1)
        assert counted == pytest.approx(built_bytes(SLICE, mesh, mesh.ranks_of(stage)[0]), rel=1e-4)
