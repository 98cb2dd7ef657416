"""What a fixed set of requests must be answered, greedy and sampled: by transformers' probabilities."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.worker.sampler import uniform

CLEAR = 1e-3
"""A greedy answer is asked for only where the best token is ahead of the second by so much at every place."""
CLEAR_MASS = 1e-5
"""A sampled one only where no other token's share of the mass begins or ends so near to what was drawn."""
NUM_GREEDY = 24
NUM_SAMPLED = 16
LONGEST_PROMPT = 300
LONGEST_ANSWER = 120


@dataclass(frozen=True)
class Asked:
    """One request, and the ids that answer it; none where they are not known yet."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    answer: tuple[int, ...] = ()

    def body(self, *, stream: bool) -> dict[str, Any]:
        """As a request of the completions endpoint."""
        return {
            "prompt": list(self.prompt), "max_tokens": self.max_tokens, "temperature": self.temperature,
            "seed": self.seed, "ignore_eos": True, "logprobs": 1, "stream": stream,
        }  # fmt: skip


def greedy_requests(model: Any, seed: int, vocab: int = 256) -> list[Asked]:
    """Requests with transformers' greedy answers, none of which hangs on a rounding."""
    source = random.Random(seed)
    found: list[Asked] = []
    while len(found) < NUM_GREEDY:
        length = source.choice((1, 2, source.randint(3, 60), source.randint(60, LONGEST_PROMPT)))
        prompt = tuple(source.randrange(vocab) for _ in range(length))
        if found and source.random() < 0.3:
            # As long as another's, and all but the last token the same: what is cached of it is found.
            prompt = (*source.choice(found).prompt[:-1], source.randrange(vocab))
        max_tokens = source.randint(4, LONGEST_ANSWER)
        answer = _answer(model, prompt, max_tokens)
        if answer:
            found.append(Asked(prompt, len(answer), answer=answer))
    return found


def sampled_requests(model: Any, seed: int, vocab: int = 256) -> list[Asked]:
    """Requests whose answers follow from their seeds, none of which hangs on a rounding."""
    source = random.Random(seed)
    found: list[Asked] = []
    for number in range(NUM_SAMPLED):
        prompt = tuple(source.randrange(vocab) for _ in range(source.randint(1, 200)))
        answer = _drawn(model, prompt, source.randint(20, LONGEST_ANSWER), number)
        if answer:
            found.append(Asked(prompt, len(answer), temperature=1.0, seed=number, answer=answer))
    return found


def _drawn(model: Any, prompt: tuple[int, ...], max_tokens: int, seed: int) -> tuple[int, ...]:
    """What the noise of `seed` draws at temperature 1, as far as it is clear."""
    ids, answer = list(prompt), list[int]()
    seeds = np.array([seed], dtype=np.uint64)
    with torch.inference_mode():
        for _ in range(max_tokens):
            probs = model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1].double().softmax(-1)
            mass, noise = probs.cumsum(-1), float(uniform(seeds, np.array([len(ids)]))[0])
            if float((mass - noise).abs().min()) < CLEAR_MASS:
                break
            answer.append(int(torch.searchsorted(mass, noise, right=True)))
            ids.append(answer[-1])
    return tuple(answer)


def _answer(model: Any, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """The greedy answer, as far as it is clear."""
    ids, answer = list(prompt), list[int]()
    with torch.inference_mode():
        for _ in range(max_tokens):
            best = model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1].float().topk(2)
            if float(best.values[0] - best.values[1]) < CLEAR:
                break
            answer.append(int(best.indices[0]))
            ids.append(answer[-1])
    return tuple(answer)
