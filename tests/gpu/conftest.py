"""What tests on a GPU run under: skipped where there is none, and references that use the processor's cores."""

from __future__ import annotations

import os

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Nothing here runs without a GPU, or with fewer than a test's `gpus` mark or case says."""
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if "gpu" not in item.keywords:
            continue
        case = getattr(item, "callspec", None) and item.callspec.params.get("case")  # type: ignore[attr-defined]
        needed = int(getattr(case, "num_gpus", 1))
        if present < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU{'s' if needed > 1 else ''}, {present} here"))


@pytest.fixture(autouse=True, scope="session")
def threads() -> None:
    """Tests share a processor with others, these have one to themselves (and with xdist a part of it)."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, min(16, len(os.sched_getaffinity(0))) // workers))
