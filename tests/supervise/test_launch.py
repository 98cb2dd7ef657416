"""A mesh as commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.mesh import Mesh
from headrace.supervise import launch
from headrace.supervise.launch import engine_commands

DIR = Path("/run/headrace-x")


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in launch.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launch, "num_cores", lambda: 4)


def mesh(pp: int = 1, tp: int = 1) -> Mesh:
    return Mesh(pp=pp, tp=tp, ep=1, split=(2,) * pp)


def test_one_process_a_rank_and_names_that_say_the_stage() -> None:
    commands = engine_commands(DIR, mesh(pp=2, tp=2), http=True)
    assert [command.who for command in commands] == [
        "engine",
        "worker rank 0 (stage 0)",
        "worker rank 1 (stage 0)",
        "worker rank 2 (stage 1)",
        "worker rank 3 (stage 1)",
        "http",
    ]
    assert [command.argv[3:] for command in commands[1:3]] == [
        ("headrace.worker", "--join", f"ipc://{DIR}/workers.sock", "--rank", str(rank), "--dir", str(DIR))
        for rank in range(2)
    ]


def test_ranks_are_told_that_they_write_to_a_terminal() -> None:
    for on_terminal in (False, True):
        commands = engine_commands(DIR, mesh(pp=2), http=True, on_terminal=on_terminal)
        told = [command.who for command in commands if "--on-terminal" in command.argv]
        assert told == (["worker rank 0 (stage 0)", "worker rank 1 (stage 1)"] if on_terminal else [])


def test_without_http_there_is_none() -> None:
    assert [command.who for command in engine_commands(DIR, mesh(), http=False)] == [
        "engine",
        "worker rank 0 (stage 0)",
    ]


def test_http_ends_first_and_the_workers_last() -> None:
    commands = engine_commands(DIR, mesh(pp=2), http=True)
    order = [command.who.split()[0] for command in sorted(commands, key=lambda command: command.stop_order)]
    assert order == ["http", "engine", "worker", "worker"]


@pytest.mark.parametrize(("ranks", "threads"), [(1, "4"), (2, "2"), (3, "1"), (8, "1")])
def test_the_ranks_share_the_cores(ranks: int, threads: str) -> None:
    commands = engine_commands(DIR, mesh(pp=ranks), http=True)
    assert {c.env["OMP_NUM_THREADS"] for c in commands if c.who.startswith("worker")} == {threads}
    assert {c.env["OMP_NUM_THREADS"] for c in commands if not c.who.startswith("worker")} == {"1"}


def test_a_users_own_thread_count_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert all("OMP_NUM_THREADS" not in command.env for command in engine_commands(DIR, mesh(), http=True))


def test_over_tcp_the_workers_read_where_to_join() -> None:
    worker = engine_commands(DIR, mesh(), http=False, transport="tcp")[1]
    assert worker.argv[5] == f"file://{DIR}/endpoints.json#workers"


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000", None), ("150000 100000", 1), ("400000 100000", 4), ("50000 100000", 1), ("", None)],
)
def test_a_control_groups_quota(tmp_path: Path, text: str, cores: int | None) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(text)
    assert launch._cpu_quota(file) == cores
    assert launch._cpu_quota(tmp_path / "missing") is None
