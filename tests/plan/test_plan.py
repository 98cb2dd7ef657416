"""`headrace plan`, as it is called, and what must hold of its answers."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.cli.main import run
from headrace.mesh import Mesh
from headrace.plan.arrivals import Ask, Open
from headrace.plan.cost import Roofline
from headrace.plan.experts import Uniform
from headrace.plan.hardware import GIB, Link, Machine, catalogue
from headrace.plan.history import Figures, Start, errors, history_text, keep, read_history
from headrace.plan.machines import Here, find_machine
from headrace.plan.memory import Limits
from headrace.plan.options import DemandConfig, FixedConfig, HardwareConfig
from headrace.plan.pace import decode_pace, decode_sizes, first_token_s
from headrace.plan.reads import decode_balance
from headrace.plan.search import Layout, Question, judge, search
from headrace.plan.virtual import VirtualEngine
from headrace.schedule import SchedulerConfig
from headrace.spec import ModelSpec
from tests.plan.specs import CONFIGS, K2, K2_CONFIG, QWEN, SLICE

PRO, H200 = catalogue().gpu("rtx-pro-6000"), catalogue().gpu("h200")
PCIE = catalogue().link("pcie5-x16")
LIMITS = Limits(chunk=8192, max_running=256)


def machine(gpu: Any, count: int, link: Link | None = PCIE) -> Machine:
    return Machine(gpus=(gpu,) * count, link=link)


def question(spec: ModelSpec, limits: Limits = LIMITS, **demand: Any) -> Question:
    return Question(spec=spec, demand=DemandConfig(**demand), limits=limits, routing=Uniform())


def best_of(spec: ModelSpec, where: Machine, **demand: Any) -> Layout:
    return search(question(spec, **demand), where, FixedConfig())[0]


# --- K2 on eight GPUs, by hand ----------------------------------------------------------------------------------------


def planned(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    code = run(["plan", *args, "--json"])
    said = capsys.readouterr()
    assert (code, said.err) == (0, "")
    found: dict[str, Any] = json.loads(said.out)
    return found


EIGHT = (str(K2_CONFIG), "--gpus", "8", "--gpu", "rtx-pro-6000")


def test_k2_on_eight_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *EIGHT)
    assert found["model"]["bytes"] / GIB == pytest.approx(553, rel=0.005)
    layouts = {layout["name"]: layout for layout in found["layouts"]}
    assert layouts.keys() >= {"pp8", "tp8", "pp4ep2", "pp2ep4", "ep8"}
    assert all(layout["fits"] and sum(layout["split"]) == 61 for layout in layouts.values())
    pp8 = layouts["pp8"]
    assert pp8["split"] == [8, 8, 8, 8, 8, 8, 8, 5]
    assert max(stage["bytes"] for stage in pp8["stages"]) / GIB == pytest.approx(8 * 9.135, rel=1e-3)
    assert sum(stage["bytes"] for stage in pp8["stages"]) == pytest.approx(found["model"]["bytes"], rel=1e-6)
    assert [one["decode"]["32"]["tok_s"] for one in found["layouts"]] != []
    ranks = [sum(one["decode"][str(c)]["tok_s"] for c in (1, 8, 32, 128)) for one in found["layouts"]]
    assert ranks[0] > ranks[-1]


def test_kv_tokens_of_pp8_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """Stage 1: 95.6 GiB, 2% alone, eight layers, 21 graphs, a chunk of 8192, ten plans sent and eleven received."""
    (pp8,) = planned(capsys, *EIGHT, "--pp", "8")["layouts"]
    sent = 8192 * 7168 * 2
    pairs = 8192 * 8 * (2048 + 7168) + 3 * 8192 * 2048
    expanded = 8192 * 64 * (2 * 192 + 128) + 32768 * 64 * 256
    chunk = (4 * 8192 * 7168 + max(pairs, expanded)) * 2
    graphs = 21 * 16 * 2**20 + 2 * (4 * 256 * 7168 + 256 * 8 * (2048 + 7168) + 3 * 256 * 2048)
    left = 95.6 * 0.98 * GIB - 2.1 * GIB - 8 * 9.135 * GIB - chunk - graphs - 21 * sent
    assert pp8["kv_tokens"] == pytest.approx(left / (8 * 1152), rel=0.03)


@pytest.mark.parametrize("name", ["kimi-k2.5", "k2-slice", "qwen3-30b-a3b"])
@pytest.mark.parametrize("objective", ["decode", "prefill", "balanced"])
def test_every_config_has_a_plan(capsys: pytest.CaptureFixture[str], name: str, objective: str) -> None:
    found = planned(capsys, str(CONFIGS / name), "--gpus", "8", "--gpu", "h200", "--objective", objective)
    best = found["layouts"][0]
    assert best["fits"] and best["kv_tokens"] > 10_000 and best["limited_by"]
    rates = [best["decode"][count]["tok_s"] for count in ("1", "8", "32", "128")]
    assert rates == sorted(rates)


def test_where_pure_pipelines_win_and_lose() -> None:
    """K2: prefill and KV room are a pipeline's, few requests at decode are not; a slow network turns that around."""
    near = machine(PRO, 8)
    by_decode = {one.mesh.name: one for one in search(question(K2), near, FixedConfig())}
    pipe, sliced = by_decode["pp8"], by_decode["tp8"]
    assert pipe.prefill_tok_s > 3 * sliced.prefill_tok_s
    assert pipe.kv_tokens > 5 * sliced.kv_tokens
    assert pipe.decode[1].tok_s < 0.5 * sliced.decode[1].tok_s
    assert best_of(K2, near, objective="prefill").mesh.name == "pp8"
    far = Machine(gpus=(PRO,) * 16, link=PCIE, num_hosts=2, network=catalogue().network("10gbe"))
    spread = {one.mesh.name: one for one in search(question(K2), far, FixedConfig())}
    assert spread["tp16"].decode[32].tok_s < spread["pp16"].decode[32].tok_s
    assert spread["tp16"].prefill_tok_s < 0.1 * spread["pp16"].prefill_tok_s


# --- the pace against the engine in virtual time ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "mesh", "gpu"),
    [
        (SLICE, Mesh(pp=2, tp=1, ep=1, split=(5, 3)), H200),
        (SLICE, Mesh(pp=1, tp=2, ep=2, split=(8,)), H200),
        (K2, Mesh(pp=8, tp=1, ep=1, split=(8, 8, 8, 8, 8, 8, 8, 5)), PRO),
        (K2, Mesh(pp=4, tp=2, ep=2, split=(16, 15, 16, 14)), PRO),
        (QWEN, Mesh(pp=3, tp=1, ep=1, split=(18, 18, 12)), PRO),
    ],
    ids=["pp2", "ep2", "pp8", "pp4ep2", "qwen"],
)
@pytest.mark.parametrize("count", [1, 3, 8, 32, 100])
def test_the_pace_is_the_simulated_one(spec: ModelSpec, mesh: Mesh, gpu: Any, count: int) -> None:
    cost = Roofline(spec, mesh, machine(gpu, mesh.num_ranks), Uniform())
    balance = decode_balance(spec, mesh)
    config = SchedulerConfig(
        num_stages=mesh.pp, max_running=256, chunk=8192, page_size=16, num_pages=10_000, max_len=64, run_ahead=2
    )
    engine = VirtualEngine(config, cost, balance=balance)
    engine.run(Open([Ask(0.0, 1, 60)] * count))
    times = [record.token_times_s for record in engine.records]
    simulated = sum((each[-1] - each[20]) / 39 for each in times) / count
    pace = decode_pace(cost, decode_sizes(count, mesh.pp, balance), 40, 2)
    assert pace.period_s == pytest.approx(simulated, rel=0.03)


def test_the_first_token_is_the_simulated_one() -> None:
    mesh = Mesh(pp=8, tp=1, ep=1, split=(8, 8, 8, 8, 8, 8, 8, 5))
    cost = Roofline(K2, mesh, machine(PRO, 8), Uniform())
    for num_input in (1, 1000, 30_000):
        config = SchedulerConfig(
            num_stages=8, max_running=8, chunk=8192, page_size=16, num_pages=4000, max_len=40_000, run_ahead=2
        )
        engine = VirtualEngine(config, cost)
        engine.run(Open([Ask(0.0, num_input, 1)]))
        assert first_token_s(cost, num_input, 8192) == pytest.approx(engine.records[0].token_times_s[0], rel=0.01)


# --- what must hold of any answer -------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.sampled_from((1, 2, 4)), st.integers(8, 200), st.sampled_from(("decode", "balanced")))
def test_any_split_sums_to_the_layers(pp: int, tp: int, gib: int, objective: str) -> None:
    gpu = replace(H200, memory_bytes=gib * GIB)
    mesh = Mesh(pp=pp, tp=tp, ep=1, split=(8,) + (0,) * (pp - 1))
    found = judge(question(SLICE, concurrency=(16,), objective=objective), mesh, machine(gpu, pp * tp))
    assert sum(found.mesh.split) == 8 and len(found.mesh.split) == pp and min(found.mesh.split) >= 1


@given(st.integers(8, 160), st.integers(1, 40), st.sampled_from(((1, 1), (2, 1), (4, 1), (2, 2), (1, 4))))
def test_more_memory_never_holds_fewer_tokens_of_a_split(gib: int, more: int, degrees: tuple[int, int]) -> None:
    pp, tp = degrees
    mesh = Mesh(pp=pp, tp=tp, ep=1, split={1: (8,), 2: (5, 3), 4: (2, 2, 2, 2)}[pp])
    asked = question(SLICE, concurrency=(16,))
    small, large = (
        judge(asked, mesh, machine(replace(H200, memory_bytes=size * GIB), pp * tp), keep_split=True)
        for size in (gib, gib + more)
    )
    assert large.kv_tokens >= small.kv_tokens
    assert large.fits or not small.fits


@given(st.floats(1.0, 20.0), st.floats(1.0, 20.0), st.sampled_from(((2, 1), (4, 1), (2, 2), (1, 4))))
def test_a_faster_link_never_slows(times: float, closer: float, degrees: tuple[int, int]) -> None:
    pp, tp = degrees
    mesh = Mesh(pp=pp, tp=tp, ep=1, split={1: (8,), 2: (5, 3), 4: (2, 2, 2, 2)}[pp])
    slow = Link(slug="slow", name="slow", bandwidth=1e9, latency_s=50e-6, hop_s=20e-6)
    fast = replace(slow, bandwidth=slow.bandwidth * times, latency_s=slow.latency_s / closer, hop_s=slow.hop_s / closer)
    asked = question(SLICE, concurrency=(1, 16))
    one, other = (judge(asked, mesh, machine(H200, pp * tp, link), keep_split=True) for link in (slow, fast))
    assert other.prefill_tok_s >= one.prefill_tok_s * (1 - 1e-9) and other.ttft_s <= one.ttft_s * (1 + 1e-9)
    for count in (1, 16):
        assert other.decode[count].tok_s >= one.decode[count].tok_s * (1 - 1e-6)


def test_the_split_is_the_best_of_all() -> None:
    """By the pace itself, every split of eight layers over three stages."""
    asked = question(SLICE, concurrency=(12,))
    where = machine(H200, 3)
    found = judge(asked, Mesh(pp=3, tp=1, ep=1, split=(3, 3, 2)), where)
    every = [
        judge(asked, Mesh(pp=3, tp=1, ep=1, split=(a, b - a, 8 - b)), where, keep_split=True)
        for a, b in itertools.combinations(range(1, 8), 2)
    ]
    best = max(one.decode[12].tok_s for one in every if one.fits)
    assert found.decode[12].tok_s >= best * 0.98


# --- machines ---------------------------------------------------------------------------------------------------------


def test_unlike_gpus_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "machine.toml"
    file.write_text(
        '[machine]\ngpus = [["h200", 2], "mine"]\nlink = "pcie4-x16"\n'
        '[gpu.mine]\nname = "Mine"\nmemory_gib = 24\nmemory_gb_s = 900\ncache_mib = 6\nbf16_tflops = 70\n'
        'link = "pcie4-x16"\nsource = "me"\n'
    )
    where = find_machine(HardwareConfig(hardware=str(file)), None, Here)
    assert [gpu.slug for gpu in where.gpus] == ["h200", "h200", "mine"]
    best = judge(question(SLICE, concurrency=(8,)), Mesh(pp=3, tp=1, ep=1, split=(3, 3, 2)), where)
    assert best.fits and best.mesh.split[2] <= 1 < best.mesh.split[0]


def test_this_machines_gpus_are_found_by_the_drivers_names() -> None:
    names = [("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97_887 << 20), ("NVIDIA H200", 143_771 << 20)]
    where = find_machine(HardwareConfig(), None, lambda: Here(gpus=names))
    assert [gpu.slug for gpu in where.gpus] == ["rtx-pro-6000", "h200"]
    assert where.gpus[1].memory_bytes == 143_771 << 20


REFUSALS = [
    (("--gpu", "rtx-pro6000"), "--gpu rtx-pro6000: no such GPU; nearest: rtx-pro-6000"),
    (("--gpu", "h200", "--gpus", "0"), "--gpus 0: must be at least 1"),
    (("--gpu", "h200", "--pp", "62"), "--pp 62: the model has only 61 layers"),
    (("--gpu", "h200", "--gpus", "8", "--pp", "9"), "--pp 9: no such layout of 8 GPUs"),
    (("--gpu", "h200", "--gpus", "8", "--split", "60,2"), "--split adds up to 62 layers, the model has 61"),
    (("--gpu", "h200", "--gpus", "8", "--hosts", "2"), "--hosts 2: needs a --network"),
    (("--gpu", "h200", "--gpus", "7", "--hosts", "2", "--network", "10gbe"), "--hosts 2: does not divide 7 GPUs"),
    (("--gpu", "h200", "--hardware", "x"), "--gpu and --hardware: give one of them"),
    (("--hardware", "/nowhere/x"), "--hardware /nowhere/x: cannot be read"),
    (("--gpu", "h200", "--concurrency", "0,8"), "--concurrency 0,8: each must be at least 1"),
    (("--gpu", "h200", "--max-len", "999999999"), "--max-len 999999999: the model has"),
    (("--gpu", "h200", "--explain", "pp9"), "--explain pp9: no such layout here; there are"),
    (("--gpu", "h200", "--emit", "vllm"), "--emit vllm: no layout fits"),
    (("--gpu", "h200", "--plot", "x.gif"), "--plot x.gif: name a .png or .svg file"),
]


@pytest.mark.parametrize(("args", "message"), REFUSALS, ids=lambda value: value if isinstance(value, str) else "")
def test_refusals(capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str) -> None:
    code = run(["plan", str(K2_CONFIG), *args])
    said = capsys.readouterr()
    assert (code, said.out, said.err.count("\n")) == (2, "", 1)
    assert message in said.err


def test_configs_that_cannot_be_planned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "qwen3-30b-a3b" / "config.json").read_text())
    del config["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model, word in ((str(tmp_path), "hidden_size"), (str(CONFIGS / "deepseek-v3"), "FP8")):
        assert run(["plan", model, "--gpu", "h200"]) == 2
        said = capsys.readouterr()
        assert said.err.count("\n") == 1 and word in said.err


# --- what is printed --------------------------------------------------------------------------------------------------


def test_the_table_says_what_does_not_fit_and_by_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(K2_CONFIG), "--gpu", "rtx-5090", "--gpus", "8"]) == 0
    said = capsys.readouterr().out
    assert "does not fit, by GiB:" in said and " short: " in said and "32 such GPUs would do" in said


def test_explain_takes_a_layout_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *EIGHT, "--explain", "pp8"]) == 0
    said = capsys.readouterr().out
    for words in (
        "experts",
        "CUDA graphs",
        "largest chunk",
        "communication",
        "KV cache",
        "bubble",
        "the split: as many",
    ):
        assert words in said


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("headrace", "headrace serve MODEL --pp 8 --tp 1 --split 8,8,8,8,8,8,8,5"),
        ("systemd", "ExecStart=headrace serve MODEL --pp 8"),
        ("vllm", "VLLM_PP_LAYER_PARTITION=8,8,8,8,8,8,8,5 vllm serve MODEL --pipeline-parallel-size 8"),
        (
            "sglang",
            "SGLANG_PP_LAYER_PARTITION=8,8,8,8,8,8,8,5 python -m sglang.launch_server --model-path MODEL --pp-size 8",
        ),
    ],
)
def test_emitted_commands(capsys: pytest.CaptureFixture[str], engine: str, words: str) -> None:
    assert run(["plan", *EIGHT, "--pp", "8", "--emit", engine]) == 0
    assert words.replace("MODEL", str(K2_CONFIG)) in capsys.readouterr().out


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.svg"
    assert run(["plan", *EIGHT, "--plot", str(file)]) == 0
    capsys.readouterr()
    assert file.read_text().count("<path") > 50


def test_it_takes_no_torch_and_no_gpu() -> None:
    code = f"""
import sys
from headrace.cli.main import run
assert run(["plan", {str(K2_CONFIG)!r}, "--gpu", "rtx-pro-6000", "--gpus", "8"]) == 0
assert run(["plan", {str(CONFIGS / "k2-slice")!r}, "--json"]) == 0
assert not {{"torch", "matplotlib"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_history_keeps_what_was_predicted_and_what_came(tmp_path: Path) -> None:
    path = tmp_path / "state" / "history.jsonl"
    assert read_history(path) == []
    start = Start(
        "2026-11-30T00:00:00+00:00", "m", "pp2", [1, 1], "cuda", 100,
        Figures([10.0, 20.0], [100, 50], 0.5, 0.02), Figures([10.0, 25.0], [80, 50], 0.4, 0.025),
    )  # fmt: skip
    keep(start, path)
    keep(start, path)
    with path.open("a") as file:
        file.write("{broken\n")
    assert read_history(path) == [start, start]
    found = {"weight_bytes": -0.2, "kv_tokens": 0.25, "prompt_s": 0.25, "decode_s": -0.2}
    assert errors(start) == pytest.approx(found)
    assert "+25.0%" in history_text([start])
