"""What is made of measurements: a file that plans are made from, and what is wrong in plain words."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.main import run as headrace
from headrace.errors import Fault
from headrace.plan.hardware import KIB
from headrace.plan.hardware_file import read_hardware
from headrace.probe import run as probe_run
from headrace.probe import words
from headrace.probe.config import ProbeConfig
from headrace.probe.findings import Findings, believed
from headrace.probe.run import group_sizes, measure_machine
from headrace.probe.task import Outcome, Task
from headrace.probe.write import hardware_text

HANGS = "no answer within 20 s, killed"
LINK = {"gen": 5, "gen_max": 5, "width": 16, "width_max": 16}
Answers = dict[str, Any]


def good(gpus: int, name: str = "NVIDIA H200") -> Answers:
    """What a sound machine answers, by the tasks' names."""
    answers: Answers = {"disk of .": {"reads": [(1 << 20, 2e9)], "direct": True, "filesystem": "ext4"}}
    for gpu in range(gpus):
        answers |= {
            f"GPU {gpu}": {"name": name, "memory_bytes": 150e9, "cache_bytes": 60 << 20, "uuid": "GPU-1"},
            f"memory of GPU {gpu}": {"bytes_per_s": 4.24e12},
            f"products on GPU {gpu}": {"bfloat16": 788e12},
            f"host and GPU {gpu}": {"to_gpu": 55e9, "from_gpu": 54e9, "link": dict(LINK)},
        }
        for peer in range(gpu + 1, gpus):
            pair = {"p2p": True, "there": 370e9, "back": 380e9, "latency_s": 1.5e-6}
            answers[f"GPU {gpu} and GPU {peer}"] = pair
    for size in (2, 4, 8):
        sums = [(1 << 10, 5e-6 * size), (1 << 14, 6e-6 * size), (1 << 24, 1e-4)]
        answers[f"sums over {size} GPUs"] = {"sums": sums, "nccl": [(1 << 14, 2e-5)]}
    return answers


def measured(gpus: int, answers: Answers, seen: list[tuple[str, int, dict[str, str]]] | None = None) -> Findings:
    """The findings where tasks are answered so; text is a problem."""

    def run(tasks: Sequence[Task], ranks: int, env: Mapping[str, str]) -> Iterator[Outcome]:
        for task in tasks:
            if seen is not None:
                seen.append((task.name, ranks, dict(env)))
            answer = answers[task.name]
            yield Outcome(task, None, answer) if isinstance(answer, str) else Outcome(task, answer)

    return measure_machine(ProbeConfig(), gpus, run, lambda _text: None)


@pytest.fixture(autouse=True)
def sound_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_P2P_DISABLE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(probe_run, "p2p_reasons", lambda: {(0, 1): "the chipset does not support it"})
    monkeypatch.setattr(words, "iommu", lambda: "dmar0 is on")


def written(found: Findings, folder: Path) -> Path:
    path = folder / "here.toml"
    path.write_text(hardware_text(found))
    return path


def test_a_sound_machine_becomes_a_file_that_the_planner_reads(tmp_path: Path) -> None:
    found = measured(4, good(4))
    assert found.problems == []
    hardware = read_hardware(written(found, tmp_path))
    machine = hardware.machine(4, links=None, num_hosts=1, network=None)
    assert [gpu.slug for gpu in machine.gpus] == ["h200"] * 4
    gpu, link = machine.gpus[0], machine.link
    assert gpu.bandwidth == 4.24e12 and gpu.flops_rate("dense") == 788e12
    # As reached before: what the catalogue has, of what was measured here.
    assert gpu.read_rate == pytest.approx(0.93 * 4.24e12) and gpu.flops_rate("experts") == pytest.approx(
        504e12, rel=0.01
    )
    assert gpu.memory_bytes == pytest.approx(150e9, rel=1e-3) and gpu.cache_bytes == 60 << 20
    assert link is not None and link.bandwidth == 370e9 and link.latency_s == 1.5e-6
    assert link.all_reduce_s(2, 16 * KIB) == pytest.approx(12e-6)
    assert link.all_reduce_s(4, 16 * KIB) == pytest.approx(24e-6)


def test_the_rest_of_what_was_found_is_for_people(tmp_path: Path) -> None:
    tables = tomllib.loads(written(measured(2, good(2, 'a "quoted" name')), tmp_path).read_text())["probe"]
    assert tables["device"][0]["name"] == 'a "quoted" name' and tables["device"][1]["pcie"] == "PCIe 5 x16"
    assert tables["pair"] == [{"gpus": [0, 1], "p2p": True, "gb_s": 370, "back_gb_s": 380, "latency_us": 1.5}]
    assert tables["disk"]["kib_gb_s"] == [[1024, 2]] and tables["nccl_all_reduce"]["2"] == [[16, 20]]


def test_a_pair_that_hangs_is_named_with_its_likely_cause_and_sums_go_without_p2p(tmp_path: Path) -> None:
    seen: list[tuple[str, int, dict[str, str]]] = []
    found = measured(3, good(3) | {"GPU 0 and GPU 2": HANGS, "sums over 3 GPUs": {"sums": [(1024, 3e-5)]}}, seen)
    (problem, sums) = found.problems
    assert problem.startswith(f"P2P between GPU 0 and GPU 2: {HANGS}; likely an IOMMU or PCIe ACS")
    assert "dmar0 is on" in problem and "iommu=pt" in problem and "NCCL_P2P_DISABLE=1" in problem
    assert sums == "the sums in the file are those without P2P"
    assert {(ranks, env.get("NCCL_P2P_DISABLE")) for name, ranks, env in seen if "sums" in name} == {(2, "1"), (3, "1")}
    assert read_hardware(written(found, tmp_path)).gpus[2].slug == "h200"


def test_sums_that_hang_are_tried_without_p2p() -> None:
    answers = good(4) | {"sums over 2 GPUs": HANGS, "sums over 2 GPUs without P2P": {"sums": [(1024, 4e-5)]}}
    found = measured(4, answers)
    assert found.problems[0].startswith(
        f"sums over 2 GPUs: {HANGS}; without P2P they work: likely an IOMMU or PCIe ACS"
    )
    assert found.sums[2] == [(1024, 4e-5)] and 4 in found.sums


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"memory of GPU 1": {"bytes_per_s": 0.0}}, "memory of GPU 1: measured bytes_per_s 0, which cannot be"),
        ({"memory of GPU 1": {"bytes_per_s": float("nan")}}, "measured bytes_per_s nan, which cannot be"),
        ({"products on GPU 0": {"bfloat16": 1e20}}, "products on GPU 0: measured bfloat16 1e\\+20, which cannot be"),
        ({"GPU 0 and GPU 1": {"p2p": True, "there": 1e15, "back": 1e9, "latency_s": None}}, "measured there 1e\\+15"),
        ({"sums over 2 GPUs": {"sums": [(1024, -1.0)]}, "sums over 2 GPUs without P2P": HANGS}, "measured sums -1"),
        ({"memory of GPU 1": {"bytes_per_s": 1e12}}, "GPU 1 .NVIDIA H200.: its memory is copied at 1000 GB/s, 21% of"),
        (
            {"host and GPU 1": {"to_gpu": 1e9, "from_gpu": 1e9, "link": LINK | {"width": 1}}},
            "GPU 1 .NVIDIA H200.: its link runs at PCIe 5 x1 under load, GPU and slot can do PCIe 5 x16",
        ),
        (
            {"GPU 0 and GPU 1": {"p2p": False, "there": 3e10, "back": 3e10, "latency_s": 2e-5}},
            "P2P is off between GPUs 0 and 1 .the chipset does not support it.: .* through host memory",
        ),
        (
            {"GPU 0 and GPU 1": {"p2p": True, "there": 3e10, "back": 1e10, "latency_s": 2e-5}},
            "GPU 1 to GPU 0: 10 GB/s where 30 is usual here",
        ),
        ({"disk of .": ". is memory (tmpfs), not a disk"}, "--path .: . is memory .tmpfs., not a disk"),
        (
            {"disk of .": {"reads": [(1 << 20, 2e9)], "direct": False, "filesystem": "odd"}},
            "--path .: reads cannot pass by the page cache",
        ),
    ],
)
def test_what_is_wrong_is_said_and_the_file_is_written_all_the_same(
    change: Answers, problem: str, tmp_path: Path
) -> None:
    found = measured(2, good(2) | change)
    assert found.problems
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError("\n".join(found.problems))
    assert len(read_hardware(written(found, tmp_path)).gpus) == 2
    assert tomllib.loads(hardware_text(found))["probe"]["problems"] == found.problems


def test_a_gpu_that_does_not_answer_is_left_out_of_pairs_and_groups(tmp_path: Path) -> None:
    seen: list[tuple[str, int, dict[str, str]]] = []
    found = measured(4, good(4) | {"GPU 2": HANGS}, seen)
    names = [name for name, _, _ in seen]
    assert "GPU 0 and GPU 3" in names and "GPU 0 and GPU 2" not in names
    assert "sums over 2 GPUs" in names and "sums over 4 GPUs" not in names
    assert found.problems == [f"GPU 2: {HANGS}"]
    assert len(read_hardware(written(found, tmp_path)).gpus) == 3


def test_a_scratch_file_of_a_killed_process_is_deleted(tmp_path: Path) -> None:
    def run(tasks: Sequence[Task], ranks: int, env: Mapping[str, str]) -> Iterator[Outcome]:
        for task in tasks:
            if task.subject != "disk":
                yield Outcome(task, good(1)[task.name])
                continue
            (tmp_path / task.arguments["scratch"]).touch()
            yield Outcome(task, None, HANGS)

    found = measure_machine(ProbeConfig(path=str(tmp_path)), 1, run, lambda _text: None)
    assert found.problems == [f"--path {tmp_path}: {HANGS}"] and list(tmp_path.iterdir()) == []


def test_where_no_device_answers_there_is_no_file() -> None:
    with pytest.raises(Fault, match=f"GPU 0: {HANGS}"):
        measured(1, good(1) | {"GPU 0": HANGS})


def test_an_unknown_gpu_without_figures_has_no_entry() -> None:
    answers = good(1, "A GPU of nobody") | {"memory of GPU 0": "it broke"}
    with pytest.raises(Fault, match="nothing was measured that a plan could go by; memory of GPU 0: it broke"):
        hardware_text(measured(1, answers))


def test_a_known_gpu_without_figures_has_those_of_the_catalogue(tmp_path: Path) -> None:
    found = measured(1, good(1) | {"memory of GPU 0": "it broke", "products on GPU 0": "it broke"})
    hardware = read_hardware(written(found, tmp_path))
    assert hardware.gpus[0].bandwidth == 4.8e12 and "not measured, from the catalogue" in hardware.gpus[0].source


def test_gpus_that_differ_are_entries_of_their_own(tmp_path: Path) -> None:
    answers = good(3) | {"memory of GPU 1": {"bytes_per_s": 3e12}, "memory of GPU 2": {"bytes_per_s": 4.2e12}}
    hardware = read_hardware(written(measured(3, answers | {"sums over 3 GPUs": {"sums": [(1024, 3e-5)]}}), tmp_path))
    assert [gpu.slug for gpu in hardware.gpus] == ["h200", "h200-gpu1", "h200"]
    assert hardware.gpus[0].bandwidth == 4.2e12 and hardware.gpus[1].bandwidth == 3e12


def test_groups_are_powers_of_two_and_all() -> None:
    assert [group_sizes(ranks) for ranks in (0, 1, 2, 6, 8)] == [[], [], [2], [2, 4, 6], [2, 4, 8]]


def test_figures_that_can_be_are_left_alone() -> None:
    outcome = Outcome(Task("a", "memory", {}, 1.0), {"bytes_per_s": 1e10})
    assert believed(outcome) is outcome


def test_simulate_runs_on_a_measured_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], configs: Callable[[str], str]
) -> None:
    path = written(measured(2, good(2) | {"memory of GPU 1": {"bytes_per_s": 3e12}}), tmp_path)
    flags = ["--tp", "2", "--hardware", str(path), "--concurrency", "1", "--requests", "1", "--output", "5"]
    assert headrace(["simulate", configs("k2-slice"), *flags]) == 0
    assert "h200 and h200-gpu1, links: here" in capsys.readouterr().out
    assert headrace(["simulate", configs("k2-slice"), "--pp", "4", "--hardware", str(path)]) == 2
    assert "has 2 GPUs, the layout needs 4 of a host" in capsys.readouterr().err
