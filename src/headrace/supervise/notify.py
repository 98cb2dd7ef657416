"""The service manager's notification protocol (sd_notify(3)): short datagrams of NAME=value lines to a Unix socket."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Self

ADDRESS, WATCHDOG_USEC, WATCHDOG_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"


@dataclass(frozen=True)
class Notifier:
    """Tells the service manager, if there is one. Nothing it does can fail the service: what is not heard is lost."""

    address: str | None = None
    """A path, or `@name` for an abstract socket; None tells nobody."""
    watchdog_s: float | None = None
    """A service that says nothing for so many seconds is killed; None where the manager does not watch."""

    @classmethod
    def take(cls, environ: MutableMapping[str, str]) -> Self:
        """What the manager wrote into `environ`, removed from there: what this process starts is not the service."""
        address = environ.pop(ADDRESS, None)
        usec, pid = environ.pop(WATCHDOG_USEC, ""), environ.pop(WATCHDOG_PID, "")
        # A shell in between would hand on what is meant for itself.
        ours = usec.isdecimal() and int(usec) > 0 and pid in ("", str(os.getpid()))
        return cls(address or None, int(usec) / 1e6 if ours else None)

    def send(self, **assignments: str | int) -> None:
        """Send `NAME=value` lines as one datagram; a value is one line."""
        if self.address is None:
            return
        text = "\n".join(f"{name}={' '.join(str(value).split())}" for name, value in assignments.items())
        # Abstract sockets have names that begin with a zero byte, which no environment can hold.
        where = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            # A manager whose queue is full must not hold up the service.
            sender.setblocking(False)
            sender.sendto(text.encode(), where)
