"""The name table of a model: which checkpoint module fills which part of which module, whatever the order on disk.

A rule's names have holes: `{i}` a layer, `{e}` an expert. Names are the published ones, without the wrapper's prefix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

from torch import nn

from headrace.errors import CheckpointError, UnsupportedModel
from headrace.spec import DenseSpec, Int4Spec, LayerSpec, ModelSpec, MoeSpec
from headrace.weights.headers import listed
from headrace.weights.slots import Slot


@dataclass(frozen=True)
class Rule:
    """One checkpoint module (or as many as its holes make)."""

    name: str
    """`model.layers.{i}.self_attn.q_proj`."""
    target: str
    """Path of the module it fills: `layers.{i}.attention.qkv`."""
    part: str = ""
    """Which part of that module."""
    suffixes: tuple[str, ...] = ("weight",)
    linear: bool = False
    """Whether the quantisation scheme's `Linear` target means it."""
    when: Callable[[LayerSpec], bool] | None = None
    """Which layers have it; None: all."""


def is_dense(layer: LayerSpec) -> bool:
    """Whether a layer has a plain MLP."""
    return isinstance(layer.mlp, DenseSpec)


def is_moe(layer: LayerSpec) -> bool:
    """Whether a layer has experts."""
    return isinstance(layer.mlp, MoeSpec)


def linear(
    name: str, target: str, part: str, *, bias: bool = False, when: Callable[[LayerSpec], bool] | None = None
) -> Rule:
    """A rule for an `nn.Linear` of the published model."""
    return Rule(name, target, part, ("weight", "bias") if bias else ("weight",), linear=True, when=when)


class HasSlots(Protocol):
    """What every module is that a rule names as its target."""

    def slots(self, name: str, expert: int | None = None) -> dict[str, Slot]:
        """Where the tensors of one part go, by the suffix of their checkpoint names; {} if they are not held here."""
        ...


@dataclass(frozen=True)
class Expected:
    """A checkpoint tensor that a rule asks for."""

    tensor: str
    rule: Rule
    target: str
    suffix: str
    expert: int | None


def expand(rules: Iterable[Rule], spec: ModelSpec) -> Iterator[Expected]:
    """Every tensor that the whole model needs, all layers and experts."""
    for rule in rules:
        layers: Iterable[LayerSpec | None] = [None]
        if "{i}" in rule.name:
            layers = [layer for layer in spec.layers if rule.when is None or rule.when(layer)]
        for layer in layers:
            experts: Iterable[int | None] = [None]
            if "{e}" in rule.name and layer is not None and isinstance(layer.mlp, MoeSpec):
                experts = range(layer.mlp.num_experts)
            i = layer.index if layer is not None else None
            target = rule.target.format(i=i)
            for expert in experts:
                module = spec.weight_prefix + rule.name.format(i=i, e=expert)
                for suffix in _suffixes(rule, module, spec.quant):
                    yield Expected(f"{module}.{suffix}", rule, target, suffix, expert)


def _suffixes(rule: Rule, module: str, quant: Int4Spec | None) -> tuple[str, ...]:
    if rule.linear and quant is not None and quant.covers(module):
        return ("weight_packed", "weight_scale", *rule.suffixes[1:])
    return rule.suffixes


def check_names(expected: Iterable[Expected], present: Iterable[str], spec: ModelSpec) -> None:
    """Raise CheckpointError, listing names, for tensors that are missing or that nothing here knows."""
    wanted = {item.tensor for item in expected}
    have = set(present)
    shapes = {name.removesuffix("packed") + "shape" for name in wanted if name.endswith(".weight_packed")}
    missing = sorted(wanted - have)
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_count(missing)}")
    ignored = [re.compile(pattern) for pattern in spec.ignored]
    unknown = sorted(n for n in have - wanted - shapes if not any(p.fullmatch(n) for p in ignored))
    if unknown:
        raise CheckpointError(f"the checkpoint holds {_count(unknown)} that {spec.architecture} does not use")


def bind(model: nn.Module, rules: Iterable[Rule], spec: ModelSpec, present: Iterable[str]) -> Mapping[str, list[Slot]]:
    """The slots of this rank's modules, by checkpoint tensor. Every name of the whole model is checked first."""
    expected = list(expand(rules, spec))
    check_names(expected, present, spec)
    modules = dict(model.named_modules())
    found: dict[str, list[Slot]] = {}
    cache: dict[tuple[str, str, int | None], dict[str, Slot]] = {}
    for item in expected:
        module = modules.get(item.target)
        if module is None:
            continue  # another stage's
        key = (item.target, item.rule.part, item.expert)
        if key not in cache:
            cache = {key: cast("HasSlots", module).slots(item.rule.part, item.expert)}
        if not cache[key]:
            continue  # another rank's expert, or a head that shares the embedding
        slot = cache[key].get(item.suffix)
        if slot is None:
            raise UnsupportedModel(f"{item.tensor} is stored otherwise than its siblings, with which it is one product")
        found.setdefault(item.tensor, []).append(slot)
    return found


def _count(names: list[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}: {listed(names)}"
