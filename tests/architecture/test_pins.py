"""What make installs is pinned, once, and is what the package asks for."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "requirements").glob("*.txt"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for file in FILES:
        for line in file.read_text().splitlines():
            if line and not line.startswith("#"):
                pin = Requirement(line)
                (spec,) = pin.specifier
                assert spec.operator == "==", line
                assert "*" not in spec.version, line
                found.setdefault(canonicalize_name(pin.name), set()).add(spec.version)
    return found


def test_every_line_names_one_version_and_files_agree() -> None:
    assert {name: versions for name, versions in pins().items() if len(versions) != 1} == {}


ASKED = [*PROJECT["dependencies"], *(text for extra in PROJECT["optional-dependencies"].values() for text in extra)]


@pytest.mark.parametrize("text", ASKED)
def test_what_the_package_asks_for_is_pinned_within_its_bounds(text: str) -> None:
    asked = Requirement(text)
    (version,) = pins()[canonicalize_name(asked.name)]
    assert version in asked.specifier
