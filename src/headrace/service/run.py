"""`headrace service`: files written and removed, systemctl and journalctl called, and what is said of it."""

from __future__ import annotations

import os
import pwd
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import Fault, UserError
from headrace.service.config import ServiceConfig
from headrace.service.unit import MARK, URL_KEY, Unit, local_url, secrets_text, unit_text
from headrace.supervise.vitals import limits_of
from headrace.wait.config import WaitConfig
from headrace.wait.run import wait

ROOT = Path("/")
PASSED_ON = (
    "CUDA_VISIBLE_DEVICES", "HEADRACE_LOG", "HEADRACE_SHARE_GPUS", "HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE",
    "HF_HUB_OFFLINE", "NCCL_P2P_DISABLE", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS", "TRITON_CACHE_DIR",
)  # fmt: skip
"""Variables that a service gets as they are when it is installed; all others are left behind."""
KEY = "HEADRACE_API_KEY"
HUB_TOKEN = "HF_TOKEN"  # noqa: S105  # a variable's name
SECRET = "<secret>"  # noqa: S105  # what is shown instead of one
LOG_LINES = 200


@dataclass(frozen=True)
class Place:
    """Where a service's files are, and how its manager is called."""

    user: bool
    unit: Path
    secrets: Path

    def command(self, program: str, *words: str) -> list[str]:
        """A command line for the right manager."""
        return [program, *(["--user"] if self.user else []), *words]


def service(config: ServiceConfig, serve_flags: Sequence[str]) -> int:
    """Do what is asked; the exit code. `serve_flags` is the service's command line, without model and secrets.

    Raises UserError, and Fault where systemd refuses.
    """
    place = place_of(config)
    if config.action == "install":
        return _install(config, place, serve_flags)
    if config.action in ("status", "logs"):
        words = {
            "status": place.command("systemctl", "status", "--no-pager", "--lines=5", config.unit),
            "logs": place.command("journalctl", "--no-pager", f"--lines={LOG_LINES}", _of_unit(config, place)),
        }[config.action]
        return _show(words, config.dry_run)
    _check_installed(config, place)
    if config.action == "remove":
        return _remove(config, place)
    # Not blocking: a start takes minutes, and waiting is another command's business.
    _run(place.command("systemctl", config.action, *_no_block(config), config.unit), config.dry_run)
    return _wait(config, place)


def place_of(config: ServiceConfig) -> Place:
    """The system's service or the user's; root's own are the system's."""
    if config.user or (not config.system and os.getuid() != 0):
        folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        return Place(True, folder / "systemd" / "user" / config.unit, folder / "headrace" / f"{config.name}.env")
    return Place(False, ROOT / "etc/systemd/system" / config.unit, ROOT / "etc/headrace" / f"{config.name}.env")


# --- install and remove -----------------------------------------------------------------------------------------------


def _install(config: ServiceConfig, place: Place, serve_flags: Sequence[str]) -> int:
    text = unit_text(_unit_of(config, place, serve_flags))
    secrets = _secrets(config, place)
    if config.dry_run:
        sys.stdout.write(f"# {place.unit}\n{text}")
        if secrets:
            sys.stdout.write(f"\n# {place.secrets}\n{secrets_text(dict.fromkeys(secrets, SECRET))}")
        return 0
    if place.unit.exists() and not place.unit.read_text().startswith(MARK):
        raise UserError(f"NAME {config.name}: {place.unit} is there and was not written by headrace")
    _write(place.unit, text, 0o644)
    if secrets:
        _write(place.secrets, secrets_text(secrets), 0o600)
    else:
        place.secrets.unlink(missing_ok=True)
    _run(place.command("systemctl", "daemon-reload"))
    _run(place.command("systemctl", "enable", config.unit))
    _run(place.command("systemctl", "restart", "--no-block", config.unit))
    sys.stderr.write(f"{config.unit} is written to {place.unit}, enabled and started\n")
    if place.user:
        sys.stderr.write("it ends with your last session unless you say: loginctl enable-linger\n")
    return _wait(config, place)


def _secrets(config: ServiceConfig, place: Place) -> dict[str, str]:
    """What the file of secrets shall hold: what is there already, and what is given now."""
    secrets = dict(read_secrets(place.secrets))
    # A key from before would be asked for without a word.
    secrets.pop(KEY, None)
    if config.serve.http.api_key is not None:
        secrets[KEY] = config.serve.http.api_key
    if os.environ.get(HUB_TOKEN):
        secrets[HUB_TOKEN] = os.environ[HUB_TOKEN]
    return secrets


def _unit_of(config: ServiceConfig, place: Place, serve_flags: Sequence[str]) -> Unit:
    model = _model(config)
    python = (sys.executable, "-P", "-m")
    return Unit(
        name=config.name,
        argv=(*python, "headrace", "serve", *([model] if model else []), *_absolute_paths(serve_flags)),
        keeper=(*python, "headrace.service.keep"),
        url=local_url(config.serve.http),
        environment={name: os.environ[name] for name in PASSED_ON if os.environ.get(name)},
        environment_file=str(place.secrets),
        run_as=None if place.user else _run_as(config),
        user=place.user,
        version=systemd_version(),
        drain_s=config.serve.http.drain_timeout_s,
        limits=limits_of(config.serve.engine.run),
    )


def _model(config: ServiceConfig) -> str | None:
    """The model as a service finds it: a path from the root, or a hub id."""
    model = config.serve.engine.model.model
    if model is None:
        return None
    path = Path(model).expanduser()
    if path.exists():
        return str(path.absolute())
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model) and path.suffix.lower() != ".gguf":
        return model
    raise UserError(f"MODEL {model}: there is no such folder or .gguf file, and it is not a hub id (org/name)")


def _absolute_paths(flags: Sequence[str]) -> list[str]:
    return [_absolute(flag) if flag.startswith(("--trace=", "--diagnostics=")) else flag for flag in flags]


def _absolute(flag: str) -> str:
    name, _, path = flag.partition("=")
    return f"{name}={Path(path).absolute()}"


def _run_as(config: ServiceConfig) -> str | None:
    name = config.run_as or os.environ.get("SUDO_USER")
    if name is None or name == "root":
        return None
    try:
        pwd.getpwnam(name)
    except KeyError:
        raise UserError(f"--run-as {name}: there is no such user") from None
    return name


def _remove(config: ServiceConfig, place: Place) -> int:
    _run(place.command("systemctl", "disable", "--now", config.unit), config.dry_run)
    for path in (place.unit, place.secrets):
        if config.dry_run:
            sys.stdout.write(f"rm -f {shlex.quote(str(path))}\n")
        else:
            path.unlink(missing_ok=True)
    _run(place.command("systemctl", "daemon-reload"), config.dry_run)
    return 0


def _write(path: Path, text: str, mode: int) -> None:
    """Write a file that has `mode` from its first moment on. Raises UserError where it may not be written."""
    new = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode), "w") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
        new.rename(path)
    except OSError as error:
        hint = "; --user installs it for you alone" if isinstance(error, PermissionError) else ""
        raise UserError(f"{path}: cannot be written: {error.strerror or error}{hint}") from None


# --- the manager ------------------------------------------------------------------------------------------------------


def systemd_version() -> int | None:
    """Its version; None where it is not there."""
    try:
        done = subprocess.run(["systemctl", "--version"], capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.match(r"systemd (\d+)", done.stdout)
    return int(found[1]) if found else None


def _check_installed(config: ServiceConfig, place: Place) -> None:
    if not place.unit.exists():
        raise UserError(f"NAME {config.name}: {place.unit} is not there; headrace service install writes it")


def _no_block(config: ServiceConfig) -> list[str]:
    return ["--no-block"] if config.action in ("start", "restart") else []


def _of_unit(config: ServiceConfig, place: Place) -> str:
    return f"--user-unit={config.unit}" if place.user else f"--unit={config.unit}"


def _run(words: Sequence[str], dry_run: bool = False) -> None:
    """Run a command. Raises Fault with its own words where it fails."""
    if dry_run:
        sys.stdout.write(shlex.join(words) + "\n")
        return
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", check=False)
    except FileNotFoundError:
        raise UserError(f"{words[0]}: not found on this machine; --dry-run prints the unit") from None
    if done.returncode:
        raise Fault(f"{shlex.join(words)}: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")


def _show(words: Sequence[str], dry_run: bool) -> int:
    """Run a command that prints for the user; its exit code."""
    if dry_run:
        sys.stdout.write(shlex.join(words) + "\n")
        return 0
    try:
        return subprocess.run(words, check=False).returncode
    except FileNotFoundError:
        raise UserError(f"{words[0]}: not found on this machine") from None


def _wait(config: ServiceConfig, place: Place) -> int:
    if not config.wait or config.dry_run:
        return 0
    unit = place.unit.read_text()
    found = re.search(rf"^{URL_KEY}=(.+)$", unit, re.MULTILINE)
    if found is None:
        raise UserError(f"--wait: {place.unit} does not say where the service listens; install it again")
    return wait(WaitConfig(unit=config.unit, url=found[1], api_key=_key(config, place)))


def _key(config: ServiceConfig, place: Place) -> str | None:
    """The key that the service asks for: the one just given, else the one in its file."""
    if config.serve.http.api_key is not None:
        return config.serve.http.api_key
    return read_secrets(place.secrets).get(KEY)


def read_secrets(path: Path) -> Mapping[str, str]:
    """What `secrets_text` or a person wrote (`NAME=value`); empty where there is no such file, or it is not ours."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    found = (re.fullmatch(r'(\w+)=("?)(.*)\2', line.strip()) for line in lines)
    return {match[1]: re.sub(r"\\(.)", r"\1", match[3]) if match[2] else match[3] for match in found if match}
