"""Whether the address to serve on can be had, found before anything is started."""

from __future__ import annotations

import errno
import socket

from headrace.errors import UserError


def check_address(host: str, port: int) -> None:
    """Raise UserError naming `--host` or `--port` where a server could not listen there. Port 0 is always free."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise UserError(f"--host {host}: not a known host name or address") from None
    errors = [_try(*entry) for entry in addresses]
    # "localhost" may name an IPv6 address where IPv6 is switched off: the others will do.
    if None in errors:
        errors = [error for error in errors if error is not None and error.errno != errno.EADDRNOTAVAIL]
    for error in errors:
        assert error is not None
        raise UserError(_refusal(host, port, error))


def _try(family: int, kind: int, protocol: int, _name: str, address: tuple[object, ...]) -> OSError | None:
    with socket.socket(family, kind, protocol) as trial:
        # As the server will: a port whose last connections are still closing is free.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(address)
            trial.listen(1)
        except OSError as error:
            return error
    return None


def _refusal(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"--port {port}: already in use on {host}; --port 0 picks a free one"
    if error.errno == errno.EACCES:
        return f"--port {port}: not permitted to this user"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host}: not an address of this machine"
    return f"--host {host} --port {port}: {error.strerror or error}"
