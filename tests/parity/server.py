"""A served model as a user has it: the real command, real HTTP; streamed greedy completions with log-probabilities."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from headrace.text.tokenizer import Tokenizer
from tests.parity.reference import Written

START_S = 120.0


@dataclass(frozen=True)
class Server:
    """A ready server."""

    url: str
    ready: dict[str, Any]
    process: subprocess.Popen[bytes]


@contextmanager
def served(*args: str, stderr: Path) -> Iterator[Server]:
    """`headrace serve` with these arguments, on a port of its own; stopped as a user would, and cleanly."""
    command = [sys.executable, "-m", "headrace", "serve", *args, "--port", "0", "--json-ready"]
    with stderr.open("wb") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, f"exit code {process.wait()}: {stderr.read_text()}"
            ready = json.loads(line)
            yield Server(ready["url"], ready, process)
            assert process.poll() is None, stderr.read_text()
        finally:
            process.terminate()
            code = process.wait(timeout=60)
            rest = process.stdout.read() if process.stdout is not None else b""
            if process.stdout is not None:
                process.stdout.close()
        assert (code, rest) == (0, b""), f"exit code {code}, {rest!r}: {stderr.read_text()}"


@dataclass
class _Heard:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)


def names_of(tokenizer: Tokenizer, vocab: int) -> dict[str, int]:
    """What a token is called in `logprobs`, to its id; tiny vocabularies name every token differently."""
    names: dict[str, int] = {}
    for token in range(vocab):
        raw = tokenizer.token_bytes(token)
        try:
            name = raw.decode()
        except UnicodeDecodeError:
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        names.setdefault(name, token)
    return names


def complete(
    server: Server, prompts: Sequence[Sequence[int]], max_tokens: int, names: dict[str, int], seed: int
) -> list[Written]:
    """Greedy completions of all prompts; each starts when a random number of tokens of the others has been seen."""
    return asyncio.run(_complete(server, prompts, max_tokens, names, seed))


async def _complete(
    server: Server, prompts: Sequence[Sequence[int]], max_tokens: int, names: dict[str, int], seed: int
) -> list[Written]:
    source = random.Random(seed)
    # A third at once; the others after so many tokens as surely come from those that started before them.
    first = max(1, len(prompts) // 3)
    thresholds = sorted(0 if i < first else source.randint(1, first * max_tokens) for i in range(len(prompts)))
    seen, moved = 0, asyncio.Condition()
    heard = [_Heard() for _ in prompts]

    async def run(client: httpx.AsyncClient, i: int) -> None:
        nonlocal seen
        async with moved:
            await moved.wait_for(lambda: seen >= thresholds[i])
        body = {
            "prompt": list(prompts[i]), "max_tokens": max_tokens, "temperature": 0, "logprobs": 3, "stream": True,
            "ignore_eos": True,
        }  # fmt: skip
        async with client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                entries = json.loads(line[6:])["choices"][0]["logprobs"]
                if not entries:
                    continue
                heard[i].tokens += [names[name] for name in entries["tokens"]]
                heard[i].logprobs += entries["token_logprobs"]
                heard[i].top += [{names[n]: p for n, p in top.items()} for top in entries["top_logprobs"]]
                async with moved:
                    seen += len(entries["tokens"])
                    moved.notify_all()

    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(timeout=START_S, limits=limits, trust_env=False) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for i in range(len(prompts)):
            tasks.create_task(run(client, i))
    return [Written(p, h.tokens, h.logprobs, h.top) for p, h in zip(prompts, heard, strict=True)]


def metric(server: Server, name: str) -> float:
    """A sample of /metrics, the first of that name."""
    for line in httpx.get(f"{server.url}/metrics", trust_env=False).text.splitlines():
        if line.startswith((name + " ", name + "{")):
            return float(line.rsplit(" ", 1)[1])
    raise KeyError(name)
