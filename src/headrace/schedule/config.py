"""What bounds the scheduler's plans."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.schedule.cost import CostCurve
from headrace.schedule.order import FirstComeFirstServed, Policy


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The sizes that bound every plan."""

    num_stages: int
    max_running: int
    """Requests admitted at once; slots are 0..max_running-1."""
    chunk: int
    """Most tokens of a plan."""
    page_size: int
    num_pages: int
    max_len: int
    """Longest request in tokens, prompt and output together."""
    run_ahead: int = 0
    """Plans issued at most beyond those that are live. 0: a decode row waits for the commit of the token before it."""
    max_in_flight: int | None = None
    """Plans issued and not committed at most; by default one a stage and `run_ahead` more."""
    headroom: int = 32
    """Tokens that each running request can grow by before an admission makes pages run out. Without any, an admitted
    request is soon pre-empted again and most of what it computed is lost."""
    prefix_cache: bool = True
    """Whether pages are found again by what they hold."""
    curve: CostCurve | None = None
    """What rows cost, so that prompts cost about what the microbatches beside them do; None: `chunk` alone bounds."""
    policy: Policy = field(default_factory=FirstComeFirstServed)
    """Who is admitted first and gives way last."""
    max_waiting: int | None = None
    """Requests that may wait; more are refused."""
