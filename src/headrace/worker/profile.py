"""HEADRACE_PROFILE=DIR: what a GPU does in a step, kernel by kernel, a file for each rank and number of tokens."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import torch

STEPS = 20
"""Steps of one record, all of as many tokens; the last record of each size is the one that is left."""


class Profile:
    """Records steps in turns of `STEPS`."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._rank = folder, rank
        self._size = self._left = 0
        self._profiler: torch.profiler.profile | None = None

    @classmethod
    def asked_for(cls, rank: int) -> Profile | None:
        """By the environment."""
        folder = os.environ.get("HEADRACE_PROFILE")
        return cls(Path(folder), rank) if folder and torch.cuda.is_available() else None

    def step(self, num_tokens: int) -> None:
        """A step of so many tokens is about to be issued."""
        if self._left and num_tokens == self._size:
            self._left -= 1
            return
        if self._profiler is not None:
            torch.cuda.synchronize()
            self._profiler.stop()
            if not self._left:
                self._write()
        self._left, self._size = STEPS - 1, num_tokens
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profiler.start()

    def _write(self) -> None:
        assert self._profiler is not None
        times: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        for event in self._profiler.events() or ():
            times[event.name] += event.device_time_total
            counts[event.name] += 1
        lines = [f"{time / STEPS:10.1f} us {counts[name] / STEPS:7.1f} x  {name}" for name, time in times.most_common()]
        path = self._folder / f"rank-{self._rank}-tokens-{self._size}.txt"
        path.write_text("\n".join([f"{sum(times.values()) / STEPS:10.1f} us a step", *lines]) + "\n")
