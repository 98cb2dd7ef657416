"""The reference: `transformers` in float32, asked what it thinks of every token that headrace wrote."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.engine.llm import Generation

TOLERANCE = 1e-4
"""Of log-probabilities; where the reference's two best tokens are nearer than this, either is right."""


@dataclass(frozen=True)
class Written:
    """What headrace said of one greedy request."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    top: Sequence[dict[int, float]]
    """Best tokens with their log-probabilities, by generated position."""


def written_by(generation: Generation) -> Written:
    """What a greedy generation with log-probabilities says."""
    entries = generation.logprobs or []
    top = [dict(zip(entry.top_tokens, entry.top_logprobs, strict=True)) for entry in entries]
    logprobs = [entry.logprob for entry in entries]
    return Written(generation.prompt_token_ids, generation.token_ids, logprobs, top)


def check(model: Any, written: Written, where: str) -> None:
    """Every token is the reference's best, and every log-probability its own, given the same past."""
    assert len(written.logprobs) == len(written.tokens) > 0, where
    ids = [*written.prompt, *written.tokens]
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, len(written.prompt) - 1 : -1]
    expected = logits.float().log_softmax(-1)
    for i, (token, logprob) in enumerate(zip(written.tokens, written.logprobs, strict=True)):
        at = f"{where}, token {i} of {len(written.tokens)}"
        best = expected[i].topk(2)
        if token != best.indices[0]:
            gap = float(best.values[0] - expected[i, token])
            assert gap < TOLERANCE, f"{at}: {token} where the reference has {int(best.indices[0])}, better by {gap:.2e}"
        difference = abs(logprob - float(expected[i, token]))
        assert difference < TOLERANCE, f"{at}: log-probability {logprob} is off by {difference:.2e}"
        for other, value in written.top[i].items():
            difference = abs(value - float(expected[i, other]))
            assert difference < TOLERANCE, f"{at}: log-probability of {other} is off by {difference:.2e}"


def prompts(seed: int, count: int, *, vocab: int = 256, longest: int = 90) -> list[list[int]]:
    """Random prompts, from one token to `longest`; a third of them begin as the longest does."""
    source = random.Random(seed)
    lengths = [1, 2, longest, *(source.randint(1, longest) for _ in range(count))][:count]
    source.shuffle(lengths)
    found = [[source.randrange(vocab) for _ in range(length)] for length in lengths]
    whole = max(found, key=len)
    for prompt in found[::3]:
        if prompt is not whole:
            prompt[:-1] = whole[: len(prompt) - 1]
    return found
