"""The command as a whole: exit codes, what is printed, and its flags."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from headrace.errors import UserError
from headrace.wait.config import WaitConfig
from headrace.wait.run import wait


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


def test_a_process_that_ended_is_exit_3_with_its_last_lines_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", ""]) as process:
        process.wait()
    url = f"http://127.0.0.1:{closed_port()}"
    assert wait(WaitConfig(pid=process.pid, url=url, json=True)) == 3
    out = json.loads(capsys.readouterr().out)
    assert out.pop("elapsed_s") >= 0
    assert out == {
        "outcome": "failed", "text": f"process {process.pid}: there is none", "url": url, "model": None,
        "probe_s": None, "errors": [], "causes": [],
    }  # fmt: skip


def test_one_that_does_not_come_is_exit_4(capsys: pytest.CaptureFixture[str]) -> None:
    config = WaitConfig(url=f"http://127.0.0.1:{closed_port()}/v1/", every_s=0.01, timeout_s=0.02)
    assert wait(config) == 4
    out, err = capsys.readouterr()
    assert out == "[0s] timed out: HTTP: no connection: refused\n"
    assert err == "[0s] HTTP: no connection: refused\n"


@pytest.mark.parametrize(
    ("config", "url"),
    [
        (WaitConfig(), "http://127.0.0.1:8000"),
        (WaitConfig(url="https://x/base/v1/"), "https://x/base"),
        (WaitConfig(unit="u", ssh="me@gpu1"), "http://gpu1:8000"),
        (WaitConfig(unit="u", ssh="me@gpu1", url="http://gpu2:9"), "http://gpu2:9"),
    ],
)
def test_where_the_engine_is_looked_for(config: WaitConfig, url: str) -> None:
    assert config.base_url == url


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"url": "x"}, "--url x: must be like http://127.0.0.1:8000"),
        ({"ssh": "x"}, "--ssh x: needs --unit"),
        ({"unit": "u", "ssh": "-oProxyCommand=x"}, "--ssh -oProxyCommand=x: not the name of a machine"),
        ({"unit": "--help"}, "--unit --help: not the name of a unit"),
        ({"unit": "u", "pid": 1}, "--unit and --pid: give one of them"),
        ({"pid": 0}, "--pid 0: must be at least 1"),
        ({"every_s": 0.0}, "--every 0: must be above 0"),
        ({"timeout_s": -1.0}, "--timeout -1: must be above 0"),
    ],
)
def test_flags_that_are_refused(flags: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as refused:
        WaitConfig(**flags)  # type: ignore[arg-type]  # a table of them
    assert str(refused.value) == message
