"""What is kept of a failure: all that helps, nothing secret, within bounds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.config import HttpConfig, ServeConfig
from headrace.step import Failed
from headrace.supervise import diagnostics
from headrace.supervise.diagnostics import HIDDEN, KEPT, Evidence, diagnostics_root, environment, save, secrets_of
from headrace.supervise.failure import Failure
from headrace.supervise.group import Exited, ProcessGroup
from headrace.supervise.private import stacks_file
from tests.supervise.fakes import fake

KEY, TOKEN = "sk-0123456789", "hf_abcdefghijk"
CONFIG = ServeConfig(http=HttpConfig(api_key=KEY))
CAUSE = Failed("worker rank 1 (stage 1)", "lost", at_s=5.0)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> ProcessGroup:
    """Of one process that said too much, and has ended."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    said = f"[print('line', i) for i in range(300)]; print({KEY!r}, {TOKEN!r}, 'the end', end='', flush=True)"
    group = ProcessGroup([fake(CAUSE.who, f"ready('w'); {said}")])
    group.start()
    while group.pids:
        group.wait(60)
    group.stop(60)
    group.close()
    return group


def evidence() -> Evidence:
    echo = Failed("engine", "no result", secondary=True, at_s=4.0)
    failure = Failure(CAUSE.who, CAUSE.message, False)
    return Evidence(failure, [Exited("http", -9, 6.0), CAUSE, echo], {"engine": None}, {"kv_tokens": 7})


def test_a_folder_says_what_happened_in_order_and_no_secret(group: ProcessGroup, tmp_path: Path) -> None:
    stacks = stacks_file(tmp_path, CAUSE.who)
    stacks.parent.mkdir()
    stacks.write_text("x" * 10 + "y" * diagnostics.MAX_FILE)
    folder = save(tmp_path / "kept", evidence(), CONFIG, tmp_path, group)
    assert folder is not None
    files = {file.name: file.read_text() for file in folder.iterdir()}
    assert files.keys() == {
        "failure.json", "config.json", "environment.json", "memory.json", "devices.json",
        "log-worker-rank-1-stage-1.txt", "stacks-worker-rank-1-stage-1.txt",
    }  # fmt: skip
    assert not any(secret in text for secret in (KEY, TOKEN) for text in files.values())
    failure = json.loads(files["failure.json"])
    assert [(event["who"], event["secondary"]) for event in failure["events"]] == [
        ("engine", True), (CAUSE.who, False), ("http", False),
    ]  # fmt: skip
    lines = files["log-worker-rank-1-stage-1.txt"].splitlines()
    assert (len(lines), lines[-1]) == (200, f"{HIDDEN} {HIDDEN} the end")
    assert set(files["stacks-worker-rank-1-stage-1.txt"]) == {"y"}
    assert json.loads(files["config.json"])["http"]["api_key"] == HIDDEN
    assert json.loads(files["environment.json"])["NCCL_DEBUG"] == "INFO"
    assert json.loads(files["memory.json"])["engine"] == {"kv_tokens": 7}
    assert folder.stat().st_mode & 0o077 == 0


def test_the_newest_are_kept_and_what_is_not_ours_stays(group: ProcessGroup, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    kept = [save(tmp_path, replace(evidence(), at=1e9 + i), CONFIG, tmp_path, group) for i in range(KEPT + 3)]
    assert set(tmp_path.iterdir()) == {tmp_path / "notes", *kept[3:]}


def test_a_folder_that_cannot_be_written_is_a_line_in_the_log(
    group: ProcessGroup, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    assert save(tmp_path / "file", evidence(), CONFIG, tmp_path, group) is None
    assert "no diagnostics in" in caplog.text


@pytest.mark.parametrize(
    ("asked", "environ", "root"),
    [
        ("/d", {"STATE_DIRECTORY": "/s"}, "/d"),
        (None, {"STATE_DIRECTORY": "/s:/t", "XDG_STATE_HOME": "/x"}, "/s/diagnostics"),
        (None, {"XDG_STATE_HOME": "/x"}, "/x/headrace/diagnostics"),
        (None, {}, f"{Path.home()}/.local/state/headrace/diagnostics"),
    ],
)
def test_where_it_goes(asked: str | None, environ: dict[str, str], root: str) -> None:
    assert diagnostics_root(asked, environ) == Path(root)


def test_what_counts_as_secret() -> None:
    environ = {"AWS_SECRET_ACCESS_KEY": "0123456789", "MY_TOKEN": "short", "CUDA_VISIBLE_DEVICES": "0", "PATH": "/bin"}
    assert secrets_of(CONFIG, environ) == [KEY, "0123456789"]
    assert environment(environ | {"HEADRACE_API_KEY": KEY}) == {"CUDA_VISIBLE_DEVICES": "0", "HEADRACE_API_KEY": HIDDEN}
