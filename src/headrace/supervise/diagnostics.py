"""A folder for each failure: what a person who was not there wants to know, within bounds and without secrets."""

from __future__ import annotations

import json
import logging
import os
import platform
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

import headrace
from headrace.config import ServeConfig
from headrace.step import Failed
from headrace.supervise.child import Beat
from headrace.supervise.devices import describe_gpus
from headrace.supervise.failure import Failure, describe_exit
from headrace.supervise.group import Exited, ProcessGroup
from headrace.supervise.private import slug, stacks_file

log = logging.getLogger(__name__)

KEPT = 10
MAX_FILE = 256 << 10
"""Bytes of a file, from its end."""
DEVICES_S = 2.0
"""A driver that has failed may not answer."""
STACKS_S = 0.5
_NAME = re.compile(r"\d{8}-\d{6}-\d+")
_SHOWN = re.compile(r"(HEADRACE|NCCL|GLOO|CUDA|NVIDIA|TORCH|PYTORCH|TRITON|OMP|GOMP|MKL)_|(LD_LIBRARY_PATH|TMPDIR)$")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")
HIDDEN = "(not shown)"


def diagnostics_root(asked: str | None, environ: Mapping[str, str] = os.environ) -> Path:
    """Where the folders go: what was asked for, the service manager's state directory, or the user's."""
    if asked is not None:
        return Path(asked)
    # The manager may name several, with colons between.
    managed = environ.get("STATE_DIRECTORY", "").split(":")[0]
    if managed:
        return Path(managed) / "diagnostics"
    return Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "headrace" / "diagnostics"


@dataclass
class Evidence:
    """What is found out while the processes still live; `save` adds what they said up to their end."""

    failure: Failure
    seen: list[Failed | Exited]
    beats: Mapping[str, Beat | None]
    engine: Mapping[str, Any]
    """Fields of the engine's `Ready`, empty before: layout and memory."""
    at: float = field(default_factory=time.time)
    memory: dict[str, Any] = field(default_factory=dict)
    devices: list[dict[str, Any]] = field(default_factory=list)

    def look(self, group: ProcessGroup) -> None:
        """Have every process that can write down where it is, and read what its memory and the devices hold."""
        asked = {who for who, beat in self.beats.items() if beat is not None}
        if asked:
            # Only those that have beaten: before, the signal would end them.
            group.signal(signal.SIGUSR1, *asked)
        self.memory = _memory(group)
        self.devices = _within(DEVICES_S)
        if asked & group.pids.keys():
            # A signal is taken at once; writing a hundred threads' stacks takes some milliseconds.
            left = STACKS_S - min(STACKS_S, time.time() - self.at)
            time.sleep(left)


def save(root: Path, evidence: Evidence, config: ServeConfig, directory: Path, group: ProcessGroup) -> Path | None:
    """Write the folder and drop the oldest beyond `KEPT`; None, and a line in the log, where that fails.

    directory: the private directory of the processes.
    """
    folder = root / f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(evidence.at))}-{os.getpid()}"
    hide = secrets_of(config, os.environ)
    try:
        folder.mkdir(parents=True, mode=0o700)
        files = {
            "failure.json": _json(_failure(evidence)),
            "config.json": _json(_config(config)),
            "environment.json": _json(environment(os.environ)),
            "memory.json": _json({"processes": evidence.memory, "engine": evidence.engine}),
            "devices.json": _json(evidence.devices),
        }
        for who, text in group.logs.last().items():
            files[f"log-{slug(who)}.txt"] = text
        for who in group.names:
            files[f"stacks-{slug(who)}.txt"] = _tail(stacks_file(directory, who))
        for name, data in files.items():
            if data:
                (folder / name).write_bytes(redact(data, hide)[-MAX_FILE:])
        _prune(root)
    except OSError as error:
        log.warning("no diagnostics in %s: %s", folder, error.strerror or error)
        return None
    return folder


def redact(data: bytes, secrets: Iterable[str]) -> bytes:
    """`data` without the secrets."""
    for secret in secrets:
        data = data.replace(secret.encode(), HIDDEN.encode())
    return data


def secrets_of(config: ServeConfig, environ: Mapping[str, str]) -> list[str]:
    """What must not be written anywhere: the API key, and what the environment calls a key or a token."""
    found = [value for name, value in environ.items() if _SECRET.search(name) and len(value) >= 8]
    return sorted({*found, *([config.http.api_key] if config.http.api_key else [])}, key=len, reverse=True)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that change what the processes do."""
    return {k: HIDDEN if _SECRET.search(k) else v for k, v in sorted(environ.items()) if _SHOWN.match(k)}


def _failure(evidence: Evidence) -> dict[str, Any]:
    failure, now = evidence.failure, time.monotonic()
    events = [
        {
            "who": event.who,
            "seconds_ago": round(now - event.at_s, 3),
            "what": event.message if isinstance(event, Failed) else describe_exit(event.returncode),
            "secondary": isinstance(event, Failed) and event.secondary,
        }
        for event in sorted(evidence.seen, key=lambda event: event.at_s)
    ]
    return {
        "line": failure.line,
        "who": failure.who,
        "at": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(evidence.at)),
        "exit_code": failure.exit_code,
        "events": events,
        "last_beats": {who: None if b is None else msgspec.to_builtins(b) for who, b in evidence.beats.items()},
        "headrace": headrace.__version__,
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def _config(config: ServeConfig) -> Any:
    found = msgspec.to_builtins(config)
    if found["http"]["api_key"] is not None:
        found["http"]["api_key"] = HIDDEN
    return found


def _memory(group: ProcessGroup) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for who, pid in group.pids.items():
        try:
            process = psutil.Process(pid)
            resident = process.memory_info().rss
            found[who] = {"pid": pid, "status": process.status(), "resident_bytes": resident}
        except psutil.Error:
            continue
    host = psutil.virtual_memory()
    found["host"] = {"total_bytes": host.total, "available_bytes": host.available}
    return found


def _within(seconds: float) -> list[dict[str, Any]]:
    """The GPUs as the driver describes them, if it does so in time."""
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.extend(describe_gpus()), name="devices", daemon=True)
    thread.start()
    thread.join(seconds)
    return [{"error": f"the driver did not answer within {seconds:g} s"}] if thread.is_alive() else found


def _tail(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MAX_FILE))
            return file.read()
    except OSError:
        return b""


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, default=str).encode() + b"\n"


def _prune(root: Path) -> None:
    ours = sorted(folder for folder in root.iterdir() if _NAME.fullmatch(folder.name) and folder.is_dir())
    for folder in ours[:-KEPT]:
        shutil.rmtree(folder, ignore_errors=True)
