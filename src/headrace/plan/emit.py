"""The command that runs a layout: headrace's own, a systemd unit around it, or another engine's."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from headrace.errors import UserError
from headrace.plan.options import Emit
from headrace.plan.search import Layout, Question

SERVICE = """[Unit]
Description=headrace: {model}
After=network-online.target
Wants=network-online.target

[Service]
ExecStart={command}
Restart=on-failure
TimeoutStartSec=infinity
KillMode=mixed
TimeoutStopSec=60

[Install]
WantedBy=multi-user.target
"""


def emit(what: Emit, model: str, question: Question, layout: Layout) -> str:
    """Raises UserError where that engine cannot run the layout."""
    if not layout.fits:
        raise UserError(f"--emit {what}: no layout fits; --explain {layout.mesh.name} says why")
    if what == "headrace":
        return _headrace(what, model, question, layout)
    if what == "systemd":
        return SERVICE.format(model=model, command=_headrace(what, model, question, layout)).rstrip()
    return (_vllm if what == "vllm" else _sglang)(model, question, layout)


def _headrace(what: Emit, model: str, question: Question, layout: Layout) -> str:
    demand, mesh = question.demand, layout.mesh
    if layout.machine.num_hosts > 1:
        raise UserError(
            f"--emit {what}: headrace serve runs on one host yet, this layout is on {layout.machine.num_hosts}"
        )
    if demand.kv_dtype == "fp8":
        raise UserError(f"--emit {what}: --kv-dtype fp8 is priced for other engines, headrace serve does not have it")
    flags: dict[str, object] = {"--pp": mesh.pp, "--tp": mesh.tp}
    if mesh.ep > 1:
        flags["--ep"] = mesh.ep
    if mesh.pp > 1:
        flags["--split"] = _split(layout)
    if demand.max_len is not None:
        flags["--max-len"] = demand.max_len
    if demand.chunk is not None:
        flags["--chunk"] = demand.chunk
    flags["--max-running"] = question.limits.max_running
    return _command({}, ["headrace", "serve", model], flags)


def _vllm(model: str, question: Question, layout: Layout) -> str:
    """Its experts are spread over all of a stage's ranks or sliced over them."""
    mesh = layout.mesh
    if mesh.ep not in (1, mesh.tp):
        raise UserError(f"--emit vllm: {mesh.name}: vLLM spreads whole experts over all ranks of a stage or over none")
    flags: dict[str, object] = {"--pipeline-parallel-size": mesh.pp, "--tensor-parallel-size": mesh.tp}
    if mesh.ep > 1:
        flags["--enable-expert-parallel"] = ""
    flags["--max-model-len"] = question.longest
    flags["--max-num-seqs"] = question.limits.max_running
    if question.demand.kv_dtype == "fp8":
        flags["--kv-cache-dtype"] = "fp8"
    if layout.machine.num_hosts > 1:
        flags["--distributed-executor-backend"] = "ray"
    return _command(_partition("VLLM", layout), ["vllm", "serve", model], flags)


def _sglang(model: str, question: Question, layout: Layout) -> str:
    mesh = layout.mesh
    flags: dict[str, object] = {"--model-path": model, "--pp-size": mesh.pp, "--tp-size": mesh.tp}
    if mesh.ep > 1:
        flags["--ep-size"] = mesh.ep
    flags["--context-length"] = question.longest
    flags["--max-running-requests"] = question.limits.max_running
    if question.demand.kv_dtype == "fp8":
        flags["--kv-cache-dtype"] = "fp8_e4m3"
    if layout.machine.num_hosts > 1:
        flags |= {"--nnodes": layout.machine.num_hosts, "--node-rank": "$RANK", "--dist-init-addr": "$FIRST_HOST:20000"}
    return _command(_partition("SGLANG", layout), ["python", "-m", "sglang.launch_server"], flags)


def _partition(engine: str, layout: Layout) -> dict[str, str]:
    """The variable by which the engine splits layers as it is told and not by count."""
    return {f"{engine}_PP_LAYER_PARTITION": _split(layout)} if layout.mesh.pp > 1 else {}


def _split(layout: Layout) -> str:
    return ",".join(map(str, layout.mesh.split))


def _command(environment: Mapping[str, str], words: Sequence[str], flags: Mapping[str, object]) -> str:
    parts = [f"{name}={value}" for name, value in environment.items()]
    parts += [shlex.quote(word) for word in words]
    parts += [f"{name} {value}".rstrip() for name, value in flags.items()]
    return " ".join(parts)
