"""A machine as it was measured: a file in the catalogue's form that also says which GPUs there are, and their link."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import UserError
from headrace.plan.hardware import Catalogue, Gpu, Machine, join, read_catalogue

MOST_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class HardwareFile:
    """`[machine]` names GPUs in the order of the ranks, of the file or of the catalogue, and what joins them."""

    path: Path
    known: Catalogue
    """The package's, with the file's own entries."""
    gpus: Sequence[Gpu]
    """Of all hosts of the file."""
    link: str | None
    """None: what the GPUs come with, the slowest where they differ; "none" prices no communication."""
    num_hosts: int = 1
    network: str | None = None

    def whole(self) -> Machine:
        """All that the file describes."""
        return join(self.gpus, self.known, self.link, self.num_hosts, self.network)

    def machine(self, num_ranks: int, *, links: str | None, num_hosts: int, network: str | None) -> Machine:
        """The first GPUs of so many such hosts, one a rank. Raises UserError as `build_machine` does."""
        if num_ranks % num_hosts:
            raise UserError(f"--hosts {num_hosts}: does not divide the layout's {num_ranks} GPUs")
        each = num_ranks // num_hosts
        if each > len(self.gpus):
            have = f"{len(self.gpus)} GPU" + ("s" if len(self.gpus) > 1 else "")
            raise UserError(f"--hardware {self.path}: has {have}, the layout needs {each} of a host")
        return join(tuple(self.gpus[:each]) * num_hosts, self.known, links or self.link, num_hosts, network)


def read_hardware(path: Path) -> HardwareFile:
    """Read what `headrace probe` wrote, or somebody by hand: TOML or JSON.

    `machine.gpus` lists slugs, one a GPU, or pairs of a slug and a count; `machine.link`, `machine.hosts` and
    `machine.network` may say how they are joined. Tables `gpu`, `link` and `network` define or change entries as the
    catalogue has them. Raises UserError naming --hardware and what is wrong.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES).decode()
        tables = json.loads(text) if text.lstrip().startswith("{") else tomllib.loads(text)
        known = read_catalogue({kind: tables.get(kind, {}) for kind in ("gpu", "link", "network")})
        machine = tables["machine"]
        gpus = tuple(known.gpus[slug] for slug in _slugs(machine["gpus"]))
        link, network = machine.get("link"), machine.get("network")
        if link not in (None, "none"):
            link = known.links[link].slug
        if network is not None:
            network = known.networks[network].slug
        found = HardwareFile(
            path=path, known=known, gpus=gpus, link=link, num_hosts=int(machine.get("hosts", 1)), network=network
        )
        if not gpus:
            raise UserError("names no GPU")
        if found.num_hosts < 1:
            raise UserError(f"machine.hosts is {found.num_hosts}")
        found.whole()
    except OSError as error:
        raise UserError(f"--hardware {path}: cannot be read: {error.strerror or error}") from None
    except KeyError as error:
        raise UserError(f"--hardware {path}: {error.args[0]!r} is missing") from None
    except UserError as error:
        raise UserError(f"--hardware {path}: {error}") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"--hardware {path}: not a hardware file: {error}") from None
    return found


def _slugs(gpus: Any) -> list[str]:
    if not isinstance(gpus, list):
        raise TypeError("machine.gpus is not a list")
    found: list[str] = []
    for entry in gpus:
        slug, count = (entry, 1) if isinstance(entry, str) else entry
        found += [slug] * count
    return found
