"""The private directory and the configuration in it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from headrace.config import EngineConfig, HttpConfig, LayoutConfig, ModelConfig, ScheduleConfig, ServeConfig
from headrace.errors import UserError
from headrace.supervise import private
from headrace.supervise.private import MAX_PATH, PrivateDir, read_config, write_config


@pytest.fixture
def parent(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    # Not tmp_path: a test's long name would make the path too long for a socket.
    path = tmp_path_factory.mktemp("p")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    return path


def test_it_is_the_owners_alone_and_goes(parent: Path) -> None:
    with PrivateDir() as directory:
        assert directory.path.parent == parent
        assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
        (directory.path / "engine.sock").touch()
    assert list(parent.iterdir()) == []
    directory.remove()


def test_any_number_live_side_by_side(parent: Path) -> None:
    with PrivateDir() as one, PrivateDir() as two:
        assert one.path != two.path
        assert one.path.is_dir()


def test_what_a_killed_owner_left_is_removed_by_the_next(parent: Path) -> None:
    code = "import os; from headrace.supervise.private import PrivateDir; PrivateDir(); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code], check=False)
    (orphan,) = parent.iterdir()
    with PrivateDir() as directory:
        assert not orphan.exists()
        assert directory.path.is_dir()


def test_a_folder_of_another_kind_is_left_alone(parent: Path) -> None:
    (parent / "headrace-notes").mkdir()
    with PrivateDir():
        assert (parent / "headrace-notes").is_dir()


def test_a_path_too_long_for_a_socket_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * MAX_PATH)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with PrivateDir() as directory:
        assert len(os.fsencode(directory.path)) <= MAX_PATH


def test_nowhere_to_go_is_the_users_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UserError, match="^TMPDIR "):
        private._parent()


def test_the_temporary_folder_serves_where_there_is_no_runtime_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/tmp")
    assert private._parent() == Path("/tmp")


def test_the_configuration_comes_back_as_it_was(tmp_path: Path) -> None:
    config = ServeConfig(
        engine=EngineConfig(
            model=ModelConfig(model="/models/x", device="cpu", dtype="float32", max_len=512, seed=7),
            layout=LayoutConfig(pp=3, ep=2, split=(8, 8, 7)),
            schedule=ScheduleConfig(chunk=64, kv_memory=1 << 30),
        ),
        http=HttpConfig(port=0, served_name="x", api_key="secret"),
        json_ready=True,
    )
    write_config(tmp_path, config)
    assert read_config(tmp_path) == config
    assert stat.S_IMODE((tmp_path / "config.msgpack").stat().st_mode) == 0o600
