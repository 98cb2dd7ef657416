"""Hypothesis strategies for the values that several tests draw."""

from __future__ import annotations

from hypothesis import strategies as st

from headrace.schedule import SchedulerConfig
from headrace.schedule.order import POLICIES
from headrace.step import SamplerSpec
from tests.fakes.executor import VOCAB_SIZE

TOKENS = st.integers(0, VOCAB_SIZE - 1)


ALIKE = st.lists(st.sampled_from([7, 7, 7, 8]), min_size=1, max_size=20)
"""Prompts that often begin alike."""
PROMPTS = ALIKE | st.lists(TOKENS, min_size=1, max_size=20)


@st.composite
def scheduler_configs(draw: st.DrawFn) -> SchedulerConfig:
    """Small ones, so that every bound is met often."""
    return SchedulerConfig(
        num_stages=draw(st.integers(1, 4)),
        max_running=draw(st.integers(1, 8)),
        chunk=draw(st.sampled_from([1, 2, 5, 16, 64])),
        page_size=draw(st.sampled_from([1, 3, 4])),
        num_pages=draw(st.integers(4, 24)),
        max_len=draw(st.sampled_from([8, 24, 64])),
        max_in_flight=draw(st.sampled_from([None, None, 1, 2])),
        headroom=draw(st.sampled_from([0, 0, 4, 32])),
        prefix_cache=draw(st.sampled_from([True, True, True, False])),
        policy=draw(st.sampled_from(list(POLICIES.values()))),
        max_waiting=draw(st.sampled_from([None, None, None, 0, 2])),
    )


@st.composite
def sampler_specs(draw: st.DrawFn) -> SamplerSpec:
    """What decides when a request ends and what it brings along."""
    return SamplerSpec(
        seed=draw(st.integers(0, 3)),
        logprobs=draw(st.sampled_from([None, 0])),
        prompt_logprobs=draw(st.sampled_from([None, 0])),
        min_tokens=draw(st.integers(0, 3)),
        stop_token_ids=draw(st.lists(TOKENS, max_size=3, unique=True)),
    )
