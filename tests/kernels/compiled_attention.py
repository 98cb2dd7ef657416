"""Compiles the attention kernels for sm_90 and sm_120, without a device: a line of JSON each, with shared memory."""

from __future__ import annotations

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from headrace.kernels import attention_tiles as tiling
from headrace.kernels import gqa_attention, mla_attention, mla_hopper

INT32 = {"row_slot", "row_start", "row_count", "row_offset", "page_table", "kv_offset", "kv_len"}
BF16 = {"q", "cache", "out", "k", "v", "rope"}
ALIGNED = {"table_stride", "q_stride", "k_stride", "k_head", "rope_stride", "v_stride", "v_head"}


def compiled(
    kernel: Any, constants: dict[str, Any], target: int, options: dict[str, int], source: Any = ASTSource
) -> Any:
    """The kernel as a launch with these constants would compile it; pointers that it lacks are None."""
    types = {
        name: "constexpr" if name in constants else "*bf16" if name in BF16 else "*i32" if name in INT32
        else "*fp32" if name in ("partial", "lse") else "fp32" if name == "scale_log2" else "i32"
        for name in kernel.arg_names
    }  # fmt: skip
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if types[name].startswith("*") or (name in ALIGNED and types[name] == "i32")
    }
    made = source(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    return triton.compile(made, target=GPUTarget("cuda", target, 32), options=options)


WHOLE: dict[str, Any] = {"partial": None, "lse": None, "CHUNKS": True, "SPLIT": False, "PREC": "tf32", "S": 64}
WHOLE |= {"PDL": True}


def sizes(tiles: tiling.Tiles) -> dict[str, int]:
    return {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "STAGES": tiles.num_stages}


def options(tiles: tiling.Tiles) -> dict[str, int]:
    return {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}


def gqa(target: int, limit: int) -> tuple[int, Any]:
    """(estimate, compiled) for chunks of a dense model."""
    tiles = tiling.gqa_tiles(limit, 4096, 128, 2)
    dims = {"K": 8, "G": 8, "D": 128, "BLOCK_D": 128}
    kernel = compiled(gqa_attention._paged, WHOLE | dims | sizes(tiles), target, options(tiles))
    return tiles.shared_bytes(128, 256, 2), kernel


def latent(target: int, limit: int) -> tuple[int, Any]:
    """(estimate, compiled) for K2, the portable kernel."""
    tiles = tiling.latent_tiles(limit, 4096, 576, 512, 2)
    dims = {"H": 64, "V": 512, "C": 576, "BLOCK_V": 512, "BLOCK_R": 64}
    kernel = compiled(mla_attention._latent, WHOLE | dims | sizes(tiles), target, options(tiles))
    return tiles.shared_bytes(576, 576, 2), kernel


def expanded(target: int, limit: int) -> tuple[int, Any]:
    """(estimate, compiled) for prompts of K2."""
    tiles = tiling.expanded_tiles(limit, 192, 128, 2)
    dims = {"H": 64, "N": 128, "R": 64, "V": 128, "BLOCK_K": 128, "BLOCK_R": 64, "BLOCK_V": 128, "PREC": "tf32"}
    kernel = compiled(mla_attention._expanded, dims | sizes(tiles), target, options(tiles))
    return tiles.shared_bytes(192, 320, 2), kernel


def hopper(target: int, limit: int) -> tuple[int, Any]:
    """(limit, compiled) for K2, the kernel of sm_90."""
    constants = {
        "H": 64, "V": 512, "C": 576, "S": 64, "BLOCK_M": mla_hopper.BLOCK_M, "BLOCK_N": mla_hopper.BLOCK_N,
        "CHUNKS": False, "SPLIT": True, "row_count": None, "row_offset": None, "PDL": True,
    }  # fmt: skip
    return limit, compiled(
        mla_hopper.latent_sm90, constants, target, {"num_warps": mla_hopper.NUM_WARPS}, GluonASTSource
    )


def main() -> None:
    """Print a covering part of them: each takes seconds."""
    sm90, sm120 = (90, tiling.SHARED_SM90), (120, tiling.SHARED_SM120)
    for make, (target, limit) in ((gqa, sm120), (latent, sm120), (expanded, sm90), (hopper, sm90)):
        estimate, kernel = make(target, limit)
        found = {"name": make.__name__, "shared": kernel.metadata.shared, "estimate": estimate, "limit": limit}
        print(json.dumps(found))


if __name__ == "__main__":
    main()
