"""A worker's one loop: join the engine, be what it says, execute its plans in order."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import zmq

from headrace.config import EngineConfig
from headrace.errors import UserError
from headrace.kernels.jit import on_compile
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
from headrace.supervise.beat import Pulse
from headrace.worker.load_log import LoadLog
from headrace.worker.prepare import kv_memory, prepare
from headrace.worker.profile import Profile
from headrace.worker.runner import Runner
from headrace.worker.stage import bring_up

log = logging.getLogger(__name__)

STATS_PERIOD_S = 0.5
IDLE_MS = 1000
QUIET_MS = 5
"""With nothing to do for so long a rank tells its counters: its last word before a silence is true. Not at once, for
between the short steps of a few requests a message for each would cost more than it says."""
PROGRESS_PERIOD_S = 0.1

Message = TypeVar("Message", Start, Allocate)


@contextmanager
def enough_memory(otherwise: str) -> Iterator[None]:
    """What takes a GPU's memory as the user's settings have it. Raises UserError where that is more than there is."""
    try:
        yield
    except torch.OutOfMemoryError:
        device = torch.cuda.current_device()
        free, total = torch.cuda.mem_get_info(device)
        raise UserError(f"GPU {device}: out of memory, {free} of {total} bytes are free: {otherwise}") from None


class Worker:
    """One rank. `run` returns when the engine says stop, or after `stop` was called."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        rank: int,
        pid: int,
        trace_folder: Path,
        pulse: Pulse,
        *,
        on_terminal: bool = False,
    ) -> None:
        self._socket, self._rank, self._pid, self._trace_folder = socket, rank, pid, trace_folder
        self._pulse = pulse
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(ToWorkerMessage).decode
        self._stopped = False
        self._next_stats_s = 0.0
        self._next_progress_s = 0.0
        # On a terminal the supervisor has one line for all ranks, which must stay whole.
        self._load_log = LoadLog(log.debug if on_terminal else log.info)
        self._told: WorkerStats | None = None

    def stop(self) -> None:
        """Make `run` return soon; safe in a signal handler."""
        self._stopped = True

    def run(self) -> None:
        """Join, load, execute."""
        self._pulse.say("")
        self._send(Join(self._rank, self._pid))
        start = self._expect(Start)
        if start is None:
            return
        config = msgspec.msgpack.decode(start.config, type=EngineConfig)
        self._pulse.say("connecting")
        with enough_memory("the weights of its layers do not fit: more --pp or --tp take fewer on each"):
            stage = bring_up(config, self._rank, start.store, self._progress)
        self._pulse.say("measuring what a step takes")
        with enough_memory("a step does not fit beside the weights: a smaller --chunk or --max-running takes less"):
            kv = kv_memory(stage)
        self._send(Loaded(self._rank, stage.weight_bytes, stage.page_bytes, kv, stage.load_s))
        self._pulse.say("")
        allocate = self._expect(Allocate)
        if allocate is None:
            return
        self._pulse.say("preparing to run plans")
        with enough_memory("the KV cache does not fit: a smaller --kv-memory takes less"):
            prepared = prepare(stage, allocate.num_pages, allocate.max_len, self._trace_folder)
        if stage.config.model.attention != "torch":
            on_compile(lambda name: log.warning("%s was made while requests wait: no step before was like it", name))
        runner = prepared.runner
        self._send(Prepared(self._rank, prepared.kv_bytes, runner.backend, prepared.graph_bytes))
        self._pulse.follow(runner.work)
        self._execute(runner)

    def _execute(self, runner: Runner) -> None:
        profile = Profile.asked_for(self._rank)
        ending = False
        while not self._stopped and not (ending and not runner.holds_plans and not runner.is_busy):
            message = self._receive(0 if ending else self._patience_ms(runner))
            if isinstance(message, StepPlan):
                runner.accept(message)
                continue
            if isinstance(message, Stop):
                # What all ranks were sent all ranks compute: nobody is left waiting for a peer that has gone.
                ending = True
            quiet = not (runner.holds_plans or runner.is_busy)
            if runner.holds_plans:
                if profile is not None:
                    profile.step(runner.next_tokens)
                runner.execute()
            for result in runner.results():
                self._send(result)
            self._tell_stats(runner, at_once=quiet)

    def _patience_ms(self, runner: Runner) -> int:
        """How long to wait for a message."""
        # With plans in hand never wait for more, but take what is there: its receives are posted that much sooner.
        # With work on the device look again and again: its result is what the engine waits for.
        if runner.holds_plans or runner.is_busy:
            return 0
        return IDLE_MS if runner.settle() and runner.stats() == self._told else QUIET_MS

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
        self._pulse.say("loading weights" if done < total else "preparing weights")
        self._load_log.progress(done, total)
        now = time.monotonic()
        if done >= total or now >= self._next_progress_s:
            self._next_progress_s = now + PROGRESS_PERIOD_S
            self._send(LoadProgress(self._rank, done, total))

    def _tell_stats(self, runner: Runner, *, at_once: bool) -> None:
        now = time.monotonic()
        if not at_once and now < self._next_stats_s:
            return
        stats = runner.stats()
        if stats != self._told:
            self._next_stats_s, self._told = now + STATS_PERIOD_S, stats
            self._send(stats)
