"""headrace without a server: `LLM` starts the same engine and worker processes and talks to them directly."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from headrace.channel import join, join_url
from headrace.config import EngineConfig, HttpConfig, LayoutConfig, ModelConfig, RunConfig, ScheduleConfig, ServeConfig
from headrace.errors import Fault, UserError
from headrace.mesh import Mesh
from headrace.sampling import SamplingParams
from headrace.step import (
    Abort,
    EngineMessage,
    EngineStatus,
    FinishReason,
    Hello,
    Output,
    ResetPrefixCache,
    Submit,
    TokenLogprobs,
    pack,
)
from headrace.supervise.failure import failures_in, settle
from headrace.supervise.group import Event, ProcessGroup
from headrace.supervise.launch import engine_commands
from headrace.supervise.prepare import prepare
from headrace.supervise.private import PrivateDir, trace_folder, write_config
from headrace.supervise.vitals import Vitals, limits_of
from headrace.telemetry.trace import save_trace
from headrace.text.chat import load_chat_template
from headrace.text.detokenizer import Detokenizer
from headrace.text.tokenizer import Tokenizer, load_tokenizer
from headrace.weights.source import ModelSource, resolve

log = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
POLL_MS = 200
CHECK_S = 1.0

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Generation:
    """What one prompt became."""

    text: str
    """Without what a stop string cut off; "" for a model without a tokenizer."""
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """One entry a token, where asked for."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """All prompt positions but the first, where asked for."""
    num_cached: int = 0
    """Prompt tokens that were found in the prefix cache."""


@dataclass
class _Pending:
    index: int
    tokens: list[int]
    sampling: SamplingParams
    detokenizer: Detokenizer | None
    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached: int = 0


class LLM:
    """A model, loaded and ready when the constructor returns.

    model: as in `headrace serve`. Options are the fields of the configuration by their own names: `pp`, `tp`, `ep`,
    `split`, `device`, `dtype`, `max_len`, `seed`, `attention`, `graphs`, `weights`, `routing`, `max_running`, `chunk`,
    `page_size`, `kv_memory`, `run_ahead`, `balance`, `prefix_cache`, `policy`, `max_waiting`, `transport`, `timeout_s`,
    `stall_timeout_s`, `edges`, `all_reduce`, `trace`. Raises UserError for what cannot be, Fault when it fails; both in
    one line. A context manager; `close` leaves no process and no file behind. Belongs to one thread.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        config = _config(model, options)
        self._closed = False
        self._policy = config.schedule.policy
        prepared = prepare(ServeConfig(engine=config, http=HttpConfig()), say=log.info)
        self.mesh: Mesh = prepared.mesh
        self.spec = prepared.spec
        assert prepared.config.engine.model.model is not None
        self._source: ModelSource = resolve(prepared.config.engine.model.model, say=log.info)
        self._tokenizer: Tokenizer | None = None
        self._status = EngineStatus("starting")
        self._heard = 0
        """Statuses."""
        self._trace = None if config.run.trace is None else Path(config.run.trace)
        self._num_requests = 0
        self._private = PrivateDir()
        try:
            write_config(self._private.path, prepared.config)
            transport = prepared.config.engine.run.transport
            self._group = ProcessGroup(engine_commands(self._private.path, self.mesh, http=False, transport=transport))
        except BaseException:
            self._private.remove()
            raise
        try:
            self._group.start()
            self._vitals = Vitals(self._group.names, limits_of(config.run))
            self._next_check_s = 0.0
            self._encode = msgspec.msgpack.Encoder().encode
            self._decode = msgspec.msgpack.Decoder(EngineMessage).decode
            self._socket = join(zmq.Context.instance(), join_url(self._private.path, transport, "clients"))
            self._socket.send(self._encode(Hello()))
            while self._status.phase != "ready":
                self._hear()
        except BaseException:
            self.close()
            raise

    # --- what users call --------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[Generation]:
        """Complete prompts (texts or token ids), all at once; results in their order.

        sampling, priority: one for all, or one a prompt. Raises UserError naming what is wrong with a prompt or a
        parameter; the others of the call are then dropped.
        """
        many = _as_prompts(prompts)
        if sampling is None or isinstance(sampling, SamplingParams):
            sampling = [sampling or SamplingParams()] * len(many)
        if len(sampling) != len(many):
            raise UserError(f"sampling: {len(sampling)} for {len(many)} prompts")
        priorities = [priority] * len(many) if isinstance(priority, int) else list(priority)
        if len(priorities) != len(many):
            raise UserError(f"priority: {len(priorities)} for {len(many)} prompts")
        if any(priorities) and self._policy != "priority":
            raise UserError('priority: any but 0 needs policy="priority"')
        # All are checked before any is submitted: what is wrong with one must not leave others running.
        checked = [
            self._check(i, prompt, params) for i, (prompt, params) in enumerate(zip(many, sampling, strict=True))
        ]
        pairs = zip(checked, priorities, strict=True)
        return self._collect({self._submit(one.tokens, one.sampling, first): one for one, first in pairs})

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template: Any,
    ) -> list[Generation]:
        """Answer one conversation or several, through the model's chat template; `template` are its variables."""
        form = load_chat_template(self._source)
        if form is None:
            raise UserError(f"{self._source.name} has no chat template")
        single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if single else messages
        texts = [form.render(one, tools=tools, add_generation_prompt=True, **template) for one in conversations]
        # The template writes the special tokens itself.
        return self.generate([self.tokenizer.encode(text, add_special=False) for text in texts], sampling)

    def reset_prefix_cache(self) -> None:
        """Forget what is cached of the prompts and answers so far."""
        if self._closed:
            raise Fault("this LLM is closed")
        self._socket.send(self._encode(ResetPrefixCache()))

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, loaded at first use. Raises UserError if it has none."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._source)
        return self._tokenizer

    @property
    def status(self) -> EngineStatus:
        """How the engine stood when it last spoke."""
        return self._status

    def settle(self) -> EngineStatus:
        """Wait until nothing is in flight and every stage has told what it did; the status that says so."""
        before = self._heard
        while self._heard == before or not self._status.settled:
            self._hear()
        return self._status

    @property
    def directory(self) -> Path:
        """The private directory of its processes; gone when it is closed."""
        return self._private.path

    def close(self) -> None:
        """Stop every process and remove every file. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._group.stop(STOP_GRACE_S)
            if self._trace is not None:
                log.info(save_trace(trace_folder(self._private.path), self._trace))
        finally:
            self._group.close()
            if hasattr(self, "_socket"):
                self._socket.close(linger=0)
            self._private.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_group"):
            self.close()

    # --- underneath -------------------------------------------------------------------------------------------------

    def _check(self, index: int, prompt: Prompt, params: SamplingParams) -> _Pending:
        vocab = self.spec.vocab_size
        tokens = self.tokenizer.encode(prompt, add_special=True) if isinstance(prompt, str) else list(prompt)
        if not all(0 <= token < vocab for token in tokens):
            raise UserError(f"prompt: token ids must be between 0 and {vocab - 1}")
        try:
            params.validate(vocab)
        except ValueError as error:
            raise UserError(str(error)) from None
        detokenizer = self._detokenizer(params)
        if detokenizer is not None:
            params = params.ending_at([token for token in self.tokenizer.eos_ids if token < vocab])
        return _Pending(index, tokens, params, detokenizer)

    def _submit(self, tokens: Sequence[int], params: SamplingParams, priority: int) -> str:
        if self._closed:
            raise Fault("this LLM is closed")
        request_id = str(self._num_requests)
        self._num_requests += 1
        self._socket.send(self._encode(Submit(request_id, pack(tokens), params, priority)))
        return request_id

    def _detokenizer(self, params: SamplingParams) -> Detokenizer | None:
        try:
            return Detokenizer(self.tokenizer, stop=params.stop)
        except UserError:
            if params.stop:
                raise
            return None

    def _collect(self, pending: dict[str, _Pending]) -> list[Generation]:
        done: dict[int, Generation] = {}
        total = len(pending)
        try:
            while len(done) < total:
                for output in self._hear():
                    one = pending.get(output.request_id)
                    if one is None:
                        continue
                    finished = self._take(one, output)
                    if finished is not None:
                        del pending[output.request_id]
                        done[one.index] = finished
        finally:
            if pending and not self._closed:
                self._socket.send(self._encode(Abort(list(pending))))
        return [done[index] for index in range(total)]

    def _take(self, one: _Pending, output: Output) -> Generation | None:
        if output.error is not None:
            raise UserError(output.error)
        one.prompt_logprobs += output.prompt_logprobs
        one.ids += output.tokens
        one.logprobs += output.logprobs
        one.num_cached += output.num_cached
        reason, stopped = output.finish_reason, False
        if one.detokenizer is not None:
            delta = one.detokenizer.push(output.tokens)
            one.text, stopped = one.text + delta.text, delta.stopped
            if reason is not None and not stopped:
                one.text += one.detokenizer.finish().text
        if stopped and reason is None:
            self._socket.send(self._encode(Abort([output.request_id])))
        if stopped:
            reason = "stop"
        if reason is None:
            return None
        wanted = one.sampling
        return Generation(
            one.text,
            one.ids,
            reason,
            one.tokens,
            None if wanted.logprobs is None else one.logprobs,
            None if wanted.prompt_logprobs is None else one.prompt_logprobs,
            one.num_cached,
        )

    def _hear(self) -> list[Output]:
        """What the engine said within a moment; raises if any of the processes is gone."""
        found: list[Output] = []
        if self._socket.poll(POLL_MS):
            while self._socket.poll(0):
                message = self._decode(self._socket.recv(zmq.NOBLOCK))
                if isinstance(message, EngineStatus):
                    self._status, self._heard = message, self._heard + 1
                else:
                    found += message.outputs
            if found:
                return found
        events: list[Event] = self._group.wait(0)
        self._vitals.hear(events)
        if not failures_in(events) and time.monotonic() >= self._next_check_s:
            self._next_check_s = time.monotonic() + CHECK_S
            trouble = self._vitals.check(self._group.signs())
            events += [trouble] if trouble is not None else []
        if failures_in(events):
            error = settle(self._group, events, self._vitals.suspect)[0].error()
            self.close()
            raise error
        return found


def _config(model: str | None, options: Mapping[str, Any]) -> EngineConfig:
    parts = {"model": ModelConfig, "layout": LayoutConfig, "schedule": ScheduleConfig, "run": RunConfig}
    left = dict(options)
    made: dict[str, Any] = {}
    for name, kind in parts.items():
        given = {f.name: left.pop(f.name) for f in fields(kind) if f.name in left}
        if name == "model":
            given["model"] = model
        if given.get("split") is not None:
            given["split"] = tuple(given["split"])
        made[name] = kind(**given)
    if left:
        raise UserError(f"LLM: unknown option {', '.join(sorted(left))}")
    return EngineConfig(**made)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]  # a text or one list of ids
    return list(prompts)  # type: ignore[arg-type]  # then it is a sequence of them
