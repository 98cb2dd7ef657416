"""A unit of systemd for `headrace serve`, and the file of its secrets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from headrace.config import HttpConfig
from headrace.errors import UserError
from headrace.supervise.life import START_TIMEOUT_S, watchdog_s
from headrace.supervise.vitals import Limits
from headrace.supervise.watch import DRAIN_MARGIN_S, STOP_GRACE_S

MARK = "# Written by `headrace service install`; it is replaced by the next install, so change it with a drop-in."
URL_KEY = "X-Headrace-Url"
"""Keys that begin with X- are left alone by systemd."""
STOP_MARGIN_S = 12
BACKOFF_VERSION = 254
"""The first systemd with growing delays between restarts."""
RESTART_S, MAX_RESTART_S, RESTART_STEPS = 5, 300, 6
MAX_FAILED_STARTS = 10


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What a unit is made from."""

    name: str
    """Of the service."""
    argv: Sequence[str]
    """The command of the engine; no secret is in it."""
    keeper: Sequence[str]
    """The command that keeps diagnostics when it has ended."""
    url: str
    environment: Mapping[str, str]
    environment_file: str
    """Path of the file of secrets; it may be missing."""
    run_as: str | None
    """None: whoever the manager runs as."""
    user: bool
    """Whether it is for a user's manager."""
    version: int | None
    """Of systemd; None: the newest."""
    drain_s: float
    """Time that requests in flight have after a stop."""
    limits: Limits
    """After which the supervisor gives up a process or its work."""


def unit_text(unit: Unit) -> str:
    """The unit's file."""
    return "\n".join([MARK, *_unit_section(unit), "", *_service_section(unit), "", *_install_section(unit), ""])


def _unit_section(unit: Unit) -> list[str]:
    # A user's manager does not know the system's targets.
    network = (
        [] if unit.user else ["Wants=network-online.target", "After=network-online.target nvidia-persistenced.service"]
    )
    return [
        "[Unit]",
        f"Description=headrace: {unit.name}",
        "Documentation=man:systemd.service(5)",
        *network,
        # A model that cannot start is given up after a while, and then is `failed`.
        "StartLimitIntervalSec=2h",
        f"StartLimitBurst={MAX_FAILED_STARTS}",
        f"{URL_KEY}={unit.url}",
    ]


def _service_section(unit: Unit) -> list[str]:
    return [
        "[Service]",
        # READY=1 comes from the supervisor, once an inference went through every stage.
        "Type=notify",
        "NotifyAccess=main",
        f"ExecStart={_command(unit.argv)}",
        # Behind a failed start too; `-`: what it cannot keep does not make the unit fail.
        f"ExecStopPost=-{_command(unit.keeper)}",
        *([f"User={unit.run_as}"] if unit.run_as else []),
        *[f"Environment={quoted(f'{name}={value}')}" for name, value in sorted(unit.environment.items())],
        f"EnvironmentFile=-{_escaped(unit.environment_file)}",
        # Diagnostics: /var/lib/headrace/NAME, or ~/.local/state (before systemd 254 ~/.config) for a user.
        f"StateDirectory=headrace/{unit.name}",
        "StateDirectoryMode=0700",
        # While bytes of weights arrive the supervisor asks for more time.
        f"TimeoutStartSec={START_TIMEOUT_S}",
        # The supervisor itself is what it watches: all else it finds sooner, and can name.
        f"WatchdogSec={watchdog_s(unit.limits)}",
        # A hung supervisor: its stack, if cores are kept, is worth more than a quick end.
        "WatchdogSignal=SIGABRT",
        # The supervisor ends its processes; what it has left behind by then is killed.
        "KillMode=mixed",
        f"TimeoutStopSec={ceil(unit.drain_s + DRAIN_MARGIN_S + STOP_GRACE_S) + STOP_MARGIN_S}",
        # One process killed for memory: the supervisor says which, and ends the others.
        "OOMPolicy=continue",
        *_restart(unit.version),
        *_hardening(unit.user),
    ]


def _restart(version: int | None) -> list[str]:
    lines = [
        "Restart=on-failure",
        # 2 is the user's error: it fails the next time too.
        "RestartPreventExitStatus=2",
        f"RestartSec={RESTART_S}",
    ]
    if version is None or version >= BACKOFF_VERSION:
        lines += [f"RestartSteps={RESTART_STEPS}", f"RestartMaxDelaySec={MAX_RESTART_S}"]
    return lines


def _hardening(user: bool) -> list[str]:
    """What a GPU program can live with.

    Not PrivateDevices, nor ProtectClock or DeviceAllow, which close the devices too: the GPUs are devices. Not
    MemoryDenyWriteExecute: kernels are compiled at run time. Not PrivateUsers or a private /dev/shm: ranks map each
    other's memory. Not ProtectHome: models and caches lie there.
    """
    lines = ["NoNewPrivileges=yes", "LockPersonality=yes", "RestrictSUIDSGID=yes", "RestrictRealtime=yes", "UMask=0077"]
    if user:
        # The rest needs a mount namespace, which a user's manager may not make, and higher limits.
        return lines
    return [
        *lines,
        "PrivateTmp=yes",
        "ProtectSystem=full",
        "ProtectControlGroups=yes",
        "ProtectKernelTunables=yes",
        "ProtectKernelLogs=yes",
        "ProtectHostname=yes",
        # NCCL asks the kernel for its interfaces by netlink.
        "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
        # Pinned buffers, and those that network cards write to.
        "LimitMEMLOCK=infinity",
        "LimitNOFILE=1048576",
    ]


def _install_section(unit: Unit) -> list[str]:
    return ["[Install]", f"WantedBy={'default' if unit.user else 'multi-user'}.target"]


def secrets_text(secrets: Mapping[str, str]) -> str:
    """The environment file: one NAME="value" a line."""
    return "".join(f"{name}={_file_value(name, value)}\n" for name, value in sorted(secrets.items()))


def local_url(http: HttpConfig) -> str:
    """Where this machine reaches the service."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(http.host, http.host)  # noqa: S104  # compared
    return f"http://{f'[{host}]' if ':' in host else host}:{http.port}"


def quoted(text: str) -> str:
    """`text` as one word of a unit's line, taken as it is."""
    if "\0" in text or "\n" in text or "\r" in text:
        raise UserError(f"{text!r}: a unit cannot hold line breaks")
    escaped = _escaped(text).replace("\\", "\\\\").replace('"', '\\"')
    plain = text and all(char.isalnum() or char in "-_./=,:@+%" for char in text)
    return escaped if plain else f'"{escaped}"'


def _command(argv: Sequence[str]) -> str:
    # A dollar sign begins a variable, in commands only.
    return " ".join(quoted(word).replace("$", "$$") for word in argv)


def _escaped(text: str) -> str:
    # A percent sign begins a specifier.
    return text.replace("%", "%%")


def _file_value(name: str, value: str) -> str:
    if "\n" in value or "\r" in value or "\0" in value:
        raise UserError(f"{name}: must not hold line breaks")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`").replace("$", "\\$")
    return f'"{escaped}"'
