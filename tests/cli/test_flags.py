"""The flags are frozen: a change here is a change for everyone who wrote a script."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench.config import BenchConfig
from headrace.cli.flags import arguments, build, flags_of
from headrace.cli.main import COMMANDS, run
from headrace.config import EngineConfig, HttpConfig, LayoutConfig, ModelConfig, RunConfig, ScheduleConfig, ServeConfig
from headrace.doctor.config import DoctorConfig
from headrace.errors import UserError
from headrace.probe.config import ProbeConfig
from headrace.service.config import ServiceConfig
from headrace.wait.config import WaitConfig

words = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1).filter(lambda text: text[0] != "-")
serve_configs = st.builds(
    ServeConfig,
    engine=st.builds(
        EngineConfig,
        model=st.builds(
            ModelConfig,
            model=st.none(),
            device=st.sampled_from(["auto", "cpu"]),
            max_len=st.none() | st.integers(2, 1 << 40),
            graphs=st.booleans(),
        ),
        layout=st.builds(
            LayoutConfig, pp=st.just(2), split=st.none() | st.tuples(st.integers(1, 99), st.integers(1, 9))
        ),
        schedule=st.builds(ScheduleConfig, kv_memory=st.none() | st.integers(1, 1 << 50)),
        run=st.builds(RunConfig, timeout_s=st.floats(0.1, 1e6), trace=st.none() | words),
    ),
    http=st.builds(HttpConfig, port=st.integers(0, 65535), served_name=st.none() | words),
    json_ready=st.booleans(),
)

SERVE = """
--model        str | None                              None
--device       Literal['auto', 'cpu', 'cuda']          'auto'
--dtype        Literal['auto', 'float32', 'bfloat16']  'auto'
--max-len      int | None                              None
--seed         int                                     0
--attention    Literal['auto', 'torch', 'triton', 'flashinfer']  'auto'
--graphs       bool                                    True
--weights      Literal['checkpoint', 'random']         'checkpoint'
--routing      Literal['model', 'uniform']             'model'
--pp           int                                     1
--tp           int                                     1
--ep           int                                     1
--split        tuple[int, ...] | None                  None
--layout       str | None                              None
--max-running  int                                     256
--chunk        int | None                              None
--page-size    int                                     16
--kv-memory    int | None                              None
--run-ahead    int | None                              None
--balance      Literal['auto', 'level']                'auto'
--prefix-cache bool                                    True
--policy       Literal['fcfs', 'priority']             'fcfs'
--max-waiting  int | None                              None
--transport    Literal['ipc', 'tcp']                   'ipc'
--timeout      float                                   600.0
--stall-timeout float                                  60.0
--edges        Literal['auto', 'nccl']                 'auto'
--all-reduce   Literal['auto', 'nccl']                 'auto'
--trace        str | None                              None
--host         str                                     '127.0.0.1'
--port         int                                     8000
--served-name  str | None                              None
--api-key      str | None                              None
--drain-timeout float                                  30.0
--json-ready   bool                                    False
--diagnostics  str | None                              None
"""

BENCH = """
--url          str                                     'http://127.0.0.1:8000'
--model        str | None                              None
--api-key      str | None                              None
--concurrency  tuple[int, ...]                         (1, 4, 16, 32)
--input        int                                     64
--output       int                                     64
--requests     int | None                              None
--duration     float | None                            None
--timeout      float                                   600.0
--seed         int | None                              None
--json         bool                                    False
"""

PROBE = """
--out          str | None                              None
--path         str                                     '.'
--quick        bool                                    False
"""

WAIT = """
--url          str | None                              None
--unit         str | None                              None
--ssh          str | None                              None
--pid          int | None                              None
--api-key      str | None                              None
--every        float                                   5.0
--timeout      float                                   1800.0
--no-probe     bool                                    False
--json         bool                                    False
"""

SERVICE = """
--wait         bool                                    False
--user         bool                                    False
--system       bool                                    False
--run-as       str | None                              None
--dry-run      bool                                    False
"""


def table(config: type[Any]) -> list[tuple[str, str, str]]:
    """Name, type and default of every flag."""
    return [(flag.name, type_name(flag.type), default(flag.default)) for flag in flags_of(config)]


def type_name(annotation: Any) -> str:
    plain = isinstance(annotation, type) and not hasattr(annotation, "__args__")
    return annotation.__name__ if plain else str(annotation).replace("typing.", "")


def default(value: Any) -> str:
    return "required" if value is MISSING else repr(value)


def frozen(text: str) -> list[tuple[str, str, str]]:
    rows = []
    for line in text.strip().splitlines():
        name, rest = line.split(maxsplit=1)
        kind, value = rest.rsplit("  ", maxsplit=1)
        rows.append((name, kind.strip(), value.strip()))
    return rows


def test_the_flags_of_serve() -> None:
    assert table(ServeConfig) == frozen(SERVE)


def test_the_flags_of_bench() -> None:
    assert table(BenchConfig) == frozen(BENCH)


def test_the_flags_of_probe() -> None:
    assert table(ProbeConfig) == frozen(PROBE)


def test_the_flags_of_wait() -> None:
    assert table(WaitConfig) == frozen(WAIT)


def test_the_flags_of_service_are_its_own_around_those_of_serve() -> None:
    first, second, *rest = table(ServiceConfig)
    assert (first[0], second) == ("--action", ("--name", "str", "required"))
    assert rest == frozen(SERVE) + frozen(SERVICE)


# Each makes the whole command line afresh.
@settings(max_examples=8)
@given(serve_configs)
def test_a_configuration_can_be_written_as_a_command_line(config: ServeConfig) -> None:
    seen: list[ServeConfig] = []

    def record(found: ServeConfig) -> int:
        seen.append(found)
        return 0

    command = replace(COMMANDS["serve"], call=record)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(COMMANDS, "serve", command)
        patch.delenv("HEADRACE_API_KEY", raising=False)
        assert run(["serve", *arguments(config)]) == 0
    assert seen == [config]


@pytest.mark.parametrize("config", [ServeConfig, BenchConfig, ProbeConfig, WaitConfig, ServiceConfig, DoctorConfig])
def test_every_flag_says_what_it_is(config: type[Any]) -> None:
    assert [flag.name for flag in flags_of(config) if not flag.help] == []


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: int = 1
    """How deep,
    in all."""
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    name: str
    """What it is called."""
    limit_s: float = 1.0

    def __post_init__(self) -> None:
        if self.limit_s <= 0:
            raise UserError(f"--limit {self.limit_s}: must be above 0")


def test_a_tree_is_read_in_order_with_its_docstrings() -> None:
    assert [(flag.name, flag.default, flag.help) for flag in flags_of(Outer)] == [
        ("--depth", 1, "How deep, in all."),
        ("--sizes", (), ""),
        ("--name", MISSING, "What it is called."),
        ("--limit", 1.0, ""),
    ]


def test_a_tree_is_built_from_what_is_given() -> None:
    assert build(Outer, {"depth": 3, "name": "x"}) == Outer(inner=Inner(depth=3), name="x")
    with pytest.raises(UserError, match="^--limit 0: must be above 0$"):
        build(Outer, {"name": "x", "limit_s": 0})
