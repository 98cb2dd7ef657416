"""Brings one rank up: device, connections, the stage's modules and their weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch
from torch import nn

from headrace.config import EngineConfig
from headrace.layers.build import Build
from headrace.layers.decoder import Decoder
from headrace.mesh import Mesh, build_mesh
from headrace.models.registry import build_model, rules_of
from headrace.spec import ModelSpec
from headrace.weights.checkpoint import Checkpoint, load
from headrace.weights.rules import bind
from headrace.weights.source import read_spec, resolve
from headrace.worker.cache import page_bytes
from headrace.worker.comm import Comm, connect

KV_SHARE, KV_MOST = 0.25, 4 << 30
"""On a CPU the KV cache gets a quarter of the memory that is free, shared by the host's ranks, and 4 GiB at most."""


@dataclass(frozen=True)
class Stage:
    """A rank that is ready for its KV cache."""

    spec: ModelSpec
    mesh: Mesh
    rank: int
    comm: Comm
    model: Decoder
    dtype: torch.dtype
    device: torch.device
    weight_bytes: int
    page_bytes: int
    kv_memory: int
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
    device = torch.device("cpu" if config.model.device == "cpu" else f"cuda:{rank % max(1, torch.cuda.device_count())}")
    dtype = getattr(torch, config.model.dtype)
    comm = connect(mesh, rank, store, config.run.timeout_s, max_in_flight=mesh.pp)
    started = time.monotonic()
    build = Build(
        spec=spec,
        layers=mesh.layers_of(mesh.stage_of(rank)),
        first=mesh.is_first(rank),
        last=mesh.is_last(rank),
        max_len=config.model.max_len or spec.max_positions,
        dtype=dtype,
        device=device,
        tensor=comm.tensor,
        expert=comm.expert,
        expert_slice=comm.expert_slice,
    )
    model = build_model(build)
    checkpoint = Checkpoint(source, spec)
    load(checkpoint, bind(model, rules_of(spec), spec, checkpoint.tensors), progress)
    loaded_bytes = weight_bytes(model)
    model.finalise()
    stage = mesh.stage_of(rank)
    return Stage(
        spec=spec,
        mesh=mesh,
        rank=rank,
        comm=comm,
        model=model,
        dtype=dtype,
        device=device,
        weight_bytes=loaded_bytes + (model.head.copied_bytes if model.head is not None else 0),
        page_bytes=page_bytes(spec, mesh, stage, config.schedule.page_size, config.model.dtype),
        kv_memory=config.schedule.kv_memory or _free_memory(mesh.num_ranks),
        load_s=time.monotonic() - started,
    )


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters, each counted once."""
    seen: dict[int, int] = {p.data_ptr(): p.nbytes for p in model.parameters()}
    return sum(seen.values())


def _free_memory(num_ranks: int) -> int:
    return min(KV_MOST, int(psutil.virtual_memory().available * KV_SHARE)) // num_ranks
