"""The configuration tree: frozen, complete, torch-free; command-line flags and child processes are made from it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from headrace.errors import UserError

DeviceName = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["auto", "float32", "bfloat16"]
AttentionName = Literal["auto", "torch", "triton", "flashinfer"]
PolicyName = Literal["fcfs", "priority"]


@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """How many ways the model is split. `ep > 1` alone implies `tp = ep`."""

    pp: int = 1
    """Pipeline stages."""
    tp: int = 1
    """Tensor-parallel ranks a stage."""
    ep: int = 1
    """Ranks of a stage over which whole experts are spread; alone it implies as many tensor-parallel ranks."""
    split: tuple[int, ...] | None = None
    """Layers of each stage, first to last; by default the split that levels the stages' time."""
    layout: str | None = None
    """All of it by its name: pp4, pp4ep2, ...; auto is what headrace plan puts first on this machine."""

    def __post_init__(self) -> None:
        if self.layout is not None:
            self._take_name(self.layout)
        for flag, value in (("--pp", self.pp), ("--tp", self.tp), ("--ep", self.ep)):
            if value < 1:
                raise UserError(f"{flag} {value}: must be at least 1")
        if self.ep > 1 and self.tp == 1:
            object.__setattr__(self, "tp", self.ep)
        if self.tp % self.ep:
            raise UserError(f"--ep {self.ep}: must divide --tp {self.tp}")
        if self.split is not None:
            if len(self.split) != self.pp:
                raise UserError(f"--split names {len(self.split)} stages, --pp says {self.pp}")
            if min(self.split) < 1:
                raise UserError(f"--split {','.join(map(str, self.split))}: every stage needs at least one layer")

    def _take_name(self, name: str) -> None:
        """Degrees from a name; auto stays, for who knows the machine."""
        if (self.pp, self.tp, self.ep) != (1, 1, 1) or (name == "auto" and self.split is not None):
            raise UserError(f"--layout {name}: stands for --pp, --tp, --ep and, if auto, --split; leave them out")
        if name == "auto":
            return
        found = re.fullmatch(r"(?:pp(\d+))?(?:tp(\d+))?(?:ep(\d+))?", name.replace("×", ""))
        if found is None or not any(found.groups()):
            raise UserError(f"--layout {name}: write auto, or a name like pp4, tp2, pp4ep2")
        for field_name, degree in zip(("pp", "tp", "ep"), found.groups(), strict=True):
            object.__setattr__(self, field_name, int(degree or 1))
        object.__setattr__(self, "layout", None)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, in which type, on which device."""

    model: str | None = None
    """A folder, a .gguf file or a hub id; None is the embedded default."""
    device: DeviceName = "auto"
    """Where the ranks run, one a device; auto takes GPUs where they are."""
    dtype: DtypeName = "auto"
    """Type of weights and activations; auto is bfloat16 on a GPU and on a CPU with AMX, float32 on others."""
    max_len: int | None = None
    """Longest request in tokens, prompt and output together; by default what the model and the KV cache allow."""
    seed: int = 0
    """Seed from which requests that bring none are given theirs."""
    attention: AttentionName = "auto"
    """Which attention kernels; auto is triton on a GPU and torch on a CPU."""
    graphs: bool = True
    """Whether decode steps on a GPU are replayed as CUDA graphs."""
    weights: Literal["checkpoint", "random"] = "checkpoint"
    """Where weights come from; random makes them on the device, to measure a layout with nothing but a config.json."""
    routing: Literal["model", "uniform"] = "model"
    """How tokens choose experts; uniform draws them afresh for every token and layer, for measuring random weights."""

    def __post_init__(self) -> None:
        if self.max_len is not None and self.max_len < 2:
            raise UserError(f"--max-len {self.max_len}: must be at least 2")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """What one step may hold and where the KV cache ends."""

    max_running: int = 256
    """Most requests that hold KV pages at once."""
    chunk: int | None = None
    """Most tokens one step computes; by default 512 on a CPU and 8192 on a GPU."""
    page_size: int = 16
    """Tokens of a KV page."""
    kv_memory: int | None = None
    """Bytes of KV cache on each rank; by default from the memory that is free."""
    run_ahead: int | None = None
    """Plans issued beyond those live on the stages, before their inputs are sampled; 2 on a GPU and 0 on a CPU."""
    balance: Literal["auto", "level"] = "auto"
    """Decode rows of each microbatch; level is the same for all, auto lets them differ where stages' bytes say so."""
    prefix_cache: bool = True
    """Whether a prompt takes over KV pages that hold what it begins with, whoever computed them."""
    policy: PolicyName = "fcfs"
    """Who goes first and gives way last: who came first, or whose priority is lowest, among equals who came first."""
    max_waiting: int | None = None
    """Most requests that wait for a place; what comes beyond them is refused. By default any number waits."""

    def __post_init__(self) -> None:
        for flag, value in (
            ("--max-running", self.max_running),
            ("--chunk", self.chunk),
            ("--page-size", self.page_size),
            ("--kv-memory", self.kv_memory),
        ):
            if value is not None and value < 1:
                raise UserError(f"{flag} {value}: must be at least 1")
        if self.max_waiting is not None and self.max_waiting < 0:
            raise UserError(f"--max-waiting {self.max_waiting}: must be at least 0")
        if self.run_ahead is not None and not 0 <= self.run_ahead <= 16:
            raise UserError(f"--run-ahead {self.run_ahead}: must be between 0 and 16")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How the processes of one engine talk and what they record."""

    transport: Literal["ipc", "tcp"] = "ipc"
    """How engine and workers are joined: sockets in a private directory, or encrypted TCP."""
    timeout_s: float = 600.0
    """Deadline of every wait between ranks, in seconds: the longest that one step may compute."""
    stall_timeout_s: float = 60.0
    """With work in hand and nobody at it, nothing done for so many seconds ends the service."""
    edges: Literal["auto", "nccl"] = "auto"
    """How stages on GPUs are joined; auto writes into the next GPU's memory where it can be reached, else uses NCCL."""
    all_reduce: Literal["auto", "nccl"] = "auto"
    """How a stage's GPUs add up small results; auto writes into each other's memory where all can, else uses NCCL."""
    trace: str | None = None
    """File for a trace of every stage's steps, written at the end, which Perfetto and Chrome open."""

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise UserError(f"--timeout {self.timeout_s:g}: must be above 0")
        if not self.stall_timeout_s > 0:
            raise UserError(f"--stall-timeout {self.stall_timeout_s:g}: must be above 0")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything the engine and its workers need: no HTTP in it."""

    model: ModelConfig = field(default_factory=ModelConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    run: RunConfig = field(default_factory=RunConfig)


@dataclass(frozen=True, kw_only=True)
class HttpConfig:
    """Where and as what the model is served."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every network of the machine."""
    port: int = 8000
    """Port to listen on; 0 picks a free one."""
    served_name: str | None = None
    """Name of the model in requests; by default its folder's, file's or hub's name."""
    api_key: str | None = None
    """Bearer token that every /v1 request must carry."""
    drain_timeout_s: float = 30.0
    """How long requests in flight may take to end after a stop, in seconds."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UserError(f"--port {self.port}: must be between 0 and 65535")
        if not self.drain_timeout_s >= 0:
            raise UserError(f"--drain-timeout {self.drain_timeout_s:g}: must not be below 0")


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """`headrace serve`."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    json_ready: bool = False
    """Print one JSON line on standard output when ready, and nothing else there."""
    diagnostics: str | None = None
    """Folder for what is written down after a failure; by default in the state directory of the service or user."""
