"""The unit's text, and what systemd itself says of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.config import HttpConfig
from headrace.errors import UserError
from headrace.service.unit import MARK, Unit, local_url, quoted, secrets_text, unit_text
from headrace.supervise.vitals import Limits

PYTHON = sys.executable


def unit(*, user: bool = False, version: int | None = None, trace: str = "/t") -> Unit:
    return Unit(
        name="kimi",
        argv=(PYTHON, "-P", "-m", "headrace", "serve", "/models/a b", "--pp=2", f"--trace={trace}"),
        keeper=(PYTHON, "-P", "-m", "headrace.service.keep"),
        url="http://127.0.0.1:8000",
        environment={"CUDA_VISIBLE_DEVICES": "0,1", "HF_HOME": "/data/hub 1"},
        environment_file="/etc/headrace/kimi.env",
        run_as=None if user else "daemon",
        user=user,
        version=version,
        drain_s=30.0,
        limits=Limits(),
    )


def lines(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))


def test_what_a_unit_promises() -> None:
    text = unit_text(unit())
    assert text.startswith(MARK)
    found = lines(text)
    expected = {
        "Type": "notify", "NotifyAccess": "main", "WatchdogSec": "135", "TimeoutStartSec": "300",
        "TimeoutStopSec": "53", "KillMode": "mixed", "Restart": "on-failure", "RestartPreventExitStatus": "2",
        "RestartSec": "5", "RestartSteps": "6", "RestartMaxDelaySec": "300", "StartLimitBurst": "10", "User": "daemon",
        "EnvironmentFile": "-/etc/headrace/kimi.env", "StateDirectory": "headrace/kimi",
        "X-Headrace-Url": "http://127.0.0.1:8000", "WantedBy": "multi-user.target",
        "ExecStart": f'{PYTHON} -P -m headrace serve "/models/a b" --pp=2 --trace=/t',
        "ExecStopPost": f"-{PYTHON} -P -m headrace.service.keep",
    }  # fmt: skip
    assert {name: found.get(name) for name in expected} == expected


def test_what_would_hide_the_gpus_or_stop_the_compiler_is_not_there() -> None:
    found = lines(unit_text(unit()))
    assert not found.keys() & {"PrivateDevices", "DeviceAllow", "ProtectClock", "MemoryDenyWriteExecute", "ProtectHome"}


def test_back_off_only_where_systemd_knows_it() -> None:
    assert "RestartSteps" not in unit_text(unit(version=252))
    assert "RestartSteps" in unit_text(unit(version=254))


@pytest.mark.parametrize("user", [False, True], ids=["system", "user"])
def test_systemd_finds_nothing_wrong(user: bool, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed here")
    version = int(subprocess.run([analyze, "--version"], capture_output=True, text=True, check=True).stdout.split()[1])
    path = tmp_path / "headrace-kimi.service"
    path.write_text(unit_text(unit(user=user, version=version, trace="/t/100% $x")))
    done = subprocess.run(
        [analyze, "verify", "--user" if user else "--system", "--man=no", str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if "headrace-kimi" in line]
    assert (done.returncode, said) == (0, [])


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("--pp=2", "--pp=2"),
        ("a b", '"a b"'),
        ("", '""'),
        ("100%", "100%%"),
        ('say "hi"\\', '"say \\"hi\\"\\\\"'),
        ("a;b", '"a;b"'),
    ],
)
def test_words_of_a_line(text: str, word: str) -> None:
    assert quoted(text) == word


def test_line_breaks_cannot_be_smuggled_in() -> None:
    with pytest.raises(UserError, match="line breaks"):
        quoted("a\nExecStart=/bin/sh")
    with pytest.raises(UserError, match="^K: must not hold line breaks$"):
        secrets_text({"K": "a\nB=c"})


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:9"), ("0.0.0.0", "http://127.0.0.1:9"), ("::", "http://[::1]:9")],
)
def test_where_this_machine_reaches_it(host: str, url: str) -> None:
    assert local_url(HttpConfig(host=host, port=9)) == url
