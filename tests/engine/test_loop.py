"""The engine's loop without workers: what it says of a start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.config import EngineConfig
from headrace.engine.executor import Executor
from headrace.engine.loop import Engine
from headrace.engine.requests import decode_step_s
from headrace.errors import UserError
from headrace.weights.source import read_spec, resolve
from tests.tiny import write_tiny


def test_a_rank_that_compiles_after_its_last_byte_is_warming_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []

    def load(_executor: Executor, on_progress: Callable[[int, int], None], _idle: Callable[[], None]) -> None:
        for done in (1, 2, 2):  # the last with the message that it has loaded
            on_progress(done, 2)
            status = engine.status()
            seen.append((status.phase, status.detail))
        raise UserError("enough")

    monkeypatch.setattr(Executor, "load", load)
    model = write_tiny(tmp_path / "m", "llama", tokenizer=False)
    engine = Engine(EngineConfig(), read_spec(resolve(str(model), say=lambda _: None)), tmp_path)
    told: list[tuple[int, int]] = []
    try:
        with pytest.raises(UserError, match="enough"):
            engine.run(lambda done, total: told.append((done, total)), lambda _: None)
        # Whoever asks hears why from the supervisor, not that it is stopping.
        assert engine.status().phase == "warming"
    finally:
        engine._context.destroy(linger=0)
    assert seen == [("loading", "1 of 2 bytes of weights"), ("warming", ""), ("warming", "")]
    assert told == [(1, 2), (2, 2), (2, 2)]


@pytest.mark.parametrize(
    ("times", "mean"),
    [([1.0, 3.0], 2.0), ([1.0, 3.0, 4.0], 1.0), ([1.0, 9.0, 9.0, 9.0, 12.0, 13.0], 1.0), ([1.0, 1.5, 2.5, 2.5], 0.5)],
)
def test_results_that_come_together_make_no_step_short(times: list[float], mean: float) -> None:
    assert decode_step_s(times) == pytest.approx(mean)
