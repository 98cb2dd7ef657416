"""Models named by hub id: downloads, the cache, and what is said when there is neither."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import write_tiny
from tests.weights.hub_server import SHA, Cut, Hub, serve_hub

# The client reads its environment when it is imported, so each environment is a process of its own.
PROGRAM = """
import json, sys
import huggingface_hub.constants
huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 1000
from headrace.errors import UserError
from headrace.weights.source import read_spec, resolve
said, out = [], []
for model in sys.argv[1:]:
    try:
        source = resolve(model, say=said.append)
        out.append({"path": str(source.path), "name": source.name, "family": read_spec(source).family})
    except UserError as error:
        out.append({"error": str(error)})
print(json.dumps({"said": said, "out": out}))
"""


def environment_for(cache: Path, endpoint: str) -> dict[str, str]:
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_TELEMETRY": "1"}
    return {key: value for key, value in os.environ.items() if not key.startswith("HF_")} | settings


def resolve_all(cache: Path, endpoint: str, *models: str, offline: bool = False) -> Any:
    environment = environment_for(cache, endpoint) | ({"HF_HUB_OFFLINE": "1"} if offline else {})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *models], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = write_tiny(tmp_path_factory.mktemp("tiny"), "llama", num_hidden_layers=1)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    unwanted = dict.fromkeys(("pytorch_model.bin", "original/model.safetensors", "consolidated.safetensors"), b"x")
    foreign = {"config.json": b'{"architectures": ["GPT2LMHeadModel"]}', "model.safetensors": b"x"}
    repositories = {"org/tiny": files | unwanted, "org/foreign": foreign, "org/data": {"data.json": b"[]"}}
    with serve_hub(Hub(repositories, gated=frozenset({"org/gated"}))) as served:
        yield served


@pytest.fixture(scope="module")
def cache(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A cache after one online run, and what that run said."""
    folder = tmp_path_factory.mktemp("cache")
    models = ("org/tiny", "org/missing", "org/gated", "org/foreign", "org/data")
    return folder, resolve_all(folder, hub.url, *models)


def test_model_comes_with_what_serving_needs_and_no_more(hub: Hub, cache: tuple[Path, Any]) -> None:
    found = cache[1]["out"][0]
    assert (found["name"], found["family"]) == ("org/tiny", "llama")
    names = {path.name for path in Path(found["path"]).iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert "org/tiny" in cache[1]["said"][0]


@pytest.mark.parametrize(
    ("place", "model", "words"),
    [
        (1, "org/missing", "not found"),
        (2, "org/gated", "gated"),
        (3, "GPT2LMHeadModel", "not supported"),
        (4, "org/data", "no config.json"),
    ],
)
def test_refusals_are_one_line_naming_the_model(cache: tuple[Path, Any], place: int, model: str, words: str) -> None:
    error = cache[1]["out"][place]["error"]
    assert model in error
    assert words in error
    assert "\n" not in error


def test_unsupported_model_is_refused_before_its_weights_are_fetched(hub: Hub, cache: tuple[Path, Any]) -> None:
    assert hub.fetched(f"org/foreign/resolve/{SHA}/config.json")
    assert not [line for line in hub.fetched(".safetensors") if "foreign" in line]


@pytest.mark.parametrize("offline", [True, False])
def test_cache_serves_without_the_hub(cache: tuple[Path, Any], offline: bool) -> None:
    with socket.socket() as closed:
        # Bound but never listening: connections are refused at once.
        closed.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
        here, gone = resolve_all(cache[0], endpoint, "org/tiny", "org/never", offline=offline)["out"]
    assert here["path"] == cache[1]["out"][0]["path"]
    assert "org/never" in gone["error"]
    assert ("HF_HUB_OFFLINE" if offline else "cannot be reached") in gone["error"]
    assert "\n" not in gone["error"]


def test_a_simulation_fetches_the_config_and_nothing_else(hub: Hub, tmp_path: Path) -> None:
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_TELEMETRY": "1"}
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")} | settings
    before = len(hub.requests)
    command = [sys.executable, "-m", "headrace", "simulate", "org/tiny", "--gpu", "h200", "--requests", "2", "--json"]
    done = subprocess.run(
        [*command, "--input", "8", "--output", "2"], env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["model"] == "org/tiny"
    asked = [line for line in hub.requests[before:] if "/resolve/" in line]
    assert asked and all(line.endswith("/config.json") for line in asked)


def test_interrupted_download_goes_on_where_it_ended(hub: Hub, tmp_path: Path) -> None:
    """Once after the process was killed, once after the connection was lost."""
    whole = hub.repositories["org/tiny"]["model.safetensors"]
    killed, lost = Cut(100_000), Cut(50_000)
    lost.release.set()
    hub.cuts[:] = [killed, lost]
    hub.ranges.clear()
    command = [sys.executable, "-c", PROGRAM, "org/tiny"]
    environment = environment_for(tmp_path, hub.url)
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        assert killed.reached.wait(60)
        while not any(part.stat().st_size == 100_000 for part in tmp_path.rglob("*.part")):
            assert first.poll() is None
            time.sleep(0.01)
        first.kill()
    killed.release.set()
    (found,) = resolve_all(tmp_path, hub.url, "org/tiny")["out"]
    assert (Path(found["path"]) / "model.safetensors").read_bytes() == whole
    assert [asked.removesuffix("-") for asked in hub.ranges] == ["bytes=100000", "bytes=150000"]
    assert not list(tmp_path.rglob("*.part"))


def test_part_of_another_file_is_not_taken_for_this_one(hub: Hub, tmp_path: Path) -> None:
    """The hub names large files by their hash, and what was put together from parts is compared with it."""
    whole = hub.repositories["org/tiny"]["model.safetensors"]
    hub.hashed = True
    try:
        blobs = tmp_path / "hub" / "models--org--tiny" / "blobs"
        blobs.mkdir(parents=True)
        (blobs / f"{hashlib.sha256(whole).hexdigest()}.part").write_bytes(b"x" * 1000)
        spoilt, anew = resolve_all(tmp_path, hub.url, "org/tiny", "org/tiny")["out"]
    finally:
        hub.hashed = False
    assert "MODEL org/tiny: could not be fetched from the hub: model.safetensors: what came in" in spoilt["error"]
    assert (Path(anew["path"]) / "model.safetensors").read_bytes() == whole
