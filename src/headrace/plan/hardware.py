"""GPUs, links and networks by slug, from one catalogue file, and the machine that a layout would run on."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from typing import Any, Literal, TypeVar

from headrace.errors import UserError

KIB, MIB, GIB = 2**10, 2**20, 2**30
NCCL_BASE_S = 6.6e-6
"""What an all-reduce costs before its hops, in NCCL's own model."""
Named = TypeVar("Named")
Rate = Literal["dense", "experts", "attention"]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU: what it is sold as, and what of it was seen to be reached."""

    slug: str
    name: str
    memory_bytes: int
    bandwidth: float
    """Bytes a second, nominal."""
    bf16_flops: float
    """Operations a second, dense, nominal."""
    read_share: float = 1.0
    """Of the bandwidth, what weights are read at."""
    dense_share: float = 1.0
    """Of the operations, what a plain product reaches."""
    expert_share: float = 1.0
    """The same of products grouped by expert."""
    attention_share: float = 1.0
    """The same of attention over a prompt."""
    cache_bytes: int = 0
    """The last cache before memory: what an operation puts in and takes out stays there if it fits."""
    launch_s: float = 0.0
    """What a kernel costs beside its work."""
    overlap: float = 1.0
    """Of the shorter of reading and computing, what hides behind the longer one."""
    again_share: float = 0.0
    """Of what reading weights takes, what it costs to unpack them for another block of tokens."""
    link: str = ""
    """Slug of what joins such GPUs in one host."""
    is_cpu: bool = False
    """Ranks on a host's cores: no graphs, and its memory is the host's."""
    source: str = ""

    @property
    def read_rate(self) -> float:
        """Bytes a second, as reached."""
        return self.bandwidth * self.read_share

    def flops_rate(self, of: Rate) -> float:
        """Operations a second, as reached in products of that sort."""
        share = self.dense_share if of == "dense" else self.expert_share if of == "experts" else self.attention_share
        return self.bf16_flops * share


@dataclass(frozen=True)
class Curve:
    """Seconds by bytes through measured points: straight between them, flat before, on with the last slope after."""

    points: tuple[tuple[float, float], ...]

    def at(self, num_bytes: float) -> float:
        """Seconds for so many bytes."""
        if num_bytes <= self.points[0][0] or len(self.points) == 1:
            return self.points[0][1]
        # Of the segments, the last that begins before; beyond the points the very last goes on.
        after = next((i for i, (x, _) in enumerate(self.points) if num_bytes <= x), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[after - 1], self.points[after]
        return y0 + (y1 - y0) * (num_bytes - x0) / (x1 - x0)


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins GPUs: a bus or switch in one host, or a network between hosts."""

    slug: str
    name: str
    bandwidth: float
    """Bytes a second, usable, one way: from a GPU, or for a network from a host."""
    latency_s: float
    hop_s: float
    """A hop of an all-reduce in NCCL's model."""
    p2p: bool = True
    """Whether GPUs reach each other's memory over it."""
    curves: Mapping[int, Curve] = field(default_factory=dict, hash=False)
    """Measured all-reduces by group size."""
    source: str = ""

    def all_reduce_s(self, size: int, num_bytes: float) -> float:
        """A sum of `num_bytes` over `size` GPUs: measured, or scaled from the nearest group that was, or modelled."""
        if size == 1:
            return 0.0
        if not self.curves:
            return self._model_s(size, num_bytes)
        nearest = min(self.curves, key=lambda known: (abs(known - size), known))
        # Of a short message the hops count, of a long one the bytes that each rank moves.
        hops = self._model_s(size, 0) / self._model_s(nearest, 0)
        moved = (size - 1) / size * nearest / (nearest - 1)
        return hops * self.curves[nearest].at(num_bytes * moved / hops)

    def _model_s(self, size: int, num_bytes: float) -> float:
        return NCCL_BASE_S + 2 * (size - 1) * self.hop_s + 2 * (size - 1) / size * num_bytes / self.bandwidth


@dataclass(frozen=True, kw_only=True)
class Catalogue:
    """All hardware that has a name."""

    gpus: Mapping[str, Gpu]
    links: Mapping[str, Link]
    networks: Mapping[str, Link]

    def gpu(self, slug: str) -> Gpu:
        """Raises UserError naming --gpu and the nearest names."""
        return _named("--gpu", "GPU", slug, self.gpus)

    def link(self, slug: str) -> Link:
        """Raises UserError naming --links and the nearest names."""
        return _named("--links", "link", slug, self.links, also=("none",))

    def network(self, slug: str) -> Link:
        """Raises UserError naming --network and the nearest names."""
        return _named("--network", "network", slug, self.networks)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """GPUs by rank, and what joins them. Ranks fill one host after the other, as many in each."""

    gpus: tuple[Gpu, ...]
    link: Link | None
    """None: what crosses it costs nothing."""
    num_hosts: int = 1
    network: Link | None = None
    """Between hosts; None: what crosses it costs nothing."""

    def host_of(self, rank: int) -> int:
        """Which host a rank is on."""
        return rank * self.num_hosts // len(self.gpus)

    @property
    def reaches(self) -> bool:
        """Whether GPUs of a host write into each other's memory."""
        return self.link is None or self.link.p2p

    def between(self, ranks: Sequence[int]) -> Link | None:
        """What joins these ranks: the network as soon as they are on more than one host."""
        return self.link if len({self.host_of(rank) for rank in ranks}) == 1 else self.network


def build_machine(
    catalogue: Catalogue, gpu: str, num_gpus: int, *, links: str | None, num_hosts: int, network: str | None
) -> Machine:
    """So many equal GPUs. `links` None is what they come with, "none" no communication at all. Raises UserError."""
    kind = catalogue.gpu(gpu)
    if num_gpus % num_hosts:
        raise UserError(f"--hosts {num_hosts}: does not divide the layout's {num_gpus} GPUs")
    return join((kind,) * num_gpus, catalogue, links, num_hosts, network)


def join(gpus: Sequence[Gpu], known: Catalogue, links: str | None, num_hosts: int, network: str | None) -> Machine:
    """These GPUs as one machine; `links` None: what they come with, the slowest if they differ. Raises UserError."""
    if len(gpus) % num_hosts:
        raise UserError(f"--hosts {num_hosts}: does not divide {len(gpus)} GPUs")
    if num_hosts == 1 and network is not None:
        raise UserError(f"--network {network}: is between hosts, and --hosts is 1")
    between = known.network(network) if network is not None else None
    if links == "none":
        return Machine(gpus=tuple(gpus), link=None, num_hosts=num_hosts)
    if num_hosts > 1 and between is None:
        raise UserError(f"--hosts {num_hosts}: needs a --network between them, one of {', '.join(known.networks)}")
    found = [known.link(links)] if links else [known.link(gpu.link) for gpu in gpus]
    slowest = min(found, key=lambda link: link.bandwidth)
    return Machine(gpus=tuple(gpus), link=slowest, num_hosts=num_hosts, network=between)


def find_gpu(known: Catalogue, name: str) -> Gpu | None:
    """The GPU that a driver calls so: the entry all words of whose slug are in the name, the one with most of them.

    SXM is what a driver leaves out, or writes with a number.
    """
    said = set(name.lower().replace("-", " ").split())
    words = {slug: set(slug.split("-")) - {"sxm"} for slug in known.gpus}
    found = [slug for slug in known.gpus if words[slug] <= said]
    return known.gpus[max(found, key=lambda slug: len(words[slug]))] if found else None


@lru_cache(maxsize=1)
def _package_tables() -> Mapping[str, Any]:
    return tomllib.loads(resources.files("headrace.plan").joinpath("catalogue.toml").read_text(encoding="utf-8"))


@lru_cache(maxsize=1)
def catalogue() -> Catalogue:
    """The catalogue that comes with the package."""
    return build_catalogue(_package_tables())


def assumed_gpu() -> Gpu:
    """What is assumed of a GPU that nobody has measured: shares and launches; the rest is nothing."""
    nothing = {"name": "", "memory_gib": 0, "memory_gb_s": 0, "bf16_tflops": 0, "cache_mib": 0, "link": ""}
    return _gpu("", {**nothing, **_package_tables()["assumed"]})


def read_catalogue(own: Mapping[str, Mapping[str, Any]]) -> Catalogue:
    """The package's, with entries that `own` adds or changes: by "gpu", "link" and "network" and slug."""
    tables = dict(_package_tables())
    for kind, entries in own.items():
        known = tables[kind]
        tables[kind] = {**known, **{slug: {**known.get(slug, {}), **entry} for slug, entry in entries.items()}}
    return build_catalogue(tables)


def build_catalogue(tables: Mapping[str, Any]) -> Catalogue:
    """From the tables of its file. A wrong entry is the writer's error: KeyError, TypeError or ValueError."""
    assumed = tables["assumed"]
    return Catalogue(
        gpus={slug: _gpu(slug, {**assumed, **entry}) for slug, entry in tables["gpu"].items()},
        links={slug: _link(slug, entry) for slug, entry in tables["link"].items()},
        networks={slug: _link(slug, entry) for slug, entry in tables["network"].items()},
    )


def _gpu(slug: str, entry: Mapping[str, Any]) -> Gpu:
    return Gpu(
        slug=slug,
        name=entry["name"],
        memory_bytes=int(float(entry["memory_gib"]) * GIB),
        bandwidth=entry["memory_gb_s"] * 1e9,
        bf16_flops=entry["bf16_tflops"] * 1e12,
        cache_bytes=int(float(entry["cache_mib"]) * MIB),
        launch_s=entry["launch_us"] * 1e-6,
        overlap=float(entry["overlap"]),
        again_share=float(entry["again_share"]),
        link=entry["link"],
        source=entry.get("source", ""),
        read_share=float(entry["read_share"]),
        dense_share=float(entry["dense_share"]),
        expert_share=float(entry["expert_share"]),
        attention_share=float(entry["attention_share"]),
    )


def _link(slug: str, entry: Mapping[str, Any]) -> Link:
    return Link(
        slug=slug,
        name=entry["name"],
        bandwidth=entry["gb_s"] * 1e9,
        latency_s=entry["latency_us"] * 1e-6,
        hop_s=entry["hop_us"] * 1e-6,
        p2p=bool(entry.get("p2p", True)),
        curves={
            int(size): Curve(tuple((kib * KIB, us * 1e-6) for kib, us in points))
            for size, points in entry.get("all_reduce", {}).items()
        },
        source=entry.get("source", ""),
    )


def _named(flag: str, what: str, name: str, known: Mapping[str, Named], also: Sequence[str] = ()) -> Named:
    slug = "-".join(name.lower().replace("_", " ").split())
    if slug in known:
        return known[slug]
    names = [*known, *also]
    near = difflib.get_close_matches(slug, names, n=3, cutoff=0.5)
    # A part of a name is near it, however much longer the name is.
    near += [one for one in names if slug in one and slug and one not in near]
    hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(names)}"
    raise UserError(f"{flag} {name}: no such {what}; {hint}")
