"""From what was asked to what will run: model found, every "auto" resolved, all refused that can be refused by now."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from headrace.config import AttentionName, EngineConfig, ServeConfig
from headrace.errors import UserError
from headrace.mesh import Mesh, build_mesh
from headrace.spec import GqaSpec, ModelSpec
from headrace.supervise.devices import gpu_of, num_gpus, resolve_device, resolve_dtype
from headrace.supervise.forecast import Forecast, choose, foresee, split_for
from headrace.supervise.here import look
from headrace.telemetry.trace import check_path
from headrace.weights.headers import open_headers
from headrace.weights.source import read_spec, resolve

CPU_CHUNK = 512
GPU_CHUNK = 8192
GPU_GROUP = 32
"""Columns that share a scale in the INT4 kernels."""
GPU_RUN_AHEAD = 2
"""A step on a GPU is shorter than the trip of its result through the engine; on a CPU it is many times longer."""

FLASHINFER_DIMS, FLASHINFER_LATENT = (64, 128, 256), (512, 64)
"""Dims of a head, and of a latent row's two parts, that FlashInfer's kernels are made for."""
FLASHINFER_HEADS = tuple(1 << power for power in range(8))
"""A tile of its causal kernel over a latent cache has 64 or 128 (position, head) pairs. With other heads one tile ends
within a position, and of that position's context it may leave out the last."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What the processes of one engine are started from."""

    config: ServeConfig
    """Resolved: the model is a path, the split is there, device, dtype, chunk and served name are set."""
    spec: ModelSpec
    mesh: Mesh
    forecast: Forecast | None
    """None where the driver does not say what GPUs there are."""

    @property
    def name(self) -> str:
        """What the model is served as."""
        assert self.config.http.served_name is not None
        return self.config.http.served_name


def prepare(config: ServeConfig, *, say: Callable[[str], None]) -> Prepared:
    """Find the model and resolve the configuration against it; reads config and tensor headers, no weights.

    `say` gets one line before anything slow, and what the user should be told. Raises UserError.
    """
    if config.engine.run.trace is not None:
        check_path(Path(config.engine.run.trace))
    source = resolve(config.engine.model.model, say=say)
    spec = read_spec(source)
    layout = config.engine.layout
    # What is wrong with a layout that is given is said before anything of the machine.
    num_ranks = 1 if layout.layout == "auto" else build_mesh(layout, spec).num_ranks
    device = resolve_device(config.engine.model.device, num_ranks)
    _check_length(config.engine, spec)
    # A missing or truncated file ends here, before anything is started. Names and shapes are checked by every worker
    # before it reads a byte: their table lies with the models, which need torch.
    if config.engine.model.weights == "checkpoint":
        open_headers(source)
    for note in spec.notes:
        say(note)
    ahead = config.engine.schedule.run_ahead
    if ahead is None:
        ahead = GPU_RUN_AHEAD if device == "cuda" else 0
    dtype = resolve_dtype(config.engine.model.dtype, device, spec.dtype)
    attention = _attention(config.engine.model.attention, device)
    # The reference holds scores: a chunk that is right for kernels would not fit.
    chunk = config.engine.schedule.chunk or (CPU_CHUNK if attention == "torch" else GPU_CHUNK)
    if device == "cuda":
        _check_groups(spec)
    here = look()
    engine = replace(
        config.engine,
        model=replace(config.engine.model, model=str(source.path), device=device, dtype=dtype, attention=attention),
        schedule=replace(config.engine.schedule, chunk=chunk, run_ahead=ahead),
    )
    if layout.layout == "auto":
        layout = choose(spec, engine, device, here)
    mesh = build_mesh(layout, spec)
    if attention == "flashinfer":
        _check_flashinfer(spec, mesh.tp, dtype)
    if layout.split is None and device == "cuda":
        mesh = replace(mesh, split=split_for(spec, mesh, engine, here))
    forecast = foresee(spec, mesh, engine, device, here)
    engine = replace(engine, layout=replace(layout, split=mesh.split))
    http = replace(config.http, served_name=config.http.served_name or source.name)
    return Prepared(config=replace(config, engine=engine, http=http), spec=spec, mesh=mesh, forecast=forecast)


def devices_of(prepared: Prepared) -> list[str]:
    """What each rank computes on, for messages; empty for ranks that share the processor."""
    if prepared.config.engine.model.device != "cuda":
        return []
    mesh, gpus = prepared.mesh, num_gpus()
    return [f"cuda:{gpu_of(mesh, rank, gpus)}" for rank in range(mesh.num_ranks)]


def _attention(asked: AttentionName, device: Literal["cpu", "cuda"]) -> Literal["torch", "triton", "flashinfer"]:
    if asked == "auto":
        return "triton" if device == "cuda" else "torch"
    if asked != "torch" and device == "cpu":
        raise UserError(f"--attention {asked}: needs --device cuda")
    if asked == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        raise UserError("--attention flashinfer: is not installed: pip install 'headrace[flashinfer]'")
    return asked


def _check_flashinfer(spec: ModelSpec, tp: int, dtype: str) -> None:
    """Raises UserError for what FlashInfer has no kernels for."""
    lacks = None
    attentions = {layer.attention for layer in spec.layers}
    if dtype != "bfloat16":
        lacks = f"{dtype}; --dtype bfloat16 it has"
    elif len(attentions) > 1:
        lacks = "layers whose attention differs, planned as one"
    for attention in attentions:
        heads = attention.num_heads // tp
        if isinstance(attention, GqaSpec):
            if attention.head_dim not in FLASHINFER_DIMS:
                lacks = lacks or f"heads of {attention.head_dim} dims"
        elif (attention.kv_lora_rank, attention.rope_dim) != FLASHINFER_LATENT:
            lacks = lacks or f"latent rows of {attention.kv_lora_rank} and {attention.rope_dim} dims"
        elif heads not in FLASHINFER_HEADS:
            lacks = lacks or f"{heads} heads a rank over a latent cache, only for a power of two up to 128"
    if lacks is not None:
        raise UserError(f"--attention flashinfer: has no kernels for {lacks}; --attention triton takes this model")


def _check_groups(spec: ModelSpec) -> None:
    if spec.quant is not None and spec.quant.group_size != GPU_GROUP:
        raise UserError(
            f"quantization_config: group_size {spec.quant.group_size}: on GPUs INT4 has groups of {GPU_GROUP}; "
            "--device cpu takes any"
        )


def _check_length(config: EngineConfig, spec: ModelSpec) -> None:
    asked = config.model.max_len
    if asked is not None and asked > spec.max_positions:
        raise UserError(f"--max-len {asked}: the model has {spec.max_positions} positions")
