"""What every route needs: the engine, the text tools, the served model and whether requests may come."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Literal

from headrace.api.engine import Engine
from headrace.telemetry.metrics import Metrics
from headrace.text.chat import ChatTemplate
from headrace.text.tokenizer import Tokenizer

State = Literal["starting", "loading", "warming", "ready", "draining", "failed"]


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
    failure: str | None = None
    """Why the service fails, once the supervisor has said so."""
    num_active: int = 0
    """HTTP requests being answered now."""

    @property
    def state(self) -> tuple[State, str]:
        """How the service stands, and more about it in one line or "". Requests are served when it is ready."""
        lost, status = self.engine.lost, self.engine.status
        if self.failure is not None:
            return "failed", self.failure
        if self.stopping:
            return "draining", f"stopping, {self.num_active} requests in flight"
        if lost is not None:
            return "failed", f"the engine is lost: {lost}"
        # An engine that stops though nobody asked for it is about to be lost.
        return ("failed" if status.phase == "stopping" else status.phase), status.detail

    @property
    def not_ready(self) -> str | None:
        """Why requests cannot be served now, in one line; None when they can."""
        state, detail = self.state
        if state == "ready":
            return None
        return f"{state}: {detail}" if detail else state
