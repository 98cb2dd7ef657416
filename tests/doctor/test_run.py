"""The command: what it reads, what it prints, its exit code."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from headrace.doctor import read as reading
from headrace.doctor.config import DoctorConfig
from headrace.doctor.run import doctor
from headrace.errors import UserError

PORT = "OSError: [Errno 98] Address already in use"


def test_a_log_with_a_known_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "engine.log"
    log.write_text(f"starting\n    {PORT}\n")
    assert doctor(DoctorConfig(path=str(log))) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == ["port-in-use: another program listens on the port", f"  {log}:2: {PORT}"]
    assert out[2].startswith("  do: `ss -ltnp` names it")
    assert out[3].startswith("  see: https://github.com/")


def test_a_log_without_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "engine.log"
    log.write_text("all is well\n")
    assert doctor(DoctorConfig(path=str(log))) == 1
    assert capsys.readouterr().out.startswith(f"{log}: no known cause (")


def test_a_folder_is_read_with_all_its_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "1.log").write_text(PORT)
    (tmp_path / "ranks" / "2.log").write_text("CUDA out of memory\n" + PORT)
    (tmp_path / "core").write_bytes(b"\0\0 Permission denied")
    assert doctor(DoctorConfig(path=str(tmp_path))) == 0
    out = capsys.readouterr().out
    assert f"  {tmp_path}/ranks/1.log:1: {PORT}" in out
    assert f"  {tmp_path}/ranks/2.log:1: CUDA out of memory" in out
    assert out.count("port-in-use") == 1
    assert "permission-denied" not in out


def test_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"x\n{PORT}\n"))
    assert doctor(DoctorConfig(path="-")) == 0
    assert f"  line 2: {PORT}" in capsys.readouterr().out


def test_of_a_huge_log_the_end_is_read_and_numbers_are_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reading, "MAX_BYTES", 1000)
    log = tmp_path / "engine.log"
    log.write_text("Permission denied\n" + "x\n" * 5000 + PORT + "\n")
    assert doctor(DoctorConfig(path=str(log))) == 0
    out = capsys.readouterr().out
    assert f"  {log}:5002: {PORT}" in out
    assert "permission-denied" not in out


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="^PATH .*nothing: there is no such file or folder$"):
        DoctorConfig(path=str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="^PATH .*: holds no text$"):
        doctor(DoctorConfig(path=str(tmp_path)))
