"""What to simulate: the flags of `headrace simulate`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from headrace.config import LayoutConfig
from headrace.errors import UserError

RoutingName = Literal["uniform", "skewed"]
ARRIVALS = ("burst", "closed", "poisson", "gamma")
DEFAULT_CONCURRENCY = 32
DEFAULT_RANDOM_REQUESTS = 200


@dataclass(frozen=True, kw_only=True)
class MachineConfig:
    """The hardware, by the names of the catalogue, or as it was measured."""

    gpu: str | None = None
    """What every rank runs on, by its slug: rtx-pro-6000, h200, ... (a wrong one lists the nearest)."""
    hardware: str | None = None
    """File of headrace probe, instead of a GPU's name: the GPUs of that machine and what joins them."""
    links: str | None = None
    """What joins the GPUs of a host, by its slug; by default what they come with; none prices no communication."""
    hosts: int = 1
    """Hosts, with as many of the layout's GPUs each."""
    network: str | None = None
    """What joins hosts, by its slug: 100gbe-tcp, 400gbe, ..."""

    def __post_init__(self) -> None:
        if (self.gpu is None) == (self.hardware is None):
            raise UserError("--gpu and --hardware: give one of them")
        if self.hosts < 1:
            raise UserError(f"--hosts {self.hosts}: must be at least 1")


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    """Who asks what and when."""

    arrivals: str | None = None
    """How requests come: burst, closed, poisson, gamma, or a file with one a line; by default what the rest says."""
    requests: int | None = None
    """Requests in all; by default four a client, or 200 at a rate."""
    rate: float | None = None
    """Requests a second, on average."""
    concurrency: int | None = None
    """Clients, each of which asks again when it is answered; 32 where nothing says how requests come."""
    burstiness: float = 0.5
    """Shape of gamma arrivals: 1 is Poisson, less comes in bursts."""
    input: int = 1000
    """Tokens of a prompt."""
    output: int = 500
    """Tokens to generate for each."""
    routing: RoutingName = "uniform"
    """How tokens choose experts: all alike, or by a power law."""
    seed: int = 0
    """Of random arrivals."""

    def __post_init__(self) -> None:
        for flag, value in (
            ("--requests", self.requests),
            ("--concurrency", self.concurrency),
            ("--input", self.input),
            ("--output", self.output),
        ):
            if value is not None and value < 1:
                raise UserError(f"{flag} {value}: must be at least 1")
        for flag, number in (("--rate", self.rate), ("--burstiness", self.burstiness)):
            if number is not None and not 0 < number < math.inf:
                raise UserError(f"{flag} {number:g}: must be above 0")
        if self.seed < 0:
            raise UserError(f"--seed {self.seed}: must be at least 0")
        if self.rate is not None and self.concurrency is not None:
            raise UserError("--rate and --concurrency: give one of them")
        if (self.rate is not None) != (self.kind in ("poisson", "gamma")):
            given = f"--arrivals {self.arrivals}: "
            raise UserError(given + ("takes no --rate" if self.rate is not None else "needs a --rate"))
        if self.concurrency is not None and self.kind != "closed":
            raise UserError(f"--arrivals {self.arrivals}: takes no --concurrency")

    @property
    def kind(self) -> str:
        """One of `ARRIVALS`, or "file"."""
        if self.arrivals is not None:
            return self.arrivals if self.arrivals in ARRIVALS else "file"
        if self.rate is not None:
            return "poisson"
        return "burst" if self.requests is not None and self.concurrency is None else "closed"

    @property
    def num_clients(self) -> int:
        """Of a closed loop."""
        return self.concurrency or DEFAULT_CONCURRENCY

    @property
    def num_requests(self) -> int:
        """Requests in all, of anything but a file."""
        if self.requests is not None:
            return self.requests
        return DEFAULT_RANDOM_REQUESTS if self.rate is not None else 4 * self.num_clients


@dataclass(frozen=True, kw_only=True)
class StepsConfig:
    """What one step may hold, as `headrace serve` has it on GPUs."""

    max_running: int = 256
    """Most requests that hold KV pages at once."""
    chunk: int = 8192
    """Most tokens one step computes."""
    page_size: int = 16
    """Tokens of a KV page."""
    kv_memory: int | None = None
    """Bytes of KV cache on each rank; by default what weights and steps leave of the GPU's memory."""
    run_ahead: int = 2
    """Plans issued beyond those live on the stages, before their inputs are sampled."""

    def __post_init__(self) -> None:
        for flag, value in (
            ("--max-running", self.max_running),
            ("--chunk", self.chunk),
            ("--page-size", self.page_size),
            ("--kv-memory", self.kv_memory),
        ):
            if value is not None and value < 1:
                raise UserError(f"{flag} {value}: must be at least 1")
        if not 0 <= self.run_ahead <= 16:
            raise UserError(f"--run-ahead {self.run_ahead}: must be between 0 and 16")


@dataclass(frozen=True, kw_only=True)
class SimulateConfig:
    """`headrace simulate`."""

    model: str
    """A config.json, a folder that holds one, a .gguf file or a hub id; no weights are needed."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    machine: MachineConfig
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    steps: StepsConfig = field(default_factory=StepsConfig)
    trace: str | None = None
    """File for a trace that Perfetto opens (ui.perfetto.dev): one track a stage, one slice a microbatch."""
    json: bool = False
    """Print one JSON object on standard output instead of tables."""
