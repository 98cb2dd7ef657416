"""Small sums through the memory of two GPUs, a process each: values, bits, replays, a peer that goes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
RANKS = 2
DEADLINE_S = 100.0

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]


@dataclass(frozen=True)
class Case:
    """What the ranks do, in one run for all."""

    name: str
    num_gpus: int = RANKS


CASES = [Case("sums"), Case("replays"), Case("chain"), Case("time_one")]


def run(scenario: str, folder: Path) -> list[tuple[int, str]]:
    """Exit code and output of each rank. Where one fails the other would wait for it: it is killed."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    env = os.environ | {"PYTHONPATH": paths, "CUDA_DEVICE_MAX_CONNECTIONS": "32", "NCCL_GRAPH_REGISTER": "0"}
    command = [sys.executable, "-m", "tests.gpu.all_reduce_ranks", scenario]
    logs = [folder / f"rank-{rank}" for rank in range(RANKS)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as file:
            arguments = [str(rank), str(RANKS), str(folder / "store")]
            processes.append(subprocess.Popen([*command, *arguments], env=env, stdout=file, stderr=file))
    ends = time.monotonic() + DEADLINE_S
    while any(process.poll() is None for process in processes) and time.monotonic() < ends:
        if any(process.poll() for process in processes):
            ends = min(ends, time.monotonic() + 2)
        time.sleep(0.05)
    for process in processes:
        process.kill()
    return [(process.wait(), log.read_text()) for process, log in zip(processes, logs, strict=True)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str]]:
    if not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("these GPUs do not reach each other's memory")
    return run("all", tmp_path_factory.mktemp("all_reduce"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_rank_is_right(case: Case, ranks: list[tuple[int, str]]) -> None:
    both = "".join(text for _, text in ranks)
    print(both)
    assert both.count(f"{case.name}: right") == RANKS, both


@pytest.mark.parametrize("case", [Case("death")], ids=lambda case: case.name)
def test_a_peer_that_goes_keeps_no_process(case: Case, tmp_path: Path) -> None:
    if not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("these GPUs do not reach each other's memory")
    (code, text), (other, _) = run(case.name, tmp_path)
    assert (code, other) == (0, 0), text
    assert "waits" in text
