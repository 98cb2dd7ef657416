"""The engine's side of the workers: brings them up, sends every plan to all, hears the last stage's results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import zmq

from headrace.config import EngineConfig
from headrace.errors import Fault, PeerLost, UserError
from headrace.mesh import Mesh
from headrace.step import (
    Allocate,
    Join,
    Loaded,
    LoadProgress,
    Prepared,
    StageStats,
    Start,
    StepPlan,
    StepResult,
    Stop,
    WorkerMessage,
    WorkerStats,
)

JOIN_TIMEOUT_S = 180.0
"""A worker's first sign of life: starting Python and importing torch from a cold disk."""
COMPILE_TIMEOUT_S = 300.0
"""More for a GPU's rank, which may compile kernels that nobody has needed on this machine before."""


@dataclass(frozen=True)
class Capacity:
    """The KV cache that all stages can hold."""

    num_pages: int
    page_size: int
    stage_tokens: tuple[int, ...]
    """What each stage alone could hold, in tokens; the least of them is everyone's."""

    @property
    def num_tokens(self) -> int:
        """Token slots."""
        return self.num_pages * self.page_size


@dataclass
class _Ranks:
    joined: set[int] = field(default_factory=set)
    progress: dict[int, tuple[int, int]] = field(default_factory=dict)
    loaded: dict[int, Loaded] = field(default_factory=dict)
    prepared: dict[int, Prepared] = field(default_factory=dict)
    stats: dict[int, WorkerStats] = field(default_factory=dict)
    told_at_s: dict[int, float] = field(default_factory=dict)
    """Active time up to which the rank's stats go."""


class Executor:
    """All workers of one engine, behind one socket."""

    def __init__(self, socket: zmq.Socket[bytes], config: EngineConfig, mesh: Mesh, store: str) -> None:
        self.socket = socket
        self._config, self._mesh, self._store = config, mesh, store
        self._addresses = [f"rank-{rank}".encode() for rank in range(mesh.num_ranks)]
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(WorkerMessage).decode
        self._ranks = _Ranks()
        self._leaders = [mesh.ranks_of(stage)[0] for stage in range(mesh.pp)]
        self._plan_wait_s = [0.0] * mesh.pp
        self._active_s = 0.0
        self._active_since_s: float | None = None
        """When plans came to be in flight; None while there are none."""
        self.num_sent = 0
        """Plans."""
        self.num_done = 0
        """Results."""

    # --- bringing up ------------------------------------------------------------------------------------------------

    def load(self, on_progress: Callable[[int, int], None], idle: Callable[[], None]) -> dict[int, Loaded]:
        """Wait for every rank to join and load. `on_progress` gets bytes done and in all; `idle` is called often."""
        ranks, started = self._ranks, time.monotonic()
        while len(ranks.loaded) < self._mesh.num_ranks:
            idle()
            missing = sorted(set(range(self._mesh.num_ranks)) - ranks.joined)
            if missing and time.monotonic() - started > JOIN_TIMEOUT_S:
                raise PeerLost(f"rank {missing[0]} did not start within {JOIN_TIMEOUT_S:g} s")
            if self.socket.poll(100):
                for _ in self.results():
                    raise Fault("a result came before any plan")
                if ranks.progress:
                    done, total = (sum(column) for column in zip(*ranks.progress.values(), strict=True))
                    # All of it is loaded only when no rank is left that has yet to say how much it has.
                    if done < total or len(ranks.progress) == self._mesh.num_ranks:
                        on_progress(done, total)
        return ranks.loaded

    def allocate(self, max_len: int, num_pages: int, idle: Callable[[], None]) -> dict[int, Prepared]:
        """Have every rank make its KV cache; returns when all can run plans. `idle` is called often."""
        self._to_all(Allocate(num_pages=num_pages, max_len=max_len))
        deadline = time.monotonic() + self._config.run.timeout_s
        if self._config.model.device == "cuda":
            deadline += COMPILE_TIMEOUT_S
        while len(self._ranks.prepared) < self._mesh.num_ranks:
            idle()
            if time.monotonic() > deadline:
                missing = sorted(set(range(self._mesh.num_ranks)) - self._ranks.prepared.keys())
                raise PeerLost(f"rank {missing[0]} did not prepare its KV cache in time (--timeout)")
            if self.socket.poll(100):
                for _ in self.results():
                    raise Fault("a result came before any plan")
        return self._ranks.prepared

    def capacity(self, most_tokens: int) -> Capacity:
        """Pages that every stage can hold, no more than `most_tokens` can fill. Raises UserError if that is none."""
        page_size = self._config.schedule.page_size
        pages_of = [
            min(self._ranks.loaded[rank].kv_memory // self._ranks.loaded[rank].kv_page_bytes for rank in ranks)
            for ranks in (self._mesh.ranks_of(stage) for stage in range(self._mesh.pp))
        ]
        least = min(pages_of)
        if least < 1 or least * page_size < 2:
            stage = pages_of.index(least)
            loaded = self._ranks.loaded[self._mesh.ranks_of(stage)[0]]
            if self._config.schedule.kv_memory is None:
                raise UserError(
                    f"stage {stage} has {loaded.kv_memory} bytes left for the KV cache, a page takes "
                    f"{loaded.kv_page_bytes}: more --pp or --tp, or a smaller --chunk or --max-running"
                )
            raise UserError(
                f"--kv-memory {loaded.kv_memory}: stage {stage} needs {loaded.kv_page_bytes} bytes for each page of "
                f"{page_size} tokens, and at least 2 tokens"
            )
        num_pages = min(least, -(-most_tokens // page_size))
        return Capacity(num_pages, page_size, tuple(pages * page_size for pages in pages_of))

    # --- running ----------------------------------------------------------------------------------------------------

    def send(self, plan: StepPlan) -> None:
        """Every rank gets the same bytes."""
        if self._active_since_s is None:
            self._active_since_s = time.monotonic()
        self.num_sent += 1
        self._to_all(plan)

    def results(self) -> Iterator[StepResult]:
        """The results that have come; everything else that workers say is taken in on the way."""
        while True:
            try:
                _, data = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = self._decode(data)
            if isinstance(message, StepResult):
                self.num_done += 1
                if self.num_done == self.num_sent:
                    self._active_s, self._active_since_s = self.active_s, None
                yield message
            else:
                self._take(message)

    def _take(self, message: Join | LoadProgress | Loaded | Prepared | WorkerStats) -> None:
        ranks = self._ranks
        if isinstance(message, Join):
            ranks.joined.add(message.rank)
            config = msgspec.msgpack.encode(self._config)
            self.socket.send_multipart([self._addresses[message.rank], self._encode(Start(config, self._store))])
        elif isinstance(message, LoadProgress):
            ranks.progress[message.rank] = (message.done_bytes, message.total_bytes)
        elif isinstance(message, Loaded):
            ranks.loaded[message.rank] = message
        elif isinstance(message, Prepared):
            ranks.prepared[message.rank] = message
        else:
            ranks.stats[message.rank], ranks.told_at_s[message.rank] = message, self.active_s - message.open_s

    def stop(self) -> None:
        """Let every worker end."""
        self._to_all(Stop())

    @property
    def active_s(self) -> float:
        """Time during which plans were in flight, since start."""
        since = self._active_since_s
        return self._active_s if since is None else self._active_s + time.monotonic() - since

    @property
    def is_settled(self) -> bool:
        """Whether no plan is in flight and every stage has told all of its steps."""
        return self.num_done == self.num_sent and all(self._told_all(leader) for leader in self._leaders)

    def _told_all(self, rank: int) -> bool:
        stats = self._ranks.stats.get(rank)
        return (stats.num_steps if stats else 0) == self.num_sent

    def stage_stats(self) -> list[StageStats]:
        """The latest counters of each stage, as its first rank tells them."""
        found = []
        for stage, leader in enumerate(self._leaders):
            loaded, prepared = self._ranks.loaded.get(leader), self._ranks.prepared.get(leader)
            layers = self._mesh.layers_of(stage)
            stats = self._ranks.stats.get(leader) or WorkerStats(leader, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
            plan_wait_s = self._plan_wait(stage, stats)
            found.append(
                StageStats(
                    stage=stage,
                    first_layer=layers.start,
                    num_layers=len(layers),
                    weight_bytes=loaded.weight_bytes if loaded else 0,
                    kv_bytes=prepared.kv_bytes if prepared else 0,
                    num_steps=stats.num_steps,
                    num_tokens=stats.num_tokens,
                    busy_s=stats.busy_s,
                    activations_wait_s=stats.activations_wait_s,
                    tokens_wait_s=stats.tokens_wait_s,
                    plan_wait_s=plan_wait_s,
                    communication_s=stats.communication_s,
                    active_s=stats.told_s + plan_wait_s,
                    edge_s=stats.edge_s,
                    backend=prepared.backend if prepared else "",
                    graph_bytes=prepared.graph_bytes if prepared else 0,
                )
            )
        return found

    def _plan_wait(self, stage: int, stats: WorkerStats) -> float:
        """What a stage does not account for of the time with plans in flight: it had none in hand.

        Up to now where it has told all of its steps, else up to its last word. Never less than before: words take
        their time on the way.
        """
        up_to = self.active_s if self._told_all(stats.rank) else self._ranks.told_at_s.get(stats.rank, 0.0)
        self._plan_wait_s[stage] = max(self._plan_wait_s[stage], up_to - stats.told_s)
        return self._plan_wait_s[stage]

    def _to_all(self, message: Allocate | StepPlan | Stop) -> None:
        data = self._encode(message)
        for address in self._addresses:
            self.socket.send_multipart([address, data])
