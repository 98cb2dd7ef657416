"""The KV cache's size and the stages' counters; the workers' side is played by plain sockets."""

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
from headrace.step import (
    Allocate,
    Join,
    Loaded,
    StageStats,
    Start,
    StepPlan,
    StepResult,
    Stop,
    ToWorkerMessage,
    WorkerMessage,
    WorkerStats,
)

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

    def say(self, rank: int, message: WorkerMessage) -> None:
        self.workers[rank].send(msgspec.msgpack.encode(message))

    def hear(self, rank: int) -> Start | Allocate | StepPlan | Stop:
        assert self.workers[rank].poll(5000)
        return msgspec.msgpack.decode(self.workers[rank].recv(), type=ToWorkerMessage)

    def close(self) -> None:
        for socket in (*self.workers, self.listener.clients, self.listener.workers):
            socket.close(linger=0)
        self.context.term()


class Clock:
    """Seconds that pass when told to."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


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


# --- where a stage's time goes --------------------------------------------------------------------------------------


class Stages(Stand):
    """Two stages on a clock that the test moves."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.mesh = build_mesh(LayoutConfig(pp=2), K25)
        super().__init__(directory, self.mesh)
        load(self, self.mesh, 1000 * LATENT)
        monkeypatch.setattr("headrace.engine.executor.time", self.clock)

    def tell(
        self, rank: int, num_steps: int, seconds: tuple[float, float, float, float], open_s: float = 0.0
    ) -> list[StageStats]:
        """A worker's counters: busy, waits for activations and for tokens, communication; what stages say then."""
        busy, activations, tokens, communication = seconds
        self.say(rank, WorkerStats(rank, num_steps, 0, busy, activations, tokens, communication, 0.0, open_s))
        assert self.executor.socket.poll(5000)
        assert not list(self.executor.results())
        return self.executor.stage_stats()

    def finish(self, plan_id: int) -> None:
        """The last stage answers."""
        self.say(1, StepResult(plan_id, b""))
        assert self.executor.socket.poll(5000)
        assert [result.plan_id for result in self.executor.results()] == [plan_id]


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stages]:
    made = Stages(tmp_path, monkeypatch)
    yield made
    made.close()


def parts(stage: StageStats) -> tuple[float, ...]:
    waits = stage.activations_wait_s, stage.tokens_wait_s, stage.plan_wait_s
    assert sum((stage.busy_s, *waits, stage.communication_s)) == pytest.approx(stage.active_s)
    return stage.active_s, stage.busy_s, *waits, stage.communication_s


def test_what_a_stage_does_not_account_for_it_waited_for_a_plan(stages: Stages) -> None:
    executor, clock = stages.executor, stages.clock
    assert [parts(one) for one in executor.stage_stats()] == [(0.0,) * 6] * 2
    executor.send(StepPlan(0, b""))
    clock.now += 4
    stages.tell(0, 1, (3.0, 0.0, 0.5, 0.25))
    clock.now += 6
    settled = [executor.is_settled]
    stages.finish(0)
    settled.append(executor.is_settled)
    stages.tell(1, 1, (5.0, 4.0, 0.0, 0.0))
    assert [*settled, executor.is_settled] == [False, False, True]
    clock.now += 1000  # nothing is in flight
    first, second = executor.stage_stats()
    assert parts(first) == (10.0, 3.0, 0.0, 0.5, 6.25, 0.25)
    assert parts(second) == (10.0, 5.0, 4.0, 0.0, 1.0, 0.0)


def test_a_stage_that_is_at_work_has_its_time_up_to_its_last_word(stages: Stages) -> None:
    executor, clock = stages.executor, stages.clock
    executor.send(StepPlan(0, b""))
    executor.send(StepPlan(1, b""))
    clock.now += 4
    first, second = stages.tell(0, 1, (3.0, 0.0, 0.0, 0.0), open_s=0.75)
    clock.now += 50
    # A quarter of a second before the first step; what has passed since it may be its second step.
    assert [parts(one) for one in (first, executor.stage_stats()[0])] == [(3.25, 3.0, 0.0, 0.0, 0.25, 0.0)] * 2
    assert parts(second) == (0.0,) * 6
    # Its counters come together: a share of them is never above one.
    assert parts(stages.tell(0, 2, (53.5, 0.0, 0.0, 0.0))[0]) == (54.0, 53.5, 0.0, 0.0, 0.5, 0.0)


def test_counters_never_fall_back(stages: Stages) -> None:
    executor, clock = stages.executor, stages.clock
    executor.send(StepPlan(0, b""))
    clock.now += 2
    assert parts(stages.tell(0, 1, (1.0, 0.0, 0.0, 0.0))[0])[4] == 1.0
    clock.now += 2
    assert parts(executor.stage_stats()[0])[4] == 3.0  # idle while the other stage is not
    executor.send(StepPlan(1, b""))
    assert parts(executor.stage_stats()[0])[4] == 3.0
    # A word that was quick on its way, after one that was slow.
    clock.now += 1
    assert parts(stages.tell(0, 2, (2.125, 0.0, 0.0, 0.0))[0]) == (5.125, 2.125, 0.0, 0.0, 3.0, 0.0)
