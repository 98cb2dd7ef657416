"""A fake engine and a caller of the application over it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.api.harness import Caller, make_caller
from tests.fakes.engine import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def caller(tmp_path: Path, engine: FakeEngine) -> Caller:
    return make_caller(tmp_path, engine)


@pytest.fixture
def says(tmp_path: Path) -> Callable[[str], Caller]:
    """A caller whose engine gives every request this reply."""

    def make(reply: str) -> Caller:
        return make_caller(tmp_path, FakeEngine(reply=reply.encode()))

    return make
