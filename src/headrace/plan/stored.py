"""A model's sizes as its checkpoint has them: the headers of all tensors, summed by layer and part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.errors import CheckpointError
from headrace.plan.inventory import embedding, head, layer_matrices
from headrace.spec import DTYPE_BYTES, Extra, ModelSpec
from headrace.weights.headers import TensorHeader, open_headers
from headrace.weights.places import UNUSED, places
from headrace.weights.source import ModelSource, is_hub_id

DIFFERENT = 0.01
"""Share by which headers and config may differ before it is said."""
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Sizes:
    """Bytes by layer (None: of the ends) and part."""

    stored: Mapping[tuple[int | None, str], float]
    """As the files have them."""
    held: Mapping[tuple[int | None, str], float]
    """Once loaded: floats in the model's type."""


def headers_of(model: str, say: Callable[[str], None]) -> Iterable[TensorHeader] | None:
    """The headers of a folder with safetensors, or of a hub id; None of a bare config. Raises UserError."""
    path = Path(model).expanduser()
    if path.is_dir():
        if not any((path / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
            return None
        return open_headers(ModelSource("folder", path, path.name)).tensors.values()
    if path.exists() or not is_hub_id(model):
        return None
    from headrace.weights.hub_headers import hub_headers

    say(f"reading the headers of {model} on the hub")
    return hub_headers(model)


def measure(headers: Iterable[TensorHeader], spec: ModelSpec) -> Sizes:
    """Sum them up."""
    place, float_bytes = places(spec), DTYPE_BYTES[spec.dtype]
    stored: dict[tuple[int | None, str], float] = defaultdict(float)
    held: dict[tuple[int | None, str], float] = defaultdict(float)
    for header in headers:
        name = header.name
        where = place(name)
        stored[where] += header.num_bytes
        if name.endswith(".weight_shape"):
            continue
        if name.endswith(".weight_scale"):
            held[where] += 2 * header.num_values
        else:
            held[where] += header.num_values * float_bytes if header.dtype in _FLOATS else header.num_bytes
    return Sizes(stored, held)


def sized(spec: ModelSpec, sizes: Sizes) -> ModelSpec:
    """The spec with what its parts hold. Raises CheckpointError where a part is not there at all."""
    derived = derived_bytes(spec)
    scales, missing = [], []
    for (layer, part), num_bytes in derived.items():
        found = sizes.held.get((layer, part), 0.0)
        if part == "head" and spec.tied:
            found = num_bytes * sizes.held.get((None, "embedding"), 0.0) / derived[None, "embedding"]
        if not found:
            missing.append(part if layer is None else f"layer {layer}'s {part}")
        scales.append((layer, part, found / num_bytes))
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(f"MODEL: its headers hold nothing of {', '.join(missing[:3])}{more}")
    ends = {"vision": False, "next-token (MTP)": True}
    extras = tuple(
        Extra(name, sizes.held[None, name], last) for name, last in ends.items() if sizes.held.get((None, name))
    )
    return replace(spec, scales=tuple(scales), extras=extras)


def derived_bytes(spec: ModelSpec) -> dict[tuple[int | None, str], float]:
    """By layer and part, as the config alone says."""
    spec = replace(spec, scales=())
    found: dict[tuple[int | None, str], float] = defaultdict(float)
    for layer in spec.layers:
        for matrix in layer_matrices(spec, layer.index):
            found[layer.index, matrix.part] += matrix.bytes
    found[None, "embedding"], found[None, "head"] = embedding(spec).bytes, head(spec).bytes
    return dict(found)


def differences(spec: ModelSpec, sizes: Sizes) -> list[str]:
    """A line where files and config differ by more than a hundredth, and one for names that nothing here knows."""
    config, files = _by_part(derived_bytes(spec)), _by_part(sizes.stored)
    if spec.tied:
        config.pop("head", None)
        files.pop("head", None)
    apart = [
        f"{part} {files.get(part, 0.0) / 2**30:.2f} GiB, not {num_bytes / 2**30:.2f}"
        for part, num_bytes in config.items()
        if abs(files.get(part, 0.0) / num_bytes - 1) > DIFFERENT
    ]
    lines = [f"the checkpoint's headers differ from what config.json makes: {'; '.join(apart)}"] if apart else []
    if files.get("unknown"):
        lines.append(f"the checkpoint holds {files['unknown'] / 2**30:.2f} GiB under names that the model does not use")
    return lines


def used_bytes(sizes: Sizes) -> float:
    """Of the language model, as stored."""
    return sum(num_bytes for (_, part), num_bytes in sizes.stored.items() if part not in UNUSED)


def _by_part(found: Mapping[tuple[int | None, str], float]) -> dict[str, float]:
    parts: dict[str, float] = defaultdict(float)
    for (_, part), num_bytes in found.items():
        parts[part] += num_bytes
    return parts
