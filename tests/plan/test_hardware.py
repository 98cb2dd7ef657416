from __future__ import annotations

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UserError
from headrace.plan.hardware import KIB, Curve, Link, Machine, build_catalogue, build_machine, catalogue

KNOWN = catalogue()


def test_every_row_has_a_source_and_names_what_there_is() -> None:
    assert {"rtx-pro-6000", "h200", "h100-sxm", "mi300x"} <= KNOWN.gpus.keys()
    assert {"pcie5-x16", "nvlink-h200"} <= KNOWN.links.keys()
    assert {"10gbe", "100gbe-tcp", "400gbe"} <= KNOWN.networks.keys()
    for gpu in KNOWN.gpus.values():
        assert gpu.source and gpu.link in KNOWN.links
        assert 0.5 <= gpu.read_share <= 1 and 0.3 <= gpu.dense_share <= 1 and 0.3 <= gpu.expert_share <= 1
    for link in (*KNOWN.links.values(), *KNOWN.networks.values()):
        assert link.source
        for curve in link.curves.values():
            sizes, times = zip(*curve.points, strict=True)
            assert list(sizes) == sorted(sizes) and list(times) == sorted(times)


def test_what_is_known_of_a_gpu() -> None:
    gpu = KNOWN.gpu("rtx-pro-6000")
    assert gpu.memory_bytes == pytest.approx(97_887 * 2**20, rel=1e-3)
    assert gpu.read_rate == pytest.approx(1.51e12, rel=0.01)  # the best public INT4 kernel
    assert gpu.flops_rate("dense") == pytest.approx(459e12, rel=0.01)  # measured products
    assert KNOWN.gpu("h200").flops_rate("experts") == pytest.approx(504e12, rel=0.01)


def test_a_gpu_is_one_entry() -> None:
    text = """
[assumed]
read_share = 0.8
dense_share = 0.7
expert_share = 0.6
attention_share = 0.5
launch_us = 2.0
overlap = 1
again_share = 0
[gpu.new]
name = "New"
memory_gib = 64
memory_gb_s = 3000
cache_mib = 64
bf16_tflops = 500
read_share = 0.9
link = "bus"
source = "its maker"
[link.bus]
name = "Bus"
gb_s = 50
latency_us = 1
hop_us = 1
source = "its maker"
[network]
"""
    new = build_catalogue(tomllib.loads(text)).gpu("new")
    assert (new.read_rate, new.flops_rate("attention"), new.launch_s) == (2.7e12, 250e12, 2e-6)


@pytest.mark.parametrize(
    ("slug", "nearest"),
    [
        ("rtx-pro6000", "rtx-pro-6000"),
        ("H-200", "h200"),
        ("4090", "rtx-4090"),
        ("a100", "a100-sxm"),
        ("h100", "h100-sxm"),
    ],
)
def test_a_wrong_name_brings_the_nearest(slug: str, nearest: str) -> None:
    with pytest.raises(UserError, match=rf"--gpu {slug}: no such GPU; nearest: .*{nearest}"):
        KNOWN.gpu(slug)


def test_a_name_like_nothing_brings_all() -> None:
    with pytest.raises(UserError, match="--network carrier-pigeon: no such network; known: 400gbe, 100gbe-rdma"):
        KNOWN.network("carrier-pigeon")
    with pytest.raises(UserError, match="--links pcie5: no such link; nearest: pcie5-x16"):
        KNOWN.link("pcie5")


def test_names_may_be_written_as_they_are_said() -> None:
    assert KNOWN.gpu("RTX Pro 6000").slug == "rtx-pro-6000"


def test_a_curve_goes_through_its_points_and_on() -> None:
    curve = Curve(((1024, 10e-6), (4096, 16e-6), (8192, 20e-6)))
    assert curve.at(1) == curve.at(1024) == 10e-6
    assert curve.at(2560) == pytest.approx(13e-6)
    assert curve.at(8192) == pytest.approx(20e-6)
    assert curve.at(12288) == pytest.approx(24e-6)
    assert Curve(((1024, 10e-6),)).at(10**9) == 10e-6


def test_all_reduces_are_the_measured_ones() -> None:
    tuned, plain = KNOWN.link("pcie5-x16"), KNOWN.link("pcie5-x16-nccl")
    assert tuned.all_reduce_s(8, 256 * KIB) == pytest.approx(37e-6)
    assert plain.all_reduce_s(8, 256 * KIB) == pytest.approx(85e-6)
    assert tuned.all_reduce_s(2, 14 * KIB) == pytest.approx(7.3e-6)
    assert tuned.all_reduce_s(1, 10**9) == 0


def test_a_group_that_nobody_measured_is_scaled_from_the_nearest() -> None:
    link = KNOWN.link("nvlink-h100")
    assert link.all_reduce_s(2, 8 * KIB) < link.all_reduce_s(4, 8 * KIB) < link.all_reduce_s(8, 8 * KIB)
    assert link.all_reduce_s(8, 8 * KIB) < link.all_reduce_s(16, 8 * KIB)


def test_without_a_curve_nccls_own_model_stands_in() -> None:
    link = KNOWN.link("nvlink-b200")
    # 6.6 us and 14 hops of 0.6; of 1 MiB each rank sends and gets 7/8, twice.
    assert link.all_reduce_s(8, 2**20) == pytest.approx(6.6e-6 + 14 * 0.6e-6 + 1.75 * 2**20 / 760e9)


@given(st.integers(2, 64), st.floats(1, 1e9), st.floats(1e9, 1e12), st.floats(1, 10))
def test_a_faster_link_never_takes_longer(size: int, num_bytes: float, bandwidth: float, factor: float) -> None:
    slow = Link(slug="", name="", bandwidth=bandwidth, latency_s=1e-6, hop_s=1e-6)
    fast = Link(slug="", name="", bandwidth=bandwidth * factor, latency_s=1e-6, hop_s=1e-6)
    assert fast.all_reduce_s(size, num_bytes) <= slow.all_reduce_s(size, num_bytes)


@given(st.sampled_from(sorted(KNOWN.links)), st.integers(2, 16), st.floats(0, 1e9), st.floats(0, 1e9))
def test_more_bytes_never_take_less(slug: str, size: int, some: float, more: float) -> None:
    link = KNOWN.link(slug)
    assert link.all_reduce_s(size, some) <= link.all_reduce_s(size, some + more) * (1 + 1e-12)


def test_ranks_fill_one_host_after_the_other() -> None:
    machine = build_machine(KNOWN, "h200", 8, links=None, num_hosts=2, network="10gbe")
    assert [machine.host_of(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    inside, across = machine.between((0, 3)), machine.between((3, 4))
    assert inside is not None and inside.slug == "nvlink-h200"
    assert across is not None and across.slug == "10gbe"


def test_no_links_price_nothing() -> None:
    machine = build_machine(KNOWN, "h200", 8, links="none", num_hosts=2, network="10gbe")
    assert machine.between((0, 1)) is None and machine.between((0, 7)) is None
    assert isinstance(machine, Machine)


@pytest.mark.parametrize(
    ("num_gpus", "hosts", "network", "message"),
    [
        (8, 3, "10gbe", "--hosts 3: does not divide the layout's 8 GPUs"),
        (8, 2, None, "--hosts 2: needs a --network between them, one of 400gbe"),
        (8, 1, "10gbe", "--network 10gbe: is between hosts, and --hosts is 1"),
    ],
)
def test_hosts_that_do_not_do(num_gpus: int, hosts: int, network: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_machine(KNOWN, "h200", num_gpus, links=None, num_hosts=hosts, network=network)
