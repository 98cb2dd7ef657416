"""Rotary position embedding: tables from a `RopeSpec`.

Shapes: R rotary dims; cos and sin are [max_len, 1, R], computed in float32 and cast to the model's type.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from headrace.layers.build import Build
from headrace.spec import RopeSpec

Rope = tuple[torch.Tensor, torch.Tensor]


class Rotary(nn.Module):
    """cos and sin of every position under `build.max_len`."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        rope = build.spec.rope
        # On the host whatever the device: one unit in a frequency's last place is 3e-4 of a turn at position 65536.
        angles = torch.outer(torch.arange(build.max_len, dtype=torch.float32), inverse_frequencies(rope))
        angles = torch.cat((angles, angles), dim=-1)
        self.cos = (angles.cos() * rope.attention_factor).to(build.device, build.dtype).unsqueeze(1)
        self.sin = (angles.sin() * rope.attention_factor).to(build.device, build.dtype).unsqueeze(1)

    @property
    def tables(self) -> Rope:
        """cos and sin, [max_len, 1, R], both halves alike."""
        return self.cos, self.sin


def inverse_frequencies(rope: RopeSpec) -> torch.Tensor:
    """Angles a position, [R/2] float32; the scalings are those of the papers as `transformers` computes them."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    return _yarn(plain, rope)


def _llama3(plain: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    wavelength = 2 * math.pi / plain
    low, high = rope.original_max / rope.low_freq_factor, rope.original_max / rope.high_freq_factor
    smooth = (rope.original_max / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    mixed = (1 - smooth) * plain / rope.factor + smooth * plain
    scaled = torch.where(wavelength > low, plain / rope.factor, plain)
    return torch.where((wavelength <= low) & (wavelength >= high), mixed, scaled)


def _yarn(plain: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    def dim_of(rotations: float) -> float:
        return rope.dim * math.log(rope.original_max / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)
