"""Tokenizers that the tests of this folder share."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.text.tokenizer import Tokenizer, load_tokenizer
from headrace.weights.source import ModelSource, resolve
from tests.text.gguf_vocabulary import sentencepiece_fields, write_gguf
from tests.text.metaspace import write_metaspace
from tests.text.sources import folder_source, gguf_source
from tests.tiny_tokenizer import write_tiny_tiktoken, write_tiny_tokenizer


@pytest.fixture(scope="session")
def embedded_source() -> ModelSource:
    return resolve(None, say=lambda line: None)


@pytest.fixture(scope="session")
def transformers_embedded(embedded_source: ModelSource) -> Any:
    """The tokenizer that transformers reads from the embedded default's file."""
    from transformers import AutoTokenizer

    path = embedded_source.path
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)


@pytest.fixture(scope="session")
def tokenizers(embedded_source: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """One tokenizer of each kind."""
    folder = tmp_path_factory.mktemp("tokenizers")
    write_tiny_tokenizer(folder / "tiny")
    write_tiny_tiktoken(folder / "tiktoken", 320)
    write_metaspace(folder / "metaspace")
    write_gguf(folder / "sentencepiece.gguf", **sentencepiece_fields())
    return {
        "embedded": load_tokenizer(embedded_source),
        "tiny": load_tokenizer(folder_source(folder / "tiny")),
        "tiktoken": load_tokenizer(folder_source(folder / "tiktoken")),
        "metaspace": load_tokenizer(folder_source(folder / "metaspace")),
        "sentencepiece": load_tokenizer(gguf_source(folder / "sentencepiece.gguf")),
    }


@pytest.fixture(params=["embedded", "tiny", "tiktoken", "metaspace", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers[request.param]
