"""The flags are frozen: a change here is a change for everyone who wrote a script."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field
from typing import Any

import pytest

from headrace.bench.config import BenchConfig
from headrace.cli.flags import build, flags_of
from headrace.config import ServeConfig
from headrace.errors import UserError

SERVE = """
--model        str | None                              None
--device       Literal['auto', 'cpu', 'cuda']          'auto'
--dtype        Literal['auto', 'float32', 'bfloat16']  'auto'
--max-len      int | None                              None
--seed         int                                     0
--attention    Literal['auto', 'torch', 'triton']      'auto'
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
--transport    Literal['ipc', 'tcp']                   'ipc'
--timeout      float                                   60.0
--edges        Literal['auto', 'nccl']                 'auto'
--all-reduce   Literal['auto', 'nccl']                 'auto'
--trace        str | None                              None
--host         str                                     '127.0.0.1'
--port         int                                     8000
--served-name  str | None                              None
--api-key      str | None                              None
--json-ready   bool                                    False
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


@pytest.mark.parametrize("config", [ServeConfig, BenchConfig])
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
