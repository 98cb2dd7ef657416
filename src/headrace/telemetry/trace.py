"""A record of every stage's steps: one JSON line a step, files a rank while they run, one trace of all at the end."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path

import msgspec

from headrace.errors import UserError
from headrace.telemetry.perfetto import Span, write_trace

MOST_STEPS = 50_000
"""Steps of which a trace has room: the latest, and at least half as many. What shows a trace holds it in memory."""
VIEWER = "https://ui.perfetto.dev"


class StepSpan(msgspec.Struct, frozen=True):
    """One plan's computation on one rank. Times are of the host's monotonic clock, so ranks of one host compare."""

    plan_id: int
    rank: int
    stage: int
    num_tokens: int
    num_rows: int
    num_decodes: int
    """Rows that start from a sampled token; the other tokens are a prompt's."""
    start_ns: int
    end_ns: int
    tokens_wait_ns: int = 0
    """Ends where the wait for activations begins."""
    activations_wait_ns: int = 0
    """Ends at the start."""

    @property
    def wait_start_ns(self) -> int:
        """Begin of the waits; of the step where there are none."""
        return self.start_ns - self.activations_wait_ns - self.tokens_wait_ns


class Trace:
    """Writes `FOLDER/rank-N.jsonl`. When that holds half of what is kept at most, it becomes `rank-N.old.jsonl`."""

    def __init__(self, folder: Path, rank: int, stage: int, most_steps: int = MOST_STEPS) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._rank, self._stage, self._most = rank, stage, most_steps // 2
        self._encode = msgspec.json.Encoder().encode
        self._path = folder / f"rank-{rank}.jsonl"
        # Not buffered: what a rank has done is there when it is killed.
        self._file = self._path.open("wb", buffering=0)
        self._num = 0

    def step(
        self, plan_id: int, num_tokens: int, num_rows: int, num_decodes: int, times_ns: tuple[int, int, int, int]
    ) -> None:
        """Record a step; `times_ns`: start, end, wait for tokens, wait for activations."""
        if self._num == self._most:
            self._file.close()
            self._path.replace(self._path.with_suffix(".old.jsonl"))
            self._file, self._num = self._path.open("wb", buffering=0), 0
        self._num += 1
        span = StepSpan(plan_id, self._rank, self._stage, num_tokens, num_rows, num_decodes, *times_ns)
        self._file.write(self._encode(span) + b"\n")

    def close(self) -> None:
        """Release the file."""
        self._file.close()


def read_steps(folder: Path) -> Iterator[StepSpan]:
    """All ranks' steps by their start, read as they are asked for. A plan's come in the order of its stages."""
    return heapq.merge(*(_read(folder, rank) for rank in _ranks(folder)), key=lambda step: step.start_ns)


def _ranks(folder: Path) -> list[str]:
    return sorted({path.name.split(".")[0] for path in folder.glob("rank-*.jsonl")})


def _read(folder: Path, rank: str) -> Iterator[StepSpan]:
    decode = msgspec.json.Decoder(StepSpan).decode
    for path in (folder / f"{rank}.old.jsonl", folder / f"{rank}.jsonl"):
        if not path.exists():
            continue
        with path.open("rb") as lines:
            for line in lines:
                if line.endswith(b"\n"):  # else its writer was killed
                    yield decode(line)


def check_path(path: Path) -> None:
    """Raise UserError where a trace could not be written at the end."""
    there = path.exists()
    try:
        with path.open("ab"):
            pass
    except OSError as error:
        raise UserError(f"--trace {path}: {error.strerror}") from None
    if not there:
        path.unlink()


def save_trace(folder: Path, path: Path) -> str:
    """Write what the ranks recorded in `folder` as a trace for Perfetto or Chrome; the line to say about it."""
    first = last = -1

    def spans() -> Iterator[Span]:
        nonlocal first, last
        begins = (next(_read(folder, rank), None) for rank in _ranks(folder))
        origin_ns = min((step.wait_start_ns for step in begins if step is not None), default=0)
        for step in read_steps(folder):
            first = step.plan_id if first < 0 else min(first, step.plan_id)
            last = max(last, step.plan_id)
            yield from _spans_of(step, origin_ns)

    try:
        write_trace(path, spans())
    except OSError as error:
        return f"--trace {path}: not written: {error.strerror}"
    if first <= 0:
        return f"trace of {last + 1:,} steps in {path}: open it at {VIEWER}"
    return (
        f"trace of the last {last + 1 - first:,} of {last + 1:,} steps in {path} (there is room for {MOST_STEPS:,}): "
        f"open it at {VIEWER}"
    )


def _spans_of(step: StepSpan, origin_ns: int) -> Iterator[Span]:
    rank = step.rank
    begin = step.wait_start_ns - origin_ns
    for name, wait_ns in (("sampled tokens", step.tokens_wait_ns), ("activations", step.activations_wait_ns)):
        if wait_ns:
            yield Span(step.stage, f"waiting for {name}", begin * 1e-9, wait_ns * 1e-9, category="wait", rank=rank)
        begin += wait_ns
    num_prompt = step.num_tokens - step.num_decodes
    kind = "mixed" if num_prompt and step.num_decodes else "prompt" if num_prompt else "decode"
    args = {
        "plan": step.plan_id,
        "rows": step.num_rows,
        "tokens": step.num_tokens,
        "decode rows": step.num_decodes,
        "prompt tokens": num_prompt,
    }
    dur_s = (step.end_ns - step.start_ns) * 1e-9
    yield Span(step.stage, f"{kind} {step.plan_id}", begin * 1e-9, dur_s, args, rank=rank, flow=step.plan_id)
