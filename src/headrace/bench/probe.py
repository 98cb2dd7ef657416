"""Finds out what a server understands, and how to write prompts that it counts as long as was asked for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from headrace.bench.client import Address, Connection, Record, message_of
from headrace.bench.config import BenchConfig
from headrace.bench.workload import Dialect, Workload
from headrace.errors import UserError

LAST_IDS = (8192, 1024, 256)
"""Ids to draw below, for smaller and smaller vocabularies."""
MAX_CORRECTIONS = 6
PROBE_TOKENS = 2


@dataclass(frozen=True)
class Target:
    """A server, ready to be measured."""

    address: Address
    model: str | None
    workload: Workload
    dialect: Dialect
    notes: list[str] = field(default_factory=list)
    """What the reader of the figures must know."""


class _Refused(Exception):
    """The server does not understand a request."""


async def probe(config: BenchConfig, seed: int) -> Target:
    """Ask the server a few short requests.

    Raises UserError where it cannot be measured, Fault where it is not there.
    """
    address = Address(config.url, config.api_key)
    connection = Connection(address)
    try:
        model = config.model or await _first_model(connection, address, config)
        return await _Probe(config, connection, address, model, seed).run()
    finally:
        connection.close()


async def _first_model(connection: Connection, address: Address, config: BenchConfig) -> str | None:
    record = await connection.send(address.get("/v1/models"), config.timeout_s)
    if record.status == 404:
        return None
    if record.error is not None:
        raise _refusal(config, record)
    try:
        return str(msgspec.json.decode(record.body)["data"][0]["id"])
    except (msgspec.DecodeError, LookupError, TypeError):
        raise UserError(f"--url {config.url}: /v1/models lists no model; name one with --model") from None


class _Probe:
    def __init__(
        self, config: BenchConfig, connection: Connection, address: Address, model: str | None, seed: int
    ) -> None:
        self._config = config
        self._connection = connection
        self._address = address
        self._model = model
        self._seed = seed
        # Below zero, so that no measured request has the same number.
        self._numbers: Iterator[int] = itertools.count(-1, -1)

    async def run(self) -> Target:
        dialect = await self._dialect()
        dialect, num_prompt = await self._fit(dialect)
        notes, asked = [], self._config.input
        if num_prompt is None:
            notes.append("the server reports no usage: tokens are events, and prompts may have another length")
        elif num_prompt != asked:
            notes.append(f"prompts have about {num_prompt} tokens, not {asked}")
        if dialect.ignore_eos is None:
            notes.append("the server knows no ignore_eos: answers may end early")
        return Target(self._address, self._model, self._workload(dialect), dialect, notes)

    async def _dialect(self) -> Dialect:
        """Everything at once where the server knows it all, else one thing after the other."""
        whole = Dialect(length=self._config.input)
        if await self._accepts(whole):
            return whole
        known = replace(whole, token_ids=False, ignore_eos=None, stream_options=False)
        await self._ask(known, must=True)
        steps: list[dict[str, Any]] = [
            {"stream_options": True},
            {"ignore_eos": "ignore_eos"},
            {"ignore_eos": "generation_config"},
            *({"token_ids": True, "last_id": last} for last in LAST_IDS),
        ]
        for changes in steps:
            if any(getattr(known, name) for name in changes if name != "last_id"):
                continue
            richer = replace(known, **changes)
            if await self._accepts(richer):
                known = richer
        return known

    async def _fit(self, dialect: Dialect) -> tuple[Dialect, int | None]:
        """Correct the prompts' length by what the server counts; the length it counts, None where it does not say."""
        asked, best, num_best = self._config.input, dialect, None
        for _ in range(MAX_CORRECTIONS):
            record = await self._ask(dialect, must=True)
            if record.usage is None or not record.usage.prompt_tokens:
                return dialect, None
            found = record.usage.prompt_tokens
            if num_best is None or abs(found - asked) < abs(num_best - asked):
                best, num_best = dialect, found
            if found == asked:
                break
            # A few tokens too many are the server's own (BOS); many are words of several tokens.
            length = dialect.length + asked - found
            if length < 1 or found > 1.5 * asked:
                length = max(1, round(dialect.length * asked / found))
            dialect = replace(dialect, length=length)
        return best, num_best

    async def _accepts(self, dialect: Dialect) -> bool:
        try:
            await self._ask(dialect, must=False)
        except _Refused:
            return False
        return True

    async def _ask(self, dialect: Dialect, *, must: bool) -> Record:
        body = self._workload(dialect).body(next(self._numbers), PROBE_TOKENS)
        request = self._address.post("/v1/completions", body)
        record = await self._connection.send(request, self._config.timeout_s)
        if record.error is None:
            return record
        if must or record.status in (401, 403, 404, 429, 503):
            raise _refusal(self._config, record)
        raise _Refused

    def _workload(self, dialect: Dialect) -> Workload:
        return Workload(self._model, dialect, self._seed)


def _refusal(config: BenchConfig, record: Record) -> UserError:
    message = message_of(record.body) if record.body else record.error or "no answer"
    if record.status in (401, 403):
        return UserError(f"--api-key: the server refuses it: {message}")
    if record.status == 404:
        return UserError(f"--url {config.url}: no /v1/completions, or not this model: {message}")
    if record.status == 503:
        return UserError(f"--url {config.url}: the server is not ready: {message}")
    status = f"HTTP {record.status}: " if record.status else ""
    return UserError(f"--url {config.url}: {status}{message}")
