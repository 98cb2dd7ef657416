"""What to measure: the flags of `headrace bench`."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from headrace.errors import UserError


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """`headrace bench`."""

    url: str = "http://127.0.0.1:8000"
    """Where the server is, with or without /v1."""
    model: str | None = None
    """Model to ask for; by default the first that the server lists."""
    api_key: str | None = None
    """Bearer token of the server."""
    concurrency: tuple[int, ...] = (1, 4, 16, 32)
    """Requests in flight, one measurement each."""
    input: int = 64
    """Tokens of a prompt."""
    output: int = 64
    """Tokens to generate for each."""
    requests: int | None = None
    """Requests of each measurement; by default three for each in flight, at least 6."""
    duration_s: float | None = None
    """Seconds after which a measurement starts no more requests, instead of a number of them."""
    timeout_s: float = 600.0
    """Seconds that one request may take."""
    seed: int | None = None
    """Seed of the prompts; by default a new one each time, so that no server knows them."""
    json: bool = False
    """Print one JSON object on standard output instead of a table."""

    def __post_init__(self) -> None:
        if not _is_url(self.url):
            raise UserError(f"--url {self.url}: must be like http://127.0.0.1:8000")
        if not self.concurrency:
            raise UserError("--concurrency: needs at least one number")
        for flag, value in (
            ("--concurrency", min(self.concurrency)),
            ("--input", self.input),
            ("--output", self.output),
            ("--requests", self.requests),
        ):
            if value is not None and value < 1:
                raise UserError(f"{flag} {value}: must be at least 1")
        for flag, seconds in (("--duration", self.duration_s), ("--timeout", self.timeout_s)):
            if seconds is not None and not seconds > 0:
                raise UserError(f"{flag} {seconds:g}: must be above 0")
        if self.requests is not None and self.duration_s is not None:
            raise UserError("--requests and --duration: give one of them")

    def num_requests(self, concurrency: int) -> int | None:
        """Requests to measure at a concurrency; None: as many as start within the duration."""
        if self.duration_s is not None:
            return None
        return self.requests if self.requests is not None else max(6, 3 * concurrency)


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        return False
