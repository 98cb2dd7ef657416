"""From a loaded stage to one that runs plans: the KV cache sized and made, graphs captured, the worst shapes run."""

from __future__ import annotations

import logging
import subprocess
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from headrace.errors import UserError
from headrace.kernels.flashinfer import Planner, Shape
from headrace.kernels.sampling import argmax, sample
from headrace.plan.reserve import EXPAND_MOST, GRAPH_BYTES, LOGIT_COPIES, MARGIN, ladder, plans_in_window
from headrace.spec import GqaSpec
from headrace.supervise.devices import ranks_per_gpu
from headrace.telemetry.trace import Trace
from headrace.worker.batch import Rows
from headrace.worker.cache import KVCache
from headrace.worker.edge import DeviceEdge
from headrace.worker.graphs import GraphSteps
from headrace.worker.mirror import Mirror
from headrace.worker.runner import Runner
from headrace.worker.stage import Stage, free_host_memory
from headrace.worker.steps import DeviceState, EagerSteps

log = logging.getLogger(__name__)

LOAD_TIMEOUT = timedelta(hours=1)
"""Ranks read from disks of their own: how far apart they may have loaded. The message names who is missing."""
SMALL_SHARE = 0.5
"""Share of the memory that weights leave, under which a KV cache is small enough to say why."""


@dataclass(frozen=True)
class Prepared:
    """A rank that can run plans."""

    runner: Runner
    kv_bytes: int
    graph_bytes: int


@dataclass(frozen=True)
class _Parts:
    cache: KVCache
    mirror: Mirror
    state: DeviceState
    eager: EagerSteps
    graphs: GraphSteps | None


def kv_memory(stage: Stage) -> int:
    """Bytes that the KV cache may take on this rank: what was asked for, or what is left after everything else.

    On a GPU everything else is measured: the largest chunk is run, and the largest graph captured, over a cache of one
    page. All ranks of a stage do this at the same time.
    """
    config = stage.config
    if stage.device.type == "cpu":
        return config.schedule.kv_memory or free_host_memory(stage.mesh.num_ranks)
    torch.cuda.empty_cache()
    _together()
    before = torch.cuda.memory_allocated(stage.device)
    torch.cuda.reset_peak_memory_stats(stage.device)
    longest = config.model.max_len or stage.spec.max_positions
    parts = _make(stage, 1, longest, ladder(config.schedule.max_running)[-1:])
    assert config.schedule.chunk is not None
    count = min(config.schedule.chunk, longest)
    _run(stage, parts, start=max(0, min(EXPAND_MOST, longest) - count), count=count)
    working = torch.cuda.max_memory_allocated(stage.device) - before
    graphs = 0
    if parts.graphs is not None:
        parts.graphs.capture()
        graphs = parts.graphs.num_bytes + GRAPH_BYTES * len(ladder(config.schedule.max_running))
    del parts
    torch.cuda.empty_cache()
    _together()
    free, total = torch.cuda.mem_get_info(stage.device)
    # What is sent or received stays in memory while its plan is in the window; what comes by copy has its ring.
    assert config.schedule.run_ahead is not None
    held = int(isinstance(stage.comm.previous, DeviceEdge)) + int(stage.comm.next is not None)
    plans = held * plans_in_window(stage.mesh.pp, config.schedule.run_ahead)
    working += plans * config.schedule.chunk * stage.spec.hidden * stage.dtype.itemsize
    logits = 0
    if stage.model.head is not None:
        logits = config.schedule.max_running * stage.spec.vocab_size * 4 * LOGIT_COPIES
    share = (free - int(total * MARGIN)) // ranks_per_gpu(stage.mesh.num_ranks, torch.cuda.device_count())
    return _share_for_kv(stage, share, working + graphs + logits)


def _share_for_kv(stage: Stage, share: int, needed: int) -> int:
    """What was asked for, or all that is left. Raises UserError where there is not as much."""
    asked, left = stage.config.schedule.kv_memory, share - needed
    where = f"{share} bytes are free on {stage.device} with the weights there, and steps need {needed} of them"
    fewer = "a smaller --chunk or --max-running takes less"
    if left < (asked or stage.page_bytes):
        raise UserError(f"--kv-memory {asked or stage.page_bytes}: {where}; {fewer}")
    if asked is None and left < share * SMALL_SHARE:
        log.warning("the KV cache gets %d bytes: %s; %s", left, where, fewer)
    return asked or left


def _together() -> None:
    """Wait for all ranks: two that share a GPU must not measure each other's work."""
    if dist.is_initialized():
        dist.monitored_barrier(timeout=LOAD_TIMEOUT)


def prepare(stage: Stage, num_pages: int, max_len: int, trace_folder: Path) -> Prepared:
    """Make the KV cache and everything that runs on it; on a GPU run the longest context and every graph once.

    trace_folder: for a record of steps, where the configuration asks for a trace.
    """
    config, mesh = stage.config, stage.mesh
    parts = _make(stage, num_pages, max_len, ladder(config.schedule.max_running))
    if stage.device.type == "cuda":
        _run(stage, parts, start=max_len - 1, count=1)
        if parts.graphs is not None:
            parts.graphs.capture()
        _warm(stage, parts, max_len)
    assert config.schedule.run_ahead is not None
    runner = Runner(
        spec=stage.spec,
        mesh=mesh,
        rank=stage.rank,
        model=stage.model,
        comm=stage.comm,
        mirror=parts.mirror,
        state=parts.state,
        steps=parts.graphs or parts.eager,
        max_running=config.schedule.max_running,
        window=plans_in_window(mesh.pp, config.schedule.run_ahead),
        dtype=stage.dtype,
        device=stage.device,
        timeout_s=config.run.timeout_s,
        trace=Trace(trace_folder, stage.rank, stage.index) if config.run.trace else None,
    )
    return Prepared(runner, parts.cache.num_bytes, parts.graphs.num_bytes if parts.graphs is not None else 0)


def _make(stage: Stage, num_pages: int, max_len: int, sizes: tuple[int, ...]) -> _Parts:
    config, mesh, device = stage.config, stage.mesh, stage.device
    schedule = config.schedule
    cache = KVCache(
        stage.spec, mesh.layers_of(stage.index), num_pages, schedule.page_size, mesh.tp, stage.dtype, device
    )
    max_pages = -(-max_len // schedule.page_size)
    mirror = Mirror(schedule.max_running, max_pages)
    paged = config.model.attention == "triton"
    state = DeviceState.make(schedule.max_running, max_pages, device, paged=paged, counter=stage.counter)
    planner = _planner(stage) if config.model.attention == "flashinfer" else None
    eager = EagerSteps(stage.model, mirror, cache, state, schedule.page_size, max_len, device, planner)
    graphs = None
    # In float32 experts are multiplied by the reference, which reads the routing on the host.
    if paged and config.model.graphs and stage.dtype == torch.bfloat16:
        graphs = GraphSteps(
            eager,
            stage.model,
            mirror,
            cache,
            state,
            sizes=sizes,
            page_size=schedule.page_size,
            max_len=max_len,
            hidden=stage.spec.hidden,
            dtype=stage.dtype,
            device=device,
        )
    return _Parts(cache, mirror, state, eager, graphs)


def _planner(stage: Stage) -> Planner:
    """FlashInfer, with its kernels made. Raises UserError where it cannot be had."""
    config, mesh = stage.config, stage.mesh
    assert config.schedule.run_ahead is not None
    depth = plans_in_window(mesh.pp, config.schedule.run_ahead)
    try:
        return Planner(_shape(stage), stage.device, depth)
    except torch.OutOfMemoryError:
        raise
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        raise UserError(
            "--attention flashinfer: its kernels cannot be had here (they are made by nvcc, or come with "
            f"flashinfer-jit-cache): {error}; --attention triton does without"
        ) from error


def _shape(stage: Stage) -> Shape:
    """Of the stage's attention on this rank; layers that differ were refused before."""
    (attention,) = {stage.spec.layers[i].attention for i in stage.mesh.layers_of(stage.index)}
    heads, tp = attention.num_heads // stage.mesh.tp, stage.mesh.tp
    size = stage.config.schedule.page_size
    if isinstance(attention, GqaSpec):
        dim = attention.head_dim
        return Shape(heads, max(1, attention.num_kv_heads // tp), dim, dim, attention.scale, size, stage.dtype)
    rank = attention.kv_lora_rank
    return Shape(heads, 1, rank + attention.rope_dim, rank, attention.scale, size, stage.dtype)


@torch.inference_mode()
def _warm(stage: Stage, parts: _Parts, max_len: int) -> None:
    """Compute prompts of every order of magnitude, alone and beside a row that decodes, and draw tokens.

    Where no graph did it, compute decode steps of every order too.

    Which kernels a step takes follows from how many tokens it has: none shall be compiled while a request waits.
    """
    schedule = stage.config.schedule
    assert schedule.chunk is not None
    most = min(schedule.chunk, max_len)
    beside = schedule.max_running > 1
    for count in (1 << power for power in range(most.bit_length())):
        _run(stage, parts, start=0, count=count)
        if beside and count < most:
            _run(stage, parts, start=0, count=count, num_decodes=1)
    if parts.graphs is None:
        for rows in ladder(schedule.max_running):
            _run(stage, parts, start=0, count=1, num_decodes=min(rows, schedule.max_running) - 1)
    if stage.model.head is not None:
        for rows in ladder(schedule.max_running):
            one = torch.ones(rows, device=stage.device)
            for dtype in (stage.dtype, torch.float32):  # the latter where penalties were added
                logits = torch.zeros(rows, stage.spec.vocab_size, dtype=dtype, device=stage.device)
                argmax(logits)
                sample(logits, one, one.int(), one, one, one.double() / 2)
    torch.cuda.synchronize(stage.device)


@torch.inference_mode()
def _run(stage: Stage, parts: _Parts, *, start: int, count: int, num_decodes: int = 0) -> None:
    """One row of slot 0, whose page table is all page 0: what it computes means nothing, and is overwritten.

    num_decodes: rows beside it that decode, of the slots after.
    """
    decoding = [[slot, start, 1, 1] for slot in range(1, 1 + num_decodes)]
    rows = Rows.of(np.array([*decoding, [0, start, count, 1]], dtype=np.int32))
    mirror = parts.mirror
    for slot in rows.slots:
        mirror.tokens[slot], mirror.known[slot] = np.zeros(start + count, dtype=np.int32), start + count
    hidden = None
    if stage.model.embedding is None:
        hidden = torch.randn(rows.num_tokens, stage.spec.hidden, dtype=stage.dtype, device=stage.device)
    parts.eager.run(-1, rows, hidden)
    torch.cuda.synchronize(stage.device)
    for slot in rows.slots:
        mirror.tokens[slot], mirror.known[slot] = None, 0
