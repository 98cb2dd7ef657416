"""Weights on a GPU: loaded through pinned buffers exactly as on the processor, and made in place."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from headrace.config import LayoutConfig
from headrace.errors import CheckpointError
from headrace.layers.build import Build
from headrace.layers.decoder import Decoder
from headrace.mesh import Mesh, build_mesh
from headrace.model_config import spec_from_config
from headrace.models.registry import build_model, rules_of
from headrace.spec import ModelSpec
from headrace.weights import checkpoint as checkpoint_module
from headrace.weights.checkpoint import Checkpoint, load
from headrace.weights.fill import fill_random
from headrace.weights.reads import plan_reads
from headrace.weights.rules import bind
from headrace.weights.slots import Slot
from headrace.weights.source import ModelSource, read_spec, resolve
from headrace.worker.stage import load_model
from tests.tiny import tiny_config, write_tiny

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")


def spec_of(folder: Path) -> ModelSpec:
    return read_spec(resolve(str(folder), say=lambda _: None))


def empty_model(spec: ModelSpec, mesh: Mesh, rank: int, device: str, dtype: torch.dtype) -> Decoder:
    build = Build.of_rank(spec, mesh, rank, max_len=64, dtype=dtype, device=device)
    model = build_model(build)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data.fill_(float("nan"))
    return model


@pytest.mark.parametrize("name", ["llama_bias", "llama_tied", "qwen3_moe", "deepseek_v3", "kimi_k25_int4"])
@pytest.mark.parametrize(("tp", "block_bytes"), [(1, 8 << 20), (2, 4096)])
def test_every_rank_holds_what_it_would_on_a_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, tp: int, block_bytes: int
) -> None:
    folder = write_tiny(tmp_path / "m", name, seed=1, tokenizer=False)
    spec = spec_of(folder)
    mesh = build_mesh(LayoutConfig(tp=tp), spec)
    monkeypatch.setattr(checkpoint_module, "plan_reads", lambda wants: plan_reads(wants, block_bytes))
    for rank in range(tp):
        models = [empty_model(spec, mesh, rank, device, torch.bfloat16) for device in ("cpu", "cuda")]
        for model in models:
            checkpoint = Checkpoint(resolve(str(folder), say=lambda _: None), spec)
            load(checkpoint, bind(model, rules_of(spec), spec, checkpoint.tensors))
        host, there = (dict(model.named_parameters()) for model in models)
        for key, parameter in there.items():
            assert torch.equal(parameter.cpu(), host[key]), key


def test_many_blocks_through_few_buffers_into_any_strides_and_types(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"t{i}": torch.randn(2048 + i, 2048, generator=generator) for i in range(12)}
    tensors["words"] = torch.randint(-(2**31), 2**31, (3000, 1024), generator=generator).int()
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(ModelSource("folder", tmp_path, "m"), spec_of(write_tiny(tmp_path / "s", "llama")))
    slots, expected = {}, {}
    for i, (name, tensor) in enumerate(tensors.items()):
        part = (slice(i, 2000), slice(8 * i, 1000))
        wide = tensor.dtype.is_floating_point
        kinds = (torch.bfloat16, torch.float32, torch.float16)
        dtype = kinds[i % 3] if wide else tensor.dtype
        dest = torch.empty(2000 - i, 1000 - 8 * i, 1 + i % 2, dtype=dtype, device=CUDA)[..., 0]
        slots[name], expected[name] = [Slot(dest, part, tuple(tensor.shape))], tensor[part].to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker beside others
    try:
        started = time.monotonic()
        load(checkpoint, slots)
        spent = time.monotonic() - started
    finally:
        torch.set_num_threads(before)
    # Read on another stream than the one that loaded: it must be complete.
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for name, (slot,) in slots.items():
            assert torch.equal(slot.dest.cpu(), expected[name]), name
    assert spent < 10


@pytest.mark.parametrize("name", ["kimi_k25_int4", "deepseek_v3", "qwen3_moe"])
def test_layers_finalised_while_others_load_are_those_finalised_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Repacking on one stream follows the copies on others, with blocks so small that many are under way."""
    folder = write_tiny(tmp_path / "m", name, seed=1, tokenizer=False)
    spec = spec_of(folder)
    mesh = build_mesh(LayoutConfig(), spec)
    monkeypatch.setattr(checkpoint_module, "plan_reads", lambda wants: plan_reads(wants, 4096))
    checkpoint = Checkpoint(resolve(str(folder), say=lambda _: None), spec)
    model, reference = (empty_model(spec, mesh, 0, "cuda", torch.bfloat16) for _ in range(2))
    with torch.no_grad():
        load_model(model, checkpoint)
        model.finalise()
        load(checkpoint, bind(reference, rules_of(spec), spec, checkpoint.tensors))
        reference.finalise()
    one, other = (dict(held.named_parameters()) for held in (model, reference))
    assert one.keys() == other.keys()
    for key, parameter in one.items():
        assert torch.equal(parameter, other[key]), key


def test_a_scale_that_is_no_number_is_named_on_its_way_to_the_device(tmp_path: Path) -> None:
    scale = torch.ones(64, 8).bfloat16()
    scale[3, 1] = torch.nan
    save_file({"a.weight_scale": scale}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(ModelSource("folder", tmp_path, "m"), spec_of(write_tiny(tmp_path / "s", "llama")))
    dest = torch.empty(64, 8, device=CUDA, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"a\.weight_scale: value 25 is not a finite number"):
        load(checkpoint, {"a.weight_scale": [Slot(dest, (slice(0, 64), slice(0, 8)), (64, 8))]})
    assert float(torch.ones(1000, device=CUDA).sum()) == 1000


def test_a_truncated_file_is_named_and_leaves_the_device_usable(tmp_path: Path) -> None:
    weight = torch.randn(4000, 1024)
    save_file({"weight": weight}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(ModelSource("folder", tmp_path, "m"), spec_of(write_tiny(tmp_path / "s", "llama")))
    assert "weight" in checkpoint.tensors
    with (tmp_path / "model.safetensors").open("r+b") as handle:
        handle.truncate(9 << 20)
    dest = torch.empty(4000, 1024, device=CUDA)
    with pytest.raises(CheckpointError, match="truncated"):
        load(checkpoint, {"weight": [Slot(dest, (slice(0, 4000), slice(0, 1024)), (4000, 1024))]})
    assert float(torch.ones(1000, device=CUDA).sum()) == 1000


@pytest.mark.parametrize("name", ["kimi_k2_int4", "qwen3_moe"])
def test_weights_made_in_place_agree_between_ranks(tmp_path: Path, name: str) -> None:
    spec = spec_of(write_tiny(tmp_path / "m", name, tokenizer=False))
    mesh = build_mesh(LayoutConfig(tp=2), spec)
    ranks = [empty_model(spec, mesh, rank, "cuda", torch.bfloat16) for rank in (0, 1)]
    for model in ranks:
        fill_random(model, rules_of(spec), spec)
    one, other = (dict(model.named_parameters()) for model in ranks)
    for key, parameter in one.items():
        assert bool(parameter.float().isfinite().all()), key
        same = key.endswith(("norm.weight", "router.weight", "router.bias", "attention.down.weight"))
        assert torch.equal(parameter, other[key]) == same, key


def test_weights_are_made_at_the_speed_of_the_device() -> None:
    config = tiny_config("kimi_k2_int4") | {
        "hidden_size": 4096, "moe_intermediate_size": 2048, "n_routed_experts": 64, "num_hidden_layers": 3,
        "intermediate_size": 8192,
    }  # fmt: skip
    spec = spec_from_config(config)
    model = empty_model(spec, build_mesh(LayoutConfig(), spec), 0, "cuda", torch.bfloat16)
    fill_random(model, rules_of(spec), spec)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    started = time.monotonic()
    fill_random(model, rules_of(spec), spec, seed=1)
    spent = time.monotonic() - started
    num_bytes = sum(p.nbytes for p in model.parameters())
    assert num_bytes > 1 << 30
    assert torch.cuda.max_memory_allocated() - before < 64 << 20, "extra memory"
    assert num_bytes / spent > 10e9, f"{num_bytes / 1e9:.1f} GB took {spent:.2f} s"
