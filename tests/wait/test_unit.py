"""The unit side over programs that stand in for systemctl, journalctl and ssh: found on PATH, as the real ones are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.errors import UserError
from headrace.wait.unit import UnitSide
from headrace.wait.watch import Sight


class Programs:
    """Shell scripts in a folder of their own; every call is a line of `calls`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "calls"

    def write(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >> {self.log}\n{body}\n')
        path.chmod(0o755)

    def shows(self, properties: str, user: str = "LoadState=not-found\nActiveState=inactive") -> None:
        """What `systemctl show` prints, for the system's manager and for the user's."""
        self.write("systemctl", f"case $1 in --user) printf '{user}\\n';; *) printf '{properties}\\n';; esac")

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = Programs(tmp_path)
    found.write("journalctl", "echo line one; echo line two")
    return found


def loaded(active: str, sub: str, more: str = "") -> str:
    return f"LoadState=loaded\nActiveState={active}\nSubState={sub}\nNRestarts=0\nInvocationID=abc\n{more}"


def test_a_unit_on_its_way_up_says_how_far_it_is(programs: Programs) -> None:
    side = UnitSide("model")
    programs.shows(loaded("activating", "start", "StatusText=loading weights: 40%% (4 GB of 10 GB)"))
    assert side.look() == Sight("unit model activating (start): loading weights: 40% (4 GB of 10 GB)")
    programs.shows(loaded("active", "running", "StatusText=ready at http://x"))
    assert side.look() == Sight("unit model active (running): ready at http://x", ready=True)
    assert programs.calls[0].startswith("systemctl show model --property=LoadState,ActiveState,SubState,")


@pytest.mark.parametrize(
    ("properties", "text"),
    [
        (
            loaded("failed", "failed", "Result=exit-code\nExecMainCode=1\nExecMainStatus=1"),
            "unit model has failed: exit-code, exit code 1",
        ),
        (
            loaded("failed", "failed", "Result=oom-kill\nExecMainCode=2\nExecMainStatus=9\nStatusText=loading"),
            "unit model has failed: oom-kill, signal 9: loading",
        ),
        (
            loaded("activating", "auto-restart", "Result=exit-code\nExecMainCode=1\nExecMainStatus=1"),
            "unit model has failed and is started again: exit-code, exit code 1",
        ),
    ],
)
def test_a_unit_that_fails(programs: Programs, properties: str, text: str) -> None:
    programs.shows(properties)
    side = UnitSide("model")
    assert side.look() == Sight(text, failed=True)
    assert side.last_lines() == ["line one", "line two"]
    assert programs.calls[-1].endswith("--lines=1000 _SYSTEMD_INVOCATION_ID=abc")


def test_a_restart_between_two_looks_is_a_failure(programs: Programs) -> None:
    side = UnitSide("model")
    programs.shows(loaded("activating", "start"))
    side.look()
    programs.shows(
        loaded("activating", "start", "Result=success\nExecMainStatus=1").replace("Restarts=0", "Restarts=1")
    )
    assert side.look().failed


def test_a_unit_that_ends_has_failed_and_one_that_was_never_started_soon_has(programs: Programs) -> None:
    side = UnitSide("model")
    programs.shows(loaded("inactive", "dead"))
    looks = [side.look() for _ in range(3)]
    assert [sight.failed for sight in looks] == [False, False, True]
    assert looks[-1].text == "unit model is not started"
    side = UnitSide("model")
    programs.shows(loaded("active", "running"))
    side.look()
    programs.shows(loaded("inactive", "dead", "Result=success\nExecMainStatus=0"))
    assert side.look() == Sight("unit model has ended: success, exit code 0", failed=True)


def test_a_users_unit_is_found_too(programs: Programs) -> None:
    programs.shows("LoadState=not-found\nActiveState=inactive", user=loaded("active", "running").strip())
    side = UnitSide("model")
    assert side.look().ready
    side.look()
    side.last_lines()
    shows = [call.split()[1] for call in programs.calls if call.startswith("systemctl")]
    assert shows == ["show", "--user", "--user"]
    assert programs.calls[-1].startswith("journalctl --user ")


def test_an_unknown_unit_is_the_users_error(programs: Programs) -> None:
    programs.shows("LoadState=not-found\nActiveState=inactive")
    with pytest.raises(UserError, match="^--unit model: there is no such unit$"):
        UnitSide("model").look()


def test_over_ssh_one_quoted_command_goes_to_the_other_machine(programs: Programs) -> None:
    programs.shows(loaded("active", "running"))
    programs.write("ssh", 'eval "$(eval echo \\${$#})"')
    side = UnitSide("my model", ssh="me@gpu1")
    assert side.look().ready
    ssh, systemctl = programs.calls
    assert ssh.startswith("ssh -o BatchMode=yes -o ConnectTimeout=10 -- me@gpu1 systemctl show 'my model' --property=")
    assert systemctl.startswith("systemctl show my model ")


def test_a_machine_that_is_not_reached_is_waited_for(programs: Programs) -> None:
    programs.write("ssh", "echo 'ssh: connect to host gpu1 port 22: Connection refused' >&2; exit 255")
    sight = UnitSide("model", ssh="gpu1").look()
    assert sight == Sight("unit model: cannot look: ssh: connect to host gpu1 port 22: Connection refused")


def test_without_systemd_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="^systemctl: not found on this machine$"):
        UnitSide("model").look()


def test_a_journal_that_knows_no_run_is_asked_for_the_unit(programs: Programs) -> None:
    programs.shows(loaded("failed", "failed"))
    programs.write("journalctl", 'case "$*" in *--unit=model*) echo of the unit;; esac')
    side = UnitSide("model")
    side.look()
    assert side.last_lines() == ["of the unit"]
