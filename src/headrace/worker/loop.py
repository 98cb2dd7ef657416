"""A worker's one loop: join the engine, be what it says, execute its plans in order."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from headrace.config import EngineConfig
from headrace.step import (
    Allocate,
    Join,
    Loaded,
    LoadProgress,
    Prepared,
    Start,
    StepPlan,
    Stop,
    ToWorkerMessage,
    WorkerMessage,
    WorkerStats,
)
from headrace.telemetry.trace import Trace
from headrace.worker.cache import KVCache
from headrace.worker.runner import Runner
from headrace.worker.stage import Stage, bring_up

STATS_PERIOD_S = 0.5
PROGRESS_PERIOD_S = 0.1

Message = TypeVar("Message", Start, Allocate)


class Worker:
    """One rank. `run` returns when the engine says stop, or after `stop` was called."""

    def __init__(self, socket: zmq.Socket[bytes], rank: int, pid: int) -> None:
        self._socket, self._rank, self._pid = socket, rank, pid
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToWorkerMessage).decode
        self._stopped = False
        self._next_stats_s = 0.0
        self._next_progress_s = 0.0
        self._told_steps = 0

    def stop(self) -> None:
        """Make `run` return soon; safe in a signal handler."""
        self._stopped = True

    def run(self) -> None:
        """Join, load, execute."""
        self._send(Join(self._rank, self._pid))
        start = self._expect(Start)
        if start is None:
            return
        config = msgspec.msgpack.decode(start.config, type=EngineConfig)
        stage = bring_up(config, self._rank, start.store, self._progress)
        self._send(Loaded(self._rank, stage.weight_bytes, stage.page_bytes, stage.kv_memory, stage.load_s))
        allocate = self._expect(Allocate)
        if allocate is None:
            return
        runner, kv_bytes = make_runner(stage, config, allocate)
        self._send(Prepared(self._rank, kv_bytes))
        self._execute(runner)

    def _execute(self, runner: Runner) -> None:
        while not self._stopped:
            # With plans in hand never wait for more, but take what is there: its receives are posted that much sooner.
            message = self._receive(0 if runner.holds_plans else 1000)
            if isinstance(message, StepPlan):
                runner.accept(message)
                continue
            if isinstance(message, Stop):
                return
            if runner.holds_plans:
                result = runner.execute()
                if result is not None:
                    self._send(result)
            self._tell_stats(runner)

    def _expect(self, kind: type[Message]) -> Message | None:
        """The next message, which must be of that kind; None on a stop."""
        while not self._stopped:
            message = self._receive(1000)
            if isinstance(message, Stop):
                return None
            if message is not None:
                assert isinstance(message, kind), f"{type(message).__name__} where {kind.__name__} was due"
                return message
        return None

    def _receive(self, timeout_ms: int) -> Start | Allocate | StepPlan | Stop | None:
        if not self._socket.poll(timeout_ms):
            return None
        return self._decode(self._socket.recv())

    def _send(self, message: WorkerMessage) -> None:
        self._socket.send(self._encode(message))

    def _progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now >= self._next_progress_s:
            self._next_progress_s = now + PROGRESS_PERIOD_S
            self._send(LoadProgress(self._rank, done, total))

    def _tell_stats(self, runner: Runner) -> None:
        now = time.monotonic()
        if now < self._next_stats_s or runner.num_steps == self._told_steps:
            return
        self._next_stats_s, self._told_steps = now + STATS_PERIOD_S, runner.num_steps
        self._send(WorkerStats(self._rank, runner.num_steps, runner.num_tokens, runner.busy_s))


def make_runner(stage: Stage, config: EngineConfig, allocate: Allocate) -> tuple[Runner, int]:
    """The rank's runner with its KV cache, and the cache's bytes."""
    schedule, mesh = config.schedule, stage.mesh
    cache = KVCache(
        stage.spec,
        mesh.layers_of(stage.index),
        allocate.num_pages,
        schedule.page_size,
        mesh.tp,
        stage.dtype,
        stage.device,
    )
    trace = Trace(Path(config.run.trace), stage.rank, stage.index) if config.run.trace else None
    runner = Runner(
        spec=stage.spec,
        mesh=mesh,
        rank=stage.rank,
        model=stage.model,
        comm=stage.comm,
        cache=cache,
        max_running=schedule.max_running,
        max_len=allocate.max_len,
        page_size=schedule.page_size,
        dtype=stage.dtype,
        device=stage.device,
        trace=trace,
    )
    return runner, cache.num_bytes
