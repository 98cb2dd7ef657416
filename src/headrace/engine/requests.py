"""From what a client submits to what the scheduler takes, checked so that nothing bad reaches a worker."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from headrace.errors import UserError
from headrace.sampling import SamplingParams
from headrace.schedule.request import Request
from headrace.spec import ModelSpec
from headrace.step import Submit, unpack

WARM_UP = "warm-up"
WARM_TOKENS = 10
"""The first decode step runs what none has run before, those after it show how long one takes."""


class Intake:
    """Checks and translates the requests of one model."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        self._spec = spec
        self._eos_ids = [token for token in spec.eos_ids if token < spec.vocab_size]
        self._random = random.Random(seed)  # noqa: S311  # for noise, not for secrets

    def request(self, key: str, submit: Submit) -> Request:
        """The scheduler's request, named `key`. Raises UserError naming the field."""
        tokens, vocab = unpack(submit.tokens), self._spec.vocab_size
        if not len(tokens):
            raise UserError("prompt: is empty")
        if int(tokens.min()) < 0 or int(tokens.max()) >= vocab:
            raise UserError(f"prompt: token ids must be between 0 and {vocab - 1}")
        try:
            submit.sampling.validate(vocab)
        except ValueError as error:
            raise UserError(str(error)) from None
        # Drawn even where it is not needed, so that a seed depends on the place among the submissions alone.
        seed = self._random.getrandbits(63)
        return Request.from_sampling(
            key, submit.tokens, submit.sampling, eos_ids=self._eos_ids, seed=seed, priority=submit.priority
        )


def warm_up(length: int) -> Submit:
    """A request that passes every stage: a prompt of `length` tokens, then a few decodes, as far as there is room."""
    tokens = np.zeros(length, dtype="<i4").tobytes()
    return Submit(WARM_UP, tokens, SamplingParams(temperature=0.0, max_tokens=WARM_TOKENS, ignore_eos=True))


def decode_step_s(token_times_s: Sequence[float]) -> float:
    """From one token to the next, by when each of the warm-up's was there; at least two.

    Results of steps that run ahead may come together, so that one gap says nothing: it is the mean of those after the
    first, which is left out where there are more.
    """
    first = min(1, len(token_times_s) - 2)
    return (token_times_s[-1] - token_times_s[first]) / (len(token_times_s) - 1 - first)
