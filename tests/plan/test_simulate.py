"""`headrace simulate`, as it is called."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.cli.main import run
from headrace.plan.config import WorkloadConfig
from headrace.telemetry.perfetto import FIRST_TRACK
from tests.plan.specs import CONFIGS, K2_CONFIG

SLICE = str(CONFIGS / "k2-slice")
K2 = str(K2_CONFIG)


def figures(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    code = run(["simulate", *args, "--json"])
    said = capsys.readouterr()
    assert (code, said.err) == (0, "")
    found: dict[str, Any] = json.loads(said.out)
    return found


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    code = run(["simulate", *args])
    said = capsys.readouterr()
    assert (code, said.out, said.err.count("\n")) == (2, "", 1)
    return said.err.removeprefix("headrace simulate: ").strip()


SMALL = ("--input", "50", "--output", "10", "--requests", "20")


def test_k2_on_eight_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, K2, "--pp", "8", "--gpu", "rtx-pro-6000", "--concurrency", "20", *SMALL)
    assert found["layout"] == "pp8" and sum(found["split"]) == 61 and found["gpu"] == "rtx-pro-6000"
    assert found["completed"] == 20
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (1000, 200)
    assert found["output_throughput"] == pytest.approx(200 / found["duration"])
    assert len(found["bubble"]) == 8 and all(0 <= share <= 1 for share in found["bubble"])
    assert len(found["edge_busy"]) == 7
    assert 0 < found["steady_output_throughput"] < 8 * 1.51e12 / 33e9 * 20  # no request can go faster than bytes do
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert 0 < found[f"median_{name}_ms"] <= found[f"p95_{name}_ms"] <= found[f"p99_{name}_ms"]
        assert found[f"mean_{name}_ms"] > 0
    assert max(found["weight_bytes"]) / 2**30 == pytest.approx(73.1, abs=0.1)


def test_links_cost_time_and_none_costs_none(capsys: pytest.CaptureFixture[str]) -> None:
    args = (SLICE, "--tp", "2", "--gpu", "h200", "--concurrency", "4", *SMALL)
    linked, free = figures(capsys, *args), figures(capsys, *args, "--links", "none")
    assert free["mean_tpot_ms"] < linked["mean_tpot_ms"] - 17 * 0.005
    assert (linked["links"], free["links"]) == ("nvlink-h200", "none")


def test_a_slow_network_shows_in_prompts_first(capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--arrivals", "burst", "--requests", "16", "--input", "4000", "--output", "5")
    args = (SLICE, "--pp", "2", "--split", "5,3", "--gpu", "h200", *load)
    near, far = figures(capsys, *args), figures(capsys, *args, "--hosts", "2", "--network", "10gbe")
    assert far["edge_busy"][0] > 0.5 > near["edge_busy"][0]
    assert far["mean_ttft_ms"] > 1.3 * near["mean_ttft_ms"]


@pytest.mark.parametrize(
    "how",
    [
        ("--requests", "6"),
        ("--arrivals", "closed", "--concurrency", "2", "--requests", "6"),
        ("--rate", "20", "--requests", "6"),
        ("--arrivals", "gamma", "--rate", "20", "--burstiness", "0.3", "--requests", "6"),
    ],
    ids=" ".join,
)
def test_ways_to_arrive(capsys: pytest.CaptureFixture[str], how: tuple[str, ...]) -> None:
    args = (SLICE, "--gpu", "h200", "--input", "20", "--output", "4", *how)
    found = figures(capsys, *args)
    assert found["completed"] == 6
    assert (found["steady_output_throughput"] is None) == ("closed" not in how)
    assert found == figures(capsys, *args)


def test_arrivals_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "arrivals.jsonl"
    file.write_text("".join(f'{{"arrival_s": {i / 10}, "input": {10 + i}}}\n' for i in range(5)))
    found = figures(capsys, SLICE, "--gpu", "h200", "--output", "4", "--arrivals", str(file))
    assert (found["completed"], found["total_input_tokens"]) == (5, 60)
    assert found["duration"] > 0.4


def test_a_trace_has_a_track_a_stage_and_a_slice_a_microbatch(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "trace.json"
    args = (SLICE, "--pp", "2", "--gpu", "h200", "--concurrency", "4", *SMALL, "--trace", str(file))
    found = figures(capsys, *args)
    events = json.loads(file.read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 2 * found["num_plans"]
    for stage in (0, 1):
        track = sorted((e["ts"], e["dur"]) for e in slices if e["tid"] == FIRST_TRACK + stage)
        starts, lengths = np.array(track).T
        assert (starts[1:] >= (starts + lengths)[:-1] - 0.01).all()  # microseconds, rounded
        busy = lengths.sum() / 1e6 / found["duration"]
        assert 1 - busy == pytest.approx(found["bubble"][stage], abs=0.01)


def test_text_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", K2, "--pp", "8", "--gpu", "rtx-pro-6000", *SMALL]) == 0
    said = capsys.readouterr().out
    assert "kimi-k2.5, pp8, layers" in said and "output tokens/s" in said and "TTFT ms" in said
    assert max(map(len, said.splitlines())) <= 80


def test_many_stages_on_many_hosts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "qwen3-30b-a3b" / "config.json").read_text()) | {"num_hidden_layers": 160}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = ("--pp", "128", "--hosts", "16", "--network", "400gbe", "--gpu", "h100-sxm", "--concurrency", "256")
    found = figures(capsys, str(tmp_path), *args, "--requests", "256", "--output", "4")
    assert len(found["bubble"]) == 128 and found["completed"] == 256


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((K2,), "--gpu and --hardware: give one of them"),
        ((K2, "--gpu", "rtx-pro6000"), "--gpu rtx-pro6000: no such GPU; nearest: rtx-pro-6000"),
        ((K2, "--gpu", "h200", "--links", "nvlink"), "--links nvlink: no such link; nearest: nvlink"),
        ((K2, "--gpu", "h200", "--pp", "62"), "--pp 62: the model has only 61 layers"),
        ((K2, "--gpu", "h200", "--pp", "8", "--hosts", "2"), "--hosts 2: needs a --network"),
        ((K2, "--gpu", "h200", "--rate", "2", "--concurrency", "3"), "--rate and --concurrency: give one of them"),
        ((K2, "--gpu", "h200", "--arrivals", "poisson"), "--arrivals poisson: needs a --rate"),
        ((K2, "--gpu", "h200", "--arrivals", "burst", "--rate", "1"), "--arrivals burst: takes no --rate"),
        (
            (K2, "--gpu", "h200", "--arrivals", "burst", "--concurrency", "1"),
            "--arrivals burst: takes no --concurrency",
        ),
        ((K2, "--gpu", "h200", "--rate", "inf"), "--rate inf: must be above 0"),
        ((K2, "--gpu", "h200", "--output", "0"), "--output 0: must be at least 1"),
        ((K2, "--gpu", "h200", "--hosts", "0"), "--hosts 0: must be at least 1"),
        ((K2, "--gpu", "h200"), "stage 0 (61 layers) does not fit: 553.4 GiB of weights on each GPU"),
        (
            (SLICE, "--gpu", "h200", "--kv-memory", "1MB"),
            "--input and --output: 1500 tokens do not fit in the KV cache",
        ),
        (("/nowhere/config.json", "--gpu", "h200"), "MODEL /nowhere/config.json: there is no such file"),
        ((SLICE, "--gpu", "h200", *SMALL, "--trace", "/nowhere/x"), "--trace /nowhere/x: cannot be written"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str) -> None:
    assert message in refusal(capsys, *args)


def test_what_does_not_fit_can_be_asked_about(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, K2, "--gpu", "rtx-pro-6000", "--kv-memory", "4GB", "--concurrency", "1", *SMALL)
    assert found["completed"] == 20


def test_what_the_flags_mean_together() -> None:
    assert (WorkloadConfig().kind, WorkloadConfig().num_requests) == ("closed", 128)
    assert (WorkloadConfig(requests=7).kind, WorkloadConfig(requests=7).num_requests) == ("burst", 7)
    assert WorkloadConfig(requests=7, concurrency=2).kind == "closed"
    assert WorkloadConfig(concurrency=3).num_requests == 12
    assert (WorkloadConfig(rate=2.0).kind, WorkloadConfig(rate=2.0).num_requests) == ("poisson", 200)
    assert WorkloadConfig(arrivals="trace.jsonl").kind == "file"


def test_nothing_on_its_way_needs_torch() -> None:
    code = f"""
import sys
from headrace.cli.main import run
assert run(["simulate", {SLICE!r}, "--gpu", "h200", "--requests", "2", "--input", "4", "--output", "2"]) == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
