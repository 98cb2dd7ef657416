"""Brings one rank up: device, connections, the stage's modules and their weights."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import psutil
import torch
from torch import nn

from headrace.config import EngineConfig
from headrace.errors import UserError
from headrace.layers.build import Build
from headrace.layers.decoder import Decoder
from headrace.mesh import Mesh, build_mesh
from headrace.models.registry import build_model, rules_of
from headrace.plan.reserve import KV_MOST, KV_SHARE, plans_in_window
from headrace.spec import ModelSpec
from headrace.supervise.devices import gpu_of, ranks_per_gpu
from headrace.weights.checkpoint import Checkpoint, load
from headrace.weights.fill import fill_random
from headrace.weights.places import layer_of
from headrace.weights.rules import bind
from headrace.weights.source import ModelSource, read_spec, resolve
from headrace.worker.cache import page_bytes
from headrace.worker.comm import Comm, Devices, connect

OLDEST = (8, 0)
"""Compute capability from which on GPUs have bfloat16 and asynchronous copies."""


@dataclass(frozen=True)
class Stage:
    """A rank that is ready for its KV cache."""

    config: EngineConfig
    spec: ModelSpec
    mesh: Mesh
    rank: int
    comm: Comm
    model: Decoder
    dtype: torch.dtype
    device: torch.device
    counter: torch.Tensor | None
    """Steps so far, where routing is drawn."""
    weight_bytes: int
    page_bytes: int
    load_s: float

    @property
    def index(self) -> int:
        """Which stage of the pipeline it is."""
        return self.mesh.stage_of(self.rank)


def bring_up(config: EngineConfig, rank: int, store: str, progress: Callable[[int, int], None]) -> Stage:
    """Connect, build and load. Every rank of the mesh calls this at the same time."""
    assert config.model.model is not None and config.model.dtype != "auto"
    source = resolve(config.model.model, say=lambda _: None)
    spec = read_spec(source)
    mesh = build_mesh(config.layout, spec)
    device = _device(config, mesh, rank)
    assert config.schedule.run_ahead is not None
    devices = None if device.type == "cpu" else _devices(config, mesh, spec, getattr(torch, config.model.dtype))
    comm = connect(
        mesh, rank, store, config.run.timeout_s, plans_in_window(mesh.pp, config.schedule.run_ahead), devices
    )
    return build_stage(config, source, spec, mesh, rank, comm, device, progress)


def build_stage(
    config: EngineConfig,
    source: ModelSource,
    spec: ModelSpec,
    mesh: Mesh,
    rank: int,
    comm: Comm,
    device: torch.device,
    progress: Callable[[int, int], None],
) -> Stage:
    """Build and load what a rank holds; `comm` is how it will reach the others."""
    dtype = getattr(torch, config.model.dtype)
    started = time.monotonic()
    drawn = config.model.routing == "uniform"
    counter = torch.zeros(1, dtype=torch.int64, device=device) if drawn else None
    build = replace(
        Build.of_rank(spec, mesh, rank, max_len=config.model.max_len or spec.max_positions, dtype=dtype, device=device),
        tensor=comm.tensor,
        expert=comm.expert,
        expert_slice=comm.expert_slice,
        routing_counter=counter,
        side=torch.cuda.Stream(device, priority=-2) if device.type == "cuda" else None,
        spare=torch.cuda.Stream(device) if device.type == "cuda" else None,
        reserve=comm.held_multiprocessors,
    )
    model = build_model(build)
    loaded_bytes = weight_bytes(model)
    if config.model.weights == "random":
        fill_random(model, rules_of(spec), spec, config.model.seed, progress)
    else:
        load_model(model, Checkpoint(source, spec), progress)
    model.finalise()
    stage = mesh.stage_of(rank)
    return Stage(
        config=config,
        spec=spec,
        mesh=mesh,
        rank=rank,
        comm=comm,
        model=model,
        dtype=dtype,
        device=device,
        counter=counter,
        weight_bytes=loaded_bytes + (model.head.copied_bytes if model.head is not None else 0),
        page_bytes=page_bytes(spec, mesh, stage, config.schedule.page_size, config.model.dtype),
        load_s=time.monotonic() - started,
    )


def load_model(model: Decoder, checkpoint: Checkpoint, progress: Callable[[int, int], None] | None = None) -> None:
    """Fill a rank's modules, and finalise each layer when its last tensor is there: repacking overlaps reading.

    What is in no layer is left to `model.finalise`. Raises CheckpointError.
    """
    slots = bind(model, rules_of(checkpoint.spec), checkpoint.spec, checkpoint.tensors)
    pending = Counter(layer_of(name) for name in slots)

    def finished(name: str) -> None:
        layer = layer_of(name)
        pending[layer] -= 1
        if layer is not None and not pending[layer]:
            model.finalise_layer(layer)

    load(checkpoint, slots, progress, finished)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters, each counted once."""
    seen: dict[int, int] = {p.data_ptr(): p.nbytes for p in model.parameters()}
    return sum(seen.values())


def free_host_memory(num_ranks: int) -> int:
    """Bytes of KV cache that one of the host's ranks takes by itself."""
    return min(KV_MOST, int(psutil.virtual_memory().available * KV_SHARE)) // num_ranks


def usable_gpus(mesh: Mesh) -> int:
    """How many GPUs torch finds. Raises UserError where that is too few for the mesh."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if mesh.num_ranks > count * ranks_per_gpu(mesh.num_ranks, count):
        raise UserError(
            f"--device cuda: torch can use {count} of the GPUs here (is the driver the right one?), {mesh.num_ranks} "
            "are needed; --device cpu runs on the processor"
        )
    return count


def _devices(config: EngineConfig, mesh: Mesh, spec: ModelSpec, dtype: torch.dtype) -> Devices:
    count = usable_gpus(mesh)
    assert config.schedule.chunk is not None
    return Devices(
        [torch.device("cuda", gpu_of(mesh, rank, count)) for rank in range(mesh.num_ranks)],
        hidden_bytes=config.schedule.chunk * spec.hidden * dtype.itemsize,
        token_bytes=config.schedule.max_running * torch.int64.itemsize,
        copies=config.run.edges == "auto",
        one_shot=config.run.all_reduce == "auto",
    )


def _device(config: EngineConfig, mesh: Mesh, rank: int) -> torch.device:
    if config.model.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", gpu_of(mesh, rank, usable_gpus(mesh)))
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        name, has, needs = torch.cuda.get_device_name(device), *(".".join(map(str, c)) for c in (capability, OLDEST))
        raise UserError(f"--device cuda: {name} has compute capability {has}, {needs} or later is needed")
    take_gpu(device)
    return device


def take_gpu(device: torch.device) -> None:
    """Make a GPU this process's."""
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)  # makes the context, which the driver's own interface needs
    # Sums in full precision: the references and every layout must agree.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
