"""Clients of every kind: who reads, who reads slowly, who leaves, who never hears an answer."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.soak.answers import Asked

NUM_CLIENTS = 16
ANSWER_S = 120.0
KINDS = {"read": 6, "read slowly": 2, "whole answer": 2, "long prompt": 1, "leave": 4, "leave early": 1, "reset": 1}
"""How often each is drawn."""
LONG_PROMPT = 900


@dataclass
class Tally:
    """What the clients did and saw."""

    done: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    """Of answers that were compared."""
    problems: list[str] = field(default_factory=list)

    def problem(self, text: str) -> None:
        """Note it; the first few are enough."""
        if len(self.problems) < 20:
            self.problems.append(text)


@dataclass(frozen=True)
class Crowd:
    """A server's clients."""

    url: str
    requests: Sequence[Asked]
    names: Mapping[str, int]
    tally: Tally

    async def run(self, seconds: float, seed: int) -> None:
        """All of them until the time is up and the last answer is there."""
        until = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=ANSWER_S, limits=limits, trust_env=False) as http:
            await asyncio.gather(*(self._client(http, random.Random(seed + i), until) for i in range(NUM_CLIENTS)))

    async def _client(self, http: httpx.AsyncClient, source: random.Random, until: float) -> None:
        while time.monotonic() < until:
            kind = source.choices(list(KINDS), list(KINDS.values()))[0]
            asked = source.choice(self.requests)
            try:
                if kind == "reset":
                    assert (await http.post("/reset_prefix_cache")).status_code == 200
                elif kind == "whole answer":
                    await self._whole(http, asked)
                elif kind == "leave early":
                    await self._leave_early(http, asked, source)
                elif kind == "leave":
                    await self._stream(http, asked, source, leave_after=source.randint(0, 30))
                elif kind == "long prompt":
                    prompt = tuple(source.randrange(256) for _ in range(source.randint(500, LONG_PROMPT)))
                    await self._stream(
                        http, Asked(prompt, source.randint(1, 30), 1.0, source.randrange(1 << 30)), source
                    )
                else:
                    await self._stream(http, asked, source, slow=kind == "read slowly")
            except (httpx.HTTPError, AssertionError, KeyError, ValueError) as error:
                self.tally.problem(f"{kind}: {type(error).__name__}: {error}")
            self.tally.done[kind] += 1

    async def _stream(
        self,
        http: httpx.AsyncClient,
        asked: Asked,
        source: random.Random,
        *,
        slow: bool = False,
        leave_after: int | None = None,
    ) -> None:
        heard: list[int] = []
        ends: list[str] = []
        async with http.stream("POST", "/v1/completions", json=asked.body(stream=True)) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if leave_after is not None and len(heard) >= leave_after:
                    return
                if slow and source.random() < 0.2:
                    # Now and then for long: what is sent meanwhile has to wait somewhere.
                    await asyncio.sleep(source.choice((0.02, 0.1, 0.1, 3.0)))
                if line.startswith("data: {"):
                    self._hear(json.loads(line[6:]), heard, ends)
                elif line:
                    assert line == "data: [DONE]", line
                    ends.append("done")
        if leave_after is None:
            self.compare(asked, heard)
            assert ends == ["length", "done"], ends

    def _hear(self, chunk: Mapping[str, Any], heard: list[int], ends: list[str]) -> None:
        assert "error" not in chunk, chunk
        choice = chunk["choices"][0]
        heard += [self.names[name] for name in (choice["logprobs"] or {"tokens": []})["tokens"]]
        if choice["finish_reason"]:
            ends.append(choice["finish_reason"])

    async def _whole(self, http: httpx.AsyncClient, asked: Asked) -> None:
        self.compare(asked, await self.ask(http, asked))

    async def ask(self, http: httpx.AsyncClient, asked: Asked) -> list[int]:
        """The ids of an answer that comes at once."""
        answer = await http.post("/v1/completions", json=asked.body(stream=False))
        assert answer.status_code == 200, answer.text
        found = answer.json()
        ids = [self.names[name] for name in found["choices"][0]["logprobs"]["tokens"]]
        assert found["usage"]["completion_tokens"] == len(ids)
        assert found["usage"]["prompt_tokens"] == len(asked.prompt)
        return ids

    async def _leave_early(self, http: httpx.AsyncClient, asked: Asked, source: random.Random) -> None:
        try:
            async with asyncio.timeout(source.random() * 0.3):
                await self._whole(http, asked)
        except TimeoutError:
            pass

    def compare(self, asked: Asked, heard: Sequence[int]) -> None:
        """Token for token; where the answer is not known, their number."""
        self.tally.tokens += len(heard)
        if len(heard) != asked.max_tokens:
            self.tally.problem(f"{len(heard)} tokens where {asked.max_tokens} were asked for")
        elif asked.answer and tuple(heard) != asked.answer:
            at = next(i for i, (a, b) in enumerate(zip(heard, asked.answer, strict=True)) if a != b)
            self.tally.problem(
                f"token {at} of {len(heard)}, prompt of {len(asked.prompt)}, temperature {asked.temperature:g}: "
                f"{heard[at : at + 4]} where {list(asked.answer[at : at + 4])} was due"
            )
