"""What crosses a process boundary: requests, plans, results and status, as msgpack with a schema.

Arrays travel as little-endian bytes (`pack`/`unpack`), so a plan costs a few bytes a row and no Python object a row.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.sampling import SamplingParams

Int32Array = npt.NDArray[np.int32]

FinishReason = Literal["stop", "length", "abort", "error"]


def pack(values: Sequence[int] | Int32Array) -> bytes:
    """Encode integers as little-endian int32 bytes."""
    if isinstance(values, list):  # three times as fast as through an array
        return struct.pack(f"<{len(values)}i", *values)
    return np.ascontiguousarray(values, dtype="<i4").tobytes()


def unpack(data: bytes, width: int = 1) -> Int32Array:
    """Decode `pack`: shape [n] for width 1, else [n, width]. The array is a read-only view of the bytes."""
    array = np.frombuffer(data, dtype="<i4")
    return array if width == 1 else array.reshape(-1, width)


# --- what a user asks for -------------------------------------------------------------------------------------------


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Client to engine: a request. Its id is unique within the client."""

    request_id: str
    tokens: bytes
    """Prompt, packed int32, at least one token."""
    sampling: SamplingParams
    priority: int = 0
    """Lower goes first, where the engine's policy is priority."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Client to engine: these requests are no longer wanted."""

    request_ids: list[str]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Client to engine: send me status from now on."""


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Client to engine: forget what is cached; requests that are submitted after this find nothing from before."""


ClientMessage = Submit | Abort | Hello | ResetPrefixCache


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the token's own, then the best tokens', most likely first."""

    token: int
    logprob: float
    top_tokens: list[int] = []
    top_logprobs: list[float] = []


class Output(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Engine to client: what one step added to a request. Tokens that end it (EOS, stop ids) are included."""

    request_id: str
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    """One entry a token, where asked for."""
    prompt_logprobs: list[TokenLogprobs] = []
    """All prompt positions but the first, in one output (the last before or with the first token), where asked for."""
    finish_reason: FinishReason | None = None
    error: str | None = None
    """One line, with finish_reason `error`."""
    queued_s: float = 0.0
    """Time from submission to the first step, in the first output only."""
    num_cached: int = 0
    """Prompt tokens that were found in the prefix cache, in the first output only."""
    refused: bool = False
    """With an error: as many requests wait as may, so this one was not taken."""


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """Engine to client: all that a step produced for that client's requests."""

    outputs: list[Output]


class StageStats(msgspec.Struct, frozen=True):
    """One stage's counters since start."""

    stage: int
    first_layer: int
    num_layers: int
    weight_bytes: int
    """Resident weight bytes of each of its ranks."""
    kv_bytes: int
    """KV cache bytes of each of its ranks."""
    kv_tokens: int = 0
    """Tokens that its ranks alone could hold; the least over the stages is everyone's."""
    num_steps: int = 0
    num_tokens: int = 0
    """Positions computed."""
    busy_s: float = 0.0
    """Time spent on steps: forward passes and sampling."""
    activations_wait_s: float = 0.0
    """Time with a plan in hand whose hidden states had not come from the stage before."""
    tokens_wait_s: float = 0.0
    """Time with a plan in hand whose sampled tokens had not come from the last stage."""
    plan_wait_s: float = 0.0
    """Time with no plan in hand while the engine had plans in flight: what is left of `active_s`."""
    communication_s: float = 0.0
    """Time in which nothing but sends and messages kept the stage from its next step."""
    active_s: float = 0.0
    """Time during which the engine had plans in flight, up to the stage's last word: busy share = busy_s / active_s.

    It is the sum of busy time, waits and communication.
    """
    edge_s: float = 0.0
    """From the end of a step's computing to the end of its send, beside other work or not."""
    backend: str = ""
    """What its steps run on: "torch", "triton", "triton+graphs" or "flashinfer"."""
    graph_bytes: int = 0
    """Device memory of each rank's graphs."""


class WarmUp(msgspec.Struct, frozen=True):
    """How long the first request took, from being planned: the first run of what every step does."""

    prompt_tokens: int = 0
    prompt_s: float = 0.0
    """To the prompt's token."""
    decode_s: float = 0.0
    """From one token to the next, in the mean; the first decode step is left out where there are more."""


class EngineStatus(msgspec.Struct, frozen=True, tag="status"):
    """Engine to client: sent at every change of phase and about once a second."""

    phase: Literal["starting", "loading", "warming", "ready", "stopping"]
    detail: str = ""
    num_running: int = 0
    num_waiting: int = 0
    num_preemptions: int = 0
    kv_tokens: int = 0
    """Capacity of the KV cache in tokens."""
    kv_usage: float = 0.0
    """Share of its pages that requests hold."""
    kv_cached: float = 0.0
    """Share of its pages that no request holds and that are kept for what they hold."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache since start."""
    prefix_hits: int = 0
    """Those of them that were there."""
    max_len: int = 0
    """Longest request in tokens, prompt and output together."""
    vocab_size: int = 0
    """Token ids of prompts are below it."""
    load_s: float = 0.0
    load_bytes: tuple[int, int] = (0, 0)
    """Of weights: read so far, and in all."""
    layout: dict[str, int] = {}
    """Degrees: pp, tp, ep."""
    stages: list[StageStats] = []
    host_s: float = 0.0
    """Time the engine spent on scheduling, encoding and results since start."""
    settled: bool = False
    """Whether nothing is in flight and the stages' counters hold all that was."""
    warm: WarmUp = WarmUp()


EngineMessage = Outputs | EngineStatus


# --- engine and workers ---------------------------------------------------------------------------------------------


class SamplerSpec(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What the sampler on the last stage needs of a request's `SamplingParams`."""

    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    """Every id that ends the request: not sampled before min_tokens."""


class Register(msgspec.Struct, frozen=True, array_like=True):
    """A slot begins a life: a request, or one that was pre-empted and comes again with what it had generated."""

    slot: int
    tokens: bytes
    """Prompt and generated tokens so far, packed int32."""
    num_prompt: int
    """How many of them are the user's prompt."""
    sampler: SamplerSpec


ROW_WIDTH = 4
"""A row is (slot, start, count, samples): positions start..start+count-1; samples = 1 if its last position does."""


class StepPlan(msgspec.Struct, frozen=True, tag="plan", array_like=True):
    """One step of every stage. Deltas come first, in this order: free, register, pages; then the rows compute.

    Workers execute plans strictly by id, so a page or slot freed here may be given away in the same plan.
    """

    plan_id: int
    rows: bytes
    """Packed int32 [R, ROW_WIDTH]."""
    free: list[int] = []
    """Slots whose life ended."""
    register: list[Register] = []
    pages: bytes = b""
    """Packed int32 [n, 2]: (slot, page id), appended to the slot's page table in order."""
    replica: int = 0
    """The attention replica that runs this plan; always 0 today."""


class StepResult(msgspec.Struct, frozen=True, tag="result", array_like=True):
    """What the last stage answers for a plan, in the order of its sampling rows."""

    plan_id: int
    tokens: bytes
    """Packed int32, one a sampling row."""
    logprobs: dict[int, TokenLogprobs] = {}
    """By index of the sampling row, where asked for."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    """By row index: one entry for each position of the row whose next token is in the prompt, where asked for."""


class Join(msgspec.Struct, frozen=True, tag="join", array_like=True):
    """Worker to engine: I am here."""

    rank: int
    pid: int


class Start(msgspec.Struct, frozen=True, tag="start", array_like=True):
    """Engine to worker: what to be. `config` is an `EngineConfig` in msgpack, every "auto" resolved."""

    config: bytes
    store: str
    """Rendezvous of the process groups: `file:///...` or `tcp://host:port`."""


class LoadProgress(msgspec.Struct, frozen=True, tag="progress", array_like=True):
    """Worker to engine: bytes of weights read so far."""

    rank: int
    done_bytes: int
    total_bytes: int


class Loaded(msgspec.Struct, frozen=True, tag="loaded", array_like=True):
    """Worker to engine: weights are resident."""

    rank: int
    weight_bytes: int
    kv_page_bytes: int
    """Bytes of one KV page over the layers of this rank."""
    kv_memory: int
    """Bytes this rank can give the KV cache."""
    load_s: float


class Allocate(msgspec.Struct, frozen=True, tag="allocate", array_like=True):
    """Engine to worker: make the KV cache, prepare to run plans."""

    num_pages: int
    max_len: int


class Prepared(msgspec.Struct, frozen=True, tag="prepared", array_like=True):
    """Worker to engine: plans may come."""

    rank: int
    kv_bytes: int
    backend: str = "torch"
    """What its steps run on: "torch", "triton", "triton+graphs" or "flashinfer"."""
    graph_bytes: int = 0
    """Device memory that its graphs took."""


class WorkerStats(msgspec.Struct, frozen=True, tag="stats", array_like=True):
    """Worker to engine: counters since start (see `StageStats`)."""

    rank: int
    num_steps: int
    num_tokens: int
    busy_s: float
    activations_wait_s: float
    tokens_wait_s: float
    communication_s: float
    edge_s: float
    open_s: float = 0.0
    """Time since the last step that was counted ended; 0 with no plan in hand."""

    @property
    def told_s(self) -> float:
        """Time that the worker itself accounts for."""
        return self.busy_s + self.activations_wait_s + self.tokens_wait_s + self.communication_s


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Child to supervisor: why I end. `secondary`: another rank is the likely cause."""

    who: str
    message: str
    user_error: bool = False
    secondary: bool = False
    at_s: float = 0.0
    """When, on the host's monotonic clock."""


class Stop(msgspec.Struct, frozen=True, tag="stop", array_like=True):
    """Engine to worker: end cleanly."""


WorkerMessage = Join | LoadProgress | Loaded | Prepared | WorkerStats | StepResult
ToWorkerMessage = Start | Allocate | StepPlan | Stop
