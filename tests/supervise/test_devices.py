"""Devices found without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config import DeviceName
from headrace.errors import UserError
from headrace.mesh import Mesh
from headrace.spec import Dtype
from headrace.supervise import devices
from headrace.supervise.devices import gpu_of, has_amx, num_gpus, resolve_device, resolve_dtype


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two GPUs and a torch built for them."""
    monkeypatch.setattr(devices, "num_gpus", lambda: 2)
    monkeypatch.setattr(devices, "torch_has_cuda", lambda: True)
    return monkeypatch


@pytest.mark.parametrize(("asked", "found"), [("auto", "cuda"), ("cuda", "cuda"), ("cpu", "cpu")])
def test_gpus_are_used_where_they_are(machine: pytest.MonkeyPatch, asked: DeviceName, found: str) -> None:
    assert resolve_device(asked, 2) == found


@pytest.mark.parametrize("lacking", ["num_gpus", "torch_has_cuda"])
def test_auto_falls_back_and_cuda_does_not(machine: pytest.MonkeyPatch, lacking: str) -> None:
    machine.setattr(devices, lacking, lambda: 0)
    assert resolve_device("auto", 8) == "cpu"
    with pytest.raises(UserError, match="^--device cuda: "):
        resolve_device("cuda", 1)


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_more_ranks_than_gpus_are_refused_with_both_numbers(machine: pytest.MonkeyPatch, asked: DeviceName) -> None:
    with pytest.raises(UserError, match="needs 3 GPUs, 2 visible"):
        resolve_device(asked, 3)


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 2), ("", 0), ("-1", 0), ("1", 1), ("0,1", 2), ("0,-1,1", 1), ("GPU-5f1a", 1)]
)
def test_gpus_are_counted_from_their_device_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert num_gpus(tmp_path) == count
    assert num_gpus(tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("line", "built"), [("cuda: Optional[str] = None", False), ("cuda: Optional[str] = '13.0'", True), ("", False)]
)
def test_torch_is_asked_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, built: bool
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip: Optional[str] = '6'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "torch", raising=False)
    assert devices.torch_has_cuda() is built


def test_amx_is_read_from_the_processors_flags(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert not has_amx(cpuinfo)
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu avx2 amx_bf16 amx_tile\n")
    assert has_amx(cpuinfo)
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu avx2\n")
    assert not has_amx(cpuinfo)


def test_the_type_follows_the_device_unless_it_is_said() -> None:
    fast: Dtype = "bfloat16" if has_amx() else "float32"
    assert resolve_dtype("auto", "cpu", "float16") == resolve_dtype("auto", "cpu", "bfloat16") == fast
    assert resolve_dtype("auto", "cuda", "float16") == "bfloat16"
    assert resolve_dtype("auto", "cuda", "float32") == "float32"
    assert resolve_dtype("bfloat16", "cpu", "float32") == "bfloat16"


@pytest.mark.parametrize(("pp", "tp"), [(2, 2), (2, 1), (4, 2), (3, 2)])
def test_no_communicator_has_one_gpu_twice(pp: int, tp: int) -> None:
    """Peers of a sum, and both ends of every edge, are on distinct GPUs even where two ranks share one."""
    gpus = 2
    mesh = Mesh(pp=pp, tp=tp, ep=1, split=(1,) * pp)
    at = [gpu_of(mesh, rank, gpus) for rank in range(mesh.num_ranks)]
    for stage in range(pp):
        assert len({at[rank] for rank in mesh.ranks_of(stage)}) == tp
    assert all(at[rank] != at[rank + tp] for rank in range(mesh.num_ranks - tp))
    assert [gpu_of(mesh, rank, 8) for rank in range(mesh.num_ranks)] == list(range(mesh.num_ranks))
