"""`make demo`: starts a two-stage service, asks it one question, shows what each stage did, and stops it.

Uses nothing but the HTTP interface, so it also shows how any program would talk to headrace.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from typing import Any

import httpx

QUESTION = "What is a river? Answer in two sentences."
MAX_TOKENS = 96


def main() -> int:
    """Returns the exit code: 0 when everything went as it should."""
    flags = sys.argv[1:] or ["--pp", "2", "--device", "cpu"]
    print(f"starting: headrace serve {' '.join(flags)}", flush=True)
    serve = [sys.executable, "-m", "headrace", "serve", *flags, "--port", "0", "--json-ready"]
    # Progress goes to standard error, which is ours; the one line on standard output comes when the service is ready.
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        try:
            line = service.stdout.readline()
            if not line:
                return fail(f"the service did not start (exit code {service.wait()})")
            ready = json.loads(line)
            with httpx.Client(base_url=ready["url"], timeout=120) as client:
                before = stage_figures(client)
                ask(client)
                # The engine says how its stages stand about once a second.
                time.sleep(1.5)
                show_stages(before, stage_figures(client))
        except httpx.HTTPError as error:
            return fail(f"the service did not answer: {error}")
        finally:
            service.terminate()
    if service.returncode != 0:
        return fail(f"the service did not stop cleanly (exit code {service.returncode})")
    print("stopped; `make serve` leaves it running")
    return 0


def ask(client: httpx.Client) -> None:
    """Put the question and print the answer as it comes."""
    print(f"\n> {QUESTION}\n")
    request = {
        "model": client.get("/v1/models").raise_for_status().json()["data"][0]["id"],
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.monotonic()
    first_s: float | None = None
    usage: dict[str, Any] = {}
    with client.stream("POST", "/v1/chat/completions", json=request) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text = choice["delta"].get("content")
                if text:
                    first_s = first_s or time.monotonic() - start
                    print(text, end="", flush=True)
    took_s = time.monotonic() - start
    tokens = usage["completion_tokens"]
    if first_s is None or tokens == 0:
        raise httpx.ReadError("the answer was empty")
    rate = (tokens - 1) / (took_s - first_s) if tokens > 1 else 0.0
    print(f"\n\n{tokens} tokens, the first after {first_s:.2f} s, then {rate:.1f} tokens/s\n")


def stage_figures(client: httpx.Client) -> dict[int, dict[str, float]]:
    """What /metrics says of each stage, by metric name."""
    text = client.get("/metrics").raise_for_status().text
    figures: dict[int, dict[str, float]] = {}
    for name, stage, value in re.findall(r'^headrace:stage_(\w+)\{.*stage="(\d+)".*\} (\S+)$', text, re.MULTILINE):
        figures.setdefault(int(stage), {})[name] = float(value)
    return figures


def show_stages(before: dict[int, dict[str, float]], after: dict[int, dict[str, float]]) -> None:
    """Print what each stage holds, and how busy and fast it was in between."""
    print(f"{'stage':>5} {'layers':>7} {'weights':>9} {'KV cache':>9} {'busy':>6} {'tokens/s':>9}")
    for stage, of in sorted(after.items()):
        active, busy, tokens = (
            of[name] - before[stage][name] for name in ("active_seconds_total", "step_seconds_sum", "tokens_total")
        )
        print(
            f"{stage:>5} {of['layers']:>7.0f} {of['weight_bytes'] / 1e6:>6.0f} MB {of['kv_bytes'] / 1e6:>6.0f} MB "
            f"{busy / active if active else 0.0:>6.0%} {tokens / active if active else 0.0:>9.1f}"
        )
    print()


def fail(message: str) -> int:
    """Say what went wrong in one line."""
    print(f"demo: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
