"""What every route needs: the engine, the text tools, the served model and whether requests may come."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from headrace.api.engine import Engine
from headrace.telemetry.metrics import Metrics
from headrace.text.chat import ChatTemplate
from headrace.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The model as clients see it."""

    name: str
    root: str
    """The folder, file or hub id it comes from."""
    vocab_size: int
    """Token ids that a request may name are below it."""


@dataclass(kw_only=True)
class Service:
    """State of the HTTP process; one per application."""

    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate | None
    """None: the model brings no chat template."""
    model: ServedModel
    metrics: Metrics
    api_key: str | None = None
    has_priorities: bool = False
    """Whether the engine looks at the priority of a request."""
    created: int = field(default_factory=lambda: int(time.time()))
    stopping: bool = False
    num_active: int = 0
    """HTTP requests being answered now."""

    @property
    def not_ready(self) -> str | None:
        """Why requests cannot be served now, in one line; None when they can."""
        lost = self.engine.lost
        if lost is not None:
            return f"the engine is lost: {lost}"
        if self.stopping:
            return "stopping"
        status = self.engine.status
        if status.phase == "ready":
            return None
        return f"{status.phase}: {status.detail}" if status.detail else status.phase
