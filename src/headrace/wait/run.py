"""`headrace wait`: the sides to look at, a real clock, and how it is said."""

from __future__ import annotations

import sys
import time

from headrace.doctor.causes import diagnose, load_causes
from headrace.wait.config import WaitConfig
from headrace.wait.http import HttpSide
from headrace.wait.process import PidSide
from headrace.wait.report import Heartbeat, outcome_json, outcome_text
from headrace.wait.unit import UnitSide
from headrace.wait.watch import Side, watch

EXIT_CODES = {"ready": 0, "failed": 3, "timed out": 4}


class WallClock:
    """The machine's."""

    def now(self) -> float:
        """Seconds since anything."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Come back later."""
        time.sleep(seconds)


def wait(config: WaitConfig) -> int:
    """Wait, and say how it ended; the exit code: 0 ready, 3 failed, 4 timed out. Raises UserError."""
    process = _process(config)
    http = HttpSide(config.base_url, api_key=config.api_key, probe=not config.no_probe, fails_when_gone=process is None)
    # The process first: where it is lost, the answer that does not come needs no mention.
    sides: list[Side] = [http] if process is None else [process, http]
    heartbeat = Heartbeat(sys.stderr)
    try:
        outcome = watch(sides, WallClock(), every_s=config.every_s, timeout_s=config.timeout_s, say=heartbeat.say)
    finally:
        heartbeat.clear()
    findings = diagnose(outcome.log, load_causes())
    if config.json:
        lines = [outcome_json(outcome, findings, url=http.url, model=http.model, probe_s=http.probe_s)]
    else:
        lines = outcome_text(outcome, findings)
    sys.stdout.write("\n".join(lines) + "\n")
    return EXIT_CODES[outcome.verdict]


def _process(config: WaitConfig) -> Side | None:
    if config.unit is not None:
        return UnitSide(config.unit, config.ssh)
    return None if config.pid is None else PidSide(config.pid)
