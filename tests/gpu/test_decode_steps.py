"""The small fused kernels of a decode step against float64 on the same device, at once and from a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from headrace.kernels import activation, kv_write, latent, norm, rotary

pytestmark = pytest.mark.gpu
PAGES, SIZE = 40, 16
BF16 = torch.bfloat16


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def poison() -> None:
    """What the allocator hands out next holds NaN."""
    blocks = [torch.full((1 << power,), torch.nan, device="cuda") for power in range(7, 23) for _ in range(2)]
    del blocks


def check(got: torch.Tensor, expected: torch.Tensor, bound: float = 1e-2) -> None:
    assert got.shape == expected.shape
    error = (got.double() - expected.double()).norm() / expected.double().norm()
    assert error < bound, f"relative error {error:.1e}"


def both_ways(
    run: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor], expected: Callable[[], torch.Tensor]
) -> None:
    """Right at once, and right from a graph whose inputs changed after it was captured."""
    poison()
    check(run(), expected())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for tensor in inputs:
        tensor.normal_()
    y.fill_(torch.nan)
    graph.replay()
    check(y, expected())


def wide(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.double()


def tables(rope_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.randn(4096, 1, rope_dim // 2, device="cuda")
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(BF16), angles.sin().to(BF16)


def places(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    slots = torch.randperm(PAGES * SIZE, device="cuda")[:tokens]
    slots[1::3] = -1
    return torch.randint(0, 4096, (tokens,), device="cuda"), slots


def same_slots(got: torch.Tensor, expected: torch.Tensor) -> None:
    """What was written agrees; what was not is NaN in both."""
    assert torch.equal(got.isnan(), expected.isnan())
    check(got.nan_to_num(0), expected.nan_to_num(0))


@pytest.mark.parametrize("shape", [(1, 7168), (33, 7168), (5, 2048), (3, 1000), (300, 8, 128)])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, delta, weight = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype)

    def exact(values: torch.Tensor) -> torch.Tensor:
        v = values.double()
        return v / (v.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()

    both_ways(lambda: norm.rms_norm(x, weight, 1e-6), [x], lambda: exact(x))
    both_ways(lambda: norm.add_rms_norm(x, delta, weight, 1e-6)[0], [x, delta], lambda: exact(x + delta))
    assert torch.equal(norm.add_rms_norm(x, delta, weight, 1e-6)[1], x + delta)
    if len(shape) == 3:
        part = x[:, 2:5]
        both_ways(lambda: norm.rms_norm(part, weight, 1e-6), [x], lambda: exact(part))


@pytest.mark.parametrize("shape", [(1, 4096), (128, 2 * 1100), (3, 36864), (2, 3, 64)])
def test_silu_mul(shape: tuple[int, ...]) -> None:
    x = randn(*shape)
    both_ways(lambda: activation.silu_mul(x), [x], lambda: activation.silu_mul(x.double()))


@pytest.mark.parametrize("tokens", [1, 130])
def test_rows_of_a_cache(tokens: int) -> None:
    k, v = randn(tokens, 12, 96)[:, :5], randn(tokens, 5, 96)
    _, slots = places(tokens)
    got, expected = torch.full((2, PAGES, SIZE, 2, 5, 96), torch.nan, device="cuda", dtype=BF16)
    kv_write.write_kv(k, v, got, slots)
    kept = slots >= 0
    expected.flatten(0, 1)[slots[kept]] = torch.stack((k, v), dim=1)[kept]
    same_slots(got, expected)
    got, expected = torch.full((2, PAGES, SIZE, 576), torch.nan, device="cuda", dtype=BF16)
    rows = randn(tokens, 576)
    kv_write.write_latent(rows, got, slots)
    expected.flatten(0, 1)[slots[kept]] = rows[kept]
    same_slots(got, expected)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "dim"), [(1, 32, 4, 128), (17, 8, 1, 64), (300, 5, 2, 80)])
def test_prepare_gqa(normed: bool, tokens: int, heads: int, kv_heads: int, dim: int) -> None:
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim)
    q_w, k_w = (randn(dim), randn(dim)) if normed else (None, None)
    cos, sin = tables(dim)
    positions, slots = places(tokens)
    got = torch.full((PAGES, SIZE, 2, kv_heads, dim), torch.nan, device="cuda", dtype=BF16)
    kept = got.double()

    def expected() -> torch.Tensor:
        tables = (cos.double(), sin.double(), positions, slots)
        return rotary.prepare_gqa(qkv.double(), heads, kv_heads, *tables, kept, wide(q_w), wide(k_w), 1e-6)

    both_ways(
        lambda: rotary.prepare_gqa(qkv, heads, kv_heads, cos, sin, positions, slots, got, q_w, k_w, 1e-6),
        [qkv],
        expected,
    )
    same_slots(got, kept)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("tokens", "q_dim", "normed"), [(1, 1536, True), (19, 1536, True), (130, 3072, False)])
def test_prepare_latent(interleaved: bool, tokens: int, q_dim: int, normed: bool) -> None:
    a, kv_w, q_w = randn(tokens, q_dim + 576), randn(512), randn(q_dim) if normed else None
    cos, sin = tables(64)
    positions, slots = places(tokens)
    got = torch.full((PAGES, SIZE, 576), torch.nan, device="cuda", dtype=BF16)
    kept = got.double()

    def expected() -> torch.Tensor:
        tables = (cos.double(), sin.double(), positions, slots)
        return latent.prepare_latent(a.double(), wide(q_w), kv_w.double(), 1e-6, *tables, kept, interleaved)

    y = latent.prepare_latent(a, q_w, kv_w, 1e-6, cos, sin, positions, slots, got, interleaved)
    check(y, expected())
    same_slots(got, kept)
    if normed:
        arguments = (a, q_w, kv_w, 1e-6, cos, sin, positions, slots, got, interleaved)
        both_ways(lambda: latent.prepare_latent(*arguments), [a], expected)
        same_slots(got, kept)


@pytest.mark.parametrize(("tokens", "heads"), [(1, 64), (17, 32), (64, 16), (300, 16)])
@pytest.mark.parametrize("interleaved", [True, False])
def test_absorb_query(tokens: int, heads: int, interleaved: bool) -> None:
    q, kv_b = randn(tokens, heads, 192), randn(heads, 256, 512)
    cos, sin = tables(64)
    positions = torch.randint(0, 4096, (tokens,), device="cuda")
    w_uk = kv_b[:, :128]
    both_ways(
        lambda: latent.absorb_query(q, w_uk, cos, sin, positions, interleaved),
        [q],
        lambda: latent.absorb_query(q.double(), w_uk.double(), cos.double(), sin.double(), positions, interleaved),
    )


@pytest.mark.parametrize(("tokens", "heads"), [(1, 64), (17, 32), (33, 8), (64, 16), (300, 16)])
def test_expand_value(tokens: int, heads: int) -> None:
    out, kv_b = randn(tokens, heads, 512), randn(heads, 256, 512)
    w_uv = kv_b[:, 128:].transpose(1, 2)
    both_ways(lambda: latent.expand_value(out, w_uv), [out], lambda: latent.expand_value(out.double(), w_uv.double()))


def test_float32_is_right_too() -> None:
    q, out, kv_b = (
        randn(5, 4, 192, dtype=torch.float32),
        randn(5, 4, 512, dtype=torch.float32),
        torch.randn(4, 256, 512),
    )
    w_uk, w_uv = kv_b.cuda()[:, :128], kv_b.cuda()[:, 128:].transpose(1, 2)
    cos, sin = (table.float() for table in tables(64))
    positions = torch.arange(5, device="cuda")
    got = latent.absorb_query(q, w_uk, cos, sin, positions, True)
    check(got, latent.absorb_query(q.double(), w_uk.double(), cos.double(), sin.double(), positions, True), 1e-5)
    check(latent.expand_value(out, w_uv), latent.expand_value(out.double(), w_uv.double()), 1e-5)
