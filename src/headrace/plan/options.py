"""What to plan: the flags of `headrace plan`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from headrace.errors import UserError
from headrace.plan.config import RoutingName

Objective = Literal["decode", "prefill", "balanced"]
Emit = Literal["headrace", "systemd", "vllm", "sglang"]
KvDtype = Literal["auto", "bfloat16", "float32", "fp8"]
KV_BYTES: dict[str, int] = {"bfloat16": 2, "float32": 4, "fp8": 1}


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """What there is to run on."""

    gpus: int | None = None
    """GPUs in all; by default those of the file or of this machine, else what --pp and --tp make, else one."""
    gpu: str | None = None
    """What they are, by its slug: rtx-pro-6000, h200, ...; by default this machine's."""
    hardware: str | None = None
    """File that describes the machine, unlike GPUs included."""
    links: str | None = None
    """What joins the GPUs of a host, by its slug; by default what they come with; none prices no communication."""
    hosts: int | None = None
    """Hosts, with as many of the GPUs each; by default what the file says, else one."""
    network: str | None = None
    """What joins hosts, by its slug: 100gbe-tcp, 400gbe, ..."""

    def __post_init__(self) -> None:
        for flag, value in (("--gpus", self.gpus), ("--hosts", self.hosts)):
            if value is not None and value < 1:
                raise UserError(f"{flag} {value}: must be at least 1")
        if self.gpu is not None and self.hardware is not None:
            raise UserError("--gpu and --hardware: give one of them")


@dataclass(frozen=True, kw_only=True)
class DemandConfig:
    """What is asked of it."""

    concurrency: tuple[int, ...] = (1, 8, 32, 128)
    """Numbers of requests that decode at once; stages are levelled for the middle one."""
    input: int = 1000
    """Tokens of a prompt."""
    output: int = 500
    """Tokens to generate for each."""
    max_len: int | None = None
    """Longest request that must fit in the KV cache, in tokens; by default a prompt and its output."""
    objective: Objective = "decode"
    """What counts: tokens generated, prompt tokens computed, or requests answered, which takes both."""
    routing: RoutingName = "uniform"
    """How tokens choose experts; skewed is a power law of popularity."""
    kv_dtype: KvDtype = "auto"
    """Type of the KV cache; auto is the activations'. fp8 is priced for other engines, headrace does not have it."""
    count_unused: bool = False
    """Count next-token (MTP) layers and the vision part, which headrace leaves out and other engines load."""
    chunk: int | None = None
    """Most tokens of a step; by default what serve takes."""
    max_running: int = 256
    """Most requests that hold KV pages at once."""

    def __post_init__(self) -> None:
        if not self.concurrency or min(self.concurrency) < 1:
            raise UserError(f"--concurrency {','.join(map(str, self.concurrency))}: each must be at least 1")
        for flag, value in (
            ("--input", self.input),
            ("--output", self.output),
            ("--chunk", self.chunk),
            ("--max-running", self.max_running),
        ):
            if value is not None and value < 1:
                raise UserError(f"{flag} {value}: must be at least 1")
        if self.max_len is not None and self.max_len < 2:
            raise UserError(f"--max-len {self.max_len}: must be at least 2")

    @property
    def target(self) -> int:
        """The number of requests that stages are levelled for."""
        return sorted(self.concurrency)[len(self.concurrency) // 2]


@dataclass(frozen=True, kw_only=True)
class FixedConfig:
    """What of the layout is given; the rest is searched."""

    pp: int | None = None
    """Pipeline stages; by default any number."""
    tp: int | None = None
    """Tensor-parallel ranks a stage; by default any number."""
    ep: int | None = None
    """Ranks of a stage over which whole experts are spread; by default any number."""
    split: tuple[int, ...] | None = None
    """Layers of each stage; by default the fastest that fit."""

    def __post_init__(self) -> None:
        for flag, value in (("--pp", self.pp), ("--tp", self.tp), ("--ep", self.ep)):
            if value is not None and value < 1:
                raise UserError(f"{flag} {value}: must be at least 1")


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """`headrace plan`."""

    model: str | None = None
    """A config.json, a folder, a .gguf file or a hub id, whose config is enough; none is the embedded default."""
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    demand: DemandConfig = field(default_factory=DemandConfig)
    fixed: FixedConfig = field(default_factory=FixedConfig)
    explain: str | None = None
    """Layout to take apart: pp8, pp4ep2, ...; best is the first one."""
    emit: Emit | None = None
    """Print the command, or the systemd unit, that runs the best layout: headrace's, or another engine's."""
    plot: str | None = None
    """File for a picture, .png or .svg: throughput by concurrency, and the memory of each stage."""
    history: bool = False
    """Print what earlier starts of headrace serve were predicted to take and took."""
    json: bool = False
    """Print one JSON object on standard output instead of tables."""
