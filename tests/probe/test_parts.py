"""The measurements themselves, small ones, on this machine's processor and disk; and what is read from the system."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.cli.main import run as headrace
from headrace.errors import Fault
from headrace.plan.hardware import catalogue
from headrace.plan.hardware_file import read_hardware
from headrace.probe import disk
from headrace.probe import run as probe_run
from headrace.probe.device import last_cache, processor_name
from headrace.probe.link import PcieLink, parse_link, parse_p2p
from headrace.probe.run import run_in_processes
from headrace.probe.task import Outcome, Task
from headrace.probe.words import iommu
from headrace.probe.write import known_gpus

SMALL = {"memory": {"most_bytes": 1 << 20}, "product": {"size": 64}, "disk": {"num_bytes": 9 << 20}}
TOPOLOGY = """
\tGPU0\tGPU1\tGPU2
 GPU0\tX\tOK\tCNS
 GPU1\tOK\tX\tGNS
 GPU2\tCNS\tGNS\tX

Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
"""


def test_a_processor_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def small(tasks: Sequence[Task], ranks: int, env: Mapping[str, str]) -> Iterator[Outcome]:
        for task in tasks:
            assert task.deadline_s > 0
        budget = {"budget_s": 0.02}
        return run_in_processes(
            [
                replace(
                    task,
                    arguments=task.arguments
                    | ({"effort": 0.1} if task.subject == "sums" else {} if task.subject == "device" else budget)
                    | SMALL.get(task.subject, {}),
                    deadline_s=120.0,
                )
                for task in tasks
            ],
            ranks,
            env,
        )

    monkeypatch.setattr(probe_run, "run_in_processes", small)
    monkeypatch.setattr(probe_run, "gpus_here", lambda: 0)
    monkeypatch.setattr(probe_run, "num_gpus", lambda: 0)
    monkeypatch.setattr(probe_run, "num_cores", lambda: 2)
    out = tmp_path / "here.toml"
    assert headrace(["probe", "--quick", "--path", str(tmp_path), "--out", str(out)]) == 0
    said = capsys.readouterr().err
    for part in ("the processor: ", "GB/s", "float32", "sums over 2 processes: 1 KiB", f"written to {out}"):
        assert part in said
    hardware = read_hardware(out)
    (gpu,) = hardware.gpus
    assert 1e8 < gpu.bandwidth < 1e12 and 1e7 < gpu.bf16_flops < 1e14 and gpu.memory_bytes > 1 << 28
    link = hardware.machine(1, links=None, num_hosts=1, network=None).link
    assert link is not None and 1e-6 < link.all_reduce_s(2, 1 << 20) < 10
    if "problem" not in said:  # a folder in memory has no disk
        reads = tomllib.loads(out.read_text())["probe"]["disk"]["kib_gb_s"]
        assert [size for size, _ in reads] == [64, 256, 1024, 8192]
    assert [path.name for path in tmp_path.iterdir()] == ["here.toml"]


def test_a_file_that_is_there_is_read_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "filesystem", lambda path: "ext4")
    there = tmp_path / "model.safetensors"
    there.write_bytes(bytes(9 << 20))
    monkeypatch.setattr(disk, "_write", lambda path, num_bytes: pytest.fail("wrote a file"))
    reads = disk.measure(str(tmp_path), "scratch", 9 << 20, 0.02)["reads"]
    assert [size for size, _ in reads] == list(disk.SIZES) and all(rate > 0 for _, rate in reads)
    assert there.exists()


def test_memory_is_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "filesystem", lambda path: "tmpfs")
    with pytest.raises(Fault, match="is memory .tmpfs., not a disk"):
        disk.measure(str(tmp_path), "scratch", 1 << 20, 0.01)


def test_without_room_it_is_said_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, num_bytes: int) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "filesystem", lambda path: "ext4")
    monkeypatch.setattr(disk, "_write", full)
    with pytest.raises(Fault, match="No space left on device"):
        disk.measure(str(tmp_path), "scratch", 1 << 20, 0.01)
    assert list(tmp_path.iterdir()) == []


def test_a_link_below_what_it_can() -> None:
    assert parse_link("5, 5, 16, 16\n") == PcieLink(5, 5, 16, 16)
    x1 = parse_link("4, 5, 1, 16")
    assert x1 is not None and x1.below and x1.text == "PCIe 4 x1"
    assert parse_link("5, 5, 16, 16") and not PcieLink(5, 5, 16, 16).below
    assert parse_link("[N/A], [N/A], [N/A], [N/A]") is None and parse_link("") is None


def test_why_the_driver_allows_no_p2p() -> None:
    chipset, gpu = "the chipset does not support it", "the GPU or its driver does not support it"
    assert parse_p2p(TOPOLOGY) == {(0, 2): chipset, (1, 2): gpu, (2, 0): chipset, (2, 1): gpu}
    assert parse_p2p("") == {}


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA RTX 6000 Ada Generation", None),
        ("Intel(R) Xeon(R) Processor", None),
    ],
)
def test_a_gpu_is_known_by_its_drivers_name(name: str, slug: str | None) -> None:
    found = known_gpus(catalogue(), [name])
    assert (found[name].slug if found else None) == slug


def test_what_the_system_says_of_the_processor(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor: 0\nmodel name\t: A Processor\nmodel name\t: A Processor\n")
    assert processor_name(tmp_path / "cpuinfo") == "A Processor"
    assert processor_name(tmp_path / "none")
    for index, size in enumerate(("32K", "300M", "2048K")):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "size").write_text(size + "\n")
    assert last_cache(tmp_path) == 2 << 20


def test_what_the_system_says_of_its_iommu(tmp_path: Path) -> None:
    (tmp_path / "iommu").mkdir()
    (tmp_path / "cmdline").write_text("ro quiet")
    assert iommu(tmp_path / "iommu", tmp_path / "cmdline") == "the system shows no IOMMU, a host above it may have one"
    (tmp_path / "iommu" / "dmar0").mkdir()
    assert iommu(tmp_path / "iommu", tmp_path / "cmdline") == "dmar0 is on"
    (tmp_path / "cmdline").write_text("ro iommu=pt")
    assert iommu(tmp_path / "iommu", tmp_path / "cmdline") == "dmar0 is on, passing through"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--path", "/nowhere"], "headrace probe: --path /nowhere: not a folder"),
        (["--out", "/nowhere/x"], "headrace probe: --out /nowhere/x: its folder is not there"),
        (["--out", "/"], "headrace probe: --out /: a folder; name a file"),
    ],
)
def test_wrong_flags(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert headrace(["probe", *arguments]) == 2
    assert capsys.readouterr().err.strip() == message
