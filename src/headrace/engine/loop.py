"""The engine's one loop: what clients ask goes to the scheduler, plans go to the workers, results go back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import zmq

from headrace.channel import Listener
from headrace.config import EngineConfig
from headrace.engine.executor import Capacity, Executor
from headrace.engine.requests import Intake, decode_step_s, warm_up
from headrace.errors import PeerLost, QueueFull, UserError
from headrace.mesh import build_mesh
from headrace.plan.curve import cost_curve
from headrace.plan.reads import decode_balance
from headrace.schedule import Scheduler, SchedulerConfig
from headrace.schedule.balance import Balance, Level
from headrace.schedule.order import POLICIES
from headrace.schedule.request import Event
from headrace.spec import ModelSpec
from headrace.step import (
    Abort,
    ClientMessage,
    EngineStatus,
    Hello,
    Output,
    Outputs,
    ResetPrefixCache,
    StepResult,
    Submit,
    WarmUp,
)
from headrace.supervise.beat import Work

log = logging.getLogger(__name__)

STATUS_PERIOD_S = 1.0
RESULT_TIMEOUT_FACTOR = 1.5
"""The wait for a plan's result, in the edges' deadline: theirs ends first, for it names the edge."""

Phase = Literal["starting", "loading", "warming", "ready", "stopping"]


@dataclass(frozen=True)
class Origin:
    """Whose request it is."""

    client: bytes
    request_id: str


class Engine:
    """One engine. `run` returns after `stop` was called (from a signal handler, say); it raises UserError or Fault."""

    def __init__(self, config: EngineConfig, spec: ModelSpec, directory: Path) -> None:
        self._config, self._spec = config, spec
        self._mesh = build_mesh(config.layout, spec)
        # Not terminated at the end: the process ends with it, and a terminate would wait for peers that are gone.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._listener = Listener(self._context, directory, config.run.transport)
        self._executor = Executor(self._listener.workers, config, self._mesh, f"file://{directory}/store")
        self._poller = zmq.Poller()
        self._poller.register(self._listener.clients, zmq.POLLIN)
        self._poller.register(self._executor.socket, zmq.POLLIN)
        self._intake = Intake(spec, config.model.seed)
        self._scheduler: Scheduler | None = None
        self._capacity: Capacity | None = None
        self._max_len = 0
        self._decode = msgspec.msgpack.Decoder(ClientMessage).decode
        self._encode = msgspec.msgpack.Encoder().encode
        self._origins: dict[str, Origin] = {}
        self._keys: dict[Origin, str] = {}
        self._num_submitted = 0
        self._listeners: set[bytes] = set()
        self._phase: Phase = "starting"
        self._detail = ""
        self._load_s = 0.0
        self._load_bytes = (0, 0)
        self._turns = -1
        self._warm_up = WarmUp()
        self._token_times_s: list[float] = []
        """Of the warm-up."""
        self._stopped = False
        self._next_status_s = 0.0
        self._host_s = 0.0
        self._settled_at = 0
        """Plans sent when a settled status was told last."""
        self._flight_since: float | None = None
        """When the oldest plan in flight was sent, or the last result came."""

    def stop(self) -> None:
        """Make `run` return soon; safe in a signal handler."""
        self._stopped = True

    def work(self) -> Work:
        """For the beats: that the loop turns, and how it gets on with what is queued. For any thread."""
        scheduler, done = self._scheduler, self._executor.num_done
        if scheduler is None:
            return Work("bringing up the ranks", done, turns=self._turns)
        doing = f"work for {scheduler.num_in_flight} plans in flight" if scheduler.has_work else ""
        return Work(doing, done, turns=self._turns)

    # --- life -------------------------------------------------------------------------------------------------------

    def run(self, on_progress: Callable[[int, int], None], on_ready: Callable[[EngineStatus], None]) -> None:
        """Bring the workers up, warm every stage, serve until stopped."""
        try:
            self._load(on_progress)
            if not self._stopped:
                self._warm()
            if not self._stopped:
                self._set_phase("ready")
                on_ready(self.status())
            while not self._stopped:
                self._turn()
        except _StoppedEarly:
            pass
        except BaseException:
            # Clients hear why from the supervisor, and should not hear before that it is stopping.
            self._executor.stop()
            raise
        self._set_phase("stopping")
        self._executor.stop()

    def _load(self, on_progress: Callable[[int, int], None]) -> None:
        started = time.monotonic()

        def progress(done: int, total: int) -> None:
            self._load_bytes = (done, total)
            if done < total:
                self._phase, self._detail = "loading", f"{done} of {total} bytes of weights"
            elif self._phase != "warming":
                self._set_phase("warming")  # ranks compile and measure before they say that they have loaded
            on_progress(done, total)

        def idle() -> None:
            if self._stopped:
                raise _StoppedEarly
            self._turns += 1
            self._hear_clients()
            self._tell_status()

        loaded = self._executor.load(progress, idle)
        self._load_s = max(one.load_s for one in loaded.values())
        schedule = self._config.schedule
        longest = self._config.model.max_len or self._spec.max_positions
        self._capacity = self._executor.capacity(schedule.max_running * (longest + schedule.page_size))
        self._max_len = min(longest, self._capacity.num_tokens)
        if self._max_len < longest:
            log.warning(
                "requests are limited to %d tokens: the KV cache holds no more (%s %d)",
                self._max_len,
                "--max-len asks for" if self._config.model.max_len else "the model has positions for",
                longest,
            )
        self._executor.allocate(self._max_len, self._capacity.num_pages, idle)
        assert schedule.chunk is not None
        self._scheduler = Scheduler(
            SchedulerConfig(
                num_stages=self._mesh.pp,
                max_running=schedule.max_running,
                chunk=schedule.chunk,
                page_size=schedule.page_size,
                num_pages=self._capacity.num_pages,
                max_len=self._max_len,
                run_ahead=schedule.run_ahead or 0,
                prefix_cache=schedule.prefix_cache,
                curve=cost_curve(self._spec, "cuda" if self._config.model.device == "cuda" else "cpu", schedule.chunk),
                policy=POLICIES[schedule.policy],
                max_waiting=schedule.max_waiting,
            ),
            self._balance(),
        )
        log.debug("loaded after %.2f s", time.monotonic() - started)

    def _balance(self) -> Balance:
        return Level() if self._config.schedule.balance == "level" else decode_balance(self._spec, self._mesh)

    def _warm(self) -> None:
        """Ready means that an inference passed every stage: the largest chunk, then a decode."""
        assert self._scheduler is not None and self._config.schedule.chunk is not None
        self._set_phase("warming")
        length = min(self._config.schedule.chunk, self._max_len - 1)
        began = time.monotonic()
        self._submit(Origin(b"", ""), warm_up(length))
        while self._scheduler.has_work and not self._stopped:
            self._turn()
        self._scheduler.reset_prefix_cache()
        self._scheduler.num_prefix_queries = 0
        times = self._token_times_s
        if len(times) > 1:
            self._warm_up = WarmUp(length, times[0] - began, decode_step_s(times))

    # --- one turn ---------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Wait for something to happen, take it in, and plan."""
        self._poller.poll(int(1000 * max(0.0, self._next_status_s - time.monotonic())) + 1)
        began = time.monotonic()
        self._turns += 1
        self._hear_clients()
        for result in self._executor.results():
            self._commit(result)
        self._plan()
        self._watch_flights()
        self._host_s += time.monotonic() - began
        self._tell_status()

    def _hear_clients(self) -> None:
        while True:
            try:
                client, data = self._listener.clients.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decode(data)
            except msgspec.MsgspecError as error:
                log.warning("a client sent what is no message: %s", error)
                continue
            if isinstance(message, Hello):
                self._listeners.add(client)
                self._send_status(client)
            elif isinstance(message, Submit):
                self._submit(Origin(client, message.request_id), message)
            elif isinstance(message, ResetPrefixCache):
                if self._scheduler is not None:
                    self._scheduler.reset_prefix_cache()
            else:
                self._abort(client, message)

    def _submit(self, origin: Origin, submit: Submit) -> None:
        try:
            if self._scheduler is None:
                raise UserError("the engine is not ready")
            key = str(self._num_submitted)
            request = self._intake.request(key, submit)
            self._num_submitted += 1
            self._scheduler.submit(request, time.monotonic())
        except UserError as error:
            refused = isinstance(error, QueueFull)
            output = Output(origin.request_id, finish_reason="error", error=str(error), refused=refused)
            self._send(origin.client, [output])
            return
        self._origins[key] = origin
        self._keys[origin] = key

    def _abort(self, client: bytes, message: Abort) -> None:
        for request_id in message.request_ids:
            key = self._keys.pop(Origin(client, request_id), None)
            if key is not None and self._scheduler is not None:
                del self._origins[key]
                self._scheduler.abort(key)

    def _commit(self, result: StepResult) -> None:
        assert self._scheduler is not None
        now = time.monotonic()
        events = self._scheduler.commit(result, now)
        if self._phase == "warming" and events:
            self._token_times_s.append(now)
        self._flight_since = now if self._scheduler.num_in_flight else None
        by_client: dict[bytes, list[Output]] = {}
        for event in events:
            origin = self._origins.get(event.request_id)
            if origin is None:
                continue
            if event.finish_reason is not None:
                del self._origins[event.request_id], self._keys[origin]
            by_client.setdefault(origin.client, []).append(_output(origin.request_id, event))
        for client, outputs in by_client.items():
            self._send(client, outputs)
        if not self._scheduler.has_work:
            self._next_status_s = 0.0  # the last word before a silence should be true

    def _plan(self) -> None:
        if self._scheduler is None:
            return
        while (plan := self._scheduler.schedule(time.monotonic())) is not None:
            self._executor.send(plan)
            if self._flight_since is None:
                self._flight_since = time.monotonic()

    def _watch_flights(self) -> None:
        limit = self._config.run.timeout_s * RESULT_TIMEOUT_FACTOR
        if self._flight_since is not None and time.monotonic() - self._flight_since > limit:
            raise PeerLost(f"no result from the last stage within {limit:g} s (--timeout)")

    # --- what clients hear -----------------------------------------------------------------------------------------

    def _send(self, client: bytes, outputs: list[Output]) -> None:
        if client:  # the warm-up has none
            self._listener.clients.send_multipart([client, self._encode(Outputs(outputs))])

    def _set_phase(self, phase: Phase) -> None:
        self._phase, self._detail = phase, ""
        for client in self._listeners:
            self._send_status(client)

    def _tell_status(self) -> None:
        now = time.monotonic()
        settled = self._executor.is_settled and self._settled_at != self._executor.num_sent
        if now < self._next_status_s and not settled:
            return
        if settled:
            self._settled_at = self._executor.num_sent
        self._next_status_s = now + STATUS_PERIOD_S
        for client in self._listeners:
            self._send_status(client)

    def _send_status(self, client: bytes) -> None:
        self._listener.clients.send_multipart([client, self._encode(self.status())])

    def status(self) -> EngineStatus:
        """How things stand."""
        scheduler, capacity, layout = self._scheduler, self._capacity, self._config.layout
        stages = self._executor.stage_stats()
        if capacity is not None:
            stages = [
                msgspec.structs.replace(one, kv_tokens=tokens)
                for one, tokens in zip(stages, capacity.stage_tokens, strict=True)
            ]
        return EngineStatus(
            phase=self._phase,
            detail=self._detail,
            num_running=scheduler.num_running if scheduler else 0,
            num_waiting=scheduler.num_waiting if scheduler else 0,
            num_preemptions=scheduler.num_preemptions if scheduler else 0,
            kv_tokens=capacity.num_tokens if capacity else 0,
            kv_usage=scheduler.num_pages_used / capacity.num_pages if scheduler and capacity else 0.0,
            kv_cached=scheduler.num_pages_cached / capacity.num_pages if scheduler and capacity else 0.0,
            prefix_queries=scheduler.num_prefix_queries if scheduler else 0,
            prefix_hits=scheduler.num_prefix_hits if scheduler else 0,
            max_len=self._max_len,
            vocab_size=self._spec.vocab_size,
            load_s=self._load_s,
            load_bytes=self._load_bytes,
            layout={"pp": layout.pp, "tp": layout.tp, "ep": layout.ep},
            stages=stages,
            host_s=self._host_s,
            settled=self._executor.is_settled,
            warm=self._warm_up,
        )


class _StoppedEarly(Exception):
    """A stop was asked for while the workers were loading."""


def _output(request_id: str, event: Event) -> Output:
    return Output(
        request_id,
        event.tokens,
        event.logprobs,
        event.prompt_logprobs,
        event.finish_reason,
        None,
        event.queued_s,
        event.num_cached,
    )
