"""One rank of a layout, alone: its layers, heads and experts, the worker's own steps, and nobody to talk to.

So one GPU measures what each of eight computes. Sums give back what this rank has, activations and tokens come from
nowhere and go there: values mean nothing, times of everything but communication do. Where experts are spread this rank
has an average share of a step's tokens; a real step waits for the fullest rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from headrace.config import EngineConfig
from headrace.layers.axis import Axis
from headrace.mesh import Mesh, build_mesh
from headrace.plan.reserve import plans_in_window
from headrace.spec import ModelSpec
from headrace.step import Register, SamplerSpec, StepPlan, pack
from headrace.weights.source import read_spec, resolve
from headrace.worker.comm import Comm
from headrace.worker.prepare import prepare
from headrace.worker.stage import build_stage, take_gpu

Row = tuple[int, int, int, int]
"""Slot, start, count, samples."""


class Alone(Axis):
    """An axis on which nobody else answers."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """What is here."""
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """What is here."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """What is here, as often as there are places."""
        return torch.cat([x] * self.size, dim=-1)


@dataclass(frozen=True)
class Given:
    """A receive that was there from the start."""

    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        """At once."""
        return self.tensor

    def is_done(self) -> bool:
        """Always."""
        return True


class Nowhere:
    """An edge to nobody. Every plan is sent the front of the same block."""

    name = "nowhere"
    posts_ahead = True
    stream = None

    def __init__(self, block: torch.Tensor) -> None:
        self._block = block

    def send(self, plan_id: int, tensor: torch.Tensor, *, lent: bool = False) -> None:
        """Forget it."""

    def receive(self, plan_id: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Given:
        """As much of the block as is asked for."""
        assert self._block.dtype == dtype and shape[0] <= len(self._block)
        return Given(self._block[: shape[0]])


def alone(mesh: Mesh, rank: int, hidden: torch.Tensor, tokens: torch.Tensor) -> Comm:
    """A rank's connections, with nobody at the other end. hidden [chunk, D] and tokens [rows] are what comes in."""
    first, last = mesh.is_first(rank), mesh.is_last(rank)
    sent, fed = Nowhere(hidden), Nowhere(tokens)
    return Comm(
        Alone.at(mesh.tensor(rank), None, "tensor"),
        Alone.at(mesh.expert(rank), None, "expert"),
        Alone.at(mesh.expert_slice(rank), None, "slice"),
        previous=None if first else sent,
        next=None if last else sent,
        feedback_in=fed if first and not last else None,
        feedback_out=fed if last and not first else None,
    )


class LoneRank:
    """A rank that is ready. Belongs to one thread; holds the GPU until it is let go.

    config: every "auto" resolved, `max_len` given, random weights or a whole checkpoint. num_tokens: that the KV cache
    must hold.
    """

    def __init__(self, config: EngineConfig, rank: int, num_tokens: int) -> None:
        assert config.model.model is not None and config.model.max_len is not None
        assert config.schedule.chunk is not None and config.schedule.run_ahead is not None
        source = resolve(config.model.model, say=lambda _: None)
        self.spec: ModelSpec = read_spec(source)
        self.mesh, self.rank, self.config = build_mesh(config.layout, self.spec), rank, config
        device, dtype = torch.device(config.model.device), getattr(torch, config.model.dtype)
        if device.type == "cuda":
            device = torch.device("cuda", 0)
            take_gpu(device)
        most = max(config.schedule.chunk, config.schedule.max_running)
        hidden = torch.randn(most, self.spec.hidden, dtype=dtype, device=device)
        tokens = torch.randint(self.spec.vocab_size, (config.schedule.max_running,), device=device)
        comm = alone(self.mesh, rank, hidden, tokens)
        stage = build_stage(config, source, self.spec, self.mesh, rank, comm, device, lambda done, total: None)
        self.weight_bytes = stage.weight_bytes
        num_pages = self._pages(num_tokens) + config.schedule.max_running  # a slot's last page need not be full
        self._runner = prepare(stage, num_pages, config.model.max_len, Path()).runner
        self.backend = self._runner.backend
        self._window = plans_in_window(self.mesh.pp, config.schedule.run_ahead)
        self._issued = 0
        self._slots: list[int] = []
        """In use."""

    def decode(self, num_rows: int, prompt: int, warm: int, num_steps: int, repeats: int) -> list[float]:
        """Seconds a step of so many rows that decode after prompts, by repeat of `num_steps`; the first `warm` not."""
        assert prompt + warm + num_steps * repeats < (self.config.model.max_len or 0)
        assert self.config.schedule.chunk is not None
        each = max(1, self.config.schedule.chunk // prompt)
        free, self._slots = self._slots, list(range(num_rows))
        room = self._pages(prompt + warm + num_steps * repeats)
        for begin in range(0, num_rows, each):
            slots = self._slots[begin : begin + each]
            self._issue([(slot, 0, prompt, 1) for slot in slots], slots, prompt, room, free)
            free = []
        position = prompt
        times = []
        for count in [warm] + [num_steps] * repeats:
            self._drain()
            started = time.perf_counter()
            for _ in range(count):
                self._issue([(slot, position, 1, 1) for slot in self._slots])
                position += 1
            self._drain()
            times.append((time.perf_counter() - started) / count)
        return times[1:]

    def prefill(self, length: int, num_prompts: int, repeats: int) -> list[float]:
        """Seconds of a step that is one whole prompt, by repeat of `num_prompts`."""
        assert length <= (self.config.schedule.chunk or 0)
        times = []
        for count in [2] + [num_prompts] * repeats:
            self._drain()
            started = time.perf_counter()
            for _ in range(count):
                self._issue([(0, 0, length, 1)], [0], length, self._pages(length), self._slots)
                self._slots = [0]
            self._drain()
            times.append((time.perf_counter() - started) / count)
        return times[1:]

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.schedule.page_size)

    def _issue(
        self,
        rows: Sequence[Row],
        begins: Sequence[int] = (),
        tokens: int = 0,
        room: int = 0,
        free: Sequence[int] = (),
    ) -> None:
        """Give the rank a plan; wait while its window is full. begins: slots that begin, with room in pages."""
        pages = [number for slot in begins for i in range(room) for number in (slot, slot * room + i)]
        plan = StepPlan(
            plan_id=self._issued,
            rows=pack([number for row in rows for number in row]),
            free=list(free),
            register=[self._register(slot, tokens) for slot in begins],
            pages=pack(pages),
        )
        self._runner.accept(plan)
        self._runner.execute()
        self._issued += 1
        while self._in_flight() >= self._window:
            pass

    def _register(self, slot: int, count: int) -> Register:
        tokens = torch.randint(self.spec.vocab_size, (count,)).tolist()
        return Register(slot, pack(tokens), count, SamplerSpec(temperature=0.0))

    def _in_flight(self) -> int:
        for _ in self._runner.results():
            pass
        return self._issued - self._runner.stats().num_steps

    def _drain(self) -> None:
        while self._in_flight():
            pass
