"""Models and machines that the planner's tests share."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.mesh import Mesh
from headrace.model_config import spec_from_config
from headrace.plan.hardware import Gpu, Machine
from headrace.spec import ModelSpec

CONFIGS = Path(__file__).parents[1] / "data" / "configs"
HARDWARE = CONFIGS.parent / "hardware"
K2_CONFIG = CONFIGS / "kimi-k2.5" / "config.json"


def spec_of(name: str) -> ModelSpec:
    return spec_from_config(json.loads((CONFIGS / name / "config.json").read_text()))


K2 = spec_of("kimi-k2.5")
SLICE = spec_of("k2-slice")
QWEN = spec_of("qwen3-30b-a3b")

BARE = Gpu(
    slug="bare",
    name="1.792 TB/s, all of it reached, and nothing that a launch costs",
    memory_bytes=10**12,
    bandwidth=1.792e12,
    bf16_flops=468e12,
    cache_bytes=128 * 2**20,
)


def bare(mesh: Mesh) -> Machine:
    """So many of them, with links that cost nothing."""
    return Machine(gpus=(BARE,) * mesh.num_ranks, link=None)
