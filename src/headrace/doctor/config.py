"""What to read: the flags of `headrace doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.errors import UserError


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """`headrace doctor`."""

    path: str
    """Log file, or folder of diagnostics; - is standard input."""

    def __post_init__(self) -> None:
        if self.path != "-" and not Path(self.path).exists():
            raise UserError(f"PATH {self.path}: there is no such file or folder")
