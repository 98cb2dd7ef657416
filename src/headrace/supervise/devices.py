"""Which device the ranks run on, found without torch: the count of GPUs and whether torch was built for them."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from headrace.config import DeviceName, DtypeName
from headrace.errors import UserError
from headrace.mesh import Mesh
from headrace.spec import Dtype

NVLINKS = 18
"""Of a GPU, at most."""
_DEV = Path("/dev")
_CPUINFO = Path("/proc/cpuinfo")


def resolve_device(asked: DeviceName, num_ranks: int) -> Literal["cpu", "cuda"]:
    """Resolve `--device`; `auto` is cuda where GPUs and a torch built for them are there.

    Raises UserError where cuda is asked for and cannot be had, or where there are fewer GPUs than ranks.
    """
    if asked == "cpu":
        return "cpu"
    gpus, built = num_gpus(), torch_has_cuda()
    if asked == "auto" and not (gpus and built):
        return "cpu"
    if not gpus:
        raise UserError("--device cuda: no NVIDIA GPU is visible here")
    if not built:
        raise UserError("--device cuda: the installed torch is a build without CUDA")
    if num_ranks > gpus * ranks_per_gpu(num_ranks, gpus):
        advice = "" if asked == "cuda" else "; --device cpu runs them on the processor"
        raise UserError(f"--pp times --tp needs {num_ranks} GPUs, {gpus} visible here{advice}")
    return "cuda"


def ranks_per_gpu(num_ranks: int, gpus: int) -> int:
    """Ranks that may share one GPU: one, or two where HEADRACE_SHARE_GPUS=1 tries a layout with too few GPUs."""
    return 2 if num_ranks > gpus and os.environ.get("HEADRACE_SHARE_GPUS") == "1" else 1


def gpu_of(mesh: Mesh, rank: int, gpus: int) -> int:
    """The GPU of a rank: its own; or, where there are fewer than ranks, one that none of its peers has.

    A communicator needs a GPU for each of its ranks. The peers are the ranks of the same stage, and those of the same
    tensor index in the stages beside it, so the stages take the GPUs in turn, each from another one on. The last stage
    is beside the first one too, so of an odd number of stages two would meet: those are for as many GPUs as ranks.
    """
    if mesh.num_ranks <= gpus:
        return rank
    return (rank % mesh.tp + mesh.stage_of(rank)) % gpus


def resolve_dtype(asked: DtypeName, device: Literal["cpu", "cuda"], stored: Dtype) -> Literal["float32", "bfloat16"]:
    """Resolve `--dtype` for a model stored as `stored`; `auto` is the type that the device multiplies fastest.

    That is bfloat16 on a GPU and on a processor with AMX tiles, float32 on any other; what is stored as float32 is
    never rounded unasked.
    """
    if asked != "auto":
        return asked
    if stored == "float32":
        return "float32"
    return "bfloat16" if device == "cuda" or has_amx() else "float32"


def has_amx(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether the processor has AMX tiles for bfloat16."""
    try:
        flags = next(line for line in cpuinfo.read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        return False
    return "amx_bf16" in flags.split()


def num_gpus(dev: Path = _DEV) -> int:
    """NVIDIA GPUs that this process may use."""
    present = sum(1 for path in dev.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    # The driver reads the list up to its first invalid entry; -1 is the usual one.
    entries = [entry.strip() for entry in visible.split(",")]
    stop = next((i for i, entry in enumerate(entries) if entry in ("", "-1")), len(entries))
    return stop if present else 0


def torch_has_cuda() -> bool:
    """Whether the installed torch was built for CUDA: read from its version file, since importing it takes seconds."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    try:
        text = Path(found.origin).with_name("version.py").read_text()
    except OSError:
        return False
    return re.search(r"^cuda\b[^=\n]*=\s*['\"]", text, re.MULTILINE) is not None


def describe_gpus() -> list[dict[str, Any]]:
    """What the driver says of every GPU and its links; empty where nvidia-ml-py or a driver is missing."""
    if importlib.util.find_spec("pynvml") is None:
        return []
    import pynvml as nvml

    try:
        nvml.nvmlInit()
        driver = _said(nvml, lambda: nvml.nvmlSystemGetDriverVersion())
        count = nvml.nvmlDeviceGetCount()
        return [{"gpu": i, "driver": driver} | _describe_gpu(nvml, i) for i in range(count)]
    except nvml.NVMLError as error:
        return [{"error": str(error)}]


def _describe_gpu(nvml: Any, index: int) -> dict[str, Any]:
    """Each entry by itself: a GPU that has failed still answers some questions."""
    try:
        gpu = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return {"error": str(error)}
    links = [_said(nvml, partial(nvml.nvmlDeviceGetNvLinkState, gpu, link)) for link in range(NVLINKS)]
    return {
        "name": _said(nvml, lambda: nvml.nvmlDeviceGetName(gpu)),
        "memory_total_bytes": _said(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).total),
        "memory_used_bytes": _said(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used),
        "temperature_c": _said(nvml, lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
        "power_mw": _said(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(gpu)),
        "pcie_generation": _said(nvml, lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(gpu)),
        "pcie_generation_max": _said(nvml, lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu)),
        "pcie_width": _said(nvml, lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu)),
        "pcie_width_max": _said(nvml, lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)),
        "pcie_replays": _said(nvml, lambda: nvml.nvmlDeviceGetPcieReplayCounter(gpu)),
        "nvlinks_active": sum(1 for link in links if link == 1),
        "uncorrected_errors": _said(
            nvml,
            lambda: nvml.nvmlDeviceGetTotalEccErrors(
                gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
        ),
    }


def _said(nvml: Any, ask: Callable[[], Any]) -> Any:
    """The answer, or the driver's refusal in its own words."""
    try:
        return ask()
    except nvml.NVMLError as error:
        return str(error)
