"""What to measure: the flags of `headrace probe`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headrace.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """`headrace probe`."""

    out: str | None = None
    """File to write; by default standard output."""
    path: str = "."
    """Folder whose disk is read: the largest file in it, or a file that is written there and deleted again."""
    quick: bool = False
    """Half the time for everything, and half the bytes of disk."""

    def __post_init__(self) -> None:
        if not Path(self.path).is_dir():
            raise UserError(f"--path {self.path}: not a folder")
        if self.out is not None and not Path(self.out).absolute().parent.is_dir():
            raise UserError(f"--out {self.out}: its folder is not there")
        if self.out is not None and Path(self.out).is_dir():
            raise UserError(f"--out {self.out}: a folder; name a file")

    @property
    def effort(self) -> float:
        """What all times are multiplied by."""
        return 0.5 if self.quick else 1.0
