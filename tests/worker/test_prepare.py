"""The KV cache's share of a GPU: what is left, said why when that is little, refused when it is too little."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config import EngineConfig, ScheduleConfig
from headrace.errors import UserError
from headrace.worker.prepare import _share_for_kv

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
