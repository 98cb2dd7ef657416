"""Requests as clients send them: one pydantic model an endpoint, so that the OpenAPI description is exact.

Fields that are not named here are ignored: clients of other engines send many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

MAX_CHOICES = 64
INT64 = 2**63


def _said_once(problem: str) -> WrapValidator:
    """Give a union one plain message instead of one for each of its members."""

    def check(value: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise PydanticCustomError("value", "{problem}", {"problem": problem}) from None

    return WrapValidator(check)


def _integral(value: Any) -> Any:
    """3.0 is an integer in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_integral)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[TokenId], Field(min_length=1)]
Prompt = Annotated[
    str
    | Tokens
    | Annotated[list[str], Field(min_length=1, max_length=1024)]
    | Annotated[list[Tokens], Field(min_length=1, max_length=1024)],
    _said_once("must be a string, a list of token ids, or a list of up to 1024 of either, none of them empty"),
]
Stop = Annotated[
    Annotated[str, Field(min_length=1)] | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=16)],
    _said_once("must be a non-empty string or a list of up to 16 of them"),
]


class Body(BaseModel):
    """A request body: JSON types as they are, no conversions."""

    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(Body):
    """What a stream carries besides text."""

    include_usage: bool | None = None


class ResponseFormat(Body):
    """The shape of the answer; only "text" is served."""

    type: str


class SamplingFields(Body):
    """What both endpoints take."""

    model: str | None = None
    """Absent: the served one."""
    temperature: float | None = Field(None, ge=0, le=100)
    top_k: Int | None = Field(None, ge=-1, lt=INT64)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[str, float] | None = Field(None, max_length=1024)
    seed: Int | None = Field(None, ge=-INT64, lt=INT64)
    n: Int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: Stop | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=256)
    min_tokens: Int | None = Field(None, ge=0, lt=2**31)
    ignore_eos: bool | None = None
    priority: Int | None = Field(None, ge=-INT64, lt=INT64)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: Prompt
    max_tokens: Int | None = Field(None, ge=0, lt=2**31)
    """By default 16, as OpenAI's."""
    logprobs: Int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    suffix: str | None = None
    best_of: Int | None = Field(None, ge=1)


class Function(Body):
    """A function that the model may call."""

    model_config = ConfigDict(strict=True, extra="allow")
    name: str


class Tool(Body):
    """A tool that the model may call."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: Literal["function"]
    function: Function


class Part(Body):
    """A part of a message's content; only text is served."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: str
    text: str | None = None


class Message(Body):
    """One message of a conversation; what else it carries reaches the template as it is."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[Part] | None, _said_once("must be a string, or a list of parts with a type")] = None


class ChatFields(Body):
    """What is needed to render a conversation."""

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(SamplingFields, ChatFields):
    """POST /v1/chat/completions."""

    max_tokens: Int | None = Field(None, ge=1, lt=2**31)
    max_completion_tokens: Int | None = Field(None, ge=1, lt=2**31)
    """By default as many as fit."""
    logprobs: bool | None = None
    top_logprobs: Int | None = Field(None, ge=0, le=20)
    tool_choice: Annotated[
        str | dict[str, Any] | None, _said_once('must be "none", "auto", "required" or a named tool')
    ] = None
    parallel_tool_calls: bool | None = None


class TokenizeRequest(Body):
    """POST /tokenize: a prompt, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    """Of a prompt; a template brings its own."""
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("value", "give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[TokenId]
