"""What the HTTP process needs of an engine client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from headrace.sampling import SamplingParams
from headrace.step import EngineStatus, Output


class Engine(Protocol):
    """A running engine as its clients see it; `headrace.engine.client.EngineClient` is the real one."""

    @property
    def status(self) -> EngineStatus:
        """The latest status; phase "starting" until the first has come."""
        ...

    @property
    def lost(self) -> str | None:
        """Why the engine can no longer be used, in one line; None while it can."""
        ...

    def generate(
        self, request_id: str, tokens: Sequence[int], sampling: SamplingParams, priority: int = 0
    ) -> AsyncIterator[Output]:
        """Run one request; the outputs end after the one that has a finish_reason.

        Closing or cancelling the iterator early aborts the request. Raises Fault when the engine is lost.
        """
        ...

    def reset_prefix_cache(self) -> None:
        """Forget what is cached: requests after this find nothing from before. Raises Fault when the engine is lost."""
        ...

    async def start(self) -> None:
        """Connect."""
        ...

    async def stop(self) -> None:
        """Disconnect; requests still running end with a Fault."""
        ...
