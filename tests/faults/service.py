"""One service with one fault: what its clients, its exit and the system show afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.faults.cells import NUM_STAGES, STALL_S, Cell

ROOT = Path(__file__).parents[2]
INJECT = Path(__file__).parent / "inject"
START_S = 120.0
END_S = 60.0
STOPPED_S = 7.0
"""How long a supervisor is stopped: longer than its watch may be silent."""
SEEN_S = 0.01


@dataclass
class Outcome:
    """What became of it. Times are seconds after the fault."""

    cell: Cell
    code: int | None = None
    line: str = ""
    named_s: float | None = None
    """Until the supervisor knew."""
    told_s: float | None = None
    """Until the client knew."""
    gone_s: float | None = None
    """Until the last process had ended."""
    client: str = ""
    """What it saw."""
    left: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Client(threading.Thread):
    """Asks once, and notes what it saw and when; it ends when the answer, an error or the connection does."""

    def __init__(self, url: str, max_tokens: int) -> None:
        super().__init__(name="client", daemon=True)
        self._url, self._max_tokens = url, max_tokens
        self.first = threading.Event()
        """Set with the first token."""
        self.seen, self.at_s = "", 0.0
        self.good = False
        """Whether it was told: an answer, an error of ours, or a connection that closed."""

    def run(self) -> None:
        """One streamed completion."""
        body = {"prompt": "The river", "max_tokens": self._max_tokens, "ignore_eos": True, "stream": True}
        try:
            with (
                httpx.Client(timeout=END_S, trust_env=False) as client,
                client.stream("POST", f"{self._url}/v1/completions", json=body) as answer,
            ):
                if answer.status_code != 200:
                    error = json.loads(answer.read())["error"]
                    self._note(f"{answer.status_code}: {error['message']}", good=True)
                    return
                self._read(answer)
        except httpx.TimeoutException:
            self._note("silence", good=False)
        except httpx.ConnectError:
            self._note("connection refused", good=True)
        except httpx.TransportError:
            self._note("connection closed", good=True)
        finally:
            self.first.set()

    def _read(self, answer: httpx.Response) -> None:
        last = ""
        for line in answer.iter_lines():
            last = line or last
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    self._note(f"error event: {event['error']['message']}", good=True)
                self.first.set()
        if not self.seen:
            whole = last == "data: [DONE]"
            self._note("whole answer" if whole else f"an end without a reason after {last[:80]}", good=whole)

    def _note(self, seen: str, *, good: bool) -> None:
        self.seen, self.good, self.at_s = seen, good, time.monotonic()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


class Faulty:
    """A service into which the cell's fault is put, in a folder of its own."""

    def __init__(self, cell: Cell, model: Path, folder: Path, num_stages: int) -> None:
        self.cell, self.folder, self.num_stages = cell, folder, num_stages
        self.armed, self.fired = folder / "armed", folder / "fired"
        self.lines: list[tuple[float, str]] = []
        self.family: dict[int, psutil.Process] = {}
        self.sockets_before = set(Path("/dev/shm").iterdir()) if Path("/dev/shm").exists() else set()
        self.url = f"http://127.0.0.1:{free_port()}"
        (folder / "tmp").mkdir()
        module, function = cell.point if cell.when != "always" else ("", "")
        fault = {"who": cell.who, "module": module, "function": function, "do": cell.do}
        fault |= {"armed": str(self.armed), "fired": str(self.fired)}
        path = [str(INJECT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        env = {
            **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "TMPDIR": str(folder / "tmp"),
            "XDG_STATE_HOME": str(folder), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        env.pop("XDG_RUNTIME_DIR", None)
        if cell.when == "always":
            env["HEADRACE_LOG"] = "debug"
            self.fired.write_text(str(time.monotonic()))
        else:
            env["HEADRACE_TEST_FAULT"] = json.dumps(fault)
        if cell.when in ("load", "warm-up"):
            self.armed.touch()
        flags = ["--pp", str(num_stages), "--device", "cpu", "--dtype", "float32", "--json-ready"]
        flags += ["--port", self.url.rpartition(":")[2], "--stall-timeout", f"{STALL_S:g}", "--timeout", "120"]
        with Path("/dev/full" if cell.when == "always" else os.devnull).open("wb") as full:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "headrace", "serve", str(model), *flags],
                stdout=subprocess.PIPE,
                stderr=full if cell.when == "always" else subprocess.PIPE,
                text=True,
                env=env,
            )
        if self.process.stderr is not None:
            threading.Thread(target=self._listen, daemon=True).start()
        self.ready = threading.Event()
        threading.Thread(target=self._await_ready, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append((time.monotonic(), line.rstrip("\n")))

    def _await_ready(self) -> None:
        assert self.process.stdout is not None
        if self.process.stdout.readline():
            self.ready.set()

    def until(self, what: Callable[[], bool], seconds: float) -> bool:
        """Wait, and note meanwhile which processes there are; whether it came in time."""
        deadline = time.monotonic() + seconds
        while not what():
            if time.monotonic() > deadline:
                return False
            self._look()
            time.sleep(SEEN_S)
        return True

    def _look(self) -> None:
        try:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.family.setdefault(child.pid, child)
        except psutil.Error:
            pass

    @property
    def ended(self) -> bool:
        """Whether the supervisor has."""
        return self.process.poll() is not None

    @property
    def fired_s(self) -> float:
        """When the fault happened."""
        return float(self.fired.read_text())

    def living(self) -> list[psutil.Process]:
        """Children that still are."""
        return [one for one in self.family.values() if _lives(one)]

    def close(self) -> None:
        """Kill whatever a failed expectation has left."""
        self.process.kill()
        self.process.wait()
        for one in self.living():
            one.kill()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def run_cell(cell: Cell, model: Path, num_stages: int = NUM_STAGES) -> Outcome:
    """Start, put the fault in, watch what follows. Nothing is left afterwards, whatever happened."""
    # Sockets' paths are short.
    with tempfile.TemporaryDirectory(prefix="hf-", dir="/tmp") as scratch:
        service = Faulty(cell, model, Path(scratch), num_stages)
        outcome = Outcome(cell)
        try:
            client = _provoke(service, outcome)
            if not outcome.problems:
                (_see_end if cell.ends else _see_life)(service, outcome, client)
                _look_for_remains(service, outcome)
        finally:
            service.close()
        return outcome


def _provoke(service: Faulty, outcome: Outcome) -> Client | None:
    """Bring the service to where the fault happens; the client that waits then, if there is one."""
    cell, client = service.cell, None
    if cell.when not in ("load", "warm-up"):
        if not service.until(lambda: service.ready.is_set() or service.ended, START_S) or service.ended:
            outcome.problems.append(f"not ready: {service.lines[-3:]}")
            return None
        if cell.when == "decode":
            client = Client(service.url, 400)
            client.start()
            client.first.wait(END_S)
        service.armed.touch()
        if cell.when in ("prefill", "always"):
            client = Client(service.url, 400 if cell.ends else 40)
            client.start()
    if not service.until(lambda: service.fired.exists() or service.ended, START_S) or not service.fired.exists():
        outcome.problems.append(f"the fault did not happen: {service.lines[-3:]}")
    elif cell.when == "idle":
        # Who comes then.
        client = Client(service.url, 20)
        client.start()
    return client


def _see_end(service: Faulty, outcome: Outcome, client: Client | None) -> None:
    """The service ends by itself."""
    cell, fired_s = service.cell, service.fired_s
    over = service.until(lambda: service.ended and not service.living(), END_S)
    outcome.gone_s = time.monotonic() - fired_s
    outcome.code = service.process.poll()
    if not over:
        outcome.problems.append(f"still there after {END_S:g} s: {service.living() or 'the supervisor'}")
        return
    if outcome.gone_s > cell.within_s:
        outcome.problems.append(f"all was over after {outcome.gone_s:.1f} s, {cell.within_s:g} are allowed")
    if outcome.code != cell.code:
        outcome.problems.append(f"exit code {outcome.code}, {cell.code} expected")
    time.sleep(0.1)  # the last line is read by a thread
    outcome.named_s = next((at - fired_s for at, line in service.lines if "state: failed" in line), None)
    said = [line for _, line in service.lines if line.startswith("headrace serve:")]
    outcome.line = service.lines[-1][1] if said and service.lines else ""
    if cell.line != "" and not re.fullmatch(cell.pattern(service.num_stages), outcome.line):
        outcome.problems.append(f"its last line is {service.lines[-1:]}")
    if any(line.startswith("Traceback") for _, line in service.lines):
        outcome.problems.append("a traceback was printed")
    _hear(client, outcome, fired_s)


def _hear(client: Client | None, outcome: Outcome, fired_s: float) -> None:
    if client is None:
        outcome.client = "not ready yet"
        return
    client.join(END_S)
    outcome.client, outcome.told_s = client.seen or "silence", client.at_s - fired_s
    if not client.good:
        outcome.problems.append(f"a client saw {outcome.client}")


def _see_life(service: Faulty, outcome: Outcome, client: Client | None) -> None:
    """The service goes on, answers, and ends well when it is asked to."""
    fired_s = service.fired_s
    if service.cell.do == "stop":
        service.until(lambda: False, STOPPED_S)
        os.kill(service.process.pid, signal.SIGCONT)
    _hear(client, outcome, fired_s)
    later = Client(service.url, 20)
    later.start()
    service.until(lambda: not later.is_alive(), END_S)
    if later.seen != "whole answer":
        outcome.problems.append(f"a later client saw {later.seen}")
    service.process.terminate()
    service.until(lambda: service.ended and not service.living(), END_S)
    outcome.code = service.process.poll()
    if outcome.code != service.cell.code:
        outcome.problems.append(f"exit code {outcome.code} of a stop, {service.cell.code} expected")


def _look_for_remains(service: Faulty, outcome: Outcome) -> None:
    """Processes, sockets, files and shared memory that should not be there."""
    outcome.left += [f"process {one.pid}" for one in service.living()]
    ours = [path for path in (service.folder / "tmp").iterdir() if path.name.startswith(("headrace-", "new-headrace"))]
    if ours and service.cell.do == "kill" and service.cell.who == "parent":
        outcome.left += _swept(service.folder / "tmp")
    else:
        outcome.left += [f"folder {path.name}" for path in ours]
    if Path("/dev/shm").exists():
        outcome.left += [str(path) for path in set(Path("/dev/shm").iterdir()) - service.sockets_before]
    outcome.left += _open_addresses(service)
    outcome.problems += [f"left behind: {what}" for what in outcome.left]


def _swept(folder: Path) -> list[str]:
    """What the next start does not remove of a supervisor that was killed."""
    code = "from headrace.supervise.private import PrivateDir; PrivateDir().remove()"
    env: dict[str, Any] = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT / "src")}
    env.pop("XDG_RUNTIME_DIR", None)
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
    return [f"folder {path.name}" for path in folder.glob("*headrace-*")]


def _open_addresses(service: Faulty) -> list[str]:
    """The port, and Unix sockets with the service's folder in their names, that somebody still has."""
    found = []
    with socket.socket() as one:
        one.settimeout(1.0)
        if not one.connect_ex(("127.0.0.1", int(service.url.rpartition(":")[2]))):
            found.append("a listening port")
    table = Path("/proc/net/unix")
    names = [line for line in table.read_text().splitlines() if str(service.folder) in line] if table.exists() else []
    return found + [f"socket {line.split()[-1]}" for line in names]
