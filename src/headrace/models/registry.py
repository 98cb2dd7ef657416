"""The models there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import cast

from headrace.layers.build import Build
from headrace.layers.decoder import Decoder
from headrace.spec import ModelSpec
from headrace.weights.rules import Rule

FAMILIES = {
    "llama": "headrace.models.llama",
    "qwen3": "headrace.models.qwen3",
    "qwen3_moe": "headrace.models.qwen3_moe",
    "deepseek_v3": "headrace.models.deepseek_v3",
}
"""ModelSpec.family -> module with `build(Build) -> Decoder` and `rules(ModelSpec) -> Sequence[Rule]`."""


def build_model(build: Build) -> Decoder:
    """The stage's modules, weights uninitialised."""
    make = cast("Callable[[Build], Decoder]", import_module(FAMILIES[build.spec.family]).build)
    return make(build)


def rules_of(spec: ModelSpec) -> Sequence[Rule]:
    """The name table of the whole model."""
    table = cast("Callable[[ModelSpec], Sequence[Rule]]", import_module(FAMILIES[spec.family]).rules)
    return table(spec)
