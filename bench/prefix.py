"""What the prefix cache saves: requests that share a long prefix, with the cache, without it, and short of pages.

    python bench/prefix.py [--requests 64] [--prefix 4096]

A small random model on this machine's processor, two stages, real HTTP; first all requests at once, then eight at a
time. With few pages there is room for the prefix and four requests more; then strangers come in between, whose prompts
drive the prefix out. Writes bench/results/prefix-cache.json and prints prompt tokens that the first stage computed,
time to first token, and for how many requests the (greedy) answer is the same as without the cache.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from headrace.bench.client import Address, Connection, Record
from headrace.weights.random import write_checkpoint

RESULTS = Path(__file__).parent / "results" / "prefix-cache.json"
OWN, OUTPUT = 32, 16
"""Tokens of each prompt after the prefix, and of each answer."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
SETTLE_S = 3.0
"""Until the counters of every stage have been told."""
TOKEN_BYTES = 2 * 2 * 2 * 64 * 4
"""KV bytes of a token on each of the two stages."""


@contextmanager
def served(folder: Path, *flags: str) -> Iterator[str]:
    """A server of the model; its URL."""
    command = [
        sys.executable, "-m", "headrace", "serve", str(folder), "--pp", "2", "--device", "cpu", "--port", "0",
        "--json-ready", *flags,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "HEADRACE_LOG": "error"})
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"the server ended with exit code {process.wait()}")
        yield json.loads(line)["url"]
    finally:
        process.terminate()
        process.wait(60)


def metrics(url: str) -> dict[str, float]:
    """The first sample of each name."""
    found: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics", trust_env=False).text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found.setdefault(name.partition("{")[0].removeprefix("headrace:"), float(value))
    return found


async def ask(url: str, prompts: list[list[int]], at_once: int) -> tuple[list[float], float]:
    """Stream the answers to all prompts, so many at a time; times to first token, and that of all, in seconds."""
    address, left = Address(url), iter(prompts)
    records: list[Record] = []

    async def client() -> None:
        connection = Connection(address)
        for prompt in left:
            body = {"prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True, "stream": True}
            records.append(await connection.send(address.post("/v1/completions", json.dumps(body).encode()), 900.0))
        connection.close()

    await asyncio.gather(*(client() for _ in range(at_once)))
    for record in records:
        if record.error is not None:
            raise SystemExit(record.error)
    ttft_s = [record.token_times_s[0] - record.start_s for record in records]
    return ttft_s, max(record.end_s for record in records) - min(record.start_s for record in records)


def answers(url: str, prompts: list[list[int]], strangers: list[list[int]]) -> list[str]:
    """What each prompt is answered, eight at a time; between two times a stranger comes."""
    texts: list[str] = []
    for first in range(0, len(prompts), 8):
        if strangers:
            stranger = {"prompt": strangers[first // 8 % len(strangers)], "max_tokens": 1}
            httpx.post(f"{url}/v1/completions", json=stranger, timeout=900, trust_env=False).raise_for_status()
        body = {"prompt": prompts[first : first + 8], "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=900, trust_env=False).json()
        texts += [choice["text"] for choice in answer["choices"]]
    return texts


def measure(url: str, prompts: list[list[int]], at_once: int) -> dict[str, float]:
    """One round, from an empty cache."""
    time.sleep(SETTLE_S)
    httpx.post(f"{url}/reset_prefix_cache", trust_env=False).raise_for_status()
    before = metrics(url)
    ttft_s, duration_s = asyncio.run(ask(url, prompts, at_once))
    time.sleep(SETTLE_S)
    after = metrics(url)
    num_decoded = len(prompts) * (OUTPUT - 1)
    return {
        "at_once": at_once,
        "prompt_tokens_computed": after["stage_tokens_total"] - before["stage_tokens_total"] - num_decoded,
        "prompt_tokens_found": after["prefix_cache_hits_total"] - before["prefix_cache_hits_total"],
        "preemptions": after["num_preemptions_total"] - before["num_preemptions_total"],
        "mean_ttft_ms": round(1000 * float(np.mean(ttft_s)), 1),
        "p99_ttft_ms": round(1000 * float(np.quantile(ttft_s, 0.99)), 1),
        "duration_s": round(duration_s, 2),
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prefix", type=int, default=4096)
    args = parser.parse_args()
    source = random.Random(0)
    prefix = [source.randrange(256) for _ in range(args.prefix)]
    prompts = [prefix + [source.randrange(256) for _ in range(OWN)] for _ in range(args.requests)]
    strangers = [[source.randrange(256) for _ in range(args.prefix)] for _ in range(4)]
    # Room for a prefix, and a few requests' own parts.
    tight = str((args.prefix + 4 * (OWN + OUTPUT)) * TOKEN_BYTES)
    results: dict[str, Any] = {}
    reference: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "model"
        write_checkpoint(folder, CONFIG, tokenizer=True)
        for kind, flags, between in (
            ("without", ("--no-prefix-cache",), []),
            ("with", (), []),
            ("with, few pages", ("--kv-memory", tight), strangers),
        ):
            with served(folder, *flags) as url:
                runs = [measure(url, prompts, at_once) for at_once in (args.requests, 8)]
                texts = answers(url, prompts, between)
            reference = reference or texts
            same = sum(one == other for one, other in zip(texts, reference, strict=True))
            results[kind] = {"runs": runs, "same_answers": same}
            for run in runs:
                print(f"{kind:<16}{json.dumps(run)}, same answers {same} of {args.requests}")
    RESULTS.write_text(
        json.dumps(
            {
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
                "requests": args.requests,
                "prefix": args.prefix,
                "own": OWN,
                "output": OUTPUT,
                "results": results,
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
