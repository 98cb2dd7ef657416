"""Random checkpoints of any family and shape, streamed to disk: `python -m headrace.weights.random CONFIG.json OUT`."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch

from headrace.errors import UserError
from headrace.weights.published import Config, Kind, PublishedTensor, tensor_shapes
from headrace.weights.random_tokenizer import write_random_tokenizer

DtypeName = Literal["float32", "bfloat16", "float16"]

_CHUNK_VALUES = 1 << 22
"""Values made and written at once: what memory a tensor of any size takes."""
_DTYPES: dict[str, tuple[str, torch.dtype]] = {
    "float32": ("F32", torch.float32),
    "bfloat16": ("BF16", torch.bfloat16),
    "float16": ("F16", torch.float16),
}
_NIBBLE_STD = 4.61
"""Standard deviation of the whole numbers -8 to 7, all equally likely."""


@dataclass(frozen=True)
class _Stored:
    tensor: PublishedTensor
    dtype: str
    torch_dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.tensor.shape) * self.torch_dtype.itemsize


def write_checkpoint(
    folder: Path,
    config: Config,
    *,
    seed: int = 0,
    dtype: DtypeName | None = None,
    max_shard_bytes: int | None = None,
    tokenizer: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write config.json and random safetensors for it; INT4 where the config's quantization_config says so.

    dtype: of what is not INT4, by default the config's. max_shard_bytes: cut into shards with an index. tokenizer: also
    write a byte-level tokenizer over the config's vocabulary. A tensor depends on its name and the seed alone, so
    neither shards nor the number of layers change it; memory stays at a few chunks whatever the shape.
    """
    name = dtype or _config_dtype(config)
    if name not in _DTYPES:
        raise UserError(f"dtype {name!r}: use {', '.join(_DTYPES)}")
    stored = [_stored(tensor, name) for tensor in tensor_shapes(config)]
    shards = _shards(stored, max_shard_bytes)
    total, done = sum(item.num_bytes for item in stored), 0
    folder.mkdir(parents=True, exist_ok=True)
    names = _shard_names(len(shards))
    for file_name, shard in zip(names, shards, strict=True):
        with (folder / file_name).open("wb") as file:
            for count in _write_shard(file, shard, seed, bool(_text(config).get("tie_word_embeddings"))):
                done += count
                progress(done, total)
    if len(shards) > 1:
        places = {item.tensor.name: file for file, shard in zip(names, shards, strict=True) for item in shard}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    (folder / "config.json").write_text(json.dumps(_with_dtype(config, name), indent=2), "utf-8")
    if tokenizer:
        write_random_tokenizer(folder, _text(config))


def _text(config: Config) -> Config:
    text: Config = config.get("text_config") or config
    return text


def _config_dtype(config: Config) -> str:
    for level in (config, _text(config)):
        for key in ("dtype", "torch_dtype"):
            if level.get(key):
                return str(level[key])
    return "float32"


def _with_dtype(config: Config, name: str) -> dict[str, Any]:
    """The config saying the dtype that was written, in the spelling that it uses."""
    changed = dict(config)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    changed[key] = name
    if isinstance(config.get("text_config"), dict):
        changed["text_config"] = _with_dtype(config["text_config"], name)
    return changed


def _stored(tensor: PublishedTensor, dtype: str) -> _Stored:
    fixed: dict[Kind, tuple[str, torch.dtype]] = {
        "int4_packed": ("I32", torch.int32),
        "int4_scale": ("BF16", torch.bfloat16),
        "int4_shape": ("I64", torch.int64),
        "selection_bias": ("F32", torch.float32),
    }
    return _Stored(tensor, *fixed.get(tensor.kind, _DTYPES[dtype]))


def _shards(stored: Sequence[_Stored], max_bytes: int | None) -> list[list[_Stored]]:
    shards: list[list[_Stored]] = [[]]
    size = 0
    for item in stored:
        if max_bytes is not None and shards[-1] and size + item.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.num_bytes
    # As the safetensors library orders a file: wide dtypes first, which keeps every tensor aligned.
    return [sorted(shard, key=lambda item: (-item.torch_dtype.itemsize, item.tensor.name)) for shard in shards]


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _write_shard(file: BinaryIO, shard: Sequence[_Stored], seed: int, tied: bool) -> Iterator[int]:
    """Write one safetensors file, header first; yields the bytes of each chunk."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for item in shard:
        offsets = [at, at + item.num_bytes]
        header[item.tensor.name] = {"dtype": item.dtype, "shape": list(item.tensor.shape), "data_offsets": offsets}
        at += item.num_bytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    file.write(len(raw).to_bytes(8, "little") + raw)
    for chunk in _ahead(make for item in shard for make in _chunks(item, seed, tied)):
        data = chunk.view(torch.uint8).numpy().data
        file.write(data)
        yield len(data)


def _ahead(makers: Iterable[Callable[[], torch.Tensor]]) -> Iterator[torch.Tensor]:
    """What the makers make, in order, on all cores, never more than one chunk a core ahead of the reader."""
    workers = min(16, os.cpu_count() or 1)
    waiting: deque[Future[torch.Tensor]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for make in makers:
            waiting.append(pool.submit(make))
            if len(waiting) > workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _chunks(item: _Stored, seed: int, tied: bool) -> Iterator[Callable[[], torch.Tensor]]:
    """Makers of the tensor's values in order, 1-D, a bounded number at a time."""
    count = math.prod(item.tensor.shape)
    for start in range(0, count, _CHUNK_VALUES):
        yield partial(_values, item, start, min(_CHUNK_VALUES, count - start), seed, tied)


def _values(item: _Stored, start: int, size: int, seed: int, tied: bool) -> torch.Tensor:
    tensor = item.tensor
    if tensor.kind == "int4_shape":
        return torch.tensor(tensor.linear_shape, dtype=item.torch_dtype)
    random = np.random.Generator(np.random.SFC64([seed, start, *tensor.name.encode()]))
    if tensor.kind == "int4_packed":
        return torch.from_numpy(random.integers(0, 1 << 32, size, dtype=np.uint32).view(np.int32))
    mean, std = _mean_std(tensor, tied)
    normal = torch.from_numpy(random.standard_normal(size, dtype=np.float32))
    return normal.mul_(std).add_(mean).to(item.torch_dtype)


def _mean_std(tensor: PublishedTensor, tied: bool) -> tuple[float, float]:
    """So that activations keep their size through any number of layers, and no two tensors do the same."""
    fan_in = (tensor.linear_shape or tensor.shape)[-1]
    even = 1 / math.sqrt(fan_in)
    match tensor.kind:
        case "norm":
            return 1.0, 0.1
        case "bias" | "selection_bias":
            return 0.0, 0.1
        case "embedding":
            return 0.0, 2 * even if tied else 1.0
        case "head" | "router":
            return 0.0, 2 * even
        case "int4_scale":
            return even / _NIBBLE_STD, 0.1 * even / _NIBBLE_STD
        case _:
            return 0.0, even


# --- the command ----------------------------------------------------------------------------------------------------

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def parse_bytes(text: str) -> int:
    """Bytes from `10GB`, `512MiB` or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS or float(match[1]) * _UNITS[match[2].upper()] < 1:
        raise UserError(f"--max-shard {text!r}: not a size; write 10GB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _with_layers(config: dict[str, Any], num_layers: int) -> dict[str, Any]:
    if isinstance(config.get("text_config"), dict):
        return {**config, "text_config": _with_layers(config["text_config"], num_layers)}
    return {**config, "num_hidden_layers": num_layers}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m headrace.weights.random", description=__doc__)
    parser.add_argument("config", type=Path, metavar="CONFIG.json")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=sorted(_DTYPES), help="of what is not INT4; by default the config's")
    parser.add_argument("--max-shard", default="10GB", metavar="SIZE", help="largest file (%(default)s)")
    parser.add_argument("--layers", type=int, metavar="N", help="write only so many layers")
    options = parser.parse_args(arguments)
    try:
        config = json.loads(options.config.read_text("utf-8"))
        if options.layers is not None:
            config = _with_layers(config, options.layers)
        write_checkpoint(
            options.out,
            config,
            seed=options.seed,
            dtype=options.dtype,
            max_shard_bytes=parse_bytes(options.max_shard),
            tokenizer=True,
            progress=_show,
        )
    except (OSError, ValueError, KeyError) as error:
        what = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
        sys.stderr.write(f"\n{options.config}: {what}\n")
        return 2
    sys.stderr.write("\n")
    return 0


def _show(done: int, total: int) -> None:
    sys.stderr.write(f"\r{done / 1e9:.2f} of {total / 1e9:.2f} GB")


if __name__ == "__main__":
    sys.exit(main())
