"""The process side: a real process that runs, is suspended, ends; and the file that its errors go to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from headrace.wait.process import TAIL_BYTES, PidSide, tail
from headrace.wait.watch import Sight


def test_a_process_is_seen_until_it_ends_and_its_log_outlives_it(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE, stderr=log)
    with process:
        side = PidSide(process.pid)
        assert side.look() == Sight(f"process {process.pid} runs", ready=True)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert side.look() == Sight(f"process {process.pid} is suspended")
        process.send_signal(signal.SIGCONT)
        process.communicate()
        assert side.look() == Sight(f"process {process.pid} has ended", failed=True)
        assert side.last_lines()[-1] == "EOFError: EOF when reading a line"


def test_a_process_that_is_not_there() -> None:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", ""]) as process:
        process.wait()
    side = PidSide(process.pid)
    assert side.look() == Sight(f"process {process.pid}: there is none", failed=True)
    assert side.last_lines() == []


def test_the_tail_of_a_large_file(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("x" * TAIL_BYTES + "\nlast\n")
    assert tail(tmp_path / "log")[-1] == "last"
    assert tail(tmp_path / "none") == []
