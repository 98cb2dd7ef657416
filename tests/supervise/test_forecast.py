"""The plan before a start: what is refused and what would fit, what is chosen, what is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headrace.config import EngineConfig, LayoutConfig, ModelConfig, ScheduleConfig
from headrace.errors import UserError
from headrace.mesh import Mesh, build_mesh
from headrace.plan.history import errors, read_history
from headrace.plan.machines import Here
from headrace.spec import ModelSpec
from headrace.supervise.forecast import choose, compare, foresee, remember, split_for
from headrace.supervise.here import parse, visible
from tests.plan.specs import K2, SLICE, spec_of

PRO = ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97_887 << 20)
QWEN = spec_of("qwen3-30b-a3b")


def engine(**schedule: Any) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(dtype="bfloat16", device="cuda", attention="triton"),
        schedule=ScheduleConfig(**{"chunk": 8192, "run_ahead": 2, **schedule}),
    )


def here(count: int, name: str = PRO[0], mib: int = 97_887) -> Here:
    return Here(gpus=[(name, mib << 20)] * count, cores=8, memory_bytes=64 << 30)


def mesh_of(spec: ModelSpec, **degrees: Any) -> Mesh:
    return build_mesh(LayoutConfig(**degrees), spec)


def test_what_cannot_fit_is_refused_and_what_would_is_said() -> None:
    with pytest.raises(UserError, match=r"^pp2 cannot fit: stage 0 needs .* GiB of weights, .*; pp8|tp8.* would fit"):
        foresee(K2, mesh_of(K2, pp=2), engine(), "cuda", here(8))
    with pytest.raises(UserError, match=r"^pp4 cannot fit: .*; 8 such GPUs would do, as tp8$"):
        foresee(K2, mesh_of(K2, pp=4), engine(), "cuda", here(4))
    with pytest.raises(UserError, match=r"^pp8 cannot fit: .* and 90\.0 of --kv-memory on each GPU, which has 95\.6"):
        foresee(K2, mesh_of(K2, pp=8), engine(kv_memory=90 << 30), "cuda", here(8))


def test_what_fits_is_foreseen() -> None:
    found = foresee(K2, mesh_of(K2, pp=8), engine(), "cuda", here(8))
    assert found is not None and found.is_timed and len(found.stages) == 8
    figures = found.predicted(8192)
    assert figures.kv_tokens and 0 < figures.decode_s < 0.1 < figures.prompt_s < 5


def test_a_gpu_that_nobody_knows_has_memory_and_no_times() -> None:
    found = foresee(SLICE, mesh_of(SLICE, pp=2), engine(), "cuda", here(2, "NVIDIA Something", 81_920))
    assert found is not None and not found.is_timed
    assert found.predicted(100).decode_s == 0
    with pytest.raises(UserError, match="cannot fit"):
        foresee(SLICE, mesh_of(SLICE, pp=2), engine(), "cuda", here(2, "NVIDIA Something", 30_000))


def test_two_ranks_of_a_gpu_have_half_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_SHARE_GPUS", "1")
    found = foresee(QWEN, mesh_of(QWEN, pp=2), engine(), "cuda", here(1))
    assert found is not None and found.stages[0].gpu_bytes == PRO[1] // 2


def test_no_word_of_the_driver_no_forecast() -> None:
    assert foresee(K2, mesh_of(K2, pp=1), engine(), "cuda", Here()) is None


def test_on_a_processor_only_what_exceeds_the_host_is_refused() -> None:
    config = replace(engine(chunk=512, run_ahead=0), model=ModelConfig(dtype="float32", device="cpu"))
    assert foresee(SLICE, mesh_of(SLICE, pp=2), config, "cpu", Here(cores=2, memory_bytes=100 << 30)) is not None
    with pytest.raises(UserError, match=r"^MODEL: .* GiB of weights do not fit in this host's 16\.0 GiB$"):
        foresee(SLICE, mesh_of(SLICE, pp=2), config, "cpu", Here(cores=2, memory_bytes=16 << 30))


def test_the_automatic_layout_is_the_plans_best() -> None:
    chosen = choose(K2, engine(), "cuda", here(8))
    assert (chosen.pp, chosen.tp, chosen.ep) == (1, 8, 1)
    with pytest.raises(UserError, match=r"^--layout auto: no layout fits: .*; 8 such GPUs would do, as tp8$"):
        choose(K2, engine(), "cuda", here(4))
    config = replace(engine(chunk=512, run_ahead=0), model=ModelConfig(dtype="float32", device="cpu"))
    assert choose(QWEN, config, "cpu", Here(cores=2, memory_bytes=500 << 30)).pp == 1


def test_a_start_is_compared_and_kept(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    mesh = mesh_of(K2, pp=8)
    mesh = replace(mesh, split=split_for(K2, mesh, engine(), here(8)))
    assert mesh.split == (8, 8, 8, 8, 8, 8, 8, 5)
    found = foresee(K2, mesh, engine(), "cuda", here(8))
    assert found is not None
    stages = [{"weight_bytes": 2 * stage.weight_bytes, "kv_tokens": stage.kv_tokens} for stage in found.stages]
    predicted = found.predicted(8192)
    warm = {"prompt_tokens": 8192, "prompt_s": predicted.prompt_s / 2, "decode_s": predicted.decode_s}
    start, line = compare(found, "K2", {"stages": stages, "warm": warm})
    assert line.startswith("  predicted, measured: weights 73.08 GiB, 146.16") and "worst +100%" in line
    assert errors(start) == pytest.approx(
        {"weight_bytes": -0.5, "kv_tokens": 0, "prompt_s": 1.0, "decode_s": 0}, abs=1e-3
    )
    remember(start)
    assert read_history() == [start]
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    remember(start)  # which is no reason to fail


def test_gpus_as_the_driver_lists_them() -> None:
    gpus = parse("NVIDIA H200, 143771\nNVIDIA RTX A, B, 1000\nnonsense\n")
    assert gpus == [("NVIDIA H200", 143771 << 20), ("NVIDIA RTX A, B", 1000 << 20)]
    assert visible(gpus, None) == gpus == visible(gpus, "GPU-1234")
    assert visible(gpus, "1") == gpus[1:]


@pytest.mark.parametrize(
    ("name", "degrees"), [("pp4", (4, 1, 1)), ("pp4ep2", (4, 2, 2)), ("tp4ep2", (1, 4, 2)), ("pp4×tp2", (4, 2, 1))]
)
def test_a_layout_by_its_name(name: str, degrees: tuple[int, int, int]) -> None:
    layout = LayoutConfig(layout=name)
    assert (layout.pp, layout.tp, layout.ep, layout.layout) == (*degrees, None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layout": "pq4"}, "--layout pq4: write auto, or a name like"),
        ({"layout": "auto", "pp": 2}, "--layout auto: stands for --pp"),
        ({"layout": "auto", "split": (1,)}, "--layout auto: stands for --pp"),
        ({"layout": "pp0"}, "--pp 0: must be at least 1"),
    ],
)
def test_names_that_are_none(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        LayoutConfig(**fields)
