"""Ranks measured alone, and what is composed of them: on a processor, and from the records that are there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bench.gpu import ENGINE, main
from bench.gpu_table import read_rows
from bench.layouts import COUNTS, MODELS, Case, Composed, Ratios, latest_ranks, machine_with, mesh_of, paces, sections
from bench.layouts import main as layouts
from bench.lone_rank import LoneRank

from headrace import LLM, SamplingParams
from headrace.config import EngineConfig, LayoutConfig, ModelConfig, ScheduleConfig
from headrace.plan.cost import Roofline
from headrace.plan.experts import Uniform
from headrace.plan.load import Load
from tests.plan.specs import SLICE
from tests.tiny import write_tiny


def config(folder: Path, layout: str) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(folder), device="cpu", dtype="float32", attention="torch", max_len=64),
        layout=LayoutConfig(layout=layout),
        schedule=ScheduleConfig(max_running=3, chunk=16, run_ahead=0),
    )


def test_the_only_rank_of_a_layout_writes_what_the_engine_does(tmp_path: Path) -> None:
    """So it is driven as plans drive it: pages, positions, tokens that go round."""
    folder = write_tiny(tmp_path / "m", "kimi_k2_int4", tokenizer=False)
    rank = LoneRank(config(folder, "pp1"), 0, 3 * 40)
    assert len(rank.decode(3, 9, 2, 4, 2)) == 2
    runner = rank._runner
    mirrored = [tokens.tolist() for tokens in runner._mirror.tokens if tokens is not None]
    assert len(mirrored) == 3
    params = SamplingParams(temperature=0.0, max_tokens=1 + 2 + 4 * 2, ignore_eos=True)
    with LLM(str(folder), device="cpu", dtype="float32", max_len=64) as llm:
        made = llm.generate(mirrored, params)
    assert runner._state.last_token[:3].tolist() == [one.token_ids[-1] for one in made]
    # Other rows, and prompts, in the slots that those leave.
    assert len(rank.decode(2, 16, 1, 3, 1)) == 1 and len(rank.prefill(16, 2, 3)) == 3
    assert len(rank.decode(3, 4, 1, 1, 1)) == 1


def test_more_rows_than_a_chunk_has_tokens(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m", "kimi_k2_int4", tokenizer=False)
    few = replace(config(folder, "pp2"), schedule=ScheduleConfig(max_running=3, chunk=2, run_ahead=0))
    assert len(LoneRank(few, 1, 3 * 20).decode(3, 2, 1, 2, 2)) == 2


@pytest.mark.parametrize(("layout", "rank"), [("pp2", 0), ("pp2", 1), ("tp2", 1), ("ep2", 0), ("pp2ep2", 3)])
def test_a_rank_of_any_layout_runs_alone_with_its_share(layout: str, rank: int, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m", "kimi_k2_int4", tokenizer=False)
    whole, lone = LoneRank(config(folder, "pp1"), 0, 60), LoneRank(config(folder, layout), rank, 60)
    assert min(lone.decode(3, 9, 1, 2, 2) + lone.prefill(16, 1, 2)) > 0
    assert lone.weight_bytes < 0.8 * whole.weight_bytes
    assert lone._runner.stats().num_tokens == 3 * 9 + 3 * (1 + 2 * 2) + 16 * (2 + 1 * 2)


def test_records_of_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny(tmp_path / "m", "kimi_k2_int4", tokenizer=False)
    (folder / "model.safetensors").unlink()
    out = tmp_path / "out.jsonl"
    flags = [
        "rank", "--model", str(folder), "--layout", "pp2tp2", "--stage", "1", "--device", "cpu", "--dtype", "float32",
        "--rows", "1,2", "--prompt", "8", "--prefill", "16", "--repeats", "1", "--out", str(out),
    ]  # fmt: skip
    assert main(flags) == 0
    rows = read_rows(out)
    assert [(row["rows"], row["prompt"], row["stage"]) for row in rows] == [(1, 8, 1), (2, 8, 1), (0, 16, 1)]
    assert all(row["step_ms"] > 0 and row["predicted_ms"] is None for row in rows)  # no processor is in the catalogue
    assert layouts(["--ranks", str(out)]) == 2
    assert "holds no ranks" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--layout", "xx8"], "bench.gpu rank: --layout xx8: write auto, or a name like pp4, tp2, pp4ep2\n"),
        (["--stage", "8"], "bench.gpu rank: --stage 8: pp8 has stages 0 to 7\n"),
        (["--rows", "1,x"], "bench.gpu rank: --rows x: must be whole numbers of at least 1\n"),
        (["--split", "9,x"], "bench.gpu rank: --split 9,x: write auto, or layers a stage like 6,2\n"),
        (["--layout", "tp3"], None),
    ],
)
def test_what_cannot_be_is_one_line(flags: list[str], said: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rank", "--device", "cpu", *flags]) == 2
    err = capsys.readouterr().err
    assert err == said or (said is None and err.startswith("bench.gpu rank: --tp 3: ") and err.count("\n") == 1)


def test_ratios_lie_between_those_of_the_nearest_sizes() -> None:
    records = [
        {"rows": rows, "step_ms": ms, "predicted_ms": 1.0} for rows, ms in ((4, 1.2), (1, 1.0), (16, 1.4), (0, 0.9))
    ]
    ratios = Ratios.of(records)
    assert [ratios.at(Load.decode(rows, 100)) for rows in (1, 2, 8, 64)] == pytest.approx([1.0, 1.1, 1.3, 1.4])
    assert ratios.at(Load.prompt(0, 4, samples=True)) == 0.9


@pytest.mark.parametrize("layout", ["pp2", "tp2", "ep2"])
def test_measured_as_planned_is_the_plan_and_twice_as_slow_is_not(layout: str) -> None:
    mesh, machine = mesh_of(SLICE, layout, None), machine_with(2, "nvlink-h200")
    plan = Roofline(SLICE, mesh, machine, Uniform())
    load = Load.decode(8, 200)
    same, slow = (Composed(SLICE, mesh, machine, Ratios(((1, ratio),), 1.0)) for ratio in (1.0, 2.0))
    assert np.allclose(same.steps_s(load), plan.steps_s(load))
    alone = Roofline(SLICE, mesh, replace(machine, link=None), Uniform())
    assert np.allclose(slow.steps_s(load) - plan.steps_s(load), alone.steps_s(load))
    rates = [
        [count / pace.period_s for count, pace in zip(COUNTS, paces(SLICE, mesh, cost), strict=True)]
        for cost in (same, slow)
    ]
    assert all(fast > slower for fast, slower in zip(*rates, strict=True))


def test_the_last_record_of_a_size_counts() -> None:
    same = {
        "kind": "rank",
        "model": "k2",
        "layout": "pp8",
        "predicted_ms": 1.0,
        "gpu": "x",
        "stage": 1,
        "note": "",
        "prompt": 128,
    }
    rows = [
        same | {"split": split, "rows": count, "step_ms": ms}
        for split, count, ms in (([8], 1, 1.0), ([7], 1, 9.0), ([8], 4, 2.0), ([8], 1, 3.0))
    ]
    assert [row["step_ms"] for row in latest_ranks([*rows, {"kind": "decode"}], "k2")["pp8"]] == [3.0, 2.0]
    assert [row["step_ms"] for row in latest_ranks(rows[:2], "k2")["pp8"]] == [9.0], "ranks of two splits are not one"


def test_the_page_holds_what_the_records_say() -> None:
    page, records = (Path(__file__).parents[2] / "docs" / "layouts.md").read_text(), read_rows(ENGINE)
    for name in MODELS:
        for title, text in sections(Case.of(name, records)):
            assert f"## {title}\n\n{text}" in page, f"docs/layouts.md: {title}: python -m bench.layouts prints it anew"


def test_configs_are_the_slice_with_other_depths() -> None:
    configs = Path(__file__).parents[2] / "bench" / "configs"
    first, *others = (json.loads((configs / name / "config.json").read_text()) for name in ("k2-slice", "k2", "k2-24"))
    assert [other["num_hidden_layers"] for other in others] == [61, 24]
    assert all(other | {"num_hidden_layers": 8} == first for other in others)
