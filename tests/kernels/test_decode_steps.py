"""The small fused kernels of a decode step in Triton's interpreter, against their references and float64."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels import activation, kv_write, latent, norm, rotary

PAGES, SIZE = 5, 4


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def tables(rope_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.randn(32, 1, rope_dim // 2)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def places(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions, and slots of which every third is none."""
    slots = torch.randperm(PAGES * SIZE)[:tokens]
    slots[1::3] = -1
    return torch.randint(0, 32, (tokens,)), slots


@pytest.mark.interpreted
@pytest.mark.parametrize("shape", [(1, 7), (5, 96), (3, 5, 24)])
def test_norm(shape: tuple[int, ...]) -> None:
    x, delta, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[-1])
    close(norm.rms_norm_triton(x, None, weight, 1e-5)[0], norm.rms_norm(x, weight, 1e-5))
    for got, expected in zip(
        norm.rms_norm_triton(x, delta, weight, 1e-5), norm.add_rms_norm(x, delta, weight, 1e-5), strict=True
    ):
        close(got, expected)


@pytest.mark.interpreted
def test_norm_of_many_narrow_strided_rows() -> None:
    x, weight = torch.randn(600, 5, 16)[:, 1:4], torch.randn(16)
    assert norm.norm_tiles(1800, 16)[0] > 1
    close(norm.rms_norm_triton(x, None, weight, 1e-5)[0], norm.rms_norm(x, weight, 1e-5))


@pytest.mark.interpreted
def test_a_width_that_is_7168() -> None:
    x, delta, weight = torch.randn(2, 7168), torch.randn(2, 7168), torch.randn(7168)
    close(norm.rms_norm_triton(x, delta, weight, 1e-6)[0], norm.rms_norm(x + delta, weight, 1e-6))


@pytest.mark.interpreted
@pytest.mark.parametrize("shape", [(1, 10), (3, 2 * 1100), (2, 3, 64)])
def test_silu_mul(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    close(activation.silu_mul_triton(x), activation.silu_mul(x))


@pytest.mark.interpreted
def test_rows_of_a_cache() -> None:
    k, v = torch.randn(6, 2 + 3, 8)[:, :3], torch.randn(6, 3, 8)
    _, slots = places(6)
    got, expected = torch.full((2, PAGES, SIZE, 2, 3, 8), torch.nan)
    kv_write.write_kv(k, v, expected, slots)
    kv_write.write_rows_triton((k.flatten(1), v.flatten(1)), got, slots)
    assert torch.equal(got.nan_to_num(9), expected.nan_to_num(9))
    assert int(got[..., 0, 0, 0].isnan().sum()) == PAGES * SIZE - 4
    got, expected = torch.full((2, PAGES, SIZE, 10), torch.nan)
    rows = torch.randn(6, 10)
    kv_write.write_latent(rows, expected, slots)
    kv_write.write_rows_triton((rows,), got, slots)
    assert torch.equal(got.nan_to_num(9), expected.nan_to_num(9))


@pytest.mark.interpreted
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "dim"), [(1, 4, 2, 16), (7, 5, 1, 12)])
def test_prepare_gqa(normed: bool, tokens: int, heads: int, kv_heads: int, dim: int) -> None:
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim)
    q_w, k_w = (torch.randn(dim), torch.randn(dim)) if normed else (None, None)
    cos, sin = tables(dim)
    positions, slots = places(tokens)
    got, expected = torch.full((2, PAGES, SIZE, 2, kv_heads, dim), 9.0)
    arguments = (qkv, heads, kv_heads, cos, sin, positions, slots)
    q = rotary.prepare_gqa_triton(*arguments, got, q_w, k_w, 1e-6)
    close(q, rotary.prepare_gqa(*arguments, expected, q_w, k_w, 1e-6))
    close(got, expected)
    assert int((got == 9).all(-1).all(-1).all(-1).sum()) == PAGES * SIZE - int((slots >= 0).sum())


@pytest.mark.interpreted
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_prepare_latent(interleaved: bool, normed: bool) -> None:
    a, kv_w = torch.randn(7, 24 + 20 + 12), torch.randn(20)
    q_w = torch.randn(24) if normed else None
    cos, sin = tables(12)
    positions, slots = places(7)
    got, expected = torch.full((2, PAGES, SIZE, 32), 9.0)
    q = latent.prepare_latent_triton(a, q_w, kv_w, 1e-6, cos, sin, positions, slots, got, interleaved)
    close(q, latent.prepare_latent(a, q_w, kv_w, 1e-6, cos, sin, positions, slots, expected, interleaved))
    close(got, expected)


@pytest.mark.interpreted
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("tokens", "tiles"), [(1, None), (5, None), (21, (16, 16, 4, 1)), (70, None)])
def test_absorb_query(interleaved: bool, tokens: int, tiles: tuple[int, int, int, int] | None) -> None:
    q, kv_b = torch.randn(tokens, 3 * 28).view(tokens, 3, 28), torch.randn(3, 16 + 8, 40)
    cos, sin = tables(12)
    positions = torch.randint(0, 32, (tokens,))
    arguments = (q, kv_b[:, :16], cos, sin, positions, interleaved)
    close(latent.absorb_query_triton(*arguments, tiles), latent.absorb_query(*arguments))
    close(latent.absorb_query_bmm(*arguments), latent.absorb_query(*arguments))


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("tokens", "tiles"), [(1, None), (5, None), (21, (16, 16, 16, 4, 1)), (9, (16, 16, 64, 4, 1)), (70, None)]
)
def test_expand_value(tokens: int, tiles: tuple[int, int, int, int, int] | None) -> None:
    out, kv_b = torch.randn(tokens, 3, 40), torch.randn(3, 16 + 24, 40)
    w_uv = kv_b[:, 16:].transpose(1, 2)
    close(latent.expand_value_triton(out, w_uv, tiles), latent.expand_value(out, w_uv))
    close(latent.expand_value_bmm(out, w_uv), latent.expand_value(out, w_uv))


def test_a_slot_past_the_cache_is_an_error() -> None:
    with pytest.raises(IndexError):
        kv_write.write_latent(torch.randn(2, 4), torch.zeros(1, 2, 4), torch.tensor([-1, 2]))
