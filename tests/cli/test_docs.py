"""The pages of the commands name every flag there is, with its default, and none that there is not."""

from __future__ import annotations

import re
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.config import BenchConfig
from headrace.cli.flags import flags_of
from headrace.config import ServeConfig
from headrace.plan.config import SimulateConfig
from headrace.plan.options import PlanConfig
from headrace.probe.config import ProbeConfig
from headrace.service.config import ServiceConfig
from headrace.wait.config import WaitConfig

DOCS = Path(__file__).parents[2] / "docs"
ROW = re.compile(r"^\| `(--[\w-]+)[^|]*` \| ([^|]+) \|", re.MULTILINE)


PAGES = [
    ("serve.md", ServeConfig),
    ("bench.md", BenchConfig),
    ("plan.md", PlanConfig),
    ("simulate.md", SimulateConfig),
    ("probe.md", ProbeConfig),
    ("wait.md", WaitConfig),
]
BY_PLACE = {("serve.md", "model"), ("simulate.md", "model"), ("plan.md", "model")}


@pytest.mark.parametrize(("page", "config"), PAGES)
def test_every_flag_is_on_its_page(page: str, config: type[Any]) -> None:
    rows = dict(ROW.findall((DOCS / page).read_text()))
    flags = {flag.name: flag for flag in flags_of(config) if (page, flag.field) not in BY_PLACE}
    assert rows.keys() == flags.keys()
    for name, flag in flags.items():
        if flag.default not in (None, False, MISSING):
            shown = flag.show_default(flag.default)
            assert rows[name].strip("`") in (shown, str(shown).removesuffix(".0")), name


def test_the_page_of_services_has_the_flags_that_serve_has_not() -> None:
    rows = dict(ROW.findall((DOCS / "service.md").read_text()))
    shared = {flag.name for flag in flags_of(ServeConfig)}
    assert rows.keys() == {flag.name for flag in flags_of(ServiceConfig)} - shared - {"--action", "--name"}
