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

DOCS = Path(__file__).parents[2] / "docs"
ROW = re.compile(r"^\| `(--[\w-]+)[^|]*` \| ([^|]+) \|", re.MULTILINE)


PAGES = [("serve.md", ServeConfig), ("bench.md", BenchConfig), ("simulate.md", SimulateConfig), ("plan.md", PlanConfig)]
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
