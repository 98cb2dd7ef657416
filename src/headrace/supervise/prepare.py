"""From what was asked to what will run: model found, every "auto" resolved, all refused that can be refused by now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from headrace.config import DeviceName, EngineConfig, ServeConfig
from headrace.errors import UserError
from headrace.mesh import Mesh, build_mesh
from headrace.spec import ModelSpec
from headrace.supervise.devices import num_gpus, resolve_device, resolve_dtype, torch_has_cuda
from headrace.weights.headers import open_headers
from headrace.weights.source import read_spec, resolve

CPU_CHUNK = 512
GPU_CHUNK = 8192


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What the processes of one engine are started from."""

    config: ServeConfig
    """Resolved: the model is a path, the split is there, device, dtype, chunk and served name are set."""
    spec: ModelSpec
    mesh: Mesh

    @property
    def name(self) -> str:
        """What the model is served as."""
        assert self.config.http.served_name is not None
        return self.config.http.served_name


def prepare(config: ServeConfig, *, say: Callable[[str], None]) -> Prepared:
    """Find the model and resolve the configuration against it; reads config and tensor headers, no weights.

    `say` gets one line before anything slow, and what the user should be told. Raises UserError.
    """
    source = resolve(config.engine.model.model, say=say)
    spec = read_spec(source)
    mesh = build_mesh(config.engine.layout, spec)
    device = _device(config.engine.model.device, mesh.num_ranks, say)
    _check_length(config.engine, spec)
    # A missing or truncated file ends here, before anything is started. Names and shapes are checked by every worker
    # before it reads a byte: their table lies with the models, which need torch.
    open_headers(source)
    for note in spec.notes:
        say(note)
    chunk = config.engine.schedule.chunk or (GPU_CHUNK if device == "cuda" else CPU_CHUNK)
    dtype = resolve_dtype(config.engine.model.dtype, device, spec.dtype)
    engine = replace(
        config.engine,
        model=replace(config.engine.model, model=str(source.path), device=device, dtype=dtype),
        layout=replace(config.engine.layout, split=mesh.split),
        schedule=replace(config.engine.schedule, chunk=chunk),
    )
    http = replace(config.http, served_name=config.http.served_name or source.name)
    return Prepared(config=replace(config, engine=engine, http=http), spec=spec, mesh=mesh)


def _device(asked: DeviceName, num_ranks: int, say: Callable[[str], None]) -> Literal["cpu", "cuda"]:
    """The device of the ranks: GPUs have no kernels and no edges yet, and half a pipeline on them helps nobody."""
    if asked == "cuda":
        resolve_device(asked, num_ranks)  # what no version could do is said first
        raise UserError("--device cuda: this version computes on processors only")
    if asked == "auto" and num_gpus() and torch_has_cuda():
        say("the GPUs here are not used yet: this version computes on processors")
    return "cpu"


def _check_length(config: EngineConfig, spec: ModelSpec) -> None:
    asked = config.model.max_len
    if asked is not None and asked > spec.max_positions:
        raise UserError(f"--max-len {asked}: the model has {spec.max_positions} positions")
