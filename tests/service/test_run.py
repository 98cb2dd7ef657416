"""The command over programs that stand in for systemctl and journalctl, in a root folder of the test's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.config import EngineConfig, HttpConfig, LayoutConfig, ModelConfig, ServeConfig
from headrace.errors import Fault, UserError
from headrace.service import run as command
from headrace.service.config import Action, ServiceConfig
from headrace.service.keep import keep
from headrace.service.run import read_secrets, service
from headrace.service.unit import secrets_text
from headrace.wait.config import WaitConfig


class Machine:
    """A root folder, and the calls of systemctl and journalctl."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin = folder / "root", folder / "bin"
        self.bin.mkdir()
        self.unit = self.root / "etc/systemd/system/headrace-kimi.service"
        self.secrets = self.root / "etc/headrace/kimi.env"
        self.program("systemctl", 'case $1 in --version) echo "systemd 255 (255.4)";; esac')
        self.program("journalctl", "echo a line")

    def program(self, name: str, body: str) -> None:
        (self.bin / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {self.bin}/calls\n{body}\n')
        (self.bin / name).chmod(0o755)

    @property
    def calls(self) -> list[str]:
        lines = (self.bin / "calls").read_text().splitlines() if (self.bin / "calls").exists() else []
        return [line for line in lines if "--version" not in line]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    for name in (*command.PASSED_ON, command.HUB_TOKEN, "SUDO_USER"):
        monkeypatch.delenv(name, raising=False)
    found = Machine(tmp_path)
    monkeypatch.setenv("PATH", str(found.bin), prepend=os.pathsep)
    monkeypatch.setattr(command, "ROOT", found.root)
    return found


def config(action: Action, *, key: str | None = None, **more: object) -> ServiceConfig:
    engine = EngineConfig(model=ModelConfig(model="org/model"), layout=LayoutConfig(pp=2))
    serve = (
        ServeConfig(engine=engine, http=HttpConfig(port=9000, api_key=key)) if action == "install" else ServeConfig()
    )
    return ServiceConfig(action=action, name="kimi", serve=serve, **{"system": True, **more})  # type: ignore[arg-type]


def test_install_writes_a_unit_and_starts_it(machine: Machine) -> None:
    assert service(config("install"), ["--pp=2", "--port=9000"]) == 0
    text = machine.unit.read_text()
    assert " -m headrace serve org/model --pp=2 --port=9000\n" in text
    assert "X-Headrace-Url=http://127.0.0.1:9000\n" in text
    assert not machine.secrets.exists()
    assert machine.calls == [
        "systemctl daemon-reload",
        "systemctl enable headrace-kimi.service",
        "systemctl restart --no-block headrace-kimi.service",
    ]


def test_secrets_are_for_their_owner_alone_and_never_in_the_unit(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hub-$x9")
    service(config("install", key='k7"q9'), [])
    text = machine.unit.read_text()
    assert "k7" not in text
    assert "x9" not in text
    assert machine.secrets.stat().st_mode & 0o777 == 0o600
    assert read_secrets(machine.secrets) == {"HEADRACE_API_KEY": 'k7"q9', "HF_TOKEN": "hub-$x9"}
    monkeypatch.delenv("HF_TOKEN")
    service(config("install"), [])
    assert read_secrets(machine.secrets) == {"HF_TOKEN": "hub-$x9"}


def test_a_dry_run_shows_all_but_secrets_and_changes_nothing(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert service(config("install", key="s3cret", dry_run=True), ["--pp=2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"# {machine.unit}\n")
    assert 'HEADRACE_API_KEY="<secret>"' in out
    assert "s3cret" not in out
    assert not machine.root.exists()
    assert machine.calls == []


def test_a_life_of_commands(machine: Machine) -> None:
    service(config("install", key="k"), [])
    before = len(machine.calls)
    for action in ("stop", "start", "restart", "status", "logs", "remove"):
        assert service(config(action), []) == 0
    assert machine.calls[before:] == [
        "systemctl stop headrace-kimi.service",
        "systemctl start --no-block headrace-kimi.service",
        "systemctl restart --no-block headrace-kimi.service",
        "systemctl status --no-pager --lines=5 headrace-kimi.service",
        "journalctl --no-pager --lines=200 --unit=headrace-kimi.service",
        "systemctl disable --now headrace-kimi.service",
        "systemctl daemon-reload",
    ]
    assert not machine.unit.exists()
    assert not machine.secrets.exists()
    with pytest.raises(UserError, match="^NAME kimi: .* is not there; headrace service install writes it$"):
        service(config("start"), [])


def test_a_users_service_lies_in_the_home_and_goes_to_the_users_manager(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    service(config("install", user=True, system=False), [])
    text = (tmp_path / "config/systemd/user/headrace-kimi.service").read_text()
    assert "ProtectSystem" not in text
    assert "WantedBy=default.target" in text
    assert machine.calls[0] == "systemctl --user daemon-reload"


def test_waiting_looks_at_the_unit_and_at_its_port_with_its_key(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[WaitConfig] = []

    def record(config: WaitConfig) -> int:
        asked.append(config)
        return 3

    monkeypatch.setattr(command, "wait", record)
    assert service(config("install", key="k", wait=True), []) == 3
    assert service(config("restart", wait=True), []) == 3
    expected = WaitConfig(unit="headrace-kimi.service", url="http://127.0.0.1:9000", api_key="k")
    assert asked == [expected, expected]


def test_what_systemd_refuses_is_said_in_its_words(machine: Machine) -> None:
    machine.program("systemctl", "echo 'Failed to connect to bus: No medium found' >&2; exit 1")
    with pytest.raises(Fault, match="^systemctl daemon-reload: Failed to connect to bus: No medium found$"):
        service(config("install"), [])


def test_a_unit_of_somebody_else_is_left_alone(machine: Machine) -> None:
    machine.unit.parent.mkdir(parents=True)
    machine.unit.write_text("[Unit]\n")
    with pytest.raises(UserError, match="was not written by headrace"):
        service(config("install"), [])
    assert machine.unit.read_text() == "[Unit]\n"


@pytest.mark.parametrize(
    ("action", "more", "message"),
    [
        ("install", {"name": "../x"}, "NAME ../x: must be letters"),
        ("install", {"user": True, "system": True}, "--user and --system: give one of them"),
        ("install", {"serve": ServeConfig(http=HttpConfig(port=0))}, "--port 0: a service needs a port of its own"),
        ("install", {"user": True, "run_as": "x"}, "--run-as: a user's service runs as that user"),
        ("stop", {"wait": True}, "--wait: not with stop"),
        ("start", {"serve": ServeConfig(http=HttpConfig(port=9))}, "start: takes no model and no flags of serve"),
    ],
)
def test_what_is_refused(action: Action, more: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as refused:
        ServiceConfig(**{"action": action, "name": "kimi", **more})  # type: ignore[arg-type]
    assert str(refused.value).startswith(message)


def test_a_model_or_a_user_that_is_not_there_is_refused(machine: Machine) -> None:
    lost = ServeConfig(engine=EngineConfig(model=ModelConfig(model="/no/such.gguf")))
    with pytest.raises(UserError, match="^MODEL /no/such.gguf: there is no such"):
        service(ServiceConfig(action="install", name="kimi", serve=lost, system=True), [])
    with pytest.raises(UserError, match="^--run-as no-such-user: there is no such user$"):
        service(config("install", run_as="no-such-user"), [])


def test_a_failed_run_is_kept_and_old_ones_go(machine: Machine, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    for day in range(10, 22):
        (state / f"202601{day}T000000-exit-code").mkdir()
    environ = {
        "SERVICE_RESULT": "watchdog", "EXIT_CODE": "dumped", "EXIT_STATUS": "ABRT", "INVOCATION_ID": "abc",
        "STATE_DIRECTORY": str(state),
    }  # fmt: skip
    folder = keep(environ)
    assert folder is not None
    assert "SERVICE_RESULT=watchdog\n" in (folder / "result.txt").read_text()
    assert (folder / "journal.log").read_text() == "a line\n"
    assert len(list(state.iterdir())) == 10
    assert not (state / "20260110T000000-exit-code").exists()


def test_a_good_end_is_not_kept(tmp_path: Path) -> None:
    assert keep({"SERVICE_RESULT": "success", "STATE_DIRECTORY": str(tmp_path)}) is None
    assert keep({"SERVICE_RESULT": "exit-code"}) is None
    assert list(tmp_path.iterdir()) == []


def test_secrets_are_read_as_they_are_written(tmp_path: Path) -> None:
    secrets = {"A": 'x"y\\z', "B": "$HOME `id` %n", "C": "plain"}
    (tmp_path / "env").write_text(secrets_text(secrets) + "D=by-hand\n# a remark\n")
    assert read_secrets(tmp_path / "env") == {**secrets, "D": "by-hand"}
    assert read_secrets(tmp_path / "none") == {}
