"""The whole benchmark against real servers: ours, and ones that understand less."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.api.app import create_app
from headrace.bench.config import BenchConfig
from headrace.bench.measure import Level, measure
from headrace.bench.report import Report
from headrace.bench.run import bench, run_bench
from headrace.errors import Fault, UserError
from headrace.step import EngineStatus
from tests.api.harness import NAME, make_service, serving
from tests.bench.servers import ALL, OddServer
from tests.fakes.engine import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def url(tmp_path: Path, engine: FakeEngine) -> Iterator[str]:
    with serving(create_app(make_service(tmp_path, engine, api_key="key"))) as server:
        yield server.url


def _about_the_server(report: Report) -> list[str]:
    # A server that computes nothing leaves most of the time to the client.
    return [note for note in report.notes if "the client took" not in note]


def test_our_own_server_is_measured_exactly(url: str, engine: FakeEngine) -> None:
    lines: list[str] = []
    config = BenchConfig(url=url, api_key="key", concurrency=(1, 3), input=9, output=5, requests=4, seed=7)
    report = run_bench(config, say=lines.append)
    assert report.model == NAME
    assert _about_the_server(report) == []
    assert [level.max_concurrency for level in report.levels] == [1, 3]
    for level in report.levels:
        assert (level.completed, level.failed, level.first_error) == (4, 0, None)
        assert (level.total_input_tokens, level.total_output_tokens) == (36, 20)
        assert level.counted_by_usage
        assert 0 < level.effective_concurrency <= level.max_concurrency
        assert level.output_throughput > 0
        assert set(level.stats["ttft"]) == {"mean", "median", "std", "p90", "p95", "p99"}
    measured = [one for one in engine.submitted if one.sampling.max_tokens == 5]
    assert len(measured) == 8
    assert {len(one.tokens) for one in measured} == {9}
    assert len({tuple(one.tokens) for one in engine.submitted}) == len(engine.submitted)
    assert all(one.sampling.ignore_eos and one.sampling.temperature == 0 for one in measured)
    assert any("3 in flight" in line for line in lines)


def test_a_measurement_by_time_starts_no_more_after_it(url: str) -> None:
    report = run_bench(BenchConfig(url=url, api_key="key", concurrency=(2,), input=4, output=2, duration_s=0.05))
    assert report.levels[0].completed >= 2


def test_the_keys_that_tools_read(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = BenchConfig(url=url, api_key="key", concurrency=(2,), input=4, output=3, requests=4, json=True)
    assert bench(config) == 0
    found = json.loads(capsys.readouterr().out)
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{stat}_{metric}_ms" for stat in ("mean", "median", "std", "p90", "p95", "p99")} <= set(found)
    for name in ("output_throughput", "total_token_throughput", "request_throughput", "duration", "max_concurrency"):
        assert found[name] > 0
    assert found["request_goodput"] is None
    assert found["completed"] == 4
    assert found["levels"][0]["completed"] == 4
    assert found["input"] == 4


def test_the_table(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(BenchConfig(url=url, api_key="key", concurrency=(1, 2), input=4, output=3, requests=2)) == 0
    shown = capsys.readouterr().out
    assert "TTFT ms" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


def _measure(server: OddServer, **options: int) -> Report:
    with serving(server.app) as served:
        return run_bench(BenchConfig(url=served.url, model="m", concurrency=(2,), requests=4, output=6, **options))  # type: ignore[arg-type]  # integers


def test_a_server_that_takes_texts_and_knows_few_fields() -> None:
    server = OddServer(fields=ALL - {"ignore_eos"}, token_ids=False, bos=1)
    report = _measure(server, input=20)
    assert (report.levels[0].mean_input_tokens, report.levels[0].mean_output_tokens) == (20, 6)
    assert "generation_config" in report.dialect
    assert _about_the_server(report) == []
    # One word fewer, for the token that the server adds.
    assert len(server.asked[-1]["prompt"].split()) == 19


def test_a_small_vocabulary() -> None:
    server = OddServer(vocab_size=1024)
    assert _measure(server, input=20).levels[0].mean_input_tokens == 20
    assert max(max(body["prompt"]) for body in server.asked if isinstance(body["prompt"], list)) < 1024


def test_answers_that_end_early_are_counted_as_they_are_and_said() -> None:
    report = _measure(OddServer(fields=ALL - {"ignore_eos", "generation_config", "stream_options"}, early=2))
    assert report.levels[0].mean_output_tokens == 4
    assert any("may end early" in note for note in report.notes)
    assert any("4.0 tokens, not 6" in note for note in report.notes)


def test_a_server_without_usage_is_counted_by_events() -> None:
    report = _measure(OddServer(usage=False))
    assert not report.levels[0].counted_by_usage
    assert report.levels[0].total_output_tokens == 24
    assert any("no usage" in note for note in report.notes)


def test_failures_are_counted_and_the_first_is_told() -> None:
    report = _measure(OddServer(fail_every=3))
    (level,) = report.levels
    # Every third of all requests, those before the measurement included.
    assert level.failed in (1, 2)
    assert (level.completed, level.first_error) == (4 - level.failed, "it broke")
    assert level.total_output_tokens == 6 * level.completed
    assert any("it broke" in note for note in report.notes)


def test_a_server_that_always_fails_is_not_measured() -> None:
    with pytest.raises(UserError, match="it broke"):
        _measure(OddServer(fail_every=1))


def test_a_measurement_without_a_success_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    server = OddServer()

    async def measure_broken(*args: Any) -> Level:
        server.fail_every = 1
        return await measure(*args)

    monkeypatch.setattr("headrace.bench.run.measure", measure_broken)
    with serving(server.app) as served:
        assert bench(BenchConfig(url=served.url, model="m", concurrency=(1,), requests=2, json=True)) == 1


def test_a_server_that_cannot_be_measured_is_said_in_one_line(tmp_path: Path, url: str) -> None:
    with pytest.raises(UserError, match="--api-key"):
        run_bench(BenchConfig(url=url))
    with pytest.raises(UserError, match="`nope` does not exist"):
        run_bench(BenchConfig(url=url, api_key="key", model="nope"))
    with pytest.raises(UserError, match="maximum context length is 128"):
        run_bench(BenchConfig(url=url, api_key="key", input=500))
    loading = make_service(tmp_path, FakeEngine(status=EngineStatus("loading")))
    with serving(create_app(loading)) as server, pytest.raises(UserError, match="not ready.*loading"):
        run_bench(BenchConfig(url=server.url))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(Fault, match="cannot connect"):
            run_bench(BenchConfig(url=f"http://127.0.0.1:{free.getsockname()[1]}"))
