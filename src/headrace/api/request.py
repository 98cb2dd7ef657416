"""From a request's fields to what the engine is asked: checks that need the model, sampling, prompt lengths."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from uuid import uuid4

import msgspec

from headrace.api.errors import ApiError, bad_value, context_overflow, unsupported
from headrace.api.generation import Generation
from headrace.api.schema import SamplingFields
from headrace.api.service import Service
from headrace.sampling import SamplingParams
from headrace.text.detokenizer import Detokenizer

LONG_TEXT = 16_384
"""Texts of more characters are tokenised in a thread, so that streams go on meanwhile."""


def check_model(service: Service, name: str | None) -> None:
    """Raise a 404 for a model that is not the served one; no name means the served one."""
    if name is not None and name != service.model.name:
        raise ApiError(
            404,
            f"The model `{name}` does not exist here; `{service.model.name}` is served.",
            param="model",
            code="model_not_found",
        )


def check_fields(service: Service, fields: SamplingFields) -> None:
    """Raise a 400 for what the schema allows and no request can have here."""
    if fields.priority and not service.has_priorities:
        raise bad_value("priority", "any but 0 needs a server with --policy priority")
    if fields.stream_options is not None and not fields.stream:
        raise bad_value("stream_options", "only with stream: true")
    if fields.response_format is not None and fields.response_format.type != "text":
        kind = fields.response_format.type
        raise unsupported("response_format", f"type {kind!r} is not served yet; only 'text' is")


def sampling_of(
    fields: SamplingFields,
    vocab_size: int,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The engine's parameters. Raises a 400 that names the field."""
    given = {
        name: value
        for name in (
            "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
            "min_tokens", "ignore_eos",
        )
        if (value := getattr(fields, name)) is not None
    }  # fmt: skip
    top_k = fields.top_k or 0
    stop = fields.stop or ()
    params = SamplingParams(
        **given,
        # Any number from the vocabulary's size on keeps every token.
        top_k=0 if top_k < 0 or top_k >= vocab_size else top_k,
        logit_bias=_bias(fields.logit_bias or {}),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        max_tokens=max_tokens,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
    )
    try:
        params.validate(vocab_size)
    except ValueError as error:
        param, _, problem = str(error).partition(": ")
        raise bad_value(param, problem) from None
    return params


def _bias(given: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in given.items()}
    except ValueError:
        raise bad_value("logit_bias", "keys must be token ids") from None


def room_for(num_prompt: int, asked: int | None, max_len: int, *, param: str, field: str) -> int:
    """How many tokens to generate: as many as asked, or all that fit.

    `param` is the field that holds the prompt, `field` the one that holds the number asked for. Raises a 400 for what
    does not fit.
    """
    room = max_len - num_prompt
    if asked is not None:
        if asked <= room:
            return asked
        raise context_overflow(field if room > 0 else param, num_prompt, asked if room > 0 else 0, max_len)
    if room < 1:
        raise context_overflow(param, num_prompt, 0, max_len)
    return room


def generations(
    service: Service, prompts: Sequence[tuple[Sequence[int], SamplingParams]], num_each: int, priority: int
) -> list[Generation]:
    """One run for every choice, in the order of the choices: all of the first prompt, then all of the next.

    With a seed, the choices of a prompt get seed, seed + 1 and so on.
    """
    base = uuid4().hex
    runs: list[Generation] = []
    for tokens, asked in prompts:
        sampling = asked.ending_at([i for i in service.tokenizer.eos_ids if i < service.model.vocab_size])
        for index in range(num_each):
            params = sampling
            if index and sampling.seed is not None:
                params = msgspec.structs.replace(sampling, seed=_wrap(sampling.seed + index))
            runs.append(
                Generation(
                    f"{base}-{len(runs)}",
                    tokens,
                    params,
                    Detokenizer(service.tokenizer, stop=params.stop),
                    service.metrics.track(len(tokens)),
                    priority,
                )
            )
    return runs


def _wrap(seed: int) -> int:
    """Into 64 bits, signed."""
    return (seed + 2**63) % 2**64 - 2**63


async def encode(service: Service, text: str, *, add_special: bool) -> list[int]:
    """Token ids of a text."""
    tokenizer = service.tokenizer
    if len(text) > LONG_TEXT:
        return await asyncio.to_thread(tokenizer.encode, text, add_special=add_special)
    return tokenizer.encode(text, add_special=add_special)


async def encode_prompt(service: Service, text: str, *, add_special: bool, param: str) -> list[int]:
    """Token ids of a prompt. Raises a 400 when there are none."""
    tokens = await encode(service, text, add_special=add_special)
    if not tokens:
        raise bad_value(param, "is empty")
    return tokens
