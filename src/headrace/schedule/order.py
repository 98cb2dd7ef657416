"""Who goes first: strategies that rank requests, and the queue of those that wait."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from headrace.schedule.request import Job, Rank, Request


class Policy(Protocol):
    """Ranks requests. The lowest is admitted first and gives way last; a rank is a request's own and never changes."""

    def rank(self, request: Request, arrival: int) -> Rank:
        """Of the request that arrived as number `arrival`."""
        ...


@dataclass(frozen=True)
class FirstComeFirstServed:
    """By arrival alone."""

    def rank(self, request: Request, arrival: int) -> Rank:
        return (0, arrival)


@dataclass(frozen=True)
class PriorityFirst:
    """By the requests' own priority, the lowest number first, then by arrival."""

    def rank(self, request: Request, arrival: int) -> Rank:
        return (request.priority, arrival)


POLICIES: Mapping[str, Policy] = {"fcfs": FirstComeFirstServed(), "priority": PriorityFirst()}
"""By the names that users give them."""


def rank_of(job: Job) -> Rank:
    """A key to sort by."""
    return job.rank


class Queue:
    """Jobs that wait, the lowest rank first."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []
        self._put_off: tuple[Job, int, int] | None = None

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def first(self) -> Job:
        """Whose turn it is; there must be one."""
        return self._jobs[0]

    def put_off(self, spare: int, num_prefilling: int) -> None:
        """The first was not admitted for want of pages, with `spare` to spare and so many prompts not computed yet."""
        self._put_off = self.first, spare, num_prefilling

    def is_put_off(self, spare: int, num_prefilling: int) -> bool:
        """Whether nothing has changed for the better since then: to look a long prompt up in the prefix cache in vain
        for every plan would cost more than the plan.
        """
        if self._put_off is None:
            return False
        job, most, least = self._put_off
        return job is self.first and spare <= most and num_prefilling >= least

    def add(self, job: Job) -> None:
        """Put it where its rank belongs."""
        insort(self._jobs, job, key=rank_of)

    def remove(self, job: Job) -> bool:
        """Take it out; False if it is not here."""
        index = bisect_left(self._jobs, job.rank, key=rank_of)
        if index == len(self._jobs) or self._jobs[index] is not job:
            return False
        del self._jobs[index]
        return True
