"""The INT4 layout against a plain reading of its definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.weights.formats import dequantise, pack_int4, quantise, unpack_int4

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def oracle_pack(rows: list[list[int]]) -> list[list[int]]:
    """Eight columns a word, the lowest column in the lowest nibble, stored value = weight + 8; words are signed."""
    packed = []
    for row in rows:
        words = []
        for start in range(0, len(row), 8):
            word = sum((value + 8) << (4 * i) for i, value in enumerate(row[start : start + 8]))
            words.append(word - (1 << 32) if word >= 1 << 31 else word)
        packed.append(words)
    return packed


matrices = st.tuples(st.integers(1, 4), st.integers(1, 4)).flatmap(
    lambda size: st.lists(
        st.lists(st.integers(-8, 7), min_size=8 * size[1], max_size=8 * size[1]), min_size=size[0], max_size=size[0]
    )
)


@given(matrices)
def test_packing_is_the_definition(rows: list[list[int]]) -> None:
    q = torch.tensor(rows, dtype=torch.int8)
    packed = pack_int4(q)
    assert packed.dtype == torch.int32
    assert packed.tolist() == oracle_pack(rows)
    for dtype in (torch.int8, *DTYPES):
        assert torch.equal(unpack_int4(packed, dtype), q.to(dtype))


def test_one_word_by_hand() -> None:
    q = torch.tensor([[-8, -7, 0, 1, 7, -1, 2, 3]], dtype=torch.int8)
    assert pack_int4(q).tolist() == [[0xBA7F9810 - (1 << 32)]]


def test_any_bits_are_weights() -> None:
    words = torch.randint(-(2**31), 2**31, (6, 4), dtype=torch.int64).to(torch.int32)
    assert torch.equal(pack_int4(unpack_int4(words)), words)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(3, 2, 8), (4, 1, 16), (2, 3, 32)]), st.sampled_from(DTYPES))
def test_dequantising_is_weight_times_its_groups_scale(
    seed: int, size: tuple[int, int, int], dtype: torch.dtype
) -> None:
    rows, groups, group = size
    random = np.random.default_rng(seed)
    q = random.integers(-8, 8, (rows, groups * group)).astype(np.int8)
    scale = torch.from_numpy(random.uniform(1e-3, 2, (rows, groups)).astype(np.float32)).bfloat16()
    got = dequantise(pack_int4(torch.from_numpy(q)), scale, dtype)
    assert got.dtype == dtype
    for row in range(rows):
        for column in range(groups * group):
            exact = int(q[row, column]) * scale[row, column // group].item()
            assert got[row, column].item() == torch.tensor(exact, dtype=torch.float64).to(dtype).item()


@pytest.mark.parametrize("dtype", DTYPES)
def test_leading_dims_are_so_many_matrices(dtype: torch.dtype) -> None:
    weight = torch.randn(2, 3, 5, 64)
    packed, scale = quantise(weight, 32)
    assert (packed.shape, scale.shape, scale.dtype) == ((2, 3, 5, 8), (2, 3, 5, 2), torch.bfloat16)
    together = dequantise(packed, scale, dtype)
    for i in range(2):
        for j in range(3):
            assert torch.equal(dequantise(packed[i, j], scale[i, j], dtype), together[i, j])


def test_part_of_a_packed_weight_is_that_part() -> None:
    packed, scale = quantise(torch.randn(6, 128), 32)
    whole = dequantise(packed, scale, torch.float32)
    assert torch.equal(dequantise(packed[2:4, 8:12], scale[2:4, 2:3], torch.float32), whole[2:4, 64:96])


@given(st.integers(0, 2**32 - 1), st.sampled_from([8, 32]))
def test_quantising_errs_by_half_a_step_or_a_clipped_one(seed: int, group: int) -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
    packed, scale = quantise(weight, group)
    step = scale.float().repeat_interleave(group, dim=1)
    error = (dequantise(packed, scale, torch.float32) - weight).abs()
    # The largest magnitude is 7.5 steps, give or take the scale's own rounding: one that is positive is cut to 7.
    assert (error <= 0.56 * step).all()


def test_group_of_zeros_stays_zero() -> None:
    packed, scale = quantise(torch.zeros(2, 32), 32)
    assert torch.equal(dequantise(packed, scale, torch.float32), torch.zeros(2, 32))
