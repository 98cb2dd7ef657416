"""Edges between real processes: nothing is overwritten, no direction blocks the other, waits end and say where."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def start(scenario: str, num_ranks: int, store: Path) -> list[subprocess.Popen[str]]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.worker.peers", scenario, str(rank), f"file://{store}"],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(num_ranks)
    ]  # fmt: skip


@pytest.mark.parametrize(("scenario", "num_ranks"), [("flood", 2), ("both_ways", 2), ("sums", 4)])
def test_scenario(scenario: str, num_ranks: int, tmp_path: Path) -> None:
    for process in reversed(start(scenario, num_ranks, tmp_path / "store")):
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err


def test_silence_ends_at_the_deadline_and_names_edge_and_plan(tmp_path: Path) -> None:
    sender, receiver = start("silence", 2, tmp_path / "store")
    assert receiver.stdout is not None
    line = receiver.stdout.readline()
    assert line == ("activations from rank 0 (stage 0) to rank 1 (stage 1), plan 7: nothing within 0.5 s (--timeout)\n")
    for process in (sender, receiver):
        process.communicate(timeout=60)


def test_a_dead_peer_is_named_with_edge_and_plan(tmp_path: Path) -> None:
    sender, receiver = start("death", 2, tmp_path / "store")
    out, _ = receiver.communicate(timeout=60)
    assert out.startswith("activations from rank 0 (stage 0) to rank 1 (stage 1), plan 3: "), out
    sender.communicate(timeout=60)
