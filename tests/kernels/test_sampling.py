"""Sampling kernels in the interpreter, and their references against the sampler of the CPU path."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.argmax import argmax, argmax_reference, launch_argmax
from headrace.kernels.sampling import launch_sample, sample
from headrace.worker.sampler import draw, truncate


def knobs(rows: int) -> tuple[torch.Tensor, ...]:
    """temperature, top_k, top_p, min_p, noise, each from a set with the corners in it."""

    def pick(values: list[float]) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), (rows,))]

    temperature = pick([0.0, 0.5, 1.0, 2.0])
    top_k = pick([0, 1, 5, 30, 300]).int()
    top_p, min_p = pick([0.0, 0.1, 0.5, 0.9, 1.0]), pick([0.0, 0.02, 0.1, 1.0])
    return temperature, top_k, top_p, min_p, torch.rand(rows, dtype=torch.float64)


def spoilt(rows: int, vocab: int) -> torch.Tensor:
    """Logits of which rows 0 to 5 hold what they should not, or ties."""
    logits = torch.randn(rows, vocab) * 3
    logits[0, 5] = float("nan")
    logits[1] = float("nan")
    logits[2, 7] = float("inf")
    logits[3, : vocab // 2] = float("-inf")
    logits[4] = float("-inf")
    logits[5] = 0.0
    return logits


SOUND = [False, False, False, True, False, True]


def test_argmax() -> None:
    logits = spoilt(9, 40)
    tokens, sound = argmax(logits)
    assert sound[:6].tolist() == SOUND and sound[6:].all()
    assert torch.equal(tokens[6:], logits[6:].argmax(-1))
    assert tokens[5] == 0
    reference, expected = argmax_reference(logits)
    assert torch.equal(sound, expected) and torch.equal(tokens[sound.bool()], reference[sound.bool()])


@pytest.mark.parametrize("rounded", [False, True])
def test_sample_is_the_samplers_choice(rounded: bool) -> None:
    rows = 200
    logits = torch.randn(rows, 300) * 3
    if rounded:  # ties
        logits = logits.round()
    temperature, top_k, top_p, min_p, noise = knobs(rows)
    tokens, sound = sample(logits, temperature, top_k, top_p, min_p, noise)
    assert sound.all()
    greedy = temperature == 0
    assert torch.equal(tokens[greedy], argmax(logits)[0][greedy])
    drawn = ~greedy
    probs = truncate(
        ((logits - logits.amax(-1, keepdim=True)) / temperature.unsqueeze(-1)).softmax(-1)[drawn],
        top_k[drawn].long(),
        top_p[drawn],
        min_p[drawn],
    )
    # A sum rounded otherwise may move a boundary; never by more than one row in hundreds.
    assert int((draw(probs, noise[drawn]) != tokens[drawn]).sum()) <= 1


@pytest.mark.interpreted
def test_argmax_kernels() -> None:
    logits = spoilt(8, 50)
    tokens, sound = launch_argmax(logits, chunk=16)
    expected, expected_sound = argmax_reference(logits)
    assert torch.equal(tokens, expected) and torch.equal(sound, expected_sound)


@pytest.mark.interpreted
@pytest.mark.parametrize(("room", "rounded"), [(16, False), (64, True), (4, False)])
def test_sample_kernels(room: int, rounded: bool) -> None:
    """With room for some, all or hardly any of the weights that are gathered apart."""
    logits = spoilt(12, 50)
    if rounded:
        logits = logits.round()
    temperature, top_k, top_p, min_p, noise = knobs(12)
    tokens, sound = launch_sample(logits, temperature, top_k, top_p, min_p, noise, chunk=32, tile=32, room=room)
    expected, expected_sound = sample(logits, temperature, top_k, top_p, min_p, noise)
    assert torch.equal(sound, expected_sound)
    assert torch.equal(tokens, expected)
