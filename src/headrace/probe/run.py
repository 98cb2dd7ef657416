"""`headrace probe`: what there is to measure, in order; findings made of the outcomes."""

from __future__ import annotations

import itertools
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from headrace.errors import Fault, UserError
from headrace.plan.hardware import catalogue
from headrace.probe.config import ProbeConfig
from headrace.probe.findings import Device, Findings, Pair, believed
from headrace.probe.link import PcieLink, p2p_reasons
from headrace.probe.measure import run_tasks
from headrace.probe.task import Outcome, Task
from headrace.probe.words import IN_WORDS, WITHOUT_P2P, broken_p2p, wrong_with
from headrace.probe.write import hardware_text, known_gpus
from headrace.supervise.devices import num_gpus, torch_has_cuda
from headrace.supervise.launch import Command, num_cores, python_module, rank_environment

DISK_BYTES = 512 << 20
PROCESSOR = "the processor"
Run = Callable[[Sequence[Task], int, Mapping[str, str]], Iterator[Outcome]]
"""Runs tasks in so many ranks, with more environment."""


def probe(config: ProbeConfig) -> int:
    """Measure, say how it goes on standard error, and write the file. Raises UserError or Fault."""
    found = measure_machine(config, gpus_here(), run_in_processes, _say)
    text = hardware_text(found)
    if config.out is None:
        sys.stdout.write(text)
    else:
        try:
            Path(config.out).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"--out {config.out}: cannot be written: {error.strerror or error}") from None
    for problem in found.problems:
        _say(f"problem: {problem}\n")
    if config.out is not None:
        _say(f"written to {config.out}: headrace simulate --hardware {config.out} ... reads it\n")
    return 0


def gpus_here() -> int:
    """GPUs that can be measured; 0 is the processor."""
    return num_gpus() if torch_has_cuda() else 0


def run_in_processes(tasks: Sequence[Task], ranks: int, env: Mapping[str, str]) -> Iterator[Outcome]:
    """Each set of processes finds together through a file of its own."""
    with tempfile.TemporaryDirectory(prefix="headrace-probe-") as folder:
        stores = itertools.count()

        def commands(left: Sequence[Task]) -> list[Command]:
            store = Path(folder) / f"store-{next(stores)}"
            base = (*python_module("headrace.probe"), "--tasks", msgspec.json.encode(list(left)).decode())
            place = ("--ranks", str(ranks), "--store", str(store))
            return [
                Command(
                    who=f"probe rank {rank}" if ranks > 1 else "probe",
                    argv=(*base, *place, "--rank", str(rank)),
                    env={**rank_environment(ranks), **env},
                )
                for rank in range(ranks)
            ]

        yield from run_tasks(tasks, commands, begun=lambda task: _say(f"{task.name}: "))


def measure_machine(config: ProbeConfig, gpus: int, run: Run, say: Callable[[str], None]) -> Findings:
    """All there is to find out. Raises Fault where not even a device answers."""
    found = Findings(disk_path=str(Path(config.path).resolve()))
    if not gpus and num_gpus():
        found.problems.append(
            f"{num_gpus()} GPUs are here, but this torch is a build without CUDA: the processor is measured"
        )
    _devices(config.effort, gpus, run, say, found)
    if not found.devices:
        raise Fault("; ".join(found.problems))
    answering = [device.gpu for device in found.devices if device.gpu is not None]
    broken = _pairs(config.effort, answering, run, say, found)
    # Ranks take GPUs by number: a group is as large as the first ones that answer.
    first = next((i for i, gpu in enumerate([*answering, -1]) if i != gpu), 0)
    _sums(config.effort, first, run, say, found, without_p2p=broken)
    _disk(config, run, say, found)
    known = known_gpus(catalogue(), (device.name for device in found.devices if device.gpu is not None))
    # The driver's numbers are ours only where all GPUs are visible.
    ask = any(not pair.p2p for pair in found.pairs) and "CUDA_VISIBLE_DEVICES" not in os.environ
    found.problems += wrong_with(found, known, p2p_reasons() if ask else {})
    return found


def _told(outcomes: Iterable[Outcome], say: Callable[[str], None]) -> Iterator[Outcome]:
    """The same, checked, and each said."""
    for outcome in map(believed, outcomes):
        said = outcome.problem if outcome.fields is None else IN_WORDS[outcome.task.subject](outcome.fields)
        say(f"{said}\n" if outcome.tried else f"{outcome.task.name}: {said}\n")
        yield outcome


def _devices(effort: float, gpus: int, run: Run, say: Callable[[str], None], found: Findings) -> None:
    tasks = []
    for gpu in range(gpus) if gpus else (None,):
        name, here = (PROCESSOR, {"gpu": None}) if gpu is None else (f"GPU {gpu}", {"gpu": gpu})
        budget = {"budget_s": (2.0 if gpu is None else 0.6) * effort}
        tasks += [
            Task(name, "device", here, 60 * effort, about=name, vital=True),
            Task(f"memory of {name}", "memory", here | budget, 30 * effort, about=name),
            Task(f"products on {name}", "product", here | budget, 30 * effort, about=name),
        ]
        if gpu is not None:
            tasks.append(Task(f"host and {name}", "host", here | budget, 30 * effort, about=name))
    by_gpu: dict[int | None, Device] = {}
    for outcome in _told(run(tasks, 1, {}), say):
        gpu, fields = outcome.task.arguments["gpu"], outcome.fields
        if fields is None:
            found.problems += [f"{outcome.task.name}: {outcome.problem}"] if outcome.tried else []
        elif outcome.task.subject == "device":
            by_gpu[gpu] = Device(
                gpu, fields["name"], fields["memory_bytes"], fields["cache_bytes"], fields.get("cores", 0)
            )
        elif gpu in by_gpu:
            _add(by_gpu[gpu], outcome)
    found.devices = list(by_gpu.values())


def _add(device: Device, outcome: Outcome) -> None:
    fields = outcome.fields
    assert fields is not None
    if outcome.task.subject == "memory":
        device.bandwidth = fields["bytes_per_s"]
    elif outcome.task.subject == "product":
        device.flops = dict(fields)
    else:
        device.to_gpu, device.from_gpu = fields["to_gpu"], fields["from_gpu"]
        device.link = PcieLink(**fields["link"]) if fields["link"] else None


def _pairs(effort: float, gpus: Sequence[int], run: Run, say: Callable[[str], None], found: Findings) -> bool:
    """Whether a pair is broken."""
    tasks = [
        Task(
            f"GPU {gpu} and GPU {peer}",
            "peer",
            {"gpu": gpu, "peer": peer, "budget_s": 0.4 * effort},
            20 * effort,
        )
        for gpu, peer in itertools.combinations(gpus, 2)
    ]
    broken, untried = False, 0
    for outcome in _told(run(tasks, 1, {}) if tasks else (), say):
        gpu, peer = outcome.task.arguments["gpu"], outcome.task.arguments["peer"]
        if not outcome.tried:
            untried += 1
        elif outcome.fields is None:
            broken = True
            found.problems.append(broken_p2p(gpu, peer, outcome.problem))
        else:
            found.pairs.append(
                Pair(gpu, peer, *(outcome.fields[name] for name in ("p2p", "there", "back", "latency_s")))
            )
    if untried:
        found.problems.append(f"P2P between {untried} more pairs was not tried")
    return broken


def group_sizes(ranks: int) -> list[int]:
    """Powers of two up to all ranks, and all ranks."""
    return sorted({size for size in (2, 4, 8, 16, 32) if size <= ranks} | ({ranks} if ranks > 1 else set()))


def _sums(
    effort: float, gpus: int, run: Run, say: Callable[[str], None], found: Findings, *, without_p2p: bool
) -> None:
    env = {"NCCL_P2P_DISABLE": "1"} if without_p2p else {}
    for size in group_sizes(gpus if found.on_gpus else max(2, min(4, num_cores()))):
        name, deadline_s = f"sums over {size} {'GPUs' if gpus else 'processes'}", 60 * effort
        # Its own deadline first: it knows what it waits for.
        arguments = {"gpus": gpus > 0, "one_shot": True, "effort": effort, "timeout_s": 0.7 * deadline_s}
        task = Task(name, "sums", arguments, deadline_s)
        (outcome,) = _told(run([task], size, env), say)
        if outcome.fields is None:
            problem = f"{name}: {outcome.problem}"
            if gpus and not env and "NCCL_P2P_DISABLE" not in os.environ:
                env = {"NCCL_P2P_DISABLE": "1"}
                (outcome,) = _told(run([replace(task, name=f"{name} without P2P")], size, env), say)
                if outcome.fields is not None:
                    problem += f"; without P2P they work: likely an IOMMU or PCIe ACS stands in its way; {WITHOUT_P2P}"
            found.problems.append(problem)
        if outcome.fields is None:
            break
        found.sums[size] = outcome.fields["sums"]
        if "nccl" in outcome.fields:
            found.nccl_sums[size] = outcome.fields["nccl"]
    if env:
        found.problems.append("the sums in the file are those without P2P")


def _disk(config: ProbeConfig, run: Run, say: Callable[[str], None], found: Findings) -> None:
    scratch = f".headrace-probe-{secrets.token_hex(4)}"
    arguments = {
        "path": config.path,
        "scratch": scratch,
        "num_bytes": int(DISK_BYTES * config.effort),
        "budget_s": 4.0 * config.effort,
    }
    task = Task(f"disk of {config.path}", "disk", arguments, 90 * config.effort)
    (outcome,) = _told(run([task], 1, {}), say)
    with suppress(OSError):  # where the process was killed it is still there
        (Path(config.path) / scratch).unlink(missing_ok=True)
    if outcome.fields is None:
        found.problems.append(f"--path {config.path}: {outcome.problem}")
        return
    found.disk_reads, found.disk_direct = outcome.fields["reads"], outcome.fields["direct"]
    if not found.disk_direct:
        found.problems.append(
            f"--path {config.path}: reads cannot pass by the page cache there; their rate may be memory's"
        )


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
