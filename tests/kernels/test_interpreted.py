"""Every test marked `interpreted`, in one process where Triton kernels are interpreted: it decides that at import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(900)
def test_kernels_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", str(here), "-m", "interpreted", "-q", "-x", "-n", "0"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"], env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=here.parents[1],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
