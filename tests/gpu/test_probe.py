"""This machine's GPUs probed as a user would, and the file read back."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from headrace.plan.hardware_file import read_hardware

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]


@dataclass(frozen=True)
class Case:
    """On how many GPUs."""

    num_gpus: int


@pytest.mark.parametrize("case", [Case(2)], ids=["two"])
def test_two_gpus_are_measured(case: Case, tmp_path: Path) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    env["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[: case.num_gpus])
    out = tmp_path / "here.toml"
    command = [sys.executable, "-m", "headrace", "probe", "--quick", "--path", str(tmp_path), "--out", str(out)]
    started = time.monotonic()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150, check=False)
    print(done.stderr, f"{time.monotonic() - started:.1f} s", out.read_text() if out.exists() else "", sep="\n")
    assert done.returncode == 0, done.stderr
    hardware = read_hardware(out)
    assert len(hardware.gpus) == case.num_gpus
    for gpu in hardware.gpus:
        assert 1e11 < gpu.bandwidth < 2e13 and 1e13 < gpu.bf16_flops < 1e16
    link = hardware.machine(case.num_gpus, links=None, num_hosts=1, network=None).link
    assert link is not None and 1e-6 < link.all_reduce_s(2, 14 << 10) < 1e-3
    found = tomllib.loads(out.read_text())["probe"]
    (pair,) = found["pair"]
    assert pair["gb_s"] > 1 and pair["latency_us"] < 200
    assert all(device["host_to_gpu_gb_s"] > 0.5 for device in found["device"])
    assert pair["p2p"] == torch.cuda.can_device_access_peer(0, 1)
