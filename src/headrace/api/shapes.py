"""Answers as clients get them: msgspec structs, encoded once a chunk, and their part of the OpenAPI description."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from headrace.api.errors import ErrorBody, ErrorDetail
from headrace.api.generation import Finish, Generation


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """What became of a request's prompt tokens."""

    cached_tokens: int
    """Those that were found in the prefix cache and not computed again."""


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request, all its choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(num_prompt: int, runs: Sequence[Generation], num_each: int) -> Usage:
    """Prompts count once, whatever number of choices each has; as cached counts what none of these computed."""
    num_completion = sum(run.num_tokens for run in runs)
    firsts = range(0, len(runs), num_each)
    num_cached = sum(min(run.num_cached for run in runs[first : first + num_each]) for first in firsts)
    return Usage(num_prompt, num_completion, num_prompt + num_completion, PromptTokensDetails(num_cached))


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """One entry a token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Where each token's text begins in the choice's text, in characters."""


class CompletionChoice(msgspec.Struct, frozen=True):
    """One completion, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None


class Completion(msgspec.Struct, frozen=True):
    """An answer of /v1/completions, or one chunk of its stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None | UnsetType = UNSET
    object: Literal["text_completion"] = "text_completion"


class TopLogprob(msgspec.Struct, frozen=True):
    """A token that could have been."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(msgspec.Struct, frozen=True):
    """A token that was sampled."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """One entry a token."""

    content: list[ChatLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """The assistant's message."""

    content: str
    role: Literal["assistant"] = "assistant"


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish


class ChatCompletion(msgspec.Struct, frozen=True):
    """An answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class ChatDelta(msgspec.Struct, frozen=True):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    """What a chunk adds to one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatChunk(msgspec.Struct, frozen=True):
    """One chunk of a stream of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None | UnsetType = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class ModelCard(msgspec.Struct, frozen=True):
    """A model that is served."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: Literal["headrace"] = "headrace"
    parent: None = None


class ModelList(msgspec.Struct, frozen=True):
    """The models that are served: one."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


class Tokenized(msgspec.Struct, frozen=True):
    """An answer of /tokenize."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    """An answer of /detokenize."""

    prompt: str


class Health(msgspec.Struct, frozen=True):
    """An answer of /health."""

    status: str
    detail: str = ""


class Readiness(msgspec.Struct, frozen=True):
    """An answer of /ready: 200 with status "ready", else 503."""

    status: str
    """starting, loading, warming, ready, draining or failed."""
    detail: str = ""
    done_bytes: int = 0
    """Of weights, while loading."""
    total_bytes: int = 0
    error: ErrorDetail | None = None
    """The same as other routes answer it; null when ready."""


class Version(msgspec.Struct, frozen=True):
    """An answer of /version."""

    version: str


_DESCRIBED: tuple[type[msgspec.Struct], ...] = (
    Completion, ChatCompletion, ChatChunk, ModelCard, ModelList, Tokenized, Detokenized, Health, Readiness, Version,
    ErrorBody,
)  # fmt: skip


def component_schemas() -> dict[str, Any]:
    """JSON schemas of all answers, by struct name, as OpenAPI components."""
    _, components = msgspec.json.schema_components(_DESCRIBED, ref_template="#/components/schemas/{name}")
    return components


def describe(answer: type[msgspec.Struct], *, errors: tuple[int, ...] = (), sse: bool = False) -> dict[int | str, Any]:
    """The `responses` of a route: its success, as an event stream too where it can be, and its errors."""
    content: dict[str, Any] = {"application/json": {"schema": _ref(answer)}}
    if sse:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    found: dict[int | str, Any] = {200: {"description": answer.__doc__, "content": content}}
    for status in errors:
        found[status] = {"description": "Error", "content": {"application/json": {"schema": _ref(ErrorBody)}}}
    return found


def _ref(struct: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{struct.__name__}"}
