"""What to wait for: the flags of `headrace wait`."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from headrace.errors import UserError


@dataclass(frozen=True, kw_only=True)
class WaitConfig:
    """`headrace wait`."""

    url: str | None = None
    """Where the engine is, with or without /v1; by default port 8000 here, or on the machine that --ssh names."""
    unit: str | None = None
    """Unit of systemd that runs the engine; the system's is looked for first, then the user's."""
    ssh: str | None = None
    """Machine on which the unit is, as ssh takes it."""
    pid: int | None = None
    """Process of the engine."""
    api_key: str | None = None
    """Bearer token of the engine."""
    every_s: float = 5.0
    """Time between looks; 5s, 2m and 1h30m are understood."""
    timeout_s: float = 1800.0
    """Time after which to give up; 90s, 30m and 2h are understood."""
    no_probe: bool = False
    """Believe the engine that it is ready, without asking for a completion."""
    json: bool = False
    """Print one JSON object on standard output at the end."""

    def __post_init__(self) -> None:
        if self.url is not None and not _is_url(self.url):
            raise UserError(f"--url {self.url}: must be like http://127.0.0.1:8000")
        if self.unit is not None and (not self.unit or self.unit.startswith("-")):
            raise UserError(f"--unit {self.unit}: not the name of a unit")
        if self.ssh is not None and self.unit is None:
            raise UserError(f"--ssh {self.ssh}: needs --unit")
        if self.ssh is not None and (not self.ssh or self.ssh.startswith("-")):
            raise UserError(f"--ssh {self.ssh}: not the name of a machine")
        if self.unit is not None and self.pid is not None:
            raise UserError("--unit and --pid: give one of them")
        if self.pid is not None and self.pid < 1:
            raise UserError(f"--pid {self.pid}: must be at least 1")
        for flag, seconds in (("--every", self.every_s), ("--timeout", self.timeout_s)):
            if not seconds > 0:
                raise UserError(f"{flag} {seconds:g}: must be above 0")

    @property
    def base_url(self) -> str:
        """Where the engine is, without /v1."""
        if self.url is not None:
            return self.url.rstrip("/").removesuffix("/v1")
        host = self.ssh.rpartition("@")[2] if self.ssh else "127.0.0.1"
        return f"http://{host}:8000"


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        return False
