"""The real service over a tiny model: what becomes of it, of its processes and of its clients when something ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors.torch import load_file, save_file

from headrace.wait.config import WaitConfig
from headrace.wait.run import wait
from tests.telemetry.trace_format import read, slices, track_names
from tests.tiny import write_tiny


class Service:
    """`headrace serve` as a user runs it."""

    def __init__(self, model: Path, folder: Path, *flags: str) -> None:
        self.folder = folder
        keep = ("--diagnostics", str(folder))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace", "serve", str(model), "--port", "0", "--json-ready", *keep, *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.children: dict[str, psutil.Process] = {}

    def ready(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.end()
        self.find_children()
        ready: dict[str, Any] = json.loads(line)
        return ready

    def find_children(self) -> dict[str, psutil.Process]:
        for child in psutil.Process(self.process.pid).children():
            command = child.cmdline()
            rank = command[command.index("--rank") + 1] if "--rank" in command else ""
            # Between its begin and its program a child has its parent's command line.
            if command[2:3] == ["-m"] and command[3].startswith("headrace."):
                self.children[command[3].removeprefix("headrace.") + rank] = child
        return self.children

    def diagnostics(self, err: list[str]) -> Path:
        """The folder that a line says was written; the only one."""
        (folder,) = self.folder.iterdir()
        assert f"diagnostics in {folder}" in err
        return folder

    def end(self) -> tuple[int, str, list[str]]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err.splitlines()

    def all_gone(self) -> bool:
        _, alive = psutil.wait_procs(list(self.children.values()), timeout=10)
        return all(child.status() == psutil.STATUS_ZOMBIE for child in alive)


Start = Callable[..., Service]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Start]:
    services: list[Service] = []

    def start(*flags: str, model: Path = model) -> Service:
        services.append(Service(model, tmp_path / f"diagnostics-{len(services)}", *flags))
        return services[-1]

    yield start
    for service in services:
        service.process.kill()
        service.process.communicate()


def stream(client: httpx.Client, url: str) -> Any:
    """A request that goes on for long."""
    body = {"prompt": "The river", "max_tokens": 400, "ignore_eos": True, "stream": True}
    return client.stream("POST", f"{url}/v1/completions", json=body)


def test_two_services_live_and_end_each_in_its_way(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = [tmp_path / "first.json", tmp_path / "second.json"]
    first, second = (start("--pp", "2", "--trace", str(trace)) for trace in traces)
    killed, stopped = first.ready(), second.ready()
    assert killed["url"] != stopped["url"]
    assert killed["layout"] == {"pp": 2, "tp": 1, "ep": 1, "split": killed["layout"]["split"]}
    assert first.children.keys() == {"engine", "worker0", "worker1", "api"}
    with httpx.Client(timeout=60, trust_env=False) as client:
        assert client.get(f"{killed['url']}/ready").json()["status"] == "ready"
        waiting = WaitConfig(url=killed["url"], pid=first.process.pid, every_s=0.1, json=True)
        assert wait(waiting) == 0
        assert json.loads(capsys.readouterr().out)["outcome"] == "ready"

        with stream(client, killed["url"]) as answer:
            lines = answer.iter_lines()
            next(lines)
            first.children["worker1"].kill()
            rest = [line for line in lines if line]
        why = "worker rank 1 (stage 1): killed by signal 9 (SIGKILL)"
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["message"] == f"The service has failed: {why}"
        code, out, err = first.end()
        assert (code, out) == (1, "")
        assert wait(waiting) == 3
        assert err[-1] == f"headrace serve: {why}"
        assert [line for line in err if line.startswith("headrace serve:")] == err[-1:]
        assert re.fullmatch(rf"trace of \d+ steps in {traces[0]}: .*", err[-2])
        folder = first.diagnostics(err)
        failure = json.loads((folder / "failure.json").read_text())
        assert (failure["line"], failure["exit_code"]) == (why, 1)
        assert failure["events"][0]["who"] == "worker rank 1 (stage 1)"
        assert not failure["events"][0]["secondary"]
        for who in ("engine", "http", "worker-rank-0-stage-0"):
            assert "in run_child" in (folder / f"stacks-{who}.txt").read_text()

        # What runs ends well, and nothing more is taken.
        with stream(client, stopped["url"]) as answer:
            lines = answer.iter_lines()
            next(lines)
            second.process.send_signal(signal.SIGTERM)
            late = client.post(f"{stopped['url']}/v1/completions", json={"prompt": "a"})
            while late.status_code == 200:
                late = client.post(f"{stopped['url']}/v1/completions", json={"prompt": "a", "max_tokens": 1})
            assert (late.status_code, late.headers["retry-after"]) == (503, "1")
            assert client.get(f"{stopped['url']}/ready").json()["status"] == "draining"
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        code, out, err = second.end()
        assert (code, out) == (0, "")
        shares = r"busy \d+\.\d%, .*waiting for a plan \d+\.\d%, communicating \d+\.\d% of [\d.]+ s; \d+ steps"
        for stage, line in enumerate(err[-3:-1]):
            assert re.fullmatch(rf"  stage {stage}: {shares}", line)
        assert err[-1].startswith("trace of ")
    assert first.all_gone() and second.all_gone()
    for trace in traces:
        events = read(trace)
        assert list(track_names(events).values()) == ["stage 0 (rank 0)", "stage 1 (rank 1)"]
        assert len(slices(events, "step")) > 2


def test_a_rank_that_is_stopped_is_named_whether_it_idles_or_brings_up(start: Start) -> None:
    # At once, since each takes its seconds. One stands still when all are ready and nothing is asked of it; the other
    # while it starts, so that its peer and the engine wait for it.
    idle, starting = start("--pp", "2"), start("--pp", "2")
    while "worker1" not in starting.find_children():
        pass
    starting.children["worker1"].suspend()
    idle.ready()
    idle.children["worker0"].suspend()
    stopped = r"stopped by a signal \(SIGSTOP, SIGTSTP or a debugger\) for \d+ s"
    for service, rank in ((idle, 0), (starting, 1)):
        code, _, err = service.end()
        assert code == 1
        assert re.fullmatch(rf"headrace serve: worker rank {rank} \(stage {rank}\): {stopped}", err[-1])
        assert service.all_gone()


def test_no_process_outlives_a_supervisor_that_is_killed(start: Start) -> None:
    service = start("--pp", "2")
    service.ready()
    service.process.kill()
    assert service.all_gone()


def test_a_stop_while_it_loads_is_clean(start: Start) -> None:
    service = start()
    assert service.process.stderr is not None
    assert service.process.stderr.readline().startswith("loading weights")
    service.process.send_signal(signal.SIGINT)
    assert service.end()[:2] == (0, "")


def test_a_tensor_that_is_missing_ends_the_start_with_exit_2(start: Start, model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    code, out, err = start("--pp", "2", model=tmp_path).end()
    assert (code, out) == (2, "")
    assert [line for line in err if line.startswith("headrace serve:")] == err[-1:]
    assert "model.layers.3.mlp.up_proj.weight" in err[-1]
