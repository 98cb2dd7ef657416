"""headrace beside `transformers serve` on this machine's processor: the same weights, the same client, one run.

    python bench/peers.py [--levels 1,4,8,16,32] [--only NAME,...]

Each server has the machine to itself; the client shares it. Writes bench/results/cpu-peers.json and prints a table.
transformers gets the embedded model as float32 safetensors, dequantised from the same GGUF, and needs `accelerate`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
PLAIN = ROOT / "build" / "peers" / "smollm2-135m-float32"
RESULTS = ROOT / "bench" / "results" / "cpu-peers.json"
START_S = 300.0
INPUT, OUTPUT = 64, 64


@dataclass(frozen=True)
class Peer:
    """A server to measure. `{port}` and `{plain}` are filled in."""

    name: str
    command: tuple[str, ...]
    health: str


def _headrace(name: str, *flags: str) -> Peer:
    command = (sys.executable, "-m", "headrace", "serve", "--device", "cpu", "--port", "{port}", *flags)
    return Peer(name, command, "/ready")


PEERS = (
    _headrace("headrace pp1"),
    _headrace("headrace pp1 float32", "--dtype", "float32"),
    _headrace("headrace pp2", "--pp", "2"),
    _headrace("headrace pp2 float32", "--pp", "2", "--dtype", "float32"),
    Peer(
        "transformers serve float32 (continuous batching)",
        (
            str(Path(sys.executable).with_name("transformers")), "serve", "{plain}", "--device", "cpu",
            "--dtype", "float32", "--continuous-batching", "--port", "{port}", "--host", "127.0.0.1",
        ),
        "/health",
    ),
)  # fmt: skip


def main() -> int:
    """Measure and write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--levels", default="1,4,8,16,32")
    parser.add_argument("--only", default="", help="names of the servers to measure")
    args = parser.parse_args()
    write_plain()
    only = set(filter(None, args.only.split(",")))
    rows = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() and only else {}
    for peer in PEERS:
        if only and peer.name not in only:
            continue
        with running(peer) as (url, ready_s):
            print(f"{peer.name}: ready after {ready_s:.1f} s", flush=True)
            rows[peer.name] = {"ready_s": round(ready_s, 1), **measure(url, args.levels)}
        report(rows, args.levels)
    return 0


def write_plain() -> None:
    """The embedded model as a plain float32 checkpoint; `save_pretrained` refuses one that came from a GGUF."""
    if (PLAIN / "model.safetensors").exists():
        return
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from headrace.weights.source import resolve

    gguf = resolve(None, say=print).path
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    PLAIN.mkdir(parents=True, exist_ok=True)
    state = {
        name: tensor.float().contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"
    }
    save_file(state, PLAIN / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = ["LlamaForCausalLM"]  # a GGUF names none, and the server asks
    model.config.save_pretrained(PLAIN)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(PLAIN)


@contextmanager
def running(peer: Peer) -> Iterator[tuple[str, float]]:
    """The server's URL and the seconds it took to be ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [part.format(port=port, plain=PLAIN) for part in peer.command]
    url, started = f"http://127.0.0.1:{port}", time.monotonic()
    log = ROOT / "build" / "peers" / "server.log"
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            while not _answers(url + peer.health):
                if process.poll() is not None or time.monotonic() - started > START_S:
                    raise SystemExit(f"{peer.name} did not start: see {log}")
                time.sleep(0.1)
            yield url, time.monotonic() - started
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def measure(url: str, levels: str) -> dict[str, Any]:
    """What `headrace bench` says of a server."""
    command = [sys.executable, "-m", "headrace", "bench", "--url", url, "--concurrency", levels, "--json"]
    command += ["--input", str(INPUT), "--output", str(OUTPUT)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    found["model"] = str(found["model"]).removeprefix(f"{ROOT}/")
    return found


def report(rows: dict[str, Any], levels: str) -> None:
    """Write the results and print the table so far."""
    machine = {"processor": _processor(), "cores": os.cpu_count(), "system": platform.platform()}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    day = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    RESULTS.write_text(json.dumps({"date": day, "machine": machine, "rows": rows}, indent=1) + "\n")
    print(f"\noutput tokens/s, {INPUT} in, {OUTPUT} out, {machine['processor']}, {machine['cores']} cores")
    wanted = levels.split(",")
    print("| engine | ready | " + " | ".join(wanted) + " |\n|---|--:|" + "--:|" * len(wanted))
    for name, row in rows.items():
        by_level = {str(one["max_concurrency"]): one for one in row.get("levels", [row])}
        cells = [f"{by_level[level]['output_throughput']:.0f}" if level in by_level else "-" for level in wanted]
        print(f"| {name} | {row['ready_s']} s | " + " | ".join(cells) + " |", flush=True)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
