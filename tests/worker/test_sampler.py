"""Sampling: exact where it can be, against the distribution where it cannot; never a matter of load."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import Fault
from headrace.step import Register, SamplerSpec, pack
from headrace.worker.sampler import Sampler, draw, token_logprobs, truncate, uniform

CPU = torch.device("cpu")
VOCAB = 40


def sampler_with(*specs: SamplerSpec, prompt: list[int] | None = None) -> Sampler:
    sampler = Sampler(len(specs), VOCAB, CPU)
    tokens = np.array(prompt or [1], dtype=np.int32)
    for slot, spec in enumerate(specs):
        sampler.register(Register(slot, pack(tokens), len(tokens), spec), tokens)
    return sampler


def sample(sampler: Sampler, logits: torch.Tensor, positions: list[int]) -> list[int]:
    slots = np.arange(len(positions))
    sampled = sampler.sample(logits, slots, np.array(positions))
    sampled.fetch(None)
    return sampled.finish()[0]


def test_temperature_zero_is_the_best_token() -> None:
    logits = torch.randn(3, VOCAB)
    assert sample(sampler_with(*[SamplerSpec(temperature=0.0)] * 3), logits, [1, 2, 3]) == logits.argmax(-1).tolist()


def test_noise_depends_on_seed_and_position_alone() -> None:
    logits = torch.randn(1, VOCAB)
    alone = sampler_with(SamplerSpec(seed=11))
    company = sampler_with(SamplerSpec(seed=11), SamplerSpec(seed=12, top_k=3), SamplerSpec(seed=13, top_p=0.5))
    for position in range(1, 30):
        crowd = torch.cat((logits, torch.randn(2, VOCAB)))
        assert sample(alone, logits, [position])[0] == sample(company, crowd, [position, 5, 6])[0]


def test_uniform_is_uniform_and_its_streams_are_apart() -> None:
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200))
    numbers = uniform(seeds.ravel(), positions.ravel())
    assert numbers.min() >= 0 and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.005 and abs(numbers.var() - 1 / 12) < 0.002
    grid = numbers.reshape(200, 200)
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02
    assert len(np.unique(numbers)) == numbers.size


def test_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.0, 0.3, 0.2])
    n = 20000
    noise = torch.from_numpy(uniform(np.full(n, 3, dtype=np.uint64), np.arange(n)))
    counts = torch.bincount(draw(probs.expand(n, 4), noise), minlength=4) / n
    torch.testing.assert_close(counts, probs, atol=0.015, rtol=0)
    assert counts[1] == 0


def test_draw_at_the_ends() -> None:
    probs = torch.tensor([[0.0, 1.0, 0.0]]).expand(2, 3)
    assert draw(probs, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)).tolist() == [1, 1]


@settings(deadline=None)
@given(top_k=st.integers(0, VOCAB + 5), top_p=st.floats(0.01, 1.0), min_p=st.floats(0, 1), seed=st.integers(0, 10**6))
def test_truncate_is_what_the_words_say(top_k: int, top_p: float, min_p: float, seed: int) -> None:
    probs = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)).mul(2).softmax(-1)
    top_k = min(top_k, VOCAB)
    got = truncate(probs[None], torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))[0]
    order = probs.argsort(descending=True).tolist()
    kept = [t for t in order[: top_k or VOCAB] if float(probs[t]) >= float(np.float32(min_p) * np.float32(probs.max()))]
    mass, nucleus = 0.0, list[int]()
    total = sum(float(probs[t]) for t in kept)
    for token in kept:
        if mass >= float(np.float32(top_p)) * total * (1 + 1e-6):
            break
        nucleus.append(token)
        mass += float(probs[token])
    got_set = set(got.nonzero().flatten().tolist())
    # At the very edge of the nucleus float sums may differ by one token.
    assert got_set <= set(kept) and len(got_set ^ set(nucleus)) <= (1 if top_p < 1 else 0)
    assert order[0] in got_set
    assert all(got[t] == probs[t] for t in got_set)


def test_nucleus_wider_than_the_first_guess() -> None:
    probs = torch.full((1, 4096), 1 / 4096)
    probs[0, 7] += 1e-4
    kept = truncate(probs / probs.sum(), torch.tensor([0]), torch.tensor([0.9]), torch.tensor([0.0]))
    assert 0.89 * 4096 < (kept > 0).sum() <= 4096


def test_penalties_count_prompt_and_output_as_they_should() -> None:
    spec = SamplerSpec(temperature=0.0, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=2.0)
    sampler = sampler_with(spec, prompt=[3])
    logits = torch.zeros(1, VOCAB)
    logits[0, 3], logits[0, 4], logits[0, 5] = 4.0, 3.0, 2.9
    # 3 is in the prompt: 4 / 2 = 2. Then 4 was generated: 3 / 2 - 0.5 - 1 = 0. Then 5: 2.9 / 2 - 1.5 < 2.
    assert [sample(sampler, logits, [p])[0] for p in (1, 2, 3)] == [4, 5, 3]
    # And 3 once generated: 2 - 1.5 = 0.5, still above 4's 0 and 5's -0.05; twice: 0; then token 0 of logit 0 wins ties.
    assert sample(sampler, logits, [4])[0] == 3


def test_a_new_life_remembers_what_was_generated() -> None:
    spec = SamplerSpec(temperature=0.0, presence_penalty=2.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 5] = 1.0, 0.5
    sampler = Sampler(1, VOCAB, CPU)
    tokens = np.array([3, 4], dtype=np.int32)
    sampler.register(Register(0, pack(tokens), 1, spec), tokens)
    assert sample(sampler, logits, [2]) == [5]


def test_bias_and_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 5.0
    biased = sampler_with(SamplerSpec(temperature=0.0, logit_bias={6: 50.0, 9: -100.0}))
    assert sample(biased, logits, [1]) == [6]
    held = sampler_with(SamplerSpec(temperature=0.0, min_tokens=2, stop_token_ids=[9]))
    assert [sample(held, logits, [p])[0] == 9 for p in (1, 2, 3)] == [False, False, True]


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_logprobs_are_the_models_own(num_top: int) -> None:
    logits = torch.randn(2, VOCAB)
    sampler = sampler_with(
        SamplerSpec(temperature=0.0, logprobs=num_top, logit_bias={3: 100.0}), SamplerSpec(temperature=0.0)
    )
    sampled = sampler.sample(logits, np.arange(2), np.array([1, 1]))
    sampled.fetch(None)
    tokens, logprobs = sampled.finish()
    assert tokens[0] == 3 and list(logprobs) == [0]
    own = logits[0].log_softmax(-1)
    assert logprobs[0].logprob == pytest.approx(float(own[3]), abs=1e-5)
    assert logprobs[0].top_tokens == own.topk(num_top).indices.tolist()


def test_each_row_gets_as_many_top_tokens_as_it_asked_for() -> None:
    entries = token_logprobs(torch.randn(3, VOCAB), torch.tensor([1, 2, 3]), [0, 2, 4])
    assert [len(e.top_tokens) for e in entries] == [len(e.top_logprobs) for e in entries] == [0, 2, 4]
    assert [e.token for e in entries] == [1, 2, 3]


def test_slots_do_not_inherit() -> None:
    sampler = sampler_with(SamplerSpec(temperature=0.0, presence_penalty=2.0, logit_bias={3: 100.0}))
    tokens = np.array([1], dtype=np.int32)
    sampler.register(Register(0, pack(tokens), 1, SamplerSpec(temperature=0.0)), tokens)
    logits = torch.zeros(1, VOCAB)
    logits[0, 8] = 1
    assert [sample(sampler, logits, [p])[0] for p in (1, 2, 3)] == [8, 8, 8]


@pytest.mark.parametrize("temperature", [1e-38, 1e-10, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.randn(1, VOCAB) * 20
    assert sample(sampler_with(SamplerSpec(temperature=temperature)), logits, [1]) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_a_fault(value: float) -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, 3] = value
    with pytest.raises(Fault, match="NaN"):
        sample(sampler_with(SamplerSpec(), SamplerSpec(temperature=0.0)), logits, [1, 1])
