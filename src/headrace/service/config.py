"""What to do with which service: the flags of `headrace service`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from headrace.config import HttpConfig, ServeConfig
from headrace.errors import UserError

Action = Literal["install", "remove", "start", "stop", "restart", "status", "logs"]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """`headrace service`."""

    action: Action
    """What to do."""
    name: str
    """Name of the service; its unit is headrace-NAME.service."""
    serve: ServeConfig = field(default_factory=ServeConfig)
    wait: bool = False
    """Wait until the model answers, and say why where it does not; the exit code is that of headrace wait."""
    user: bool = False
    """Act on the user's services; the default where you are not root."""
    system: bool = False
    """Act on the system's services; the default for root."""
    run_as: str | None = None
    """User that a service of the system runs as; by default who called sudo, else root."""
    dry_run: bool = False
    """Print the unit, or the commands, and change nothing."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UserError(f"NAME {self.name}: must be letters, digits, dots, dashes and underscores, at most 64")
        if self.user and self.system:
            raise UserError("--user and --system: give one of them")
        if self.action == "install":
            self._check_install()
        # The key may come from the environment.
        elif self.serve != ServeConfig(http=HttpConfig(api_key=self.serve.http.api_key)):
            raise UserError(f"{self.action}: takes no model and no flags of serve; install does")
        if self.wait and self.action not in ("install", "start", "restart"):
            raise UserError(f"--wait: not with {self.action}")

    def _check_install(self) -> None:
        if self.serve.http.port == 0:
            raise UserError("--port 0: a service needs a port of its own")
        if self.run_as is not None and self.user:
            raise UserError("--run-as: a user's service runs as that user")

    @property
    def unit(self) -> str:
        """The unit's name."""
        return f"headrace-{self.name}.service"
