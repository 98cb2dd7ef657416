"""The KV cache's size: the least over the stages, whose layers decide; the workers' side is played by plain sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from headrace.channel import Listener, join, join_url
from headrace.config import EngineConfig, LayoutConfig, ScheduleConfig
from headrace.engine.executor import Executor
from headrace.errors import UserError
from headrace.mesh import Mesh, build_mesh
from headrace.model_config import spec_from_config
from headrace.step import Allocate, Join, Loaded, Prepared, Start, StepPlan, Stop, ToWorkerMessage

K25 = spec_from_config(json.loads((Path(__file__).parents[1] / "data/configs/kimi-k2.5/config.json").read_text()))
PAGE = 16
LATENT = 576 * 2 * PAGE
"""Bytes of a page of one layer."""


class Stand:
    """An executor and one socket a rank."""

    def __init__(self, directory: Path, mesh: Mesh, transport: str = "ipc") -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.listener = Listener(self.context, directory, transport)  # type: ignore[arg-type]
        config = EngineConfig(schedule=ScheduleConfig(page_size=PAGE))
        self.executor = Executor(self.listener.workers, config, mesh, "file:///store")
        url = join_url(directory, transport, "workers")  # type: ignore[arg-type]
        self.workers = [join(self.context, url, identity=f"rank-{r}".encode()) for r in range(mesh.num_ranks)]

    def say(self, rank: int, message: Join | Loaded | Prepared) -> None:
        self.workers[rank].send(msgspec.msgpack.encode(message))

    def hear(self, rank: int) -> Start | Allocate | StepPlan | Stop:
        assert self.workers[rank].poll(5000)
        return msgspec.msgpack.decode(self.workers[rank].recv(), type=ToWorkerMessage)

    def close(self) -> None:
        for socket in (*self.workers, self.listener.clients, self.listener.workers):
            socket.close(linger=0)
        self.context.term()


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    made = Stand(tmp_path, build_mesh(LayoutConfig(pp=8), K25))
    yield made
    made.close()


def load(stand: Stand, mesh: Mesh, memory: int) -> None:
    for rank in range(mesh.num_ranks):
        stand.say(rank, Join(rank, 1))
        layers = len(mesh.layers_of(mesh.stage_of(rank)))
        stand.say(rank, Loaded(rank, 10**9, LATENT * layers, memory, 1.0))
    assert len(stand.executor.load(lambda done, total: None, lambda: None)) == mesh.num_ranks


def test_pages_follow_from_the_stage_with_most_layers(stand: Stand) -> None:
    mesh = build_mesh(LayoutConfig(pp=8), K25)
    assert len(set(mesh.split)) > 1
    memory = 1000 * LATENT
    load(stand, mesh, memory)
    capacity = stand.executor.capacity(most_tokens=10**9)
    assert capacity.stage_tokens == tuple(1000 // layers * PAGE for layers in mesh.split)
    assert capacity.num_pages == 1000 // max(mesh.split)
    assert stand.executor.capacity(most_tokens=100).num_tokens == 112


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (LATENT * 8, r"^--kv-memory .* stage 5 needs"),
        (None, r"^stage 5 has .* left for the KV cache.*more --pp or --tp"),
    ],
)
def test_too_little_memory_names_flag_and_stage(stand: Stand, asked: int | None, words: str) -> None:
    mesh = build_mesh(LayoutConfig(pp=8), K25)
    load(stand, mesh, LATENT * 8)
    stand.executor._config = EngineConfig(schedule=ScheduleConfig(page_size=PAGE, kv_memory=asked))
    with pytest.raises(UserError, match=words):
        stand.executor.capacity(10**9)


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_start_plans_and_stop_reach_every_rank_in_order(tmp_path: Path, transport: str) -> None:
    mesh = build_mesh(LayoutConfig(pp=2), K25)
    stand = Stand(tmp_path, mesh, transport)
    load(stand, mesh, 1000 * LATENT)
    plans = [StepPlan(i, bytes(16)) for i in range(5)]
    for plan in plans:
        stand.executor.send(plan)
    stand.executor.stop()
    for rank in range(2):
        assert isinstance(stand.hear(rank), Start)
        assert [stand.hear(rank) for _ in range(5)] == plans
        assert isinstance(stand.hear(rank), Stop)
    stand.close()


def test_over_tcp_a_stranger_is_not_heard(tmp_path: Path) -> None:
    mesh = build_mesh(LayoutConfig(), K25)
    stand = Stand(tmp_path, mesh, "tcp")
    endpoints = json.loads((tmp_path / "endpoints.json").read_text())
    stranger = stand.context.socket(zmq.DEALER)
    stranger.connect(endpoints["workers"])
    stranger.send(b"not encrypted")
    load(stand, mesh, 1000 * LATENT)  # raises were the stranger's bytes taken for a worker's
    assert not stranger.poll(0)
    stranger.close(linger=0)
    stand.close()
