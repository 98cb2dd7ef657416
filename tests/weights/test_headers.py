"""Headers are what the safetensors library reads, and what cannot be served is refused from them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from headrace.errors import CheckpointError
from headrace.weights.headers import listed, open_headers
from headrace.weights.source import ModelSource
from tests.tiny import write_tiny

INDEX = "model.safetensors.index.json"


def source(folder: Path) -> ModelSource:
    return ModelSource("folder", folder, "m")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = write_tiny(tmp_path / "m", "qwen3_moe", max_shard_bytes=400_000)
    assert len(list(folder.glob("*.safetensors"))) == 5
    return folder


@pytest.mark.parametrize("max_shard_bytes", [None, 200_000])
def test_headers_are_those_of_the_library(tmp_path: Path, max_shard_bytes: int | None) -> None:
    folder = write_tiny(tmp_path / "m", "kimi_k2_int4", dtype="bfloat16", max_shard_bytes=max_shard_bytes)
    ours = dict(open_headers(source(folder)).tensors)
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # not a mapping
                header, theirs = ours.pop(name), opened.get_slice(name)
                assert (header.name, header.dtype, list(header.shape)) == (name, theirs.get_dtype(), theirs.get_shape())
                tensor = opened.get_tensor(name)
                raw = file.read_bytes()[header.offset : header.offset + header.num_bytes]
                assert header.file == file
                assert raw == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    assert not ours


def test_metadata_is_no_tensor(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors", metadata={"dtype": "F32", "format": "pt"})
    assert list(open_headers(source(tmp_path)).tensors) == ["a"]


def test_missing_shards_are_named(sharded: Path) -> None:
    for i in (2, 4):
        (sharded / f"model-0000{i}-of-00005.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"2 of 5 shards missing: model-00002-of-00005\S+, model-00004-of-00005"):
        open_headers(source(sharded))


def test_truncated_shard_is_named_with_both_sizes(sharded: Path) -> None:
    shard = sharded / "model-00003-of-00005.safetensors"
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.truncate(size - 1)
    with pytest.raises(CheckpointError, match=rf"model-00003\S+ truncated: its header needs {size} .* has {size - 1}$"):
        open_headers(source(sharded))


def test_tensor_that_its_shard_lacks_is_named(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00005.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lack \(1\): model\.extra\.weight \(model-00001"):
        open_headers(source(sharded))


def test_tensor_that_the_index_forgot_is_kept(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    assert "model.norm.weight" in open_headers(source(sharded)).tensors


@pytest.mark.parametrize("weight_map", [{"a": "../outside.safetensors"}, {"a": "/etc/passwd"}, {"a": 3}, ["a"], None])
def test_index_that_is_no_index_is_refused(tmp_path: Path, weight_map: Any) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="index"):
        open_headers(source(tmp_path))


def write_raw(file: Path, header: bytes, length: int | None = None, data: bytes = b"") -> None:
    file.write_bytes((len(header) if length is None else length).to_bytes(8, "little") + header + data)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda file: file.write_bytes(b""), "not a safetensors file"),
        (lambda file: file.write_bytes(b"\0\0\0"), "not a safetensors file"),
        (lambda file: file.write_bytes(b"<html>not the weights</html>"), "not a safetensors file"),
        (lambda file: write_raw(file, b"{}", 1000), "header ends at byte 1008, the file has 10"),
        (lambda file: write_raw(file, b"{not json"), "header is broken"),
        (lambda file: write_raw(file, b"[]"), "header is broken"),
        (lambda file: write_raw(file, b'{"a": {"dtype": "F32", "shape": "x"}}'), "header is broken"),
        (lambda file: write_raw(file, entry("F32", [2], [0, 4]), data=b"1234"), "gives tensor a"),
        (lambda file: write_raw(file, entry("F32", [1], [8, 4]), data=b"12345678"), "gives tensor a"),
        (lambda file: write_raw(file, entry("F32", [1], [-4, 0])), "gives tensor a"),
        (
            lambda file: write_raw(file, entry("F32", [1], [0, 4]), data=b"12345"),
            "accounts for \\d+ bytes, the file has",
        ),
        (
            lambda file: write_raw(file, entry("F32", [1], [4, 8]), data=b"12345678"),
            "tensor a leaves bytes \\d+ to \\d+",
        ),
        (lambda file: write_raw(file, two("F32", [1], [0, 4]), data=b"1234"), "tensor b overlaps the one before it"),
    ],
)
def test_broken_file_is_one_line(tmp_path: Path, write: Callable[[Path], None], words: str) -> None:
    write(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=words) as caught:
        open_headers(source(tmp_path))
    assert "model.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value)


def two(dtype: str, shape: list[int], offsets: list[int]) -> bytes:
    one = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    return json.dumps({"a": one, "b": one}).encode()


def entry(dtype: str, shape: list[int], offsets: list[int]) -> bytes:
    return json.dumps({"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "consolidated.00.pth"]
)
def test_pickles_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match="only pickled weights") as caught:
        open_headers(source(tmp_path))
    assert name in str(caught.value)


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        open_headers(source(tmp_path))


def test_long_lists_are_cut() -> None:
    assert listed(["a", "b"], 2) == "a, b"
    assert listed((str(i) for i in range(5)), 2) == "0, 1 and 3 more"


@contextmanager
def unprivileged() -> Iterator[None]:
    """As a user whom file permissions concern."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("closed", ["folder", "shard", "index"])
def test_path_without_permission_is_one_line(sharded: Path, closed: str) -> None:
    path = {"folder": sharded, "shard": next(sharded.glob("*.safetensors")), "index": sharded / INDEX}[closed]
    for folder in (sharded, *sharded.parents[:4]):
        if folder.owner() == sharded.owner():
            folder.chmod(0o755)
    path.chmod(0)
    try:
        with unprivileged(), pytest.raises(CheckpointError, match=r": cannot be read: Permission denied$") as caught:
            open_headers(source(sharded))
    finally:
        path.chmod(0o755)
    assert str(path) in str(caught.value)


def calls_to_open(folder: Path, num_tensors: int, num_shards: int) -> int:
    """Python and C calls that opening a checkpoint of so many empty tensors takes."""
    folder.mkdir()
    places = {f"model.layers.{i}.weight": f"{i * num_shards // num_tensors}.safetensors" for i in range(num_tensors)}
    for shard in set(places.values()):
        names = [name for name, place in places.items() if place == shard]
        entries = {name: {"dtype": "BF16", "shape": [0, 8], "data_offsets": [0, 0]} for name in names}
        write_raw(folder / shard, json.dumps(entries).encode())
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    count = 0

    def called(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        headers = open_headers(source(folder))
    finally:
        sys.setprofile(None)
    assert len(headers.tensors) == num_tensors
    return count


def test_opening_does_little_for_each_tensor_however_many_there_are(tmp_path: Path) -> None:
    """K2 has 208,000 tensors; at 0.1 us or so a call they must not take seconds."""
    few, many = calls_to_open(tmp_path / "few", 1000, 2), calls_to_open(tmp_path / "many", 4000, 2)
    assert many - few <= 12 * 3000
    apart = calls_to_open(tmp_path / "apart", 4000, 8)
    assert apart - many <= 6 * 100, "a shard's cost does not grow with the others'"
