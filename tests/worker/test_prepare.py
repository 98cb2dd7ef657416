"""The KV cache's share of a GPU: what is left, said why when that is little, refused when it is too little."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.config import EngineConfig, LayoutConfig, ScheduleConfig
from headrace.errors import UserError
from headrace.kernels.flashinfer import Shape
from headrace.mesh import build_mesh
from headrace.weights.source import read_spec, resolve
from headrace.worker.prepare import _planner, _shape, _share_for_kv
from tests.fakes import flashinfer
from tests.tiny import write_tiny

GIB = 1 << 30


def stage(kv_memory: int | None = None) -> Any:
    config = EngineConfig(schedule=ScheduleConfig(kv_memory=kv_memory))
    return SimpleNamespace(config=config, device="cuda:1", page_bytes=1 << 20)


def test_all_that_is_left(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert _share_for_kv(stage(), 40 * GIB, 3 * GIB) == 37 * GIB
    assert not caplog.records


def test_a_small_cache_on_a_gpu_with_room_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert _share_for_kv(stage(), 40 * GIB, 39 * GIB) == GIB
    (record,) = caplog.records
    message = record.getMessage()
    assert all(str(number) in message for number in (GIB, 40 * GIB, 39 * GIB)) and "--chunk" in message


@pytest.mark.parametrize(("asked", "share", "needed"), [(None, GIB, 2 * GIB), (8 * GIB, 10 * GIB, 3 * GIB)])
def test_what_cannot_fit_is_refused(asked: int | None, share: int, needed: int) -> None:
    with pytest.raises(UserError, match=f"^--kv-memory .*{share} bytes are free on cuda:1 .*{needed} of them"):
        _share_for_kv(stage(asked), share, needed)


def test_what_was_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert _share_for_kv(stage(GIB), 40 * GIB, 3 * GIB) == GIB
    assert not caplog.records


def loaded(folder: Path, family: str, tp: int, **changes: Any) -> Any:
    """A stage as far as planning attention asks."""
    path = write_tiny(folder / "m", family, tokenizer=False, dtype="bfloat16", **changes)
    spec = read_spec(resolve(str(path), say=lambda _: None))
    return SimpleNamespace(
        config=EngineConfig(schedule=ScheduleConfig(page_size=8, run_ahead=1)),
        spec=spec,
        mesh=build_mesh(LayoutConfig(tp=tp), spec),
        index=0,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )


HEADS = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


@pytest.mark.parametrize(("tp", "heads", "kv_heads"), [(1, 4, 2), (2, 2, 1), (4, 1, 1)])
def test_flashinfer_is_planned_for_a_ranks_heads(tmp_path: Path, tp: int, heads: int, kv_heads: int) -> None:
    asked = loaded(tmp_path, "llama", tp, **HEADS)
    assert _shape(asked) == Shape(heads, kv_heads, 64, 64, 64**-0.5, 8, torch.bfloat16)


def test_flashinfer_is_planned_for_a_ranks_latents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    asked = loaded(tmp_path, "deepseek_v3", 1, kv_lora_rank=512, qk_rope_head_dim=64)
    attention = asked.spec.layers[0].attention
    assert _shape(asked) == Shape(attention.num_heads, 1, 576, 512, attention.scale, 8, torch.bfloat16)
    assert len(_planner(asked)._turns) == 2  # one stage, and one plan ahead


def test_flashinfer_that_does_not_work_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = loaded(tmp_path, "llama", 1, **HEADS)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(UserError, match="^--attention flashinfer: .*import of flashinfer halted.*--attention triton"):
        _planner(asked)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("Could not find nvcc")

    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setattr(flashinfer.BatchPrefillWithPagedKVCacheWrapper, "plan", fail)
    with pytest.raises(UserError, match="^--attention flashinfer: .*nvcc, .*: Could not find nvcc; --attention triton"):
        _planner(asked)
