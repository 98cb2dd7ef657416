"""Hardware files, whoever wrote them."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.main import run
from headrace.errors import UserError
from headrace.plan.hardware_file import read_hardware
from headrace.plan.machines import Here, find_machine
from headrace.plan.options import HardwareConfig

TEXT = """
[machine]
gpus = ["new", "old", "new"]
link = "bus"
[assumed]
read_share = 0.8
dense_share = 0.7
expert_share = 0.6
attention_share = 0.5
launch_us = 2.0
source = "a guess"
[gpu.new]
name = "New"
memory_gib = 64
memory_gb_s = 3000
cache_mib = 64
bf16_tflops = 500
link = "bus"
[gpu.old]
name = "Old"
memory_gib = 32
memory_gb_s = 1000
cache_mib = 32
bf16_tflops = 100
link = "bus"
[link.bus]
name = "Bus"
gb_s = 50
latency_us = 1
hop_us = 1
source = "its maker"
[network]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "here.toml").write_text(TEXT)
    return tmp_path / "here.toml"


def test_ranks_take_the_gpus_in_order(path: Path) -> None:
    machine = read_hardware(path).machine(2, links=None, num_hosts=1, network=None)
    assert [gpu.slug for gpu in machine.gpus] == ["new", "old"]
    assert machine.link is not None and machine.link.slug == "bus" and machine.network is None


def test_several_such_hosts_with_a_network_of_the_catalogue(path: Path) -> None:
    machine = read_hardware(path).machine(4, links="none", num_hosts=2, network="10gbe")
    assert [gpu.slug for gpu in machine.gpus] == ["new", "old"] * 2 and machine.link is None
    machine = read_hardware(path).machine(4, links="nvlink-h200", num_hosts=2, network="10gbe")
    assert machine.link is not None and machine.link.slug == "nvlink-h200"
    assert machine.network is not None and machine.network.slug == "10gbe"


@pytest.mark.parametrize(
    ("ranks", "hosts", "network", "message"),
    [
        (4, 1, None, "--hardware .*here.toml: has 3 GPUs, the layout needs 4 of a host"),
        (4, 3, "10gbe", "--hosts 3: does not divide the layout's 4 GPUs"),
        (4, 2, None, "--hosts 2: needs a --network between them, one of 400gbe"),
        (2, 1, "10gbe", "--network 10gbe: is between hosts, and --hosts is 1"),
    ],
)
def test_layouts_that_do_not_do(path: Path, ranks: int, hosts: int, network: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_hardware(path).machine(ranks, links=None, num_hosts=hosts, network=network)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"old", ', '"odd", ', "'odd' is missing"),
        ('link = "bus"\n[assumed]', 'link = "odd"\n[assumed]', "'odd' is missing"),
        ("[machine]", "[else]", "'machine' is missing"),
        ("memory_gib = 64\n", "", "'memory_gib' is missing"),
        ("memory_gib = 64", 'memory_gib = "x"', "not a hardware file"),
        ("[machine]", "[machine", "not a hardware file"),
        ('["new", "old", "new"]', "[]", "names no GPU"),
        ('["new", "old", "new"]', "7", "not a hardware file"),
    ],
)
def test_a_file_that_is_none(path: Path, old: str, new: str, message: str) -> None:
    path.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(UserError, match=f"--hardware .*here.toml: {message}"):
        read_hardware(path)


def test_no_file() -> None:
    with pytest.raises(UserError, match="--hardware /nowhere: cannot be read: No such file"):
        read_hardware(Path("/nowhere"))


@pytest.mark.parametrize("flags", [(), ("--gpu", "h200", "--hardware", "x")])
def test_hardware_is_named_or_a_file(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "m", *flags]) == 2
    assert capsys.readouterr().err.strip() == "headrace simulate: --gpu and --hardware: give one of them"


def test_plan_and_simulate_read_the_same_file(tmp_path: Path) -> None:
    """Counts, JSON, hosts and a network: one reader, whoever asks."""
    file = tmp_path / "machine.json"
    file.write_text('{"machine": {"gpus": [["h200", 2], "rtx-5090", "h200"], "hosts": 2, "network": "10gbe"}}')
    whole = find_machine(HardwareConfig(hardware=str(file)), None, Here)
    assert whole == read_hardware(file).whole()
    assert [gpu.slug for gpu in whole.gpus] == ["h200", "h200", "rtx-5090", "h200"] and whole.num_hosts == 2
    assert whole.link is not None and whole.link.slug == "pcie5-x16-host"  # unlike GPUs meet at the slower link
    part = read_hardware(file).machine(2, links="pcie4-x16", num_hosts=1, network=None)
    assert part.link is not None and part.link.slug == "pcie4-x16"
