"""A record of every stage's steps: one JSON line a step, a file a rank."""

from __future__ import annotations

from pathlib import Path

import msgspec


class StepSpan(msgspec.Struct, frozen=True):
    """One plan's computation on one rank. Times are of the host's monotonic clock, so ranks of one host compare."""

    plan_id: int
    rank: int
    stage: int
    num_tokens: int
    num_rows: int
    start_ns: int
    end_ns: int


class Trace:
    """Writes `FOLDER/rank-N.jsonl`."""

    def __init__(self, folder: Path, rank: int, stage: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._rank, self._stage = rank, stage
        self._encode = msgspec.json.Encoder().encode
        self._file = (folder / f"rank-{rank}.jsonl").open("wb", buffering=0)

    def step(self, plan_id: int, num_tokens: int, num_rows: int, start_ns: int, end_ns: int) -> None:
        """Record a step."""
        span = StepSpan(plan_id, self._rank, self._stage, num_tokens, num_rows, start_ns, end_ns)
        self._file.write(self._encode(span) + b"\n")


def read_trace(folder: Path) -> list[StepSpan]:
    """All ranks' spans, by start."""
    decode = msgspec.json.Decoder(StepSpan).decode
    spans = [decode(line) for file in folder.glob("rank-*.jsonl") for line in file.read_bytes().splitlines()]
    return sorted(spans, key=lambda span: span.start_ns)
