"""What every test runs under."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import settings

_ROOT = Path(__file__).parent.parent

# Programs that tests start find the checkout's package, installed or not, and share two cores with many tests.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT / "src"), os.environ.get("PYTHONPATH")]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Time says nothing on a machine that does other work too; CI runs the same examples every time.
settings.register_profile("here", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("here")
