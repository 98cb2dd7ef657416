"""A machine as it was measured: a file in the catalogue's form that also says which GPUs there are, and their link."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import UserError
from headrace.plan.hardware import Catalogue, Gpu, Machine, read_catalogue

MOST_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class HardwareFile:
    """`[machine]` names, in the order of the ranks, entries of GPUs of the same file, and the link between them."""

    path: Path
    known: Catalogue
    """The file's GPUs and links, with the package's own links and networks."""
    gpus: Sequence[Gpu]
    link: str

    def machine(self, num_ranks: int, *, links: str | None, num_hosts: int, network: str | None) -> Machine:
        """The first GPUs of so many such hosts, one a rank. Raises UserError as `build_machine` does."""
        if num_ranks % num_hosts:
            raise UserError(f"--hosts {num_hosts}: does not divide the layout's {num_ranks} GPUs")
        each = num_ranks // num_hosts
        if each > len(self.gpus):
            have = f"{len(self.gpus)} GPU" + ("s" if len(self.gpus) > 1 else "")
            raise UserError(f"--hardware {self.path}: has {have}, the layout needs {each} of a host")
        if num_hosts == 1 and network is not None:
            raise UserError(f"--network {network}: is between hosts, and --hosts is 1")
        between = self.known.network(network) if network is not None else None
        gpus = tuple(self.gpus[:each]) * num_hosts
        if links == "none":
            return Machine(gpus=gpus, link=None, num_hosts=num_hosts)
        if num_hosts > 1 and between is None:
            raise UserError(
                f"--hosts {num_hosts}: needs a --network between them, one of {', '.join(self.known.networks)}"
            )
        return Machine(gpus=gpus, link=self.known.link(links or self.link), num_hosts=num_hosts, network=between)


def read_hardware(path: Path) -> HardwareFile:
    """Read what `headrace probe` wrote, or somebody by hand. Raises UserError naming --hardware and what is wrong."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES).decode()
        tables = tomllib.loads(text)
        known = read_catalogue({kind: tables.get(kind, {}) for kind in ("gpu", "link", "network")})
        gpus = [known.gpus[slug] for slug in tables["machine"]["gpus"]]
        link = known.links[tables["machine"]["link"]].slug
    except OSError as error:
        raise UserError(f"--hardware {path}: {error.strerror or error}") from None
    except KeyError as error:
        raise UserError(f"--hardware {path}: {error.args[0]!r} is missing") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"--hardware {path}: not a hardware file: {error}") from None
    if not gpus:
        raise UserError(f"--hardware {path}: names no GPU")
    return HardwareFile(path=path, known=known, gpus=tuple(gpus), link=link)
