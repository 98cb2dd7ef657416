"""A GPU's PCIe link and the driver's word on P2P, as nvidia-smi says them: it comes with every driver."""

from __future__ import annotations

import subprocess

import msgspec

FIELDS = ("pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max")
TIMEOUT_S = 10.0
REASONS = {
    "CNS": "the chipset does not support it",
    "GNS": "the GPU or its driver does not support it",
    "TNS": "the topology does not support it",
    "DR": "a driver setting switches it off",
    "NS": "not supported",
}


class PcieLink(msgspec.Struct, frozen=True):
    """Generation and lanes, now and at most with this GPU in this slot."""

    gen: int
    gen_max: int
    width: int
    width_max: int

    @property
    def text(self) -> str:
        """As in "PCIe 5 x16"."""
        return f"PCIe {self.gen} x{self.width}"

    @property
    def below(self) -> bool:
        """Whether it runs slower than it could."""
        return self.gen < self.gen_max or self.width < self.width_max


def pcie_link(uuid: str) -> PcieLink | None:
    """The link of a GPU; idle ones run at a lower generation. None where the driver does not say."""
    return parse_link(_output("--query-gpu=" + ",".join(FIELDS), "--format=csv,noheader,nounits", "-i", uuid))


def parse_link(text: str) -> PcieLink | None:
    """From a line of four numbers."""
    values = [value.strip() for value in text.strip().split(",")]
    if len(values) != len(FIELDS) or not all(value.isdigit() and int(value) for value in values):
        return None
    return PcieLink(*map(int, values))


def p2p_reasons() -> dict[tuple[int, int], str]:
    """Why the driver allows no P2P between two GPUs, by its own numbers of them; pairs that may are left out."""
    return parse_p2p(_output("topo", "-p2p", "r"))


def parse_p2p(text: str) -> dict[tuple[int, int], str]:
    """From the matrix: a header of GPUs, then a row each."""
    reasons = {}
    for line in text.splitlines():
        name, *cells = line.split() or [""]
        if not (name.startswith("GPU") and name[3:].isdigit()) or cells[:1] == ["GPU1"]:
            continue  # not a row, or the header
        for column, cell in enumerate(cells):
            if cell in REASONS:
                reasons[int(name[3:]), column] = REASONS[cell]
    return reasons


def _output(*arguments: str) -> str:
    try:
        done = subprocess.run(("nvidia-smi", *arguments), capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
