"""Runs plans on one rank: receive, compute the stage's layers, send on; on the last stage sample and answer.

Device work is issued in plan order by one thread and nothing here waits for it: what a plan leaves for the host is
collected when the device has come to its end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from headrace.errors import PeerLost
from headrace.layers.decoder import Decoder
from headrace.mesh import Mesh
from headrace.spec import ModelSpec
from headrace.step import ROW_WIDTH, StepPlan, StepResult, TokenLogprobs, WorkerStats, pack, unpack
from headrace.supervise.beat import Work
from headrace.telemetry.trace import Trace
from headrace.worker.batch import Rows
from headrace.worker.clock import Clock, Part, make_clocks
from headrace.worker.comm import Comm
from headrace.worker.edge import Edge, Receive
from headrace.worker.mirror import Mirror
from headrace.worker.sampler import Sampled, Sampler, Scores
from headrace.worker.steps import DeviceState, Outcome, Steps
from headrace.worker.transfer import upload

PROMPT_BLOCK = 64
"""Rows of prompt log-probabilities computed at once: logits of a whole chunk would not fit."""


@dataclass
class Held:
    """A plan the worker holds, with the receives that were posted for it."""

    plan: StepPlan
    rows: Rows
    taken_ns: int
    """When it came."""
    hidden: Receive | None = None
    feedback: Receive | None = None


@dataclass
class Flying:
    """A plan whose work is on the device, and what the host will read when it is done."""

    held: Held
    clock: Clock
    tokens: list[Receive]
    """Sampled tokens that it was made to wait for."""
    issued_s: float = 0.0
    """When all of its work was on the device."""
    sampled: Sampled | None = None
    prompt: dict[int, list[Scores]] = field(default_factory=dict)
    num_decodes: int = 0
    """Rows that start from a sampled token; counted where there is a trace."""


class Runner:
    """One rank's loop body. Plans are accepted as they come and executed strictly in order."""

    def __init__(
        self,
        *,
        spec: ModelSpec,
        mesh: Mesh,
        rank: int,
        model: Decoder,
        comm: Comm,
        mirror: Mirror,
        state: DeviceState,
        steps: Steps,
        max_running: int,
        window: int,
        dtype: torch.dtype,
        device: torch.device,
        timeout_s: float,
        trace: Trace | None = None,
    ) -> None:
        self._spec, self._model, self._comm, self._trace, self._rank = spec, model, comm, trace, rank
        self._mirror, self._state, self._steps = mirror, state, steps
        self._dtype, self._device, self._timeout_s = dtype, device, timeout_s
        self._first, self._last = mesh.is_first(rank), mesh.is_last(rank)
        self._window = window
        """Plans in flight at most."""
        self._sampler = Sampler(max_running, spec.vocab_size, device) if rank == mesh.sampler else None
        self._held: deque[Held] = deque()
        self._flying: deque[Flying] = deque()
        self._sampled_in = np.full(max_running, -1, dtype=np.int64)
        """Plan in which each slot last sampled: its token must be here before the slot's next decode row."""
        self._awaited: deque[tuple[int, torch.Tensor, Receive]] = deque()
        """Sampled tokens to come: of which plan, and the slots that they are for, on the device."""
        self._last_done_s = 0.0
        self._clocks = make_clocks(device)
        self._num_steps = self._num_tokens = 0
        self._executing: int | None = None
        """Plan that the host is at."""

    @property
    def backend(self) -> str:
        """What steps run on, for reports."""
        return self._steps.backend

    @property
    def holds_plans(self) -> bool:
        """Whether a plan waits to be executed."""
        return bool(self._held)

    @property
    def next_tokens(self) -> int:
        """Tokens of the oldest held plan."""
        return self._held[0].rows.num_tokens

    @property
    def is_busy(self) -> bool:
        """Whether a plan's work is on the device."""
        return bool(self._flying)

    def settle(self) -> bool:
        """Count the sends that have ended meanwhile; whether all have."""
        return self._clocks.settle()

    def work(self) -> Work:
        """For the beats. Runs in another thread, and may raise IndexError where that comes in between."""
        plan = self._executing
        if plan is not None:
            return Work(f"plan {plan}", self._num_steps, inside=True)
        if self._flying:
            return Work(f"plan {self._flying[0].held.plan.plan_id} on the device", self._num_steps)
        return Work(f"plan {self._held[0].plan.plan_id}" if self._held else "", self._num_steps)

    def stats(self) -> WorkerStats:
        """Counters since start."""
        spent = [part * 1e-9 for part in self._clocks.spent_ns]
        since = time.monotonic_ns() - self._clocks.last_end_ns if self._held or self._flying else 0
        return WorkerStats(
            self._rank,
            self._num_steps,
            self._num_tokens,
            busy_s=spent[Part.BUSY],
            activations_wait_s=spent[Part.ACTIVATIONS],
            tokens_wait_s=spent[Part.TOKENS],
            communication_s=spent[Part.COMMUNICATION],
            edge_s=self._clocks.edge_ns * 1e-9,
            open_s=since * 1e-9 if self._num_steps else 0.0,
        )

    def accept(self, plan: StepPlan) -> None:
        """Take a plan in and post its receives, if that can be done ahead: they arrive while earlier plans compute."""
        held = Held(plan, Rows.of(unpack(plan.rows, ROW_WIDTH)), time.monotonic_ns())
        if self._comm.previous is not None and self._comm.previous.posts_ahead:
            held.hidden = self._receive_hidden(held)
        if self._comm.feedback_in is not None and self._comm.feedback_in.posts_ahead:
            held.feedback = self._receive_tokens(held)
        self._held.append(held)

    def _receive_hidden(self, held: Held) -> Receive | None:
        edge, shape = self._comm.previous, (held.rows.num_tokens, self._spec.hidden)
        return None if edge is None else edge.receive(held.plan.plan_id, shape, self._dtype, self._device)

    def _receive_tokens(self, held: Held) -> Receive | None:
        edge, count = self._comm.feedback_in, int(held.rows.samples.sum())
        if edge is None or not count:
            return None
        return edge.receive(held.plan.plan_id, (count,), torch.int64, self._device)

    @torch.inference_mode()
    def execute(self) -> None:
        """Run the oldest held plan."""
        held = self._held.popleft()
        plan, rows = held.plan, held.rows
        self._executing = plan.plan_id
        clock = self._clocks.start(held.taken_ns)
        for new in self._mirror.apply(plan):
            if self._sampler is not None:
                self._sampler.register(new, unpack(new.tokens))
        self._state.take_pages(self._mirror)
        # Whatever can be brought to the device is brought before it begins to wait for others.
        self._steps.stage(rows)
        sampling = rows.slots[rows.samples]
        slots = upload(sampling, self._device) if self._first else None
        tokens = self._await_tokens(rows, clock) if self._first else []
        held.hidden = held.hidden or self._receive_hidden(held)
        hidden = None
        if held.hidden is not None:
            clock.enter(Part.ACTIVATIONS)
            hidden = held.hidden.wait()
        clock.enter(Part.BUSY)
        flying = Flying(held, clock, tokens)
        outcome = self._steps.run(plan.plan_id, rows, hidden)
        if self._comm.next is not None:
            self._send(self._comm.next, plan.plan_id, outcome.hidden, clock, lent=outcome.lent)
        held.feedback = held.feedback or self._receive_tokens(held)
        if self._last:
            self._finish(flying, outcome, slots)
        clock.stop()
        flying.issued_s = time.monotonic()
        if self._trace is not None:
            flying.num_decodes = int((rows.starts >= self._mirror.known[rows.slots]).sum())
        self._sampled_in[sampling] = plan.plan_id
        if held.feedback is not None:
            assert slots is not None
            self._awaited.append((plan.plan_id, slots, held.feedback))
            # What left the window has arrived; tokens that nobody continues from are not kept for ever.
            self._take_tokens(plan.plan_id - self._window)
        self._flying.append(flying)
        self._executing = None

    def results(self) -> Iterator[StepResult]:
        """What is done, in plan order; only the sampling rank has something to tell.

        Raises PeerLost, naming edge and plan, where the oldest plan is not done in time.
        """
        while self._flying:
            flying = self._flying[0]
            if not flying.clock.is_done():
                self._check_deadline(flying)
                return
            if flying.sampled is not None and not flying.sampled.is_here():
                return
            self._flying.popleft()
            self._last_done_s = time.monotonic()
            if self._sampler is not None:
                yield self._result(flying)
            # Only now: whoever waits for the result need not wait for this.
            self._account(flying)

    def _result(self, flying: Flying) -> StepResult:
        tokens, logprobs = ([], {}) if flying.sampled is None else flying.sampled.finish()
        prompt: dict[int, list[TokenLogprobs]] = {
            row: [entry for block in blocks for entry in block.entries()] for row, blocks in flying.prompt.items()
        }
        return StepResult(flying.held.plan.plan_id, pack(tokens), logprobs, prompt)

    def _account(self, flying: Flying) -> None:
        rows, times = flying.held.rows, flying.clock.account()
        self._num_steps += 1
        self._num_tokens += rows.num_tokens
        if self._trace is not None:
            self._trace.step(flying.held.plan.plan_id, rows.num_tokens, len(rows.slots), flying.num_decodes, times)

    def _check_deadline(self, flying: Flying) -> None:
        # Several are issued at once, and what comes before this one takes its time too.
        if time.monotonic() - max(flying.issued_s, self._last_done_s) < self._timeout_s:
            return
        waits: list[tuple[Edge | None, Receive | None]] = [
            *((self._comm.feedback_in, receive) for receive in flying.tokens),
            (self._comm.previous, flying.held.hidden),
        ]
        for edge, receive in waits:
            if edge is not None and receive is not None and not receive.is_done():
                break
        else:
            edge = None
        what = "the device" if edge is None else edge.name
        raise PeerLost(f"{what}, plan {flying.held.plan.plan_id}: nothing within {self._timeout_s:g} s (--timeout)")

    def _send(self, edge: Edge, plan_id: int, tensor: torch.Tensor, clock: Clock, *, lent: bool) -> None:
        clock.enter(Part.COMMUNICATION)
        edge.send(plan_id, tensor, lent=lent)
        clock.sent(edge.stream)

    def _await_tokens(self, rows: Rows, clock: Clock) -> list[Receive]:
        """Wait for the sampled tokens that these rows start from, and for no later ones; what was waited for."""
        if not self._awaited:
            return []
        clock.enter(Part.TOKENS)
        from_sample = rows.starts >= self._mirror.known[rows.slots]
        needed = int(self._sampled_in[rows.slots[from_sample]].max(initial=-1))
        return self._take_tokens(needed)

    def _take_tokens(self, up_to: int) -> list[Receive]:
        taken = []
        while self._awaited and self._awaited[0][0] <= up_to:
            _, slots, receive = self._awaited.popleft()
            self._state.last_token.index_copy_(0, slots, receive.wait())
            taken.append(receive)
        return taken

    def _finish(self, flying: Flying, outcome: Outcome, sampling: torch.Tensor | None) -> None:
        """Sample, and score prompt positions where asked for; every rank of the stage joins in.

        sampling: the slots of the sampled tokens, on the device, if this is the first stage too.
        """
        held = flying.held
        rows = held.rows
        flying.prompt = self._score_prompts(rows, outcome.hidden)
        if outcome.logits is None:
            return
        slots = rows.slots[rows.samples]
        if self._sampler is not None:
            positions = (rows.starts + rows.counts)[rows.samples]
            flying.sampled = self._sampler.sample(outcome.logits, slots, positions, outcome.best)
            tokens = flying.sampled.tokens
        else:
            tokens = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        tokens = self._comm.tensor.broadcast(tokens)
        if self._comm.feedback_out is not None:
            self._send(self._comm.feedback_out, held.plan.plan_id, tokens, flying.clock, lent=outcome.lent)
        if sampling is not None:
            self._state.last_token.index_copy_(0, sampling, tokens)
        if flying.sampled is not None:
            assert self._sampler is not None
            flying.sampled.fetch(self._sampler.copies)

    def _score_prompts(self, rows: Rows, x_TD: torch.Tensor) -> dict[int, list[Scores]]:
        found: dict[int, list[Scores]] = {}
        for r, slot in enumerate(rows.slots.tolist()):
            spec, known = self._mirror.samplers[slot], self._mirror.tokens[slot]
            if spec is None or spec.prompt_logprobs is None or known is None:
                continue
            start, offset = int(rows.starts[r]), int(rows.offsets[r])
            stop = min(start + int(rows.counts[r]), int(self._mirror.num_prompt[slot]) - 1)
            for first in range(start, stop, PROMPT_BLOCK):
                count = min(PROMPT_BLOCK, stop - first)
                logits = self._model.logits(x_TD[offset + first - start : offset + first - start + count])
                if self._sampler is not None:
                    targets = upload(known[first + 1 : first + 1 + count].astype(np.int64), self._device)
                    scores = Scores.of(logits, targets, [spec.prompt_logprobs] * count)
                    found.setdefault(r, []).append(scores)
        return found
