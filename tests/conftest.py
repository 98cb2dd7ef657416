"""What every test runs under."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

_ROOT = Path(__file__).parent.parent

# Programs that tests start find the checkout's package, installed or not, and share two cores with many tests.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT / "src"), os.environ.get("PYTHONPATH")]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What servers that tests start keep of themselves is not the user's.
_STATE = tempfile.TemporaryDirectory(prefix="headrace-tests-")
os.environ["XDG_STATE_HOME"] = _STATE.name

# Time says nothing on a machine that does other work too; CI runs the same examples every time.
settings.register_profile("here", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("here")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file's tests together, for their fixtures start servers; parity's cases go where there is room."""
    for item in items:
        if item.path.name != "test_matrix.py":
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
