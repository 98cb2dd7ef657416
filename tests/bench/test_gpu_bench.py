"""The GPU measurements' own logic without a GPU: cells, floors, tables, resuming, the whole flow on a processor."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

import pytest
from bench.gpu import main
from bench.gpu_floor import best_decode_floor, decode_floor, prompt_flops, split_of
from bench.gpu_timing import Ceilings, Timing
from bench.kernel_cells import Cell
from bench.kernel_cells.__main__ import _cells as cells_of
from bench.kernel_cells.__main__ import line, measure, summary

from bench import gpu_engine, gpu_table
from headrace.config import ModelConfig
from headrace.mesh import Mesh
from headrace.model_config import spec_from_config
from headrace.spec import ModelSpec
from tests.tiny import write_tiny

CONFIGS = Path(__file__).parents[2] / "bench" / "configs"
CEILINGS = Ceilings(1e12, 1e15)


def spec_of(name: str) -> ModelSpec:
    return spec_from_config(json.loads((CONFIGS / name / "config.json").read_text()))


def mesh(pp: int, tp: int, ep: int, *split: int) -> Mesh:
    return Mesh(pp=pp, tp=tp, ep=ep, split=split)


def test_sums_over_more_gpus_than_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["all_reduce", "--ranks", "99"]) == 2
    assert capsys.readouterr().err == "--ranks 99: there are not so many GPUs here\n"


# --- kernel cells ---------------------------------------------------------------------------------------------------


def timed(us: float) -> Callable[[Sequence[Callable[[], object]]], Timing]:
    return lambda calls: Timing(us, 0.01, True)


def cell(variant: str = "", error: float | None = None, num_bytes: float = 1e6) -> Cell:
    check = None if error is None else lambda: error
    return Cell("k", {"tokens": 4}, [lambda: None], bytes=num_bytes, variant=variant, check=check)


def test_a_cell_is_compared_with_the_larger_floor() -> None:
    row = measure(cell(error=1e-3), CEILINGS, timed(4.0))
    assert row["floor_us"] == pytest.approx(1.0) and row["of_floor"] == pytest.approx(0.25) and not row["problem"]
    assert line(row) == "k tokens=4 [] 4.0us 25% err 1.0e-03"
    assert CEILINGS.floor_s(1e6, 1e12) == pytest.approx(1e-3)


@pytest.mark.parametrize("error", [0.5, float("nan")])
def test_what_is_wrong_is_timed_and_named_but_never_best(error: float) -> None:
    wrong, right = measure(cell("a", error), CEILINGS, timed(1.0)), measure(cell("", 1e-3), CEILINGS, timed(2.0))
    assert "FAIL" in wrong["problem"] and wrong["us"] == 1.0
    assert summary([wrong, right]).splitlines() == ["--- best of 2 cells, 1 failed", "k tokens=4: 2.0us 50%"]
    assert "none of 1 is right" in summary([wrong])


def test_the_best_variant_stands_beside_the_shipped_one() -> None:
    rows = [measure(cell(name), CEILINGS, timed(us)) for name, us in (("", 3.0), ("wide", 2.0), ("deep", 2.5))]
    assert summary(rows).splitlines()[1] == "k tokens=4: 2.0us 50% [wide] shipped 3.0us"


def test_what_a_cell_raises_is_one_line() -> None:
    def broken(calls: object) -> Timing:
        raise RuntimeError("first\nsecond")

    def wrong() -> float:
        raise ValueError("bad shape")

    row = measure(Cell("k", {"tokens": 1}, [lambda: None], check=wrong), CEILINGS, broken)
    assert line(row) == "k tokens=1 [] FAIL check: ValueError: bad shape FAIL: RuntimeError: first"


def test_a_module_that_breaks_is_a_failed_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Module:
        @staticmethod
        def cells() -> Iterator[Cell]:
            yield cell()
            raise RuntimeError("out of memory")

    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    monkeypatch.setattr("importlib.import_module", lambda name: Module)
    rows: list[dict[str, object]] = []
    assert len(list(cells_of("m", rows))) == 1
    assert "out of memory" in str(rows[0]["problem"]) and "out of memory" in capsys.readouterr().out


# --- floors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requests", "level", "best"),
    [(1, 632, 632), (2, 995, 1242), (8, 2605, 3105), (32, 4774, 5269), (128, 8684, 9072), (256, 14110, 14617)],
)
def test_decode_floors_are_those_computed_before(requests: int, level: float, best: float) -> None:
    spec, halves = spec_of("k2-slice"), mesh(2, 1, 1, 4, 4)
    assert decode_floor(spec, halves, requests, 4.3e12) == pytest.approx(level, rel=1e-3)
    assert best_decode_floor(spec, halves, requests, 4.3e12)[0] == pytest.approx(best, rel=1e-3)


def test_two_ranks_of_a_stage_read_half_but_what_both_hold() -> None:
    spec = spec_of("k2-slice")
    one = decode_floor(spec, mesh(1, 1, 1, 8), 64, 4.3e12)
    tensor, expert = (decode_floor(spec, mesh(1, 2, ep, 8), 64, 4.3e12) for ep in (1, 2))
    assert 1.8 * one < expert < tensor < 2 * one


def test_prompt_flops_of_a_dense_model_are_twice_its_parameters_a_token() -> None:
    spec = spec_of("llama-8b")
    per_token = prompt_flops(spec, 1000) / 1000
    assert 2 * 6.9e9 < per_token < 2 * 7.6e9  # without embedding and head
    assert prompt_flops(spec, 8192) / 8192 > 1.05 * per_token


# --- the engine's measurement ---------------------------------------------------------------------------------------


def test_layouts_and_splits_by_name() -> None:
    assert gpu_engine.layout_of("pp2") == {"pp": 2} and gpu_engine.layout_of("pp2ep4") == {"pp": 2, "ep": 4}
    for bad in ("", "pp", "pp2x", "2pp"):
        with pytest.raises(ValueError, match="layout"):
            gpu_engine.layout_of(bad)
    assert split_of("auto") is None and split_of("6,2") == (6, 2)


def record(requests: int, rate: float, **more: object) -> dict[str, object]:
    return {
        "key": f"{requests} {more}", "kind": "decode", "model": "k2-slice", "gpu": "NVIDIA H200", "prompt": 128,
        "layout": "pp2", "split": [5, 3], "p2p": True, "options": {"weights": "random"}, "requests": requests,
        "rate": rate, "floor": 2 * rate, "best_floor": 4 * rate, "busy": [0.9, None, 0.8],
    } | more  # fmt: skip


def test_the_table_shows_ratios_and_marks_those_too_low() -> None:
    text = gpu_table.tables([record(8, 1), record(8, 2400), record(128, 6300), record(4, 900)], [])
    rows = {cells[1]: cells[2:-1] for line in text.splitlines() if len(cells := [c.strip() for c in line.split("|")])}
    assert rows["k2-slice, decode tok/s"] == ["4", "8", "128"]
    assert rows["vLLM pp2"] == ["", "1599", "6216"]
    assert rows["required ratio"] == ["", "1.3", "1.15"]
    assert rows["pp2 5/3"] == ["900", "2400", "6300"]
    assert rows["pp2 5/3: of vLLM"] == ["", "1.50", "**1.01**"]
    assert rows["pp2 5/3: of its floor"] == ["50%"] * 3
    assert rows["pp2 5/3: least busy stage"] == ["80%"] * 3


def test_only_the_same_machine_and_links_are_compared_with_vllm() -> None:
    assert gpu_table.vllm_rate(record(8, 1)) == 1599
    for change in ({"p2p": False}, {"gpu": "cpu"}, {"model": "llama-8b"}, {"prompt": 64}, {"requests": 3}):
        assert gpu_table.vllm_rate(record(8, 1) | change) is None


def test_a_fallback_is_loud(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny(tmp_path / "m", "qwen3_moe", tokenizer=False)
    out = tmp_path / "out.jsonl"
    flags = ["engine", "--model", str(folder), "--device", "cpu", "--layout", "pp1", "--backend", "triton+graphs"]
    assert main([*flags, "--requests", "1", "--max-len", "64", "--weights", "checkpoint", "--routing", "model",
                 "--out", str(out)]) == 1  # fmt: skip
    assert "triton+graphs is to be measured" in capsys.readouterr().out
    assert json.loads(out.read_text())["kind"] == "failed"


@pytest.mark.skipif(
    not {"weights", "routing"} <= {f.name for f in fields(ModelConfig)}, reason="no random weights in this version"
)
def test_the_whole_flow_on_a_processor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny(tmp_path / "m", "kimi_k2_int4", tokenizer=False)
    (folder / "model.safetensors").unlink()  # a config alone will do
    out = tmp_path / "out.jsonl"
    flags = ["engine", "--model", str(folder), "--device", "cpu", "--layout", "pp2", "--split", "3,2", "--prompt", "8",
             "--short", "2", "--output", "4", "--prefill", "24", "--repeats", "1", "--max-len", "128",
             "--option", "dtype=float32", "--option", "max_running=5", "--out", str(out)]  # fmt: skip
    assert main([*flags, "--requests", "1,3,fit"]) == 0
    rows = gpu_table.read_rows(out)
    expected = [("decode", 1), ("decode", 3), ("decode", 5), ("prefill", 12)]
    assert [(row["kind"], row["requests"]) for row in rows] == expected
    assert all(row["split"] == [3, 2] and not row.get("problem") for row in rows)
    assert all(row["first_s"] > 0 for row in rows[:3])
    capsys.readouterr()
    assert main([*flags, "--requests", "1,3,fit"]) == 0
    assert "all there already" in capsys.readouterr().out and len(gpu_table.read_rows(out)) == 4
    assert main(["table", "--engine", str(out)]) == 0
    assert "| pp2 3/2 dtype=float32 max_running=5 |" in capsys.readouterr().out
