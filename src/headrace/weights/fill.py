"""Random weights made where they lie: a model of any size without a checkpoint, for measuring and for trying layouts.

Every slot of this rank is filled in place, as a checkpoint would fill it, so that nothing but the model is ever held.
What a slot gets depends on the seed, the tensor's published name and which part of it the slot holds: tensors that
several ranks hold whole are the same on all of them, and an expert is the same wherever it lies.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from headrace.spec import ModelSpec
from headrace.weights.rules import Rule, bind, expand
from headrace.weights.slots import Slot

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""

NIBBLE_STD = 4.61
"""Standard deviation of the whole numbers -8 to 7, all equally likely."""
_INT32 = 1 << 31


def fill_random(
    model: nn.Module, rules: Sequence[Rule], spec: ModelSpec, seed: int = 0, progress: Progress | None = None
) -> None:
    """Fill every parameter of this rank's modules, on its device; before `finalise`, in the place of `load`.

    Activations keep their size through any number of layers, and differ from token to token. Complete when it returns.
    """
    slots = bind(model, rules, spec, [item.tensor for item in expand(rules, spec)])
    places = [(name, slot) for name, many in slots.items() for slot in many if slot.dest.numel()]
    total, done = sum(slot.dest.nbytes for _, slot in places), 0
    generators: dict[torch.device, torch.Generator] = {}
    with torch.inference_mode():
        for name, slot in places:
            device = slot.dest.device
            if device not in generators:
                generators[device] = torch.Generator(device)
            _fill(name, slot, spec, generators[device].manual_seed(_seed(seed, name, slot)))
            done += slot.dest.nbytes
            if progress is not None:
                progress(done, total)
    for device in generators:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _seed(seed: int, name: str, slot: Slot) -> int:
    """One number of 63 bits from the tensor and the part of it, the same on every rank and in every run."""
    key = f"{seed} {name} {[part.indices(size) for part, size in zip(slot.source, slot.shape, strict=True)]}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def _fill(name: str, slot: Slot, spec: ModelSpec, generator: torch.Generator) -> None:
    dest = slot.dest
    if not dest.is_floating_point():
        # Eight INT4 values a word, each of the sixteen equally likely.
        dest.random_(-_INT32, _INT32, generator=generator)
        return
    mean, std = _mean_std(name, slot.shape, spec)
    if std:
        dest.normal_(mean, std, generator=generator)
    else:
        dest.fill_(mean)


def _mean_std(name: str, shape: Sequence[int], spec: ModelSpec) -> tuple[float, float]:
    module, _, suffix = name.rpartition(".")
    if suffix == "e_score_correction_bias":
        return 0.0, 0.0
    if suffix == "bias":
        return 0.0, 0.02
    if suffix == "weight_scale":
        assert spec.quant is not None
        even = 1 / math.sqrt(shape[-1] * spec.quant.group_size)
        return even / NIBBLE_STD, 0.1 * even / NIBBLE_STD
    if len(shape) == 1:
        return 1.0, 0.0  # norms
    even = 1 / math.sqrt(shape[-1])
    if module.endswith("embed_tokens"):
        return 0.0, 2 * even if spec.tied else 1.0
    # Scores wide enough to tell experts and words apart.
    return 0.0, 2 * even if module.endswith(("lm_head", "mlp.gate")) else even
