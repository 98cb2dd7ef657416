"""Dense products of a few tokens, beside cuBLAS, and the small fused kernels that stand between them.

Shapes: T tokens, I input and O output dims; those of Kimi K2, whole and halved over two GPUs, Llama 8B and Qwen3 30B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from bench.kernel_cells import Cell

from headrace.kernels import few_tokens, latent
from headrace.kernels.activation import silu_mul
from headrace.kernels.few_tokens import MAX_SMEM, UNIT, Tiles
from headrace.kernels.norm import add_rms_norm, rms_norm
from headrace.kernels.rotary import prepare_gqa

BF16 = torch.bfloat16
ROTATE = 160e6
"""Bytes of weights that calls of one cell go through before they come again: three times an H200's L2."""
K2 = (
    (7168, 384), (7168, 2112), (1536, 12288), (8192, 7168), (7168, 4096), (2048, 7168), (7168, 36864), (18432, 7168),
    (7168, 163840),
)  # fmt: skip
K2_HALVES = (
    (1536, 6144), (4096, 7168), (7168, 2048), (1024, 7168), (7168, 18432), (9216, 7168), (7168, 81920),
)  # fmt: skip
OTHERS = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (2048, 5120), (4096, 2048))
SCORES = (7168, 384)
"""The product that is wanted in float32."""
TRIED = (8, 16, 32)
"""Token counts at which tiles are tried: the most of each that they are chosen by."""
CANDIDATES = (
    Tiles(1, 1, 4, 1, 4), Tiles(1, 1, 4, 1, 2), Tiles(1, 1, 8, 1, 4), Tiles(1, 1, 8, 1, 2), Tiles(1, 1, 16, 1, 2),
    Tiles(1, 1, 2, 1, 4), Tiles(1, 2, 4, 1, 2), Tiles(1, 4, 2, 1, 4), Tiles(2, 1, 4, 1, 2), Tiles(2, 1, 8, 1, 1),
    Tiles(2, 2, 4, 1, 1), Tiles(1, 1, 4, 2, 4), Tiles(1, 1, 8, 2, 2), Tiles(1, 1, 4, 4, 4), Tiles(1, 1, 8, 4, 2),
    Tiles(1, 1, 4, 8, 4),
)  # fmt: skip


def cells() -> Iterator[Cell]:
    """Everything above."""
    yield from _steps()
    for inner, out in (*K2, *K2_HALVES, *OTHERS):
        yield from _products(inner, out)


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def _copies(num_bytes: float) -> int:
    return max(1, min(64, round(ROTATE / num_bytes)))


def _plausible(tiles: Tiles, tokens: int, inner: int, out: int) -> bool:
    """Whether there is work for every multiprocessor and a unit for every warp, and no needless cluster."""
    warps = -(-out // tiles.rows) * tiles.cluster * tiles.groups * tiles.split
    shares = tiles.cluster * tiles.split
    token_blocks = 1 if tokens <= 8 else 2 if tokens <= 16 else 4
    return (
        warps >= 512
        and shares * UNIT <= inner
        and (shares <= 8 or out <= 8192)
        and tiles.smem(token_blocks) <= MAX_SMEM
    )


def _products(inner: int, out: int) -> Iterator[Cell]:
    dtype = torch.float32 if (inner, out) == SCORES else BF16
    weights = [_randn(out, inner) for _ in range(_copies(2.0 * inner * out))]
    for tokens in (1, 2, 4, 8, 16, 32):
        inputs = [(_randn(tokens, inner), weight) for weight in weights]
        shipped = partial(few_tokens.product, bias_O=None, out_dtype=dtype)
        forms: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"": shipped, "cublas": F.linear}
        if dtype == torch.float32:
            forms["cublas"] = _mm_float
        if tokens in TRIED:
            for tiles in CANDIDATES:
                if _plausible(tiles, tokens, inner, out):
                    name = "b{}g{}s{}c{}p{}".format(*tiles)
                    forms[name] = partial(few_tokens.few_tokens, bias_O=None, tiles=tiles, out_dtype=dtype)
        for name, form in forms.items():
            yield Cell(
                kernel="few_tokens",
                shape={"in": inner, "out": out, "tokens": tokens},
                calls=[partial(form, x, weight) for x, weight in inputs],
                bytes=2.0 * (inner * out + tokens * inner) + dtype.itemsize * tokens * out,
                flops=2.0 * tokens * inner * out,
                variant=name,
                check=partial(_product_error, form, *inputs[0]),
            )


def _mm_float(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def _product_error(
    form: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: torch.Tensor, weight: torch.Tensor
) -> float:
    """On some rows from everywhere, for a whole head in float64 would take ten gigabytes."""
    rows = torch.linspace(0, weight.shape[0] - 1, 1024, device="cuda").long()
    return _error(form(x, weight)[:, rows], F.linear(x.double(), weight[rows].double()))


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def _steps() -> Iterator[Cell]:
    for tokens in (1, 16, 128):
        yield from _row_kernels(tokens)
        yield from _gqa_steps(tokens)
        yield from _latent_steps(tokens)


def _row_kernels(tokens: int) -> Iterator[Cell]:
    weight = _randn(7168)
    pairs = [(_randn(tokens, 7168), _randn(tokens, 7168)) for _ in range(64)]
    yield Cell(
        "rms_norm", {"tokens": tokens}, [partial(rms_norm, x, weight, 1e-6) for x, _ in pairs], 4.0 * tokens * 7168
    )
    yield Cell(
        "add_rms_norm", {"tokens": tokens}, [partial(add_rms_norm, x, y, weight, 1e-6) for x, y in pairs],
        8.0 * tokens * 7168,
    )  # fmt: skip
    for width in (2048, 18432):
        calls = [partial(silu_mul, _randn(tokens, 2 * width)) for _ in range(64)]
        yield Cell("silu_mul", {"width": width, "tokens": tokens}, list(calls), 6.0 * tokens * width)


def _tables(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _randn(8192, 1, dim), _randn(8192, 1, dim)


def _gqa_steps(tokens: int) -> Iterator[Cell]:
    heads, kv_heads, dim = 32, 4, 128
    cos, sin = _tables(dim)
    positions, slots = torch.arange(tokens, device="cuda"), torch.arange(tokens, device="cuda") * 3
    cache, weight = _randn(64, 64, 2, kv_heads, dim), _randn(dim)
    calls = [
        partial(
            prepare_gqa, _randn(tokens, (heads + 2 * kv_heads) * dim), heads, kv_heads, cos, sin, positions, slots,
            cache, weight, weight, 1e-6,
        )
        for _ in range(64)
    ]  # fmt: skip
    yield Cell("prepare_gqa", {"tokens": tokens}, list(calls), 4.0 * tokens * (heads + 2 * kv_heads) * dim)


def _latent_steps(tokens: int) -> Iterator[Cell]:
    cos, sin = _tables(64)
    positions, slots = torch.arange(tokens, device="cuda"), torch.arange(tokens, device="cuda") * 3
    cache, q_w, kv_w = _randn(64, 64, 576), _randn(1536), _randn(512)
    calls = [
        partial(
            latent.prepare_latent, _randn(tokens, 2112), q_w, kv_w, 1e-6, cos, sin, positions, slots, cache, True
        )
        for _ in range(64)
    ]  # fmt: skip
    yield Cell("prepare_latent", {"tokens": tokens}, list(calls), 4.0 * tokens * 2112)
    for heads in (64, 32):
        weights = [_randn(heads, 256, 512) for _ in range(_copies(heads * 256.0 * 512 * 2))]
        queries, outs = _randn(tokens, heads, 192), _randn(tokens, heads, 512)
        shape: dict[str, int | str] = {"heads": heads, "tokens": tokens}
        small = (16, 32, 64) if tokens <= 64 else (64, 128)
        forms: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "": lambda w, q=queries: latent.absorb_query(q, w[:, :128], cos, sin, positions, True),  # type: ignore[misc]
            "bmm": lambda w, q=queries: latent.absorb_query_bmm(q, w[:, :128], cos, sin, positions, True),  # type: ignore[misc]
        }
        for per in small:
            for block, warps in ((64, 2), (64, 4), (128, 4), (128, 8), (256, 8)):
                forms[f"t{per}b{block}w{warps}"] = (
                    lambda w, tiles=(per, block, warps, 1), q=queries: latent.absorb_query_triton(  # type: ignore[misc]
                        q, w[:, :128], cos, sin, positions, True, tiles
                    )
                )
        moved = 2.0 * heads * (128 * 512 + tokens * (192 + 576))
        yield from _variants("absorb_query", shape, forms, weights, moved, 2.0 * tokens * heads * 128 * 512)
        forms = {
            "": lambda w, o=outs: latent.expand_value(o, w[:, 128:].transpose(1, 2)),  # type: ignore[misc]
            "bmm": lambda w, o=outs: latent.expand_value_bmm(o, w[:, 128:].transpose(1, 2)),  # type: ignore[misc]
        }
        for per in small:
            for block, inner, warps, stages in (
                (32, 128, 4, 4), (32, 256, 4, 2), (32, 512, 4, 1), (32, 512, 8, 1), (64, 128, 4, 3),
                (64, 64, 4, 4), (128, 64, 8, 3),
            ):  # fmt: skip
                forms[f"t{per}b{block}k{inner}w{warps}n{stages}"] = (
                    lambda w, tiles=(per, block, inner, warps, stages), o=outs: latent.expand_value_triton(  # type: ignore[misc]
                        o, w[:, 128:].transpose(1, 2), tiles
                    )
                )
        moved = 2.0 * heads * (128 * 512 + tokens * (512 + 128))
        yield from _variants("expand_value", shape, forms, weights, moved, 2.0 * tokens * heads * 128 * 512)


def _variants(
    kernel: str, shape: dict[str, int | str], forms: dict[str, Callable[[torch.Tensor], torch.Tensor]],
    weights: list[torch.Tensor], moved: float, flops: float,
) -> Iterator[Cell]:  # fmt: skip
    for name, form in forms.items():
        yield Cell(kernel, shape, [partial(form, weight) for weight in weights], moved, flops, name)
