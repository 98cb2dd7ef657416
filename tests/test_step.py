"""What crosses a process boundary survives it, and nothing else gets in."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.sampling import SamplingParams
from headrace.step import (
    Join,
    Register,
    SamplerSpec,
    StepPlan,
    StepResult,
    Stop,
    TokenLogprobs,
    ToWorkerMessage,
    WorkerMessage,
    pack,
    unpack,
)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_pack_round_trip(values: list[int]) -> None:
    assert unpack(pack(values)).tolist() == values


def test_plans_and_results_round_trip() -> None:
    plan = StepPlan(
        7, pack([0, 3, 1, 1]), [2], [Register(0, pack([5, 6]), 2, SamplerSpec(seed=3, logprobs=2))], pack([0, 9])
    )
    data = msgspec.msgpack.encode(plan)
    assert msgspec.msgpack.decode(data, type=ToWorkerMessage) == plan
    result = StepResult(7, pack([4]), {0: TokenLogprobs(4, -0.5, [4, 1], [-0.5, -2.0])}, {})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=WorkerMessage) == result
    assert isinstance(msgspec.msgpack.decode(msgspec.msgpack.encode(Stop()), type=ToWorkerMessage), Stop)


def test_a_decode_row_costs_few_bytes() -> None:
    def size(rows: int) -> int:
        return len(msgspec.msgpack.encode(StepPlan(1, pack([1, 2, 1, 1] * rows))))

    assert size(256) - size(128) == 128 * 16


def test_wrong_messages_are_refused() -> None:
    for data in (b"", b"\x93\xa4join\x01", msgspec.msgpack.encode({"type": "join"}), msgspec.msgpack.encode(["plan"])):
        with pytest.raises(msgspec.MsgspecError):
            msgspec.msgpack.decode(data, type=WorkerMessage)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Join(1, 2)), type=WorkerMessage) == Join(1, 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("presence_penalty", 3.0),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0.0),
        ("logprobs", 21),
        ("max_tokens", -3),
        ("min_tokens", -1),
        ("seed", 2**64),
        ("stop", ("",)),
        ("stop_token_ids", (300,)),
        ("logit_bias", {300: 1.0}),
        ("logit_bias", {1: 101.0}),
    ],
)
def test_bad_values_name_their_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{field}:"):
        SamplingParams(**{field: value}).validate(vocab_size=300)  # type: ignore[arg-type]
    SamplingParams().validate(vocab_size=300)


def test_a_tokenizers_ends_are_added_unless_ends_are_ignored() -> None:
    params = SamplingParams(stop_token_ids=(5,))
    assert params.ending_at([7, 5]).stop_token_ids == (5, 7)
    assert params.ending_at([5]) is params
    assert SamplingParams(ignore_eos=True).ending_at([7]).stop_token_ids == ()
