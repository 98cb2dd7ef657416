"""The command line: what it makes of arguments, and how it says what is wrong."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.bench.config import BenchConfig
from headrace.cli import main as cli
from headrace.cli.main import run
from headrace.config import EngineConfig, HttpConfig, LayoutConfig, ModelConfig, RunConfig, ScheduleConfig, ServeConfig
from headrace.errors import Fault, UserError
from headrace.service.config import ServiceConfig
from headrace.wait.config import WaitConfig


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeConfig]:
    """The configurations that `serve` is called with, instead of serving."""
    seen: list[ServeConfig] = []

    def record(config: ServeConfig) -> int:
        seen.append(config)
        return 0

    monkeypatch.setitem(cli.COMMANDS, "serve", replace(cli.COMMANDS["serve"], call=record))
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    return seen


def test_no_flags_are_the_defaults(served: list[ServeConfig]) -> None:
    assert run(["serve"]) == 0
    assert served == [ServeConfig()]


def test_every_flag_reaches_its_field(served: list[ServeConfig]) -> None:
    flags = """serve org/model --pp 3 --tp 2 --ep 2 --split 8,8,7 --device cpu --dtype bfloat16 --host 0.0.0.0
    --port 0 --served-name m --api-key k --max-len 512 --max-running 9 --chunk 64 --page-size 1 --kv-memory 1.5G
    --seed 7 --json-ready --transport tcp --timeout 2.5 --trace out"""
    assert run(flags.split()) == 0
    expected = ServeConfig(
        engine=EngineConfig(
            model=ModelConfig(model="org/model", device="cpu", dtype="bfloat16", max_len=512, seed=7),
            layout=LayoutConfig(pp=3, tp=2, ep=2, split=(8, 8, 7)),
            schedule=ScheduleConfig(max_running=9, chunk=64, page_size=1, kv_memory=1_500_000_000),
            run=RunConfig(transport="tcp", timeout_s=2.5, trace="out"),
        ),
        http=HttpConfig(host="0.0.0.0", port=0, served_name="m", api_key="k"),
        json_ready=True,
    )
    assert served == [expected]


def test_the_flags_of_bench_reach_their_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BenchConfig] = []

    def record(config: BenchConfig) -> int:
        seen.append(config)
        return 0

    monkeypatch.setitem(cli.COMMANDS, "bench", replace(cli.COMMANDS["bench"], call=record))
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    flags = "bench --url http://x:9 --model m --concurrency 1,4 --input 8 --output 9 --requests 7 --seed 5 --json"
    assert run(flags.split()) == 0
    assert run(["bench", "--duration", "2.5", "--timeout", "9"]) == 0
    assert seen == [
        BenchConfig(url="http://x:9", model="m", concurrency=(1, 4), input=8, output=9, requests=7, seed=5, json=True),
        BenchConfig(duration_s=2.5, timeout_s=9.0),
    ]


def test_the_flags_of_wait_and_of_service_reach_their_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def record(config: Any) -> int:
        seen.append(config)
        return 0

    for name in ("wait", "service"):
        monkeypatch.setitem(cli.COMMANDS, name, replace(cli.COMMANDS[name], call=record))
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    wait = "wait --url http://x:9 --unit u --ssh me@gpu1 --every 250ms --timeout 1h30m --no-probe --json"
    install = "service install kimi org/model --pp 2 --wait --user"
    assert [run(line.split()) for line in (wait, install)] == [0, 0]
    assert seen == [
        WaitConfig(url="http://x:9", unit="u", ssh="me@gpu1", every_s=0.25, timeout_s=5400.0, no_probe=True, json=True),
        ServiceConfig(
            action="install",
            name="kimi",
            serve=ServeConfig(engine=EngineConfig(model=ModelConfig(model="org/model"), layout=LayoutConfig(pp=2))),
            wait=True,
            user=True,
        ),
    ]


def test_flags_may_come_before_the_model_and_with_an_equals_sign(served: list[ServeConfig]) -> None:
    assert run(["serve", "--pp=2", "folder"]) == 0
    assert served[0].engine.model.model == "folder"
    assert served[0].engine.layout.pp == 2


def test_the_key_may_come_from_the_environment(served: list[ServeConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "from-there")
    run(["serve"])
    run(["serve", "--api-key", "from-here"])
    assert [config.http.api_key for config in served] == ["from-there", "from-here"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("serve --pp 0", "headrace serve: --pp 0: must be at least 1"),
        ("serve --pp", "headrace serve: --pp: needs a value"),
        ("serve --pp x", "headrace serve: --pp x: must be an integer"),
        ("serve --pp 1.5", "headrace serve: --pp 1.5: must be an integer"),
        ("serve --pp 1 --pp 2", "headrace serve: --pp: given more than once"),
        ("serve --max-len -3", "headrace serve: --max-len -3: must be at least 2"),
        ("serve --timeout x", "headrace serve: --timeout x: must be a number of seconds, or like 30s, 5m or 1h30m"),
        ("serve --timeout 0", "headrace serve: --timeout 0: must be above 0"),
        ("serve --device tpu", "headrace serve: --device tpu: must be one of auto, cpu, cuda"),
        ("serve --json-ready=7", "headrace serve: --json-ready 7: takes no value"),
        ("serve --no-json-ready", "headrace serve: --no-json-ready: unknown flag; --help lists them"),
        ("serve --gpus 2", "headrace serve: --gpus: unknown flag; --help lists them"),
        ("serve one two", "headrace serve: two: one argument too many"),
        ("serve --ep 2 --tp 3", "headrace serve: --ep 2: must divide --tp 3"),
        ("serve --pp 2 --split 8,8,7", "headrace serve: --split names 3 stages, --pp says 2"),
        ("serve --split 8,x", "headrace serve: --split 8,x: not a list of integers; write it like 8,8,7"),
        ("serve --kv-memory 12Q", "headrace serve: --kv-memory 12Q: not a size; write it like 512MB, 2GiB or 1.5G"),
        ("serve --port 70000", "headrace serve: --port 70000: must be between 0 and 65535"),
        (
            "srve",
            'headrace: Unknown command "srve". Did you mean "serve"? '
            "Available commands: serve, bench, plan, simulate, probe, service, wait, doctor.",
        ),
    ],
)
def test_a_users_error_is_one_line_and_exit_2(
    served: list[ServeConfig], capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert run(arguments.split()) == 2
    assert capsys.readouterr() == ("", message + "\n")
    assert served == []


@pytest.mark.parametrize(("error", "code"), [(UserError("--x: no"), 2), (Fault("engine: lost"), 1)])
def test_what_a_command_raises_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    def fail(_: Any) -> int:
        raise error

    monkeypatch.setitem(cli.COMMANDS, "serve", replace(cli.COMMANDS["serve"], call=fail))
    assert run(["serve"]) == code
    assert capsys.readouterr() == ("", f"headrace serve: {error}\n")


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_commands_code_is_the_exit_code(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setitem(cli.COMMANDS, "serve", replace(cli.COMMANDS["serve"], call=lambda _: code))
    with pytest.raises(SystemExit) as stop:
        cli.main(["serve"])
    assert stop.value.code == code


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"{headrace.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"], *([name, "--help"] for name in cli.COMMANDS)])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    heavy = ("torch", "transformers", "fastapi", "zmq", "huggingface_hub", "safetensors", "gguf", "tokenizers")
    code = f"""
import sys
from headrace.cli.main import run
code = run({arguments!r})
print(sorted(set(sys.modules) & set({heavy!r})), file=sys.stderr)
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert "Usage: headrace" in done.stdout


def headrace_command(*arguments: str) -> tuple[int, str, list[str]]:
    done = subprocess.run(
        [sys.executable, "-m", "headrace", *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    return done.returncode, done.stdout, done.stderr.splitlines()


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, out, err = headrace_command("serve", str(tmp_path), "--port", str(port))
    line = f"headrace serve: --port {port}: already in use on 127.0.0.1; --port 0 picks a free one"
    assert (code, out, err) == (2, "", [line])


def test_a_model_that_cannot_be_served_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    code, out, err = headrace_command("serve", str(tmp_path), "--port", "0")
    assert (code, out, len(err)) == (2, "", 1)
    assert err[0].startswith("headrace serve: architecture 'MambaForCausalLM' is not supported")
