"""Whatever the layout, its ranks together read what is used once, or as often as it is held."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import LayoutConfig
from headrace.errors import UserError
from headrace.layers.build import Build
from headrace.layers.decoder import Decoder
from headrace.mesh import Mesh, build_mesh
from headrace.models.registry import build_model, rules_of
from headrace.weights.checkpoint import Checkpoint, check_slots, planned
from headrace.weights.rules import bind, expand
from headrace.weights.source import ModelSource, read_spec
from tests.tiny import write_tiny

MODELS = ("llama_tied", "qwen3_moe", "deepseek_v3", "kimi_k25_int4")
SPLIT_BY_ROWS = ("q_proj.weight", "gate_proj.weight", "up_proj.weight", "lm_head.weight")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in MODELS:
        write_tiny(root / name, name, dtype="bfloat16", max_shard_bytes=300_000, tokenizer=False)
    return root


@cache
def opened(path: Path) -> Checkpoint:
    source = ModelSource("folder", path, "m")
    return Checkpoint(source, read_spec(source))


def empty_model(checkpoint: Checkpoint, mesh: Mesh, rank: int) -> Decoder:
    return build_model(Build.of_rank(checkpoint.spec, mesh, rank, max_len=8, dtype=torch.bfloat16, device="meta"))


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(MODELS), st.integers(1, 4), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_any_layout_reads_what_it_holds_and_no_byte_twice(folder: Path, name: str, pp: int, tp: int, ep: int) -> None:
    checkpoint = opened(folder / name)
    try:
        mesh = build_mesh(LayoutConfig(pp=pp, tp=max(tp, ep), ep=ep), checkpoint.spec)
    except UserError:
        return  # no experts to spread
    rules = rules_of(checkpoint.spec)
    used = {item.tensor for item in expand(rules, checkpoint.spec)}
    read: Counter[tuple[str, int]] = Counter()
    held: Counter[tuple[str, int]] = Counter()
    for rank in range(mesh.num_ranks):
        slots = bind(empty_model(checkpoint, mesh, rank), rules, checkpoint.spec, checkpoint.tensors)
        check_slots(checkpoint, slots)
        blocks = planned(checkpoint, slots)
        for a, b in pairwise(blocks):
            assert a.file != b.file or a.offset + a.num_bytes <= b.offset
        read.update((piece.name, row) for block in blocks for piece in block.pieces for row in piece.rows)
        held.update(
            {
                (tensor, row)
                for tensor, places in slots.items()
                for slot in places
                for row in range(*slot.source[0].indices(slot.shape[0]))
            }
        )
    assert read == held
    assert set(read) == {(tensor, row) for tensor in used for row in range(checkpoint.tensors[tensor].shape[0])}
    most = {tensor: max(read[tensor, row] for row in range(checkpoint.tensors[tensor].shape[0])) for tensor in used}
    for tensor, times in most.items():
        if "embed_tokens" in tensor and checkpoint.spec.tied:
            assert times == min(pp, 2)  # the first stage embeds with it, the last multiplies
        elif mesh.tp == 1 or (".experts." in tensor and ep == mesh.tp) or tensor.endswith(SPLIT_BY_ROWS):
            assert times == 1, tensor
        else:
            assert times <= mesh.tp, tensor
