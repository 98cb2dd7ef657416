"""Checkpoints on disk as the package is told of them."""

from __future__ import annotations

from pathlib import Path

from headrace.weights.source import ModelSource


def folder_source(path: Path) -> ModelSource:
    return ModelSource("folder", path, path.name)


def gguf_source(path: Path) -> ModelSource:
    return ModelSource("gguf", path, path.stem)
