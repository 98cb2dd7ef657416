from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

CONFIGS = Path(__file__).parents[1] / "data" / "configs"


@pytest.fixture
def configs() -> Callable[[str], str]:
    """The folder of a model's config, by its name."""
    return lambda name: str(CONFIGS / name)
