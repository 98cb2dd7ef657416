"""Stages and shards of real checkpoints, without processes: what each rank reads, and that layers keep their place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headrace.config import LayoutConfig
from headrace.errors import CheckpointError, UnsupportedModel
from headrace.layers.batch import Batch
from headrace.layers.build import Build
from headrace.layers.decoder import Decoder
from headrace.layers.moe import ExpertStack
from headrace.mesh import Mesh, build_mesh
from headrace.models.registry import build_model, rules_of
from headrace.spec import ModelSpec, MoeSpec
from headrace.step import Register, SamplerSpec, StepPlan, pack, unpack
from headrace.weights.checkpoint import Checkpoint, load
from headrace.weights.rules import bind, check_names, expand
from headrace.weights.source import read_spec, resolve
from headrace.worker.batch import Rows, make_batch
from headrace.worker.cache import KVCache, layer_shape, page_bytes
from headrace.worker.mirror import Mirror
from tests.tiny import TINY, write_tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tiny")
    return {name: write_tiny(root / name, name, seed=2, tokenizer=False) for name in TINY}


def load_rank(folder: Path, mesh: Mesh, rank: int, *, finalise: bool = True) -> Decoder:
    source = resolve(str(folder), say=lambda _: None)
    spec = read_spec(source)
    build = Build.of_rank(spec, mesh, rank, max_len=64, dtype=torch.float32)
    model = build_model(build)
    checkpoint = Checkpoint(source, spec)
    for parameter in model.parameters():
        # Poison: what the loader leaves out must be seen.
        if parameter.is_floating_point():
            parameter.data.fill_(float("nan"))
    load(checkpoint, bind(model, rules_of(spec), spec, checkpoint.tensors))
    if finalise:
        model.finalise()
    return model


def spec_of(folder: Path) -> ModelSpec:
    return read_spec(resolve(str(folder), say=lambda _: None))


def batch_for(spec: ModelSpec, mesh: Mesh, stage: int, tokens: list[int]) -> Batch:
    cache = KVCache(spec, mesh.layers_of(stage), 16, 4, mesh.tp, torch.float32, CPU)
    mirror = Mirror(1, 16)
    register = [Register(0, pack(tokens), len(tokens), SamplerSpec())]
    mirror.apply(StepPlan(0, b"", [], register, pack([v for page in range(16) for v in (0, page)])))
    rows = Rows.of(unpack(pack([0, 0, len(tokens), 1]), 4))
    return make_batch(0, rows, mirror, cache, 4, CPU, torch.tensor(tokens))


def run(
    models: list[Decoder], spec: ModelSpec, mesh: Mesh, tokens: list[int]
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Residual streams before every layer's second norm, in layer order, and the logits."""
    seen: list[torch.Tensor] = []
    x = torch.tensor(tokens)
    with torch.inference_mode():
        for stage, model in enumerate(models):
            hooks = [
                layer.register_forward_hook(lambda _m, _i, out: seen.append(out[0] + out[1]))
                for layer in model.layers.values()
            ]
            x = model(x, batch_for(spec, mesh, stage, tokens))
            for hook in hooks:
                hook.remove()
        return seen, models[-1].logits(x)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("split", [(1, 2, 2), (2, 1, 1, 1)])
def test_hidden_states_after_every_layer_are_those_of_one_stage(
    folders: dict[str, Path], name: str, split: tuple[int, ...]
) -> None:
    folder = folders[name]
    spec = spec_of(folder)
    split = (*split[:-1], spec.num_layers - sum(split[:-1]))
    whole, stages = build_mesh(LayoutConfig(), spec), build_mesh(LayoutConfig(pp=len(split), split=split), spec)
    tokens = list(range(3, 20))
    expected, logits = run([load_rank(folder, whole, 0)], spec, whole, tokens)
    got, got_logits = run([load_rank(folder, stages, r) for r in range(stages.num_ranks)], spec, stages, tokens)
    assert len(got) == len(expected) == spec.num_layers
    for layer, (a, b) in enumerate(zip(got, expected, strict=True)):
        torch.testing.assert_close(a, b, msg=f"layer {layer}")
    torch.testing.assert_close(got_logits, logits)
    assert not torch.isnan(logits).any()


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize(("pp", "tp", "ep"), [(1, 2, 1), (2, 2, 1), (2, 2, 2), (1, 4, 2), (4, 1, 1)])
def test_every_rank_fills_all_it_has_and_reads_no_more(
    folders: dict[str, Path], name: str, pp: int, tp: int, ep: int
) -> None:
    folder = folders[name]
    spec = spec_of(folder)
    if ep > 1 and not any(isinstance(layer.mlp, MoeSpec) for layer in spec.layers):
        return
    if tp == 4 and spec.quant is not None and ep < tp:
        tp, ep = 4, 4  # INT4 groups of 32 do not allow slices of 16
    mesh = build_mesh(LayoutConfig(pp=pp, tp=tp, ep=ep), spec)
    whole = dict(load_rank(folder, build_mesh(LayoutConfig(), spec), 0, finalise=False).named_parameters())
    for rank in range(mesh.num_ranks):
        model = load_rank(folder, mesh, rank, finalise=False)
        layers = {int(n.split(".")[1]) for n, _ in model.named_parameters() if n.startswith("layers.")}
        assert layers == set(mesh.layers_of(mesh.stage_of(rank)))
        for parameter_name, parameter in model.named_parameters():
            assert not torch.isnan(parameter.float()).any(), parameter_name
            if "experts" in parameter_name and parameter_name in whole:
                assert parameter.numel() * tp == whole[parameter_name].numel()


@pytest.mark.parametrize("name", ["kimi_k2_int4", "kimi_k25_int4"])
def test_int4_experts_stay_packed(folders: dict[str, Path], name: str) -> None:
    spec = spec_of(folders[name])
    model = load_rank(folders[name], build_mesh(LayoutConfig(), spec), 0)
    stacks = [module for module in model.modules() if isinstance(module, ExpertStack)]
    assert stacks
    resident = sum(tensor.nbytes for stack in stacks for tensor in (*stack.parameters(), *stack.buffers()))
    checkpoint = Checkpoint(resolve(str(folders[name]), say=lambda _: None), spec)
    packed = sum(
        header.num_bytes
        for tensor, header in checkpoint.tensors.items()
        if ".experts." in tensor and not tensor.endswith("weight_shape")
    )
    assert resident <= 1.05 * packed


def test_kv_pools_are_sized_by_local_layers(folders: dict[str, Path]) -> None:
    for name in ("llama", "deepseek_v3"):
        spec = spec_of(folders[name])
        mesh = build_mesh(LayoutConfig(pp=3, split=(1, 2, spec.num_layers - 3)), spec)
        for stage in range(3):
            cache = KVCache(spec, mesh.layers_of(stage), 5, 4, 1, torch.float32, CPU)
            assert cache.num_bytes == 5 * page_bytes(spec, mesh, stage, 4, "float32")
            with pytest.raises(KeyError):
                cache.layer(mesh.layers_of(stage).stop)
    assert layer_shape(spec_of(folders["deepseek_v3"]), 0, tp=2) == (40,)  # the latent is replicated
    assert layer_shape(spec_of(folders["llama"]), 0, tp=2) == (2, 1, 16)


@pytest.mark.parametrize("name", TINY)
def test_rules_know_exactly_the_checkpoints_names(folders: dict[str, Path], name: str) -> None:
    spec = spec_of(folders[name])
    names = list(Checkpoint(resolve(str(folders[name]), say=lambda _: None), spec).tensors)
    check_names(expand(rules_of(spec), spec), names, spec)
    wanted = sorted(item.tensor for item in expand(rules_of(spec), spec))
    for missing in (wanted[0], wanted[len(wanted) // 2]):
        with pytest.raises(CheckpointError, match="lacks 1 tensor: " + missing.replace(".", r"\.")):
            check_names(expand(rules_of(spec), spec), [n for n in names if n != missing], spec)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.surprise"):
        check_names(expand(rules_of(spec), spec), [*names, "model.layers.0.surprise"], spec)
    check_names(expand(rules_of(spec), spec), [*names, f"{spec.weight_prefix}model.rotary_emb.inv_freq"], spec)


def test_experts_of_one_layer_are_all_stored_alike(folders: dict[str, Path]) -> None:
    spec = spec_of(folders["kimi_k2_int4"])
    assert spec.quant is not None
    mixed = replace(spec, quant=replace(spec.quant, ignore=(*spec.quant.ignore, r"re:.*mlp\.experts\.5\..*")))
    model = build_model(Build(spec=mixed, layers=range(spec.num_layers), max_len=64, dtype=torch.float32))
    names = [item.tensor for item in expand(rules_of(mixed), mixed)]
    with pytest.raises(UnsupportedModel, match=r"experts\.5\."):
        bind(model, rules_of(mixed), mixed, names)
