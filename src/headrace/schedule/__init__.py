"""What runs next: a pure state machine between requests and plans."""

from headrace.schedule.config import SchedulerConfig
from headrace.schedule.request import Event, Request
from headrace.schedule.scheduler import Scheduler

__all__ = ["Event", "Request", "Scheduler", "SchedulerConfig"]
