"""What the person at the terminal sees of a start: loading progress, then where the service is and what it holds."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from headrace.mesh import Mesh
from headrace.supervise.child import Progress

PARTS = {
    "busy_s": "busy",
    "activations_wait_s": "waiting for activations",
    "tokens_wait_s": "waiting for sampled tokens",
    "plan_wait_s": "waiting for a plan",
    "communication_s": "communicating",
}
"""What the active time of a stage is made of: counters of `StageStats` and how they are called."""

LINE_PERIOD_S = 5.0
"""Where there is no terminal to update a line on, a new line this often."""
RATE_FROM_S = 0.2
"""What is read in less time says little about a rate."""


class Tally:
    """Progress, summed over the processes that do the same work."""

    def __init__(self) -> None:
        self._latest: dict[str, Progress] = {}

    def take(self, event: Progress) -> tuple[int, int]:
        """Take in one process's progress; how much of its work all of them have done, and of how much."""
        self._latest[event.who] = event
        return self._sums(event.text)

    def text(self, work: str) -> str:
        """The sum in words."""
        done, total = self._sums(work)
        share = 100 * done // total if total else 100
        return f"{work}: {share}% ({amount(done)} of {amount(total)})"

    def _sums(self, work: str) -> tuple[int, int]:
        same = [one for one in self._latest.values() if one.text == work]
        return sum(one.done for one in same), sum(one.total for one in same)


class Screen:
    """Progress on `stream`: one line that updates on a terminal, a line now and then elsewhere."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._tty = stream.isatty()
        self._tally = Tally()
        self._began: dict[str, tuple[float, int]] = {}
        """When each kind of work was first heard of, and how much of it was done by then."""
        self._shown_text = ""
        self._shown_s = 0.0
        self._last = ""
        self._ended: tuple[str, int] | None = None
        self._open_line = False

    def line(self, text: str) -> None:
        """A line of its own, below whatever is there."""
        clear = "\r\x1b[K" if self._open_line else ""
        self._open_line = False
        self._write(f"{clear}{text}\n")

    def _write(self, text: str) -> None:
        # A log on a full disk, or a terminal that has gone, is no reason to stop serving.
        with contextlib.suppress(OSError):
            self._stream.write(text)
            self._stream.flush()

    def progress(self, event: Progress) -> None:
        """Take in one process's progress and show the sum over those that do the same work."""
        done, total = self._tally.take(event)
        now = self._clock()
        began_s, before = self._began.setdefault(event.text, (now, done))
        text = progress_text(event.text, done, total, (done - before, now - began_s))
        if self._tty:
            self._write(f"\r\x1b[K{text}")
            self._open_line = True
            return
        due = event.text != self._shown_text or done >= total or now - self._shown_s >= LINE_PERIOD_S
        # Who ends late says once more that all is done.
        again = done >= total and (event.text, done) == self._ended
        if due and text != self._last and not again:
            self._shown_text, self._shown_s, self._last = event.text, now, text
            self._ended = (event.text, done) if done >= total else None
            self.line(text)


def progress_text(what: str, done: int, total: int, moved: tuple[int, float]) -> str:
    """`loading weights: 75% (150 MB of 200 MB, 1.2 GB/s)`; `moved` is the rate as bytes and seconds."""
    share = 100 * done // total if total else 100
    num_bytes, seconds = moved
    rate = f", {amount(round(num_bytes / seconds))}/s" if num_bytes and seconds >= RATE_FROM_S else ""
    return f"{what}: {share}% ({amount(done)} of {amount(total)}{rate})"


def amount(count: int) -> str:
    """Bytes for a reader: `98 MB`, `1.4 GB`."""
    value = float(count)
    for unit in ("bytes", "KB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


def ready_text(
    *,
    name: str,
    device: str,
    dtype: str,
    url: str,
    mesh: Mesh,
    fields: Mapping[str, Any],
    ready_s: float,
    has_key: bool,
) -> list[str]:
    """The lines that say that the service is up; `fields` are those of the engine's `Ready`."""
    kv = f"KV cache {fields.get('kv_tokens', 0):,} tokens"
    longest = f", requests up to {fields['max_len']:,}" if fields.get("max_len") else ""
    lines = [
        f"ready at {url} after {ready_s:.1f} s (weights {fields.get('load_s', 0.0):.1f} s)",
        f"  {name}, {mesh.name}, {dtype} on {device}, {kv}{longest}",
    ]
    for stage in fields.get("stages", ()):
        first, count = stage["first_layer"], stage["num_layers"]
        held = f"weights {amount(stage['weight_bytes'])}, KV cache {amount(stage['kv_bytes'])}"
        each = " on each rank" if mesh.tp > 1 else ""
        room = f" (room for {stage['kv_tokens']:,} tokens)" if "kv_tokens" in stage else ""
        lines.append(f"  stage {stage['stage']}: layers {first} to {first + count - 1}, {held}{each}{room}")
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}]})
    key = ' -H "Authorization: Bearer $HEADRACE_API_KEY"' if has_key else ""
    lines.append(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}")
    return lines


def stop_text(fields: Mapping[str, Any]) -> list[str]:
    """The lines that say where each stage's time went; `fields` are those of the engine's `Ended`."""
    lines = []
    for stage in fields.get("stages", ()):
        active = stage["active_s"]
        if not active:
            continue
        shares = ", ".join(f"{name} {stage[key] / active:.1%}" for key, name in PARTS.items() if stage[key])
        lines.append(f"  stage {stage['stage']}: {shares} of {active:,.1f} s; {stage['num_steps']:,} steps")
    return ["stopped; with plans in flight each stage was", *lines] if lines else []


def ready_json(*, url: str, pid: int, mesh: Mesh, fields: Mapping[str, Any], ready_s: float) -> str:
    """The one line of `--json-ready`."""
    return json.dumps(
        {
            "event": "ready",
            "url": url,
            "pid": pid,
            "layout": {"pp": mesh.pp, "tp": mesh.tp, "ep": mesh.ep, "split": list(mesh.split)},
            "kv_tokens": fields.get("kv_tokens", 0),
            "load_s": round(fields.get("load_s", 0.0), 3),
            "ready_s": round(ready_s, 3),
        }
    )
