"""Runs plans on one rank: receive, compute the stage's layers, send on; on the last stage sample and answer."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from headrace.layers.decoder import Decoder
from headrace.mesh import Mesh
from headrace.spec import ModelSpec
from headrace.step import ROW_WIDTH, StepPlan, StepResult, TokenLogprobs, pack, unpack
from headrace.telemetry.trace import Trace
from headrace.worker.batch import IntArray, Rows, gather_tokens, make_batch
from headrace.worker.cache import KVCache
from headrace.worker.comm import Comm, Receive
from headrace.worker.mirror import Mirror
from headrace.worker.sampler import Sampler, token_logprobs

PROMPT_BLOCK = 64
"""Rows of prompt log-probabilities computed at once: logits of a whole chunk would not fit."""


@dataclass(frozen=True)
class Held:
    """A plan the worker holds, with the receives that were posted for it."""

    plan: StepPlan
    rows: Rows
    hidden: Receive | None
    feedback: Receive | None


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
        cache: KVCache,
        max_running: int,
        max_len: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        trace: Trace | None = None,
    ) -> None:
        self._spec, self._model, self._comm, self._cache, self._trace = spec, model, comm, cache, trace
        self._page_size, self._dtype, self._device = page_size, dtype, device
        self._first, self._last = mesh.is_first(rank), mesh.is_last(rank)
        self._samples = rank == mesh.sampler
        self._window = mesh.pp
        """Plans in flight at most."""
        self._mirror = Mirror(max_running, -(-max_len // page_size))
        self._sampler = Sampler(max_running, spec.vocab_size, device) if self._samples else None
        self._held: deque[Held] = deque()
        self._last_token = torch.zeros(max_running, dtype=torch.int64, device=device)
        self._sampled_in = np.full(max_running, -1, dtype=np.int64)
        """Plan in which each slot last sampled: its token must be here before the slot's next decode row."""
        self._awaited: deque[tuple[int, IntArray, Receive]] = deque()
        self.num_steps = 0
        self.num_tokens = 0
        self.busy_s = 0.0

    @property
    def holds_plans(self) -> bool:
        """Whether a plan waits to be executed."""
        return bool(self._held)

    def accept(self, plan: StepPlan) -> None:
        """Take a plan in and post its receives, so that they arrive while earlier plans compute."""
        rows = Rows.of(unpack(plan.rows, ROW_WIDTH))
        hidden = feedback = None
        if self._comm.previous is not None:
            shape = (rows.num_tokens, self._spec.hidden)
            hidden = self._comm.previous.receive(plan.plan_id, shape, self._dtype, self._device)
        num_sampling = int(rows.samples.sum())
        if self._comm.feedback_in is not None and num_sampling:
            feedback = self._comm.feedback_in.receive(plan.plan_id, (num_sampling,), torch.int64, self._device)
        self._held.append(Held(plan, rows, hidden, feedback))

    @torch.inference_mode()
    def execute(self) -> StepResult | None:
        """Run the oldest held plan; the sampling rank returns its result."""
        held = self._held.popleft()
        plan, rows = held.plan, held.rows
        for new in self._mirror.apply(plan):
            if self._sampler is not None:
                self._sampler.register(new, unpack(new.tokens))
        tokens = None
        if self._first:
            self._await_tokens(rows)
            tokens = gather_tokens(rows, self._mirror, self._last_token)
        batch = make_batch(plan.plan_id, rows, self._mirror, self._cache, self._page_size, self._device, tokens)
        x = tokens if held.hidden is None else held.hidden.wait()
        assert x is not None
        started = time.monotonic_ns()
        x_TD = self._model(x, batch)
        if self._comm.next is not None:
            self._comm.next.send(plan.plan_id, x_TD)
        result = self._finish(held, x_TD) if self._last else None
        ended = time.monotonic_ns()
        sampling = rows.slots[rows.samples]
        self._sampled_in[sampling] = plan.plan_id
        if held.feedback is not None:
            self._awaited.append((plan.plan_id, sampling, held.feedback))
            # What left the window has arrived; tokens that nobody continues from are not kept for ever.
            self._take_tokens(plan.plan_id - self._window)
        self.num_steps += 1
        self.num_tokens += rows.num_tokens
        self.busy_s += (ended - started) * 1e-9
        if self._trace is not None:
            self._trace.step(plan.plan_id, rows.num_tokens, len(rows.slots), started, ended)
        return result

    def _await_tokens(self, rows: Rows) -> None:
        """Wait for the sampled tokens that these rows start from, and for no later ones."""
        if not self._awaited:
            return
        from_sample = rows.starts >= self._mirror.known[rows.slots]
        needed = int(self._sampled_in[rows.slots[from_sample]].max(initial=-1))
        self._take_tokens(needed)

    def _take_tokens(self, up_to: int) -> None:
        while self._awaited and self._awaited[0][0] <= up_to:
            _, slots, receive = self._awaited.popleft()
            self._last_token[torch.from_numpy(slots).to(self._device)] = receive.wait()

    def _finish(self, held: Held, x_TD: torch.Tensor) -> StepResult | None:
        """Logits of the rows that sample, and of prompt positions where asked for; every rank of the stage joins in."""
        rows, plan = held.rows, held.plan
        prompt = self._prompt_logprobs(rows, x_TD)
        sampling = np.flatnonzero(rows.samples)
        tokens = torch.zeros(0, dtype=torch.int64)
        logprobs: dict[int, TokenLogprobs] = {}
        if len(sampling):
            last = torch.from_numpy(rows.last_tokens[sampling]).to(self._device)
            every = len(sampling) == x_TD.shape[0]
            logits = self._model.logits(x_TD if every else x_TD.index_select(0, last))
            if self._sampler is not None:
                slots = rows.slots[sampling]
                positions = rows.starts[sampling] + rows.counts[sampling]
                tokens, logprobs = self._sampler.sample(logits, slots, positions)
                self._last_token[torch.from_numpy(slots).to(self._device)] = tokens
                for edge in self._comm.feedback_out:
                    edge.send(plan.plan_id, tokens)
        if self._sampler is None:
            return None
        return StepResult(plan.plan_id, pack(tokens.tolist()), logprobs, prompt)

    def _prompt_logprobs(self, rows: Rows, x_TD: torch.Tensor) -> dict[int, list[TokenLogprobs]]:
        found: dict[int, list[TokenLogprobs]] = {}
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
                    targets = torch.from_numpy(known[first + 1 : first + 1 + count].astype(np.int64)).to(self._device)
                    entries = token_logprobs(logits, targets, [spec.prompt_logprobs] * count)
                    found.setdefault(r, []).extend(entries)
        return found
